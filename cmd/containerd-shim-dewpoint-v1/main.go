// Command containerd-shim-dewpoint-v1 is what containerd executes to get a shim
// for a container that dewd creates, and what that shim executes to have crun
// make it. See packages shimgroup and launch.
package main

import (
	"os"
	"path/filepath"
	"runtime"

	"dewpoint/internal/engine/launch"
	"dewpoint/internal/engine/shimgroup"
)

// The main thread is the one that the kernel tells of the parent's end.
func init() { runtime.LockOSThread() }

func main() {
	run := shimgroup.Run
	switch filepath.Base(os.Args[0]) {
	case launch.Name:
		run = launch.Run
	case launch.Trial:
		run = launch.Report
	}
	if err := run(os.Args, os.Environ()); err != nil {
		os.Stderr.WriteString("containerd-shim-dewpoint-v1: " + err.Error() + "\n")
		os.Exit(1)
	}
}
