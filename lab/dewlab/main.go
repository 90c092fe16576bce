// Dewlab is the laboratory of Dewpoint: it measures the product from outside, compares it with other
// engines, and replays registries' traces against the policies of a cache. No node needs it.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"dewpoint/lab/bench"
	"dewpoint/lab/simulate"
)

var version = "unknown" // set by the linker

const usage = `Usage: dewlab bench pull|docker-pi|lazy|pop|boot|deploy|demo|images|registry [FLAGS]
       dewlab simulate [FLAGS] TRACE…

bench measures, and compares with other engines. simulate replays registry traces against cache
policies. "dewlab bench NAME -h" and "dewlab simulate --help" say more.
`

func main() {
	os.Setenv("DEWPOINT_TUNING", "1") // dewd takes keys that are not an operator's
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, unix.SIGTERM)
	err := run(ctx, os.Args[1:])
	stop()
	switch {
	case errors.Is(err, flag.ErrHelp), errors.Is(err, pflag.ErrHelp):
	case err != nil:
		fmt.Fprintln(os.Stderr, "dewlab:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	commands := map[string]func(context.Context, []string, io.Writer, io.Writer) error{
		"bench": bench.Main, "simulate": simulate.Program{Version: version}.Main,
	}
	if len(args) == 0 || commands[args[0]] == nil {
		fmt.Fprint(os.Stderr, usage)
		return errors.New("no such command")
	}
	return commands[args[0]](ctx, args[1:], os.Stdout, os.Stderr)
}
