package datafs

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"
	"time"
)

// memoryLimit is what the collector keeps the process below, where it can. What
// is not the heap (threads, the program's pages) comes on top.
const memoryLimit = 20 << 20

// Main is the datafs process: it serves the mount whose descriptors it inherits
// from a Client until Serve returns. args are the Client's. The caller ends the
// process when Main returns.
func Main(ctx context.Context, args []string, stderr io.Writer) error {
	cfg := ServerConfig{Log: slog.New(slog.NewTextHandler(stderr, nil))}
	flags := flag.NewFlagSet("datafs", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.StringVar(&cfg.Mountpoint, "mountpoint", "", "`directory` where the file system is mounted")
	flags.BoolVar(&cfg.Adopted, "adopted", false, "another datafs served it before")
	flags.DurationVar(&cfg.Idle, "idle", time.Minute, "`time` without use after which to end")
	read := flags.String("read", "", "read a `file` and end (for Probe)")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *read != "" {
		_, err := os.ReadFile(*read)
		return err
	}
	if cfg.Mountpoint == "" || flags.NArg() > 0 {
		return errors.New("dewd starts datafs by itself: it is not to be called otherwise")
	}
	// Who reads the log, and who sits at the terminal, does not matter to a mount.
	signal.Ignore(syscall.SIGPIPE, syscall.SIGHUP)
	debug.SetGCPercent(50)
	debug.SetMemoryLimit(memoryLimit)
	cfg.Device = os.NewFile(deviceFD, "/dev/fuse")
	syscall.CloseOnExec(deviceFD)
	sock := os.NewFile(listenFD, "listener")
	l, err := net.FileListener(sock)
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	sock.Close()
	ok := false
	if cfg.Listener, ok = l.(*net.UnixListener); !ok {
		return errors.New("listen: not a Unix socket")
	}
	return Serve(ctx, cfg)
}
