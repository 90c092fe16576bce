package bench

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"

	"dewpoint/testkit/demo"
	"dewpoint/testkit/testbed"
)

// Main runs one command of the benchmark: "pull", "docker-pi", "lazy", "pop", "boot" and "deploy" are the
// experiments, "demo" shows one deployment after the other, "images" builds what
// they pull, "registry" serves it, "web" is the server that a pull disturbs, "ask"
// exercises a container that is profiled, and "load" is HTTP clients.
func Main(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	self := ourselves(args)
	commands := map[string]func(context.Context, []string, io.Writer, io.Writer) error{
		"images": buildImages, "registry": serveRegistry, "web": serveWeb, "ask": askOnce, "load": generateLoad,
		"pull":      experiment(comparePull, self),
		"docker-pi": experiment(dockerPi, self),
		"lazy":      experiment(compareLazy, self),
		"pop":       experiment(comparePoP, self),
		"boot":      experiment(compareBoot, self),
		"deploy":    experiment(compareDeploy, self),
		"demo":      experiment(demonstrate, self),
	}
	if len(args) == 0 || commands[args[0]] == nil {
		return errors.New("usage: bench pull|docker-pi|lazy|pop|boot|deploy|demo|images|registry [-h]")
	}
	return commands[args[0]](ctx, args[1:], stdout, stderr)
}

func experiment(run func(context.Context, []string, io.Writer, io.Writer, []string) error,
	self []string) func(context.Context, []string, io.Writer, io.Writer) error {
	return func(ctx context.Context, args []string, stdout, stderr io.Writer) error {
		return run(ctx, args, stdout, stderr, self)
	}
}

// ourselves is the command line that leads to Main: what stands before its
// arguments, so that the registry can be the same program in another process.
func ourselves(args []string) []string {
	self := slices.Clone(os.Args[:max(1, len(os.Args)-len(args))])
	if exe, err := os.Executable(); err == nil {
		self[0] = exe
	}
	return self
}

func flags(name string, stderr io.Writer) *flag.FlagSet {
	f := flag.NewFlagSet(name, flag.ContinueOnError)
	f.SetOutput(stderr)
	return f
}

func buildImages(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	f := flags("images", stderr)
	dir := f.String("dir", demo.Dir, "OCI `layout` to build into")
	if err := f.Parse(args); err != nil {
		return err
	}
	return demo.Build(ctx, demo.Config{Dir: *dir, Names: f.Args(), Log: stdout})
}

func serveRegistry(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	f := flags("registry", stderr)
	dir := f.String("dir", demo.Dir, "OCI `layout` to serve")
	listen := f.String("listen", "127.0.0.1:5000", "`address`")
	pushed := f.String("pushed", "", "`directory` for what is pushed (default that of -dir)")
	if err := f.Parse(args); err != nil {
		return err
	}
	l, err := net.Listen("tcp", *listen)
	if err != nil {
		return err
	}
	fmt.Fprintf(stdout, "registry: %s\n", strings.TrimSpace(l.Addr().String()))
	return testbed.Serve(ctx, *dir, cmp.Or(*pushed, *dir), l)
}
