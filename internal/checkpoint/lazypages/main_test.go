package lazypages_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"dewpoint/internal/checkpoint/lazypages"
)

// What CRIU restores becomes a child of the test, so that it can be reaped. The
// test program is also a guard, and a server that can be killed.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "guard" {
		end(lazypages.Guard())
	}
	if len(os.Args) == 3 && os.Args[1] == "task" {
		end(lazypages.SendTask(os.Args[2]))
	}
	if len(os.Args) == 5 && os.Args[1] == "server" {
		s, err := lazypages.Serve(context.Background(), lazypages.Config{Dir: os.Args[2], Work: os.Args[3],
			Source: lazypages.Dir(os.Args[4]), Rate: slow, Guard: guard()})
		if err != nil {
			end(err)
		}
		fmt.Println("listens")
		end(s.Wait())
	}
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		end(err)
	}
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		if victim, err := victimPath(); err == nil {
			os.RemoveAll(filepath.Dir(victim))
		}
		os.Exit(code)
	}))
}

func guard() []string { return []string{"/proc/self/exe", "guard"} }

func end(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}
