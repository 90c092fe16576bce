package cli

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"golang.org/x/term"

	"dewpoint/internal/spec"
)

func execFlags(c *call) {
	f := c.flags
	f.BoolVarP(&c.opt.interactive, "interactive", "i", false, "pass on standard input")
	f.BoolVarP(&c.opt.tty, "tty", "t", false, "give the command a terminal")
	f.StringArrayVarP(&c.opt.env, "env", "e", nil,
		"set a `variable`: KEY=VALUE, or KEY to pass on this environment's")
	f.StringVarP(&c.opt.user, "user", "u", "", "run as `USER[:GROUP]`")
	f.StringVarP(&c.opt.dir, "workdir", "w", "", "run in this `directory`")
}

func exec(ctx context.Context, c *call) error {
	if len(c.args) < 2 {
		return misuse(c, "a container and a command are wanted")
	}
	req := spec.ExecRequest{
		Args: c.args[1:], Env: environment(c.opt.env), User: c.opt.user, Dir: c.opt.dir, TTY: c.opt.tty,
	}
	std := spec.ExecIO{Stdout: c.cfg.Stdout, Stderr: c.cfg.Stderr}
	if c.opt.interactive {
		std.Stdin = c.cfg.Stdin
	}
	ctx, stop := interruptible(ctx)
	defer stop()
	restore := func() {}
	if c.opt.tty {
		if !term.IsTerminal(int(c.cfg.Stdin.Fd())) {
			return misuse(c, "-t needs a terminal as standard input")
		}
		var err error
		if req.Size, std.Resize, restore, err = c.terminal(ctx, std.Stdin != nil); err != nil {
			return err
		}
	}
	status, err := c.client.Exec(ctx, c.args[0], req, std)
	restore()
	if err != nil {
		return err
	}
	if status != 0 {
		return exitStatus(status)
	}
	return nil
}

// terminal is this one's size, now and later, for a process that is to have one as large. With raw every
// key is passed on. The function it returns undoes that.
func (c *call) terminal(ctx context.Context, raw bool) (size spec.Size, changed <-chan spec.Size,
	restore func(), err error) {
	fd := int(c.cfg.Stdin.Fd())
	var old *term.State
	if raw {
		if old, err = term.MakeRaw(fd); err != nil {
			return size, nil, nil, fmt.Errorf("set up the terminal: %w", err)
		}
	}
	changes := make(chan os.Signal, 1)
	signal.Notify(changes, syscall.SIGWINCH)
	ctx, cancel := context.WithCancel(ctx)
	sizes, done := make(chan spec.Size), make(chan struct{})
	go func() {
		defer close(done)
		resizes(ctx, fd, changes, sizes)
	}()
	return terminalSize(fd), sizes, func() {
		signal.Stop(changes)
		cancel()
		<-done
		if old != nil {
			_ = term.Restore(fd, old)
		}
	}, nil
}

func terminalSize(fd int) spec.Size {
	cols, rows, err := term.GetSize(fd)
	if err != nil {
		return spec.Size{}
	}
	return spec.Size{Rows: uint16(rows), Cols: uint16(cols)}
}

func resizes(ctx context.Context, fd int, changes <-chan os.Signal, sizes chan<- spec.Size) {
	for {
		select {
		case <-changes:
		case <-ctx.Done():
			return
		}
		select {
		case sizes <- terminalSize(fd):
		case <-ctx.Done():
			return
		}
	}
}
