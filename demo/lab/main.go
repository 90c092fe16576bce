// Command lab builds the demonstration's images, serves them, and runs the
// benchmarks, without the rest of Dewpoint: "dew bench" does the same.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"

	"dewpoint/lab/bench"

	"golang.org/x/sys/unix"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, unix.SIGTERM)
	err := bench.Main(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "lab:", err)
		os.Exit(1)
	}
}
