// Dewd is the node daemon: it keeps image layers, mounts them for containerd,
// and deploys containers. docs/flow.md follows one deployment through it.
package main

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"syscall"

	"dewpoint/internal/checkpoint/lazypages"
	"dewpoint/internal/config"
	"dewpoint/internal/engine"
	"dewpoint/internal/layer/datafs"
	"dewpoint/internal/pack/learn"
	"dewpoint/internal/server"
	"dewpoint/internal/teardown"

	"github.com/coreos/go-systemd/v22/daemon"
)

// version is set by the linker.
var version = "unknown"

const (
	defaultConfig = "/etc/dewpoint/dewd.toml"
	defaultRoot   = "/var/lib/dewpoint"
	defaultState  = "/run/dewpoint"
	exitUsage     = 2
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	// A small heap is worth more on a small node than the collector's time.
	debug.SetGCPercent(50)
	var err error
	switch append(os.Args, "")[1] { // processes of their own, started by dewd
	case "datafs":
		err = datafs.Main(ctx, os.Args[2:], os.Stderr)
	case server.PageGuard:
		err = lazypages.Guard()
	case server.PackBuilder:
		err = learn.Child(ctx, os.Stdin, os.Stdout)
	case "teardown":
		err = tearDown(ctx, os.Args[2:], os.Stderr)
	default:
		err = run(ctx, os.Args[1:], os.Stderr)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "dewd:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, stderr io.Writer) error {
	cfg := server.Config{Version: version}
	flags := flag.NewFlagSet("dewd", flag.ContinueOnError)
	file := flags.String("config", "", "configuration `file` (default "+defaultConfig+", if it is there)")
	flags.StringVar(&cfg.Root, "root", defaultRoot, "`directory` for what survives a reboot")
	flags.StringVar(&cfg.State, "state", defaultState, "`directory` for sockets and what need not survive")
	flags.StringVar(&cfg.Containerd, "containerd", "private",
		"`socket` of the containerd to use, or private: dewd starts its own")
	flags.StringVar(&cfg.HTTP, "http", "", "`address` for metrics and, on loopback, the page (none by default)")
	check := flags.Bool("check", false, "read the configuration, say what is wrong with it, and end")
	verbose := flags.Bool("debug", false, "log more")
	showVersion := flags.Bool("version", false, "print the version and end")
	if err := flags.Parse(args); err != nil {
		if err == flag.ErrHelp {
			return nil
		}
		os.Exit(exitUsage)
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q; see dewd --help", flags.Arg(0))
	}
	if *showVersion {
		fmt.Println("dewd", version)
		return nil
	}
	level := slog.LevelInfo
	if *verbose {
		level = slog.LevelDebug
	}
	cfg.Log = slog.New(slog.NewTextHandler(stderr, &slog.HandlerOptions{Level: level}))
	if *file == "" {
		if _, err := os.Stat(defaultConfig); err == nil {
			*file = defaultConfig
		}
	}
	var err error
	if cfg.File, err = config.Load(*file); err != nil {
		return err
	}
	if *check {
		fmt.Println(cmp.Or(*file, "no configuration file: the defaults are"), "valid")
		return nil
	}
	for _, p := range []*string{&cfg.Root, &cfg.State} {
		if *p, err = filepath.Abs(*p); err != nil {
			return err
		}
	}
	if cfg.Snapshots, err = inherited(filepath.Join(cfg.State, "snapshotter.sock")); err != nil {
		return err
	}
	systemd, err := newManager(cfg.Log)
	if err != nil {
		return err
	}
	defer context.AfterFunc(ctx, func() { systemd.tell(daemon.SdNotifyStopping) })()
	// The system's containerd may be ordered after dewd: what it asks meanwhile waits in the socket.
	if cfg.Containerd != engine.Private && cfg.Snapshots != nil {
		systemd.tell(daemon.SdNotifyReady)
	}
	cfg.Reload = systemd.reloads(ctx, *file)
	started := make(chan struct{})
	go func() {
		select {
		case <-started:
			socket := filepath.Join(cfg.State, "dewd.sock")
			cfg.Log.Info("dewd serves", "socket", socket)
			systemd.tell(daemon.SdNotifyReady)
			systemd.watch(ctx, "unix://"+socket)
		case <-ctx.Done():
		}
	}()
	return server.Run(ctx, cfg, started)
}

// tearDown is the command "dewd teardown", by which a package is removed.
func tearDown(ctx context.Context, args []string, stderr io.Writer) error {
	var node teardown.Node
	flags := flag.NewFlagSet("dewd teardown", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.StringVar(&node.Root, "root", defaultRoot, "dewd's `directory` for what survives a reboot")
	flags.StringVar(&node.State, "state", defaultState, "dewd's `directory` for what need not")
	check := flags.Bool("check", false, "only say whether containers run from dewd's layers")
	if err := flags.Parse(args); err != nil {
		if err == flag.ErrHelp {
			return nil
		}
		os.Exit(exitUsage)
	}
	if *check {
		return node.Check()
	}
	return node.Run(ctx)
}
