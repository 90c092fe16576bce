// Dew deploys containers through the node daemon dewd.
package main

import (
	"context"
	"os"

	"dewpoint/internal/cli"
)

var version = "unknown" // set by the linker

func main() {
	os.Exit(cli.Main(context.Background(), os.Args[1:], cli.Config{
		Version: version,
		Stdin:   os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr,
	}))
}
