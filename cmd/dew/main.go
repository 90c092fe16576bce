// Dew deploys containers through the node daemon dewd.
package main

import (
	"context"
	"os"

	"dewpoint/internal/cli"
	"dewpoint/lab/bench"
	"dewpoint/lab/simulate"
)

var version = "unknown" // set by the linker

func main() {
	os.Exit(cli.Main(context.Background(), os.Args[1:], cli.Config{
		Version: version,
		Stdin:   os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr,
		Extra: []cli.Extra{
			{Name: "bench", Summary: "measure, and compare with other engines", Run: bench.Main},
			{Name: "simulate", Summary: "replay registry traces against cache policies",
				Run: simulate.Program{Version: version}.Main},
		},
	}))
}
