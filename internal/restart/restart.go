// Package restart keeps containers up: it starts those again that have ended, as their policies say.
//
// # The model
//
// A container has the policy that it was deployed with as a label, and its state as another one: how often
// it was started again, how often in a row, and the mark that says why it stays down. Both are in
// containerd's record of it, so they outlive dewd and the machine. What is waited for is known to the
// Supervisor alone, and the next one finds it out again.
//
// The engine's events tell of ends promptly. A look at all containers, every ten seconds, makes good for
// what no event told. One that has ended and has no mark is started again: after 100 ms the first time, twice
// as long each further time in a row, a minute at most, until it has run for ten seconds. When dewd starts,
// what ended with the machine, or with nobody there to see it, starts at once, the oldest first.
//
// A container whose deployment goes on is that deployment's business: its policy holds once it is ready.
//
// What persons do to a container that has a policy goes through the Supervisor, which marks it before it
// acts: so no start comes between.
package restart

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"dewpoint/internal/engine"
	"dewpoint/internal/sched"
	"dewpoint/internal/spec"
)

// Engine is what the containers run by.
type Engine interface {
	List(ctx context.Context) ([]*engine.Info, error)
	Inspect(ctx context.Context, id string) (*engine.Info, error)
	Events(ctx context.Context, fn func(engine.Event)) error
	// Relabel changes labels; an empty value removes one.
	Relabel(ctx context.Context, id string, labels map[string]string) error
	Stop(ctx context.Context, id string, grace time.Duration) error
	Kill(ctx context.Context, id string, sig unix.Signal) error
	Remove(ctx context.Context, id string, force bool) error
	// TaskMade is when the container's present process was made; the zero time is that it is not known.
	TaskMade(name string) time.Time
}

// Config says what a Supervisor works with. All of it is required.
type Config struct {
	Engine Engine
	// Start starts a container by its command that has ended, with labels changed; engine.ErrRunning if it runs.
	Start func(ctx context.Context, i *engine.Info, labels map[string]string) error
	// Deploying reports whether the deployment that made a container goes on.
	Deploying func(i *engine.Info) bool
	// Told is told of each start that a policy wanted, which failed unless err is nil. It must not block.
	Told func(i *engine.Info, restarts int, err error)
	Log  *slog.Logger
}

const (
	lookEvery = 10 * time.Second
	atOnce    = 4           // starts
	startTime = time.Minute // bounds one
)

// Supervisor starts containers again. It is safe for concurrent use.
type Supervisor struct {
	cfg  Config
	life context.Context
	end  context.CancelFunc
	work sync.WaitGroup // what waits, and starts
	room chan struct{}  // has a place for each start at once

	mu  sync.Mutex
	all map[string]*entry // guarded by mu; by ID
}

// entry is a container that has a policy. Its fields but turn are guarded by the Supervisor's mu.
type entry struct {
	turn   sync.Mutex // held by who marks or starts it
	busy   bool       // it is being started
	state  state
	saved  state     // as the label has it
	due    time.Time // of its next start; the zero time is that there is to be none
	disarm func()    // calls that off
}

// New returns a Supervisor that does nothing yet but what it is told to. Close must follow.
func New(cfg Config) *Supervisor {
	s := &Supervisor{cfg: cfg, room: make(chan struct{}, atOnce), all: map[string]*entry{}}
	s.life, s.end = context.WithCancel(context.Background())
	return s
}

// Close ends what goes on. Containers are not touched.
func (s *Supervisor) Close() {
	s.end()
	s.work.Wait()
}

// Run starts what is to run now that dewd has started, and then what ends, until ctx ends.
func (s *Supervisor) Run(ctx context.Context) error {
	s.lookAtAll(ctx, true)
	s.work.Go(func() {
		for sched.Sleep(ctx, lookEvery) {
			s.lookAtAll(ctx, false)
		}
	})
	err := s.cfg.Engine.Events(ctx, func(ev engine.Event) {
		if ev.Kind == engine.EventExited {
			s.look(ev.Name, false)
		}
	})
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// lookAtAll looks at all containers, the oldest first, and forgets those that are gone.
func (s *Supervisor) lookAtAll(ctx context.Context, boot bool) {
	list, err := s.cfg.Engine.List(ctx)
	if err != nil {
		return // ctx has ended
	}
	slices.SortStableFunc(list, func(a, b *engine.Info) int { return a.Created.Compare(b.Created) })
	there := map[string]bool{}
	for _, i := range list {
		there[i.ID()] = true
		s.look(i.ID(), boot)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, e := range s.all {
		if !there[id] && !e.busy {
			e.off()
			delete(s.all, id)
		}
	}
}

// look decides about a container, if it has ended and nothing is decided yet. It is known from memory.
func (s *Supervisor) look(id string, boot bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	i, err := s.cfg.Engine.Inspect(s.life, id) // as it is now: it may have been started since
	if err != nil || policyOf(i).Kind == spec.RestartNo {
		return
	}
	if boot && !ended(i) {
		s.unfinished(i)
	}
	if !ended(i) {
		return
	}
	if (s.all[i.ID()] == nil || i.Status == engine.Created) && s.cfg.Deploying(i) {
		s.work.Go(func() { // its label says by then what has become of the deployment
			if sched.Sleep(s.life, firstWait) {
				s.look(i.ID(), boot)
			}
		})
		return
	}
	e := s.entry(i)
	if e.busy || !e.due.IsZero() {
		return
	}
	if now := stateOf(i.Labels); now.Mark == failed { // its deployment has failed meanwhile
		e.state, e.saved = now, now
	}
	end := ending{boot: boot}
	if i.Exit != nil {
		end.known, end.status = true, i.Exit.Status
		if made := s.cfg.Engine.TaskMade(i.Name); !made.IsZero() {
			end.ran = i.Exit.At.Sub(made)
		}
	}
	s.decide(e, i, end)
}

// ended reports whether a container has no process: it has ended, or whoever started it again was killed
// before it ran.
func ended(i *engine.Info) bool { return i.Status == engine.Stopped || i.Status == engine.Created }

// unfinished takes the mark off a container that an earlier dewd was about to stop for a person, and that
// runs on. One that was to be stopped for its health may be ending now. It is called with mu held.
func (s *Supervisor) unfinished(i *engine.Info) {
	if m := stateOf(i.Labels).Mark; m != stopped && m != turning {
		return
	}
	e := s.entry(i)
	e.state.Mark = ""
	s.keep(e, i)
}

// keep saves the state behind its caller, who holds mu.
func (s *Supervisor) keep(e *entry, i *engine.Info) {
	s.work.Go(func() {
		e.turn.Lock()
		defer e.turn.Unlock()
		if err := s.save(s.life, e, i.ID()); err != nil && s.life.Err() == nil {
			s.cfg.Log.Warn("keep what has become of a container", "container", i.Name, "err", err)
		}
	})
}

// decide has what follows an end done, or waited for. It is called with mu held.
func (s *Supervisor) decide(e *entry, i *engine.Info, end ending) {
	after, again, wait := next(policyOf(i), e.state, end)
	e.state = after
	switch {
	case again:
		s.arm(e, i, wait)
	case e.state != e.saved:
		s.keep(e, i)
	}
}

// arm has a container started after a while. It is called with mu held.
func (s *Supervisor) arm(e *entry, i *engine.Info, wait time.Duration) {
	ctx, disarm := context.WithCancel(s.life)
	e.due, e.disarm = time.Now().Add(wait), disarm
	s.work.Go(func() {
		defer disarm()
		if !sched.Sleep(ctx, wait) {
			return
		}
		select {
		case s.room <- struct{}{}:
			s.fire(ctx, e, i.ID())
			<-s.room
		case <-ctx.Done():
		}
	})
}

// off calls a start off that is waited for, and says whether one was. It is called with the Supervisor's mu
// held.
func (e *entry) off() bool {
	if e.due.IsZero() {
		return false
	}
	e.due = time.Time{}
	e.disarm()
	return true
}

// fire starts a container unless that was called off, which ends ctx.
func (s *Supervisor) fire(ctx context.Context, e *entry, id string) {
	e.turn.Lock()
	defer e.turn.Unlock()
	i, err := s.cfg.Engine.Inspect(s.life, id)
	s.mu.Lock()
	if ctx.Err() == nil {
		e.due = time.Time{}
	}
	want := e.state
	// else it was called off, or is gone, or somebody else has started it
	e.busy = ctx.Err() == nil && want.Mark == "" && err == nil && ended(i)
	goes := e.busy
	s.mu.Unlock()
	if !goes {
		return
	}
	err = s.start(s.life, e, i, want)
	if errors.Is(err, engine.ErrRunning) || errors.Is(err, engine.ErrNotFound) || s.life.Err() != nil {
		return
	}
	s.cfg.Told(i, want.Restarts, err)
	if err == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !e.busy && e.due.IsZero() {
		s.decide(e, i, ending{known: true, status: unstarted})
	}
}

// unstarted is the status of a container that could not be started.
const unstarted = 125

// start starts a container with a state. It is called with turn held and e.busy, which it ends: an end that
// comes meanwhile is looked at behind it.
func (s *Supervisor) start(ctx context.Context, e *entry, i *engine.Info, want state) error {
	ctx, cancel := context.WithTimeout(ctx, startTime)
	defer cancel()
	err := s.cfg.Start(ctx, i, want.labels())
	s.mu.Lock()
	e.busy = false
	if err == nil {
		e.state, e.saved = want, want
	}
	s.mu.Unlock()
	if err == nil {
		s.look(i.ID(), false)
	}
	return err
}

// save keeps the state. It is called with turn held.
func (s *Supervisor) save(ctx context.Context, e *entry, id string) error {
	s.mu.Lock()
	now := e.state
	s.mu.Unlock()
	if now == e.saved {
		return nil
	}
	err := s.cfg.Engine.Relabel(ctx, id, now.labels())
	if err == nil {
		s.mu.Lock()
		e.saved = now
		s.mu.Unlock()
	}
	return err
}

// entry is that of a container. It is called with mu held.
func (s *Supervisor) entry(i *engine.Info) *entry {
	e := s.all[i.ID()]
	if e == nil {
		now := stateOf(i.Labels)
		e = &entry{state: now, saved: now}
		s.all[i.ID()] = e
	}
	return e
}

// Describe adds to what is said of a container how it stands with its restarts.
func (s *Supervisor) Describe(i *engine.Info, out *spec.Container) {
	if policyOf(i).Kind == spec.RestartNo {
		return
	}
	now, due := stateOf(i.Labels), time.Time{}
	s.mu.Lock()
	if e := s.all[i.ID()]; e != nil {
		now, due = e.state, e.due
	}
	s.mu.Unlock()
	out.Restart, out.Restarts = i.Labels[LabelPolicy], now.Restarts
	if i.Status == engine.Stopped && !due.IsZero() {
		out.Status, out.NextStart = spec.StatusRestarting, due
	}
	out.CrashLoop = now.Streak >= loops && now.Mark == "" &&
		(i.Status == engine.Stopped || time.Since(s.cfg.Engine.TaskMade(i.Name)) < steady)
}
