package engine

import (
	"context"
	"io"
	"os"

	"golang.org/x/sync/errgroup"

	"dewpoint/internal/engine/logfile"
)

// LogOptions choose what Logs copies.
type LogOptions struct {
	Follow bool
	Tail   int // lines of each stream to begin with; 0 is all, below 0 none
	Stdout io.Writer
	Stderr io.Writer // nil leaves a stream out

	from map[string]int64 // where to begin, by file; nil where Tail says
}

// Logs copies what the container has written; with Follow also what it writes,
// until it has ended and all of it is copied, or ctx has ended. The writers
// are called from two goroutines.
func (e *outputs) Logs(ctx context.Context, id string, o LogOptions) error {
	_, err := e.follow(ctx, id, o)
	return wrap(err, "logs of container %s", Name(id))
}

// follow is Logs, and says how the container has ended; nil if that was not waited for or is not known.
func (e *outputs) follow(ctx context.Context, id string, o LogOptions) (exit *Exit, err error) {
	name := Name(id)
	if err := ValidName(name); err != nil {
		return nil, err
	}
	stdout, stderr := e.cfg.places().Output(name)
	if _, err := os.Stat(e.cfg.dir(name)); err != nil {
		return nil, ErrNotFound
	}
	if id != name {
		if _, err := e.state.Inspect(ctx, id); err != nil {
			return nil, ErrNotFound
		}
	}
	var ended chan struct{}
	g, gctx := errgroup.WithContext(ctx)
	if o.Follow {
		ended = make(chan struct{})
		g.Go(func() error {
			defer close(ended)
			x, err := e.Wait(gctx, id)
			if err != nil && !gone(err) {
				return err
			}
			if err == nil {
				exit = &x
			}
			_ = e.Unexecuted(gctx, name, x.Status) // its reason is in the output from now on
			return nil
		})
	}
	if i, _, _ := e.state.Get(name); !o.Follow && i != nil && i.Exit != nil {
		_ = e.Unexecuted(ctx, name, i.Exit.Status)
	}
	stream := func(path string, w io.Writer) {
		if w != nil {
			g.Go(func() error {
				if o.from != nil {
					return logfile.CopyFrom(gctx, path, w, o.from[path], ended)
				}
				return logfile.Copy(gctx, path, w, o.Tail, ended)
			})
		}
	}
	stream(stdout, o.Stdout)
	stream(stderr, o.Stderr)
	err = g.Wait()
	return exit, err
}
