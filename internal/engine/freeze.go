package engine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"dewpoint/internal/engine/cgroup"
	"dewpoint/internal/engine/state"
	"dewpoint/internal/sched"
)

// freezeTimeout bounds how long processes may take to stop; one that sleeps in
// the kernel does not until it wakes.
const freezeTimeout = 10 * time.Second

// Pause stops all processes of a container until Resume, by its cgroup alone:
// containerd knows nothing of it and Inspect does not tell. They are stopped
// when Pause returns nil; on an error they run. A daemon that dies meanwhile
// leaves them stopped, which Start of the next one ends.
func (e *dumps) Pause(ctx context.Context, name string) error {
	if err := e.thaws.wait(ctx, name); err != nil {
		return fmt.Errorf("pause container %s: what a crash has left paused: %w", name, err)
	}
	f := cgroup.FreezerOf(e.cfg.places().Cgroup(name))
	if err := f.Set(true); err != nil {
		return fmt.Errorf("pause container %s: %w", name, paused(err))
	}
	ctx, cancel := context.WithTimeout(ctx, freezeTimeout)
	defer cancel()
	for n := 0; ; n++ {
		frozen, err := f.Frozen()
		if err == nil && frozen {
			return nil
		}
		if err == nil && !sched.Sleep(ctx, time.Millisecond) {
			err = ctx.Err()
		}
		if err == nil && n%10 == 9 {
			err = f.Set(true) // version 1 may have to be asked again
		}
		if err != nil {
			return fmt.Errorf("pause container %s: %w", name, errors.Join(err, f.Set(false)))
		}
	}
}

// Resume lets the processes of a container run on; it does no harm where they run.
func (e *dumps) Resume(name string) error {
	return wrap(paused(cgroup.FreezerOf(e.cfg.places().Cgroup(name)).Set(false)), "resume container %s", name)
}

// paused says in the engine's words that there is no such cgroup.
func paused(err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return ErrNotRunning
	}
	return err
}

// thawAll ends the pauses of a daemon that died within them. A dump that it had
// begun may still be at work, and would restore the pause that it found: its end is waited for in the
// background, until Close, and by Pause.
func (e *dumps) thawAll(ctx context.Context, recs []state.Record) {
	for _, r := range recs {
		f := cgroup.FreezerOf(e.cfg.places().Cgroup(r.Name))
		frozen, err := f.Frozen()
		switch {
		case err != nil: // it does not run
		case e.isDumped(r.Name):
			done := e.thaws.begin(r.Name)
			e.work.Go(func() {
				defer done()
				for e.isDumped(r.Name) && sched.Sleep(ctx, 10*time.Millisecond) {
				}
				if ctx.Err() == nil {
					e.thaw(r.Name, f)
				}
			})
		case frozen:
			e.thaw(r.Name, f)
		}
	}
}

func (e *dumps) thaw(name string, f cgroup.Freezer) {
	e.log.Info("resuming what a crash has left paused", "container", name)
	if err := f.Set(false); err != nil && !errors.Is(err, os.ErrNotExist) {
		e.log.Warn("resume", "container", name, "err", err)
	}
}

// thaws are the containers that are about to be resumed. It is safe for concurrent use.
type thaws struct {
	mu  sync.Mutex
	all map[string]chan struct{} // closed when it is done; guarded by mu
}

func (t *thaws) begin(name string) (done func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.all == nil {
		t.all = map[string]chan struct{}{}
	}
	c := make(chan struct{})
	t.all[name] = c
	return func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		delete(t.all, name)
		close(c)
	}
}

// pendingThaw is closed when that container is resumed; nil if it is not about to be.
func (t *thaws) pendingThaw(name string) <-chan struct{} {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.all[name]
}

func (t *thaws) wait(ctx context.Context, name string) error {
	c := t.pendingThaw(name)
	if c == nil {
		return nil
	}
	select {
	case <-c:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// isDumped says whether CRIU holds a process of the container.
func (e *dumps) isDumped(name string) bool {
	procs, _ := cgroup.Processes(e.cfg.places().Cgroup(name))
	for _, pid := range procs {
		status, err := os.ReadFile("/proc/" + pid + "/status")
		_, tracer, _ := bytes.Cut(status, []byte("\nTracerPid:\t"))
		tracer, _, _ = bytes.Cut(tracer, []byte("\n"))
		if err != nil || len(tracer) == 0 || string(tracer) == "0" {
			continue
		}
		if cmd, err := os.ReadFile("/proc/" + string(tracer) + "/cmdline"); err == nil &&
			bytes.Contains(cmd, []byte("criu")) {
			return true
		}
	}
	return false
}
