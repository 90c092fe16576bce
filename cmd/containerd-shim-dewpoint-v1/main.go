// Command containerd-shim-dewpoint-v1 is what containerd executes to get a shim
// for a container that dewd creates. See package shimgroup.
package main

import (
	"os"

	"dewpoint/internal/engine/shimgroup"
)

func main() {
	if err := shimgroup.Run(os.Args, os.Environ()); err != nil {
		os.Stderr.WriteString("containerd-shim-dewpoint-v1: " + err.Error() + "\n")
		os.Exit(1)
	}
}
