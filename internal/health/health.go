// Package health finds out whether containers that run are well, by the checks that they were deployed with.
//
// # The model
//
// A container that is checked has its check as a label, which Keep gives it, and what is known of its health
// as another one: both outlive dewd. While it runs the Monitor runs the check's command in it,
// one at a time, and eight in all. The first check comes StartInterval after the start, or Interval
// if that is shorter; so do those of the start period. The others come an Interval after the end of the one
// before. One success makes it healthy, Retries failures in a row make it unhealthy.
//
// A failure is a command that ends with another status than 0, is not there, or takes longer than Timeout.
// Other errors are none: a check that containerd could not run, and one of a container that had ended, was
// paused, or was another one by the time. It is tried again soon.
//
// A container whose deployment goes on is not checked: readiness is that deployment's business. Nor is one
// that is held, as while its memory is saved: a process beside its own could not be. Who holds it waits for
// the check that runs.
package health

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"dewpoint/internal/engine"
	"dewpoint/internal/engine/cgroup"
	"dewpoint/internal/sched"
	"dewpoint/internal/spec"
)

// Engine is what the containers run by.
type Engine interface {
	List(ctx context.Context) ([]*engine.Info, error)
	Inspect(ctx context.Context, id string) (*engine.Info, error)
	Events(ctx context.Context, fn func(engine.Event)) error
	Relabel(ctx context.Context, id string, labels map[string]string) error
	Exec(ctx context.Context, id string, s engine.ExecSpec) (status int, err error)
	// TaskMade is when the container's present process was made; the zero time is that it is not known.
	TaskMade(name string) time.Time
}

// Config says what a Monitor works with. All of it is required.
type Config struct {
	Engine Engine
	// Deploying reports whether the deployment that made a container goes on.
	Deploying func(i *engine.Info) bool
	// Told is told of each change of a container's health, with the reason of a bad one. It must not block.
	Told func(i *engine.Info, now, why string)
	// Unhealthy is called after each failure of a container that is unhealthy. It may stop the container.
	Unhealthy func(ctx context.Context, i *engine.Info)
	Log       *slog.Logger
}

const (
	lookEvery = 10 * time.Second
	atOnce    = 8   // checks
	sayBytes  = 256 // of a check's output that are kept
)

// Monitor checks containers. It is safe for concurrent use.
type Monitor struct {
	cfg  Config
	life context.Context
	end  context.CancelFunc
	work sync.WaitGroup
	room chan struct{} // has a place for each check at once

	mu  sync.Mutex
	all map[string]*watch // guarded by mu; by ID
}

// watch is a container that is checked, or held. Its fields but the channels are guarded by the Monitor's mu.
type watch struct {
	turn   chan struct{} // has one of who checks or holds it
	anew   chan struct{} // has one when its process may be another
	users  int           // of turn
	active bool          // a goroutine follows it
	state  state
}

// New returns a Monitor that does nothing yet but hold. Close must follow.
func New(cfg Config) *Monitor {
	m := &Monitor{cfg: cfg, room: make(chan struct{}, atOnce), all: map[string]*watch{}}
	m.life, m.end = context.WithCancel(context.Background())
	return m
}

// Close ends what goes on. Containers are not touched.
func (m *Monitor) Close() {
	m.end()
	m.work.Wait()
}

// Run checks containers until ctx ends.
func (m *Monitor) Run(ctx context.Context) error {
	m.lookAtAll(ctx)
	m.work.Go(func() {
		for sched.Sleep(ctx, lookEvery) { // also makes good for what no event told
			m.lookAtAll(ctx)
		}
	})
	err := m.cfg.Engine.Events(ctx, func(ev engine.Event) {
		if ev.Kind == engine.EventStarted {
			m.look(ev.Name, true)
		}
	})
	if ctx.Err() != nil {
		return nil
	}
	return err
}

func (m *Monitor) lookAtAll(ctx context.Context) {
	list, err := m.cfg.Engine.List(ctx)
	if err != nil {
		return // ctx has ended
	}
	for _, i := range list {
		m.look(i.ID(), false)
	}
}

// look has a container followed that runs and has a check. started says that its process has just been made.
func (m *Monitor) look(id string, started bool) {
	i, err := m.cfg.Engine.Inspect(m.life, id)
	if err != nil || !runs(i) || checkOf(i).None() || m.life.Err() != nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	w := m.watch(i.ID())
	if w.active {
		m.leave(i.ID(), w)
		if started {
			select {
			case w.anew <- struct{}{}:
			default:
			}
		}
		return
	}
	w.active, w.state = true, stateOf(i.Labels)
	m.work.Go(func() {
		m.follow(i.ID(), w)
		m.mu.Lock()
		defer m.mu.Unlock()
		w.active = false
		m.leave(i.ID(), w)
	})
}

// runs reports whether a container has a process, which may be paused, or may not be known now.
func runs(i *engine.Info) bool {
	return i.Status == engine.Running || i.Status == engine.Paused || i.Status == engine.Unknown
}

// watch is that of a container, to be left. It is called with mu held.
func (m *Monitor) watch(id string) *watch {
	w := m.all[id]
	if w == nil {
		w = &watch{turn: make(chan struct{}, 1), anew: make(chan struct{}, 1)}
		m.all[id] = w
	}
	w.users++
	return w
}

// leave is called with mu held.
func (m *Monitor) leave(id string, w *watch) {
	if w.users--; w.users == 0 {
		delete(m.all, id)
	}
}

// Hold waits until no check of a container runs, and keeps others off until release.
func (m *Monitor) Hold(ctx context.Context, id string) (release func(), err error) {
	m.mu.Lock()
	w := m.watch(id)
	m.mu.Unlock()
	left := func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.leave(id, w)
	}
	select {
	case w.turn <- struct{}{}:
		return sync.OnceFunc(func() { <-w.turn; left() }), nil
	case <-ctx.Done():
		left()
		return nil, context.Cause(ctx)
	}
}

// follow checks a container until it does not run any more.
func (m *Monitor) follow(id string, w *watch) {
	var t timing
	for {
		i, err := m.cfg.Engine.Inspect(m.life, id)
		if err != nil || !runs(i) {
			return
		}
		check, made := checkOf(i).Defaults(), m.cfg.Engine.TaskMade(i.Name)
		m.mu.Lock()
		if anew := w.state.Made != made.UnixNano(); anew || t.born.IsZero() {
			t = begin(made)
			if anew {
				w.state = state{Made: made.UnixNano()}
			}
		}
		due := t.due(check, w.state)
		m.mu.Unlock()
		select {
		case <-w.anew:
			continue
		case <-m.life.Done():
			return
		case <-time.After(time.Until(due)):
		}
		if m.take(w.turn, m.room) != nil {
			return
		}
		t.known = m.check(id, w, made, t.born)
		<-m.room
		<-w.turn
		t.last = time.Now()
		m.mu.Lock()
		ill := t.known && w.state.Health == spec.HealthUnhealthy && w.state.Why != ""
		m.mu.Unlock()
		if ill {
			m.cfg.Unhealthy(m.life, i)
		}
	}
}

// take takes a place in each of several, in their order.
func (m *Monitor) take(places ...chan struct{}) error {
	for n, p := range places {
		select {
		case p <- struct{}{}:
		case <-m.life.Done():
			for _, taken := range places[:n] {
				<-taken
			}
			return m.life.Err()
		}
	}
	return nil
}

// check runs a container's check, if it is the time for one, and reports whether it says something of the
// process that was made then.
func (m *Monitor) check(id string, w *watch, made, born time.Time) (known bool) {
	if !m.fit(id, made) {
		return false
	}
	i, err := m.cfg.Engine.Inspect(m.life, id)
	if err != nil || m.cfg.Deploying(i) {
		return false
	}
	check := checkOf(i).Defaults()
	why, known := m.run(i, check)
	if !known || why != "" && !m.fit(id, made) {
		return false
	}
	m.mu.Lock()
	before := w.state
	w.state = before.after(check, why, time.Since(born) < check.StartPeriod)
	now := w.state
	m.mu.Unlock()
	if now.Health == before.Health {
		return true
	}
	if err := m.cfg.Engine.Relabel(m.life, id, now.labels()); err != nil && m.life.Err() == nil &&
		!errors.Is(err, engine.ErrNotFound) { // the next daemon finds it out again
		m.cfg.Log.Warn("keep how a container is", "container", i.Name, "err", err)
	}
	m.cfg.Told(i, now.Health, now.Why)
	return true
}

// fit reports whether a container runs, not paused, by the process that was made then.
func (m *Monitor) fit(id string, made time.Time) bool {
	i, err := m.cfg.Engine.Inspect(m.life, id)
	if err != nil || i.Status != engine.Running || !m.cfg.Engine.TaskMade(i.Name).Equal(made) {
		return false
	}
	frozen, err := cgroup.FreezerOf(i.Cgroup).Frozen() // as an earlier daemon may have left it
	return err != nil || !frozen
}

// run runs the command of a check. why is what is wrong with the container, "" is nothing; known is false
// where that has not been found out.
func (m *Monitor) run(i *engine.Info, check spec.Health) (why string, known bool) {
	args, err := check.Args()
	if err != nil {
		return "", false
	}
	ctx, cancel := context.WithTimeout(m.life, check.Timeout)
	defer cancel()
	out, began := &output{}, false
	status, err := m.cfg.Engine.Exec(ctx, i.ID(), engine.ExecSpec{Args: args, Stdout: out, Stderr: out,
		Started: func() { began = true }})
	switch {
	case m.life.Err() != nil:
		return "", false
	case err == nil && status == 0:
		return "", true
	case err == nil:
		return out.after(fmt.Sprintf("status %d", status)), true
	case ctx.Err() != nil && began: // else containerd, which may be starting again, has let it wait
		return out.after(fmt.Sprintf("no end after %v", check.Timeout)), true
	case errors.Is(err, engine.ErrNoCommand), errors.Is(err, engine.ErrNotExecutable):
		return err.Error(), true
	}
	m.cfg.Log.Debug("a health check could not be run", "container", i.Name, "err", err)
	return "", false
}

// Describe adds to what is said of a container how it is.
func (m *Monitor) Describe(i *engine.Info, out *spec.Container) {
	if i.Status != engine.Running && i.Status != engine.Paused || checkOf(i).None() {
		return
	}
	now := stateOf(i.Labels)
	m.mu.Lock()
	if w := m.all[i.ID()]; w != nil && w.active {
		now = w.state
	}
	m.mu.Unlock()
	if now.Made != m.cfg.Engine.TaskMade(i.Name).UnixNano() {
		now = state{} // of its process before
	}
	out.Health, out.HealthError = spec.HealthStarting, now.Why
	if now.Health != "" {
		out.Health = now.Health
	}
}
