package cli

import (
	"context"
	"errors"
	"fmt"
	"io"

	keyterm "github.com/moby/term"
	"golang.org/x/term"

	"dewpoint/internal/spec"
)

func attachFlags(c *call) {
	c.flags.BoolVar(&c.opt.noStdin, "no-stdin", false, "pass on no input")
}

// attach shows what a container writes from now on and passes input to it, until it ends.
func attach(ctx context.Context, c *call) error {
	name, err := c.one("container")
	if err != nil {
		return err
	}
	i, err := c.client.Inspect(ctx, name)
	if err != nil {
		return err
	}
	has := spec.Options{TTY: i.Container.TTY, Stdin: i.Container.Stdin}
	ctx, stop := interruptible(ctx)
	defer stop()
	std := spec.ExecIO{Stdout: c.cfg.Stdout, Stderr: c.cfg.Stderr}
	status, err := c.join(ctx, name, has, std)
	switch {
	case errors.Is(err, errLeft):
		c.left(name)
		return nil
	case ctx.Err() != nil:
		return nil
	case err != nil:
		return err
	case status != 0:
		return exitStatus(status)
	}
	return nil
}

// errLeft is why a command ends whose user has left the container to itself.
var errLeft = errors.New("left to itself")

func (c *call) left(name string) {
	fmt.Fprintf(c.cfg.Stderr, "%s goes on; \"dew attach %s\" comes back to it\n", name, name)
}

// detachKeys are ctrl-p ctrl-q.
var detachKeys = []byte{'p' & 0x1f, 'q' & 0x1f}

// keys passes on what is typed until that is detachKeys.
type keys struct {
	io.Reader
	left func()
}

func (k keys) Read(b []byte) (int, error) {
	n, err := k.Reader.Read(b)
	var escaped keyterm.EscapeError
	if errors.As(err, &escaped) {
		k.left()
	}
	return n, err
}

// join passes this command's input, and its terminal's size and keys, to a container, and its output to std
// where that has writers, until the container has ended, or its user leaves it: errLeft.
func (c *call) join(ctx context.Context, name string, has spec.Options, std spec.ExecIO) (int, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if has.Stdin && !c.opt.noStdin {
		std.Stdin = c.cfg.Stdin
	}
	var size spec.Size
	if has.TTY && term.IsTerminal(int(c.cfg.Stdin.Fd())) {
		var restore func()
		var err error
		if size, std.Resize, restore, err = c.terminal(ctx, std.Stdin != nil); err != nil {
			return 0, err
		}
		defer restore()
		if std.Stdin != nil {
			std.Stdin = keys{keyterm.NewEscapeProxy(std.Stdin, detachKeys), func() { cancel(errLeft) }}
		}
	}
	status, err := c.client.Attach(ctx, name, size, std)
	if errors.Is(context.Cause(ctx), errLeft) {
		err = errLeft
	}
	return status, err
}
