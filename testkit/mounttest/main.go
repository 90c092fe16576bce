package mounttest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"go.uber.org/goleak"

	"dewpoint/testkit"
)

const inside = "DEWPOINT_TEST_MOUNTS"

// Main is for a package's TestMain: it runs the tests in a mount namespace of
// their own, so that whatever they mount ends with them, and looks for
// goroutines that they leave behind.
func Main(m *testing.M) {
	testkit.RequireRoot(m, "they mount file systems")
	if os.Getenv(inside) == "" {
		os.Exit(again())
	}
	goleak.VerifyTestMain(m)
}

// again runs this program once more in a new mount namespace.
func again() int {
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Args[0] = os.Args[0]
	cmd.Env = append(os.Environ(), inside+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	err := cmd.Run()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return max(exit.ExitCode(), 1)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}
