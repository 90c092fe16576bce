// Package streams connects readers and writers with a process that a shim runs, by FIFOs in a directory
// that lives as long as they do.
package streams

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/containerd/fifo"
	"golang.org/x/sys/unix"
)

// Streams are the FIFOs between a shim and its client's reader and writers.
type Streams struct {
	Stdin, Stdout, Stderr string        // paths, "" if not wanted
	StdinEnd              chan struct{} // closed when the reader is at its end

	dir    string
	open   []io.ReadWriteCloser
	copies sync.WaitGroup // of output
	cancel context.CancelFunc
}

// Open makes the FIFOs in a new directory of dir and copies until Close. A nil stdin is none; what goes to
// a nil writer is dropped. A terminal has no stderr.
func Open(ctx context.Context, dir string, stdin io.Reader, stdout, stderr io.Writer,
	terminal bool) (*Streams, error) {
	dir, err := os.MkdirTemp(dir, "")
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	t := &Streams{dir: dir, StdinEnd: make(chan struct{}), cancel: cancel}
	err = t.input(ctx, stdin)
	if err == nil {
		err = t.output(ctx, "stdout", stdout, &t.Stdout)
	}
	if err == nil && !terminal {
		err = t.output(ctx, "stderr", stderr, &t.Stderr)
	}
	if err != nil {
		t.Close()
		return nil, err
	}
	return t, nil
}

func (t *Streams) input(ctx context.Context, r io.Reader) error {
	if r == nil {
		return nil
	}
	f, err := t.fifo(ctx, "stdin", unix.O_WRONLY, &t.Stdin)
	if err != nil {
		return err
	}
	go func() {
		_, _ = io.Copy(f, r)
		f.Close()
		close(t.StdinEnd)
	}()
	return nil
}

// output copies what the process writes to w, or away.
func (t *Streams) output(ctx context.Context, name string, w io.Writer, path *string) error {
	if w == nil {
		w = io.Discard
	}
	f, err := t.fifo(ctx, name, unix.O_RDONLY, path)
	if err != nil {
		return err
	}
	t.copies.Go(func() { _, _ = io.Copy(w, f) })
	return nil
}

func (t *Streams) fifo(ctx context.Context, name string, flag int, path *string) (io.ReadWriteCloser, error) {
	*path = filepath.Join(t.dir, name)
	f, err := fifo.OpenFifo(ctx, *path, flag|unix.O_CREAT|unix.O_NONBLOCK, 0o600)
	if err != nil {
		return nil, err
	}
	t.open = append(t.open, f)
	return f, nil
}

// Drain waits for the end of the output, which a process left behind by the
// one that ended may hold open: not longer than a moment then.
func (t *Streams) Drain(ctx context.Context) {
	done := make(chan struct{})
	go func() { t.copies.Wait(); close(done) }()
	select {
	case <-done:
	case <-ctx.Done():
	case <-time.After(2 * time.Second):
	}
}

// Close ends the copying of output, and removes the FIFOs. It does not wait for the reader of stdin.
func (t *Streams) Close() {
	t.cancel()
	for _, f := range t.open {
		f.Close()
	}
	t.copies.Wait()
	os.RemoveAll(t.dir)
}
