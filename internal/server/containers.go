package server

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"dewpoint/internal/deploy"
	"dewpoint/internal/engine"
	"dewpoint/internal/engine/stdio"
	"dewpoint/internal/health"
	"dewpoint/internal/restart"
	"dewpoint/internal/spec"
)

// containers implements api.Containers.
type containers struct {
	engine     *engine.Engine
	queue      *deploy.Queue // knows what was asked for
	reads      *reads
	node       string
	supervisor *restart.Supervisor
	health     *health.Monitor
	limited    func(*engine.Info) // is told of one whose limits have changed
}

// id is the ID of the container that has a name now: what follows acts on that one, or on none. Of a name
// that no container has it is the name.
func (c *containers) id(ctx context.Context, name string) string {
	i, err := c.engine.Inspect(ctx, name)
	if err != nil {
		return name
	}
	return i.ID()
}

// Inspect implements api.Containers.
func (c *containers) Inspect(ctx context.Context, name string) (spec.Inspection, error) {
	i, err := c.engine.Inspect(ctx, name)
	if err != nil {
		return spec.Inspection{}, err
	}
	list := []spec.Container{c.container(i)}
	c.reads.mark(list)
	out := spec.Inspection{Container: list[0]}
	out.Request, out.Record = c.queue.RequestOf(i.Labels)
	oci, err := c.engine.OCI(ctx, name)
	out.OCI = string(oci)
	return out, err
}

// List implements api.Containers.
func (c *containers) List(ctx context.Context, all bool) ([]spec.Container, error) {
	infos, err := c.engine.List(ctx)
	if err != nil {
		return nil, err
	}
	out := []spec.Container{}
	for _, i := range infos {
		if v := c.container(i); all || v.Status != spec.StatusExited {
			out = append(out, v)
		}
	}
	c.reads.mark(out)
	slices.SortStableFunc(out, func(a, b spec.Container) int { return a.Created.Compare(b.Created) })
	return out, nil
}

func (c *containers) container(i *engine.Info) spec.Container {
	out := spec.Container{ID: i.ID(), Name: i.Name, Image: i.Image, Digest: i.Digest.String(),
		Status: string(i.Status), PID: int(i.Pid), Created: i.Created, Node: c.node,
		Caller: i.Labels[deploy.LabelCaller]}
	has := stdio.Of(i.Labels)
	out.TTY, out.Stdin = has.TTY, has.Stdin
	if i.Status == engine.Stopped {
		out.Status = spec.StatusExited
		if i.Exit != nil {
			out.ExitCode = i.Exit.Status
		}
	}
	c.supervisor.Describe(i, &out)
	c.health.Describe(i, &out)
	if i.Addr.IsValid() {
		out.IP = i.Addr.String()
	}
	for _, p := range i.Ports {
		np := spec.Port{Host: p.Host, Container: p.Container, Protocol: p.Protocol}
		if p.HostIP.IsValid() {
			np.HostIP = p.HostIP.String()
		}
		out.Ports = append(out.Ports, np)
	}
	return out
}

// Logs implements api.Containers.
func (c *containers) Logs(ctx context.Context, name string, o spec.LogOptions,
	emit func(spec.LogChunk) error) error {
	if err := validName(name); err != nil {
		return err
	}
	var mu sync.Mutex
	stream := func(s string) chunks { return chunks{&mu, s, emit} }
	return c.engine.Logs(ctx, c.id(ctx, name),
		engine.LogOptions{Follow: o.Follow, Tail: o.Tail, Stdout: stream(spec.Stdout), Stderr: stream(spec.Stderr)})
}

// chunks passes what is written to it to emit, one call at a time.
type chunks struct {
	mu     *sync.Mutex
	stream string
	emit   func(spec.LogChunk) error
}

func (c chunks) Write(b []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.emit(spec.LogChunk{Stream: c.stream, Data: b}); err != nil {
		return 0, err
	}
	return len(b), nil
}

// Exec implements api.Containers.
func (c *containers) Exec(ctx context.Context, name string, req spec.ExecRequest,
	io spec.ExecIO) (int, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	return c.engine.Exec(ctx, c.id(ctx, name),
		engine.ExecSpec{Args: req.Args, Env: req.Env, User: req.User, WorkingDir: req.Dir,
			TTY: req.TTY, Stdin: io.Stdin, Stdout: io.Stdout, Stderr: io.Stderr,
			Resize: sizes(ctx, req.Size, io.Resize)})
}

// Attach implements api.Containers.
func (c *containers) Attach(ctx context.Context, name string, size spec.Size, io spec.ExecIO) (int, error) {
	if err := validName(name); err != nil {
		return 0, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	x, err := c.engine.Attach(ctx, c.id(ctx, name), engine.AttachSpec{Stdin: io.Stdin, Stdout: io.Stdout,
		Stderr: io.Stderr, Resize: sizes(ctx, size, io.Resize)})
	return x.Status, err
}

// sizes are a terminal's in the engine's terms, the first of which it may lack, until ctx ends.
func sizes(ctx context.Context, first spec.Size, changes <-chan spec.Size) <-chan engine.WinSize {
	out := make(chan engine.WinSize, 1)
	if first != (spec.Size{}) {
		out <- engine.WinSize{Width: uint32(first.Cols), Height: uint32(first.Rows)}
	}
	if changes != nil {
		go forward(ctx, changes, out)
	}
	return out
}

func forward(ctx context.Context, in <-chan spec.Size, out chan<- engine.WinSize) {
	for {
		select {
		case s, ok := <-in:
			if !ok {
				return
			}
			select {
			case out <- engine.WinSize{Width: uint32(s.Cols), Height: uint32(s.Rows)}:
			case <-ctx.Done():
				return
			}
		case <-ctx.Done():
			return
		}
	}
}

// validName refuses what no container is named.
func validName(name string) error {
	if err := engine.ValidName(engine.Name(name)); err != nil {
		return fmt.Errorf("%w: %w", deploy.ErrRequest, err)
	}
	return nil
}
