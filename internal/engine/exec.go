package engine

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	tasksapi "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/errdefs"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"dewpoint/internal/engine/account"
	"dewpoint/internal/engine/program"
	"dewpoint/internal/engine/streams"
)

// ExecSpec is a process to run in a running container.
type ExecSpec struct {
	Args       []string
	Env        []string // KEY=VALUE, added to the container's
	User       string   // default the container's
	WorkingDir string   // default the container's
	TTY        bool     // Stderr is not used then
	Stdin      io.Reader
	Stdout     io.Writer
	Stderr     io.Writer
	Resize     <-chan WinSize // of the terminal; may be nil
	Started    func()         // is called once the process runs; may be nil
}

// WinSize is a terminal's size in characters.
type WinSize struct{ Width, Height uint32 }

// Exec runs a process in the container and returns its exit status once it
// has ended and its output has been copied. When ctx ends first the process
// is killed. The caller ends Stdin: Exec does not wait for a Read that blocks.
func (e *execs) Exec(ctx context.Context, id string, s ExecSpec) (int, error) {
	if len(s.Args) == 0 {
		return 0, errors.New("exec: no command")
	}
	status, err := e.exec(ctx, id, s)
	if end := ctx.Err(); err != nil && end != nil && !errors.Is(err, end) {
		err = fmt.Errorf("%w: %w", end, err) // as a shim says it, it is not to be told from others
	}
	return status, wrap(err, "exec in container %s", Name(id))
}

func (e *execs) exec(ctx context.Context, container string, s ExecSpec) (int, error) {
	name := Name(container)
	p, err := e.execProcess(ctx, name, s)
	if err != nil {
		return 0, err
	}
	spec, err := jsonAny("Process", p)
	if err != nil {
		return 0, err
	}
	io, err := streams.Open(ctx, e.cfg.execDir(), s.Stdin, s.Stdout, s.Stderr, s.TTY)
	if err != nil {
		return 0, err
	}
	defer io.Close()
	id := "exec-" + rand.Text()
	_, err = e.c.Tasks.Exec(ctx, &tasksapi.ExecProcessRequest{
		ContainerID: name, ExecID: id, Terminal: s.TTY, Spec: spec,
		Stdin: io.Stdin, Stdout: io.Stdout, Stderr: io.Stderr,
	})
	if err != nil {
		return 0, notRunning(err)
	}
	defer e.endExec(context.WithoutCancel(ctx), name, id)
	if container != name { // asked for behind the call: what has the process's id now is that container
		if _, err := e.recordOf(ctx, container); err != nil {
			return 0, err
		}
	}
	r, err := e.c.Tasks.Start(ctx, &tasksapi.StartRequest{ContainerID: name, ExecID: id})
	if err != nil {
		return 0, program.BadCommand(notRunning(err))
	}
	if s.Started != nil {
		s.Started()
	}
	if err := e.alone(ctx, name, r.Pid); err != nil {
		return 0, err
	}
	return e.attend(ctx, name, id, s, io)
}

// attend waits for the started process.
func (e *execs) attend(ctx context.Context, name, id string, s ExecSpec, io *streams.Streams) (int, error) {
	done := make(chan struct{})
	var wg sync.WaitGroup
	defer wg.Wait()
	defer close(done)
	wg.Go(func() {
		select {
		case <-io.StdinEnd:
			_, _ = e.c.Tasks.CloseIO(ctx, &tasksapi.CloseIORequest{ContainerID: name, ExecID: id, Stdin: true})
		case <-done:
		}
	})
	wg.Go(func() { e.resize(ctx, name, id, s.Resize, done) })
	x, err := e.waitProcess(ctx, name, id)
	if err != nil {
		return 0, err
	}
	io.Drain(ctx)
	return x.Status, nil
}

// resize gives a process's terminal the sizes that come, until done.
func (e *tasks) resize(ctx context.Context, name, exec string, sizes <-chan WinSize, done <-chan struct{}) {
	for {
		select {
		case z, ok := <-sizes:
			if !ok {
				return
			}
			_, _ = e.c.Tasks.ResizePty(ctx,
				&tasksapi.ResizePtyRequest{ContainerID: name, ExecID: exec, Width: z.Width, Height: z.Height})
		case <-done:
			return
		}
	}
}

// endExec kills the process if it still runs, and forgets it.
func (e *execs) endExec(ctx context.Context, name, id string) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	del := func() error {
		_, err := e.c.Tasks.DeleteProcess(ctx, &tasksapi.DeleteProcessRequest{ContainerID: name, ExecID: id})
		return err
	}
	err := del()
	if err == nil || errdefs.IsNotFound(err) {
		return
	}
	_, _ = e.c.Tasks.Kill(ctx,
		&tasksapi.KillRequest{ContainerID: name, ExecID: id, Signal: uint32(unix.SIGKILL)})
	_, _ = e.waitProcess(ctx, name, id)
	if err := del(); err != nil && !errdefs.IsNotFound(err) {
		e.log.Warn("end exec", "container", name, "err", err)
	}
}

// execProcess is the container's own process with other arguments.
func (e *execs) execProcess(ctx context.Context, name string, s ExecSpec) (*specs.Process, error) {
	r, err := e.c.Containers.Get(ctx, &containersapi.GetContainerRequest{ID: name})
	if err != nil {
		return nil, notFound(err)
	}
	o, err := parseSpec(r.Container.Spec)
	if err != nil {
		return nil, err
	}
	p := o.Process
	p.Args, p.Terminal = s.Args, s.TTY
	p.Env = append(p.Env, s.Env...)
	if s.TTY {
		p.Env = append(p.Env, "TERM=xterm")
	}
	if s.WorkingDir != "" {
		p.Cwd = s.WorkingDir
	}
	if s.User == "" {
		return p, nil
	}
	st, err := e.state.Task(ctx, name)
	if err != nil {
		return nil, notRunning(err)
	}
	u, err := account.Lookup(s.User, account.Mounted(fmt.Sprintf("/proc/%d/root", st.Pid)))
	p.User = specs.User{UID: u.UID, GID: u.GID, AdditionalGids: u.Groups}
	return p, err
}

func notRunning(err error) error {
	if errdefs.IsNotFound(err) || errdefs.IsFailedPrecondition(err) ||
		strings.Contains(err.Error(), "in a stopped state") {
		return fmt.Errorf("%w (%w)", ErrNotRunning, err)
	}
	return err
}
