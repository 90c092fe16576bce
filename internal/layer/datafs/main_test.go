package datafs

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"go.uber.org/goleak"

	"dewpoint/testkit"
)

// Roles that this program plays for the tests, by its first argument.
const (
	roleServer = "datafs-server"
	roleDewd   = "datafs-dewd"
	roleRead   = "datafs-read"
	roleProbe  = "datafs-probe"
	inside     = "DEWPOINT_DATAFS_MOUNTS"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case roleServer:
			if err := Main(context.Background(), os.Args[2:], os.Stderr); err != nil {
				fmt.Fprintln(os.Stderr, "datafs:", err)
				os.Exit(1)
			}
			os.Exit(0)
		case roleDewd:
			os.Exit(dewdProcess(os.Args[2:]))
		case roleRead:
			os.Exit(readProcess(os.Args[2:]))
		case roleProbe:
			for {
				_ = Probe(context.Background(),
					ProbeConfig{Dir: os.Args[2], Exec: []string{"/proc/self/exe", roleServer}})
			}
		}
	}
	testkit.RequireRoot(m, "they mount file systems")
	if os.Getenv(inside) == "" {
		os.Exit(again())
	}
	goleak.VerifyTestMain(m)
}

// again runs this program once more in a mount namespace of its own.
func again() int {
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Args[0] = os.Args[0]
	cmd.Env = append(os.Environ(), inside+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}
