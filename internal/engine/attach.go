package engine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	tasksapi "github.com/containerd/containerd/api/services/tasks/v1"
	"golang.org/x/sys/unix"

	"dewpoint/internal/engine/stdio"
)

// AttachSpec is what is passed between a caller and a container's process.
type AttachSpec struct {
	// Stdin ends the process's input with its end, unless the process has a terminal; not with an error, such
	// as of a caller who goes away. It is not read of a container without standard input.
	Stdin          io.Reader
	Stdout, Stderr io.Writer      // nil leaves a stream out
	Resize         <-chan WinSize // of the terminal; may be nil
}

// Attach passes on input and output of a container that was made and has not ended, until it ends, also when
// it is removed then; it returns how. The caller ends Stdin, as of Exec. When ctx ends first the container
// goes on.
func (e *outputs) Attach(ctx context.Context, id string, s AttachSpec) (Exit, error) {
	name := Name(id)
	i, err := e.state.Inspect(ctx, id)
	if err == nil && i.Status == Stopped {
		err = ErrNotRunning
	}
	if err != nil {
		return Exit{}, fmt.Errorf("attach to container %s: %w", name, err)
	}
	id = i.ID()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	has := stdio.Of(i.Labels)
	from := make(map[string]int64) // before any input: what answers that is wanted
	for _, path := range []string{i.Stdout, i.Stderr} {
		if st, err := os.Stat(path); err == nil {
			from[path] = st.Size()
		}
	}
	if s.Stdin != nil && has.Stdin {
		f, err := os.OpenFile(e.cfg.places().Stdin(name), os.O_WRONLY|unix.O_NONBLOCK, 0)
		if err == nil { // whose name it was may have another one by now
			if _, err = e.recordOf(ctx, id); err == nil {
				go e.input(ctx, name, f, s.Stdin, has.TTY)
			} else {
				f.Close()
			}
		}
		if err != nil && !errors.Is(err, unix.ENXIO) && !errors.Is(err, os.ErrNotExist) { // it has ended
			return Exit{}, fmt.Errorf("input of container %s: %w", name, err)
		}
	}
	if has.TTY {
		go e.resize(ctx, name, "", s.Resize, ctx.Done())
	}
	exit, err := e.follow(ctx, id, LogOptions{Follow: true, from: from, Stdout: s.Stdout, Stderr: s.Stderr})
	if err == nil && exit == nil {
		err = ErrNotRunning
	}
	if err != nil {
		return Exit{}, fmt.Errorf("attach to container %s: %w", name, err)
	}
	return *exit, nil
}

// input copies r to a container's FIFO until ctx ends.
func (e *outputs) input(ctx context.Context, name string, f *os.File, r io.Reader, tty bool) {
	defer f.Close()
	defer context.AfterFunc(ctx, func() { _ = f.SetWriteDeadline(time.Unix(1, 0)) })()
	if _, err := io.Copy(f, r); err == nil && !tty {
		f.Close() // or the process would wait for us
		_, _ = e.c.Tasks.CloseIO(ctx, &tasksapi.CloseIORequest{ContainerID: name, Stdin: true})
	}
}
