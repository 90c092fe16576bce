package restart

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"dewpoint/internal/engine"
	"dewpoint/internal/spec"
)

// mark says of a container that a person wants it down, and calls a start off that is waited for; waited is
// that there was one. From then on no policy starts it. An error says that the next daemon does not know.
func (s *Supervisor) mark(ctx context.Context, i *engine.Info, m mark) (waited bool, err error) {
	if policyOf(i).Kind == spec.RestartNo {
		return false, nil
	}
	s.mu.Lock()
	e := s.entry(i)
	s.mu.Unlock()
	e.turn.Lock()
	defer e.turn.Unlock()
	s.mu.Lock()
	waited = e.off()
	switch {
	case m == ill && e.state.Mark != "": // a person came before
	case m == stopped && (e.state.Mark == failed || e.state.Mark == over): // which keep it down, and longer
	default:
		e.state.Mark = m
	}
	s.mu.Unlock()
	return waited, s.save(ctx, e, i.ID())
}

// Stop stops a container as the engine does. It stays down until it is started or, if its policy is always,
// until dewd is started anew.
func (s *Supervisor) Stop(ctx context.Context, id string, grace time.Duration) error {
	i, err := s.cfg.Engine.Inspect(ctx, id)
	if err != nil {
		return err
	}
	_, unmarked := s.mark(ctx, i, stopped)
	if err := s.cfg.Engine.Stop(ctx, i.ID(), grace); err != nil && !errors.Is(err, engine.ErrNotRunning) {
		return errors.Join(err, unmarked)
	}
	return unmarked
}

// Kill sends a signal. One that is to end the container, KILL or its stop signal, is as Stop to its policy.
func (s *Supervisor) Kill(ctx context.Context, id string, sig unix.Signal) error {
	i, err := s.cfg.Engine.Inspect(ctx, id)
	if err != nil {
		return err
	}
	var waited bool
	var unmarked error
	if sig == unix.SIGKILL || sig == engine.StopSignal(i) {
		waited, unmarked = s.mark(ctx, i, stopped)
		if i, err = s.cfg.Engine.Inspect(ctx, i.ID()); err != nil { // it may have been started just before
			return errors.Join(err, unmarked)
		}
	}
	switch {
	case waited: // it was about to run
	case i.Status == engine.Stopped:
		err = fmt.Errorf("kill container %s: %w", i.Name, engine.ErrNotRunning)
	default:
		err = s.cfg.Engine.Kill(ctx, i.ID(), sig)
	}
	return errors.Join(err, unmarked)
}

// Start starts a container that has ended, and begins to count its restarts anew. ErrRunning if it runs.
func (s *Supervisor) Start(ctx context.Context, id string) error {
	i, err := s.cfg.Engine.Inspect(ctx, id)
	if err != nil {
		return err
	}
	if policyOf(i).Kind == spec.RestartNo {
		return s.cfg.Start(ctx, i, nil)
	}
	s.mu.Lock()
	e := s.entry(i)
	s.mu.Unlock()
	e.turn.Lock()
	defer e.turn.Unlock()
	s.mu.Lock()
	e.off()
	e.busy = true
	s.mu.Unlock()
	err = s.start(ctx, e, i, state{})
	if err == nil {
		return nil
	}
	s.mu.Lock()
	if errors.Is(err, engine.ErrRunning) { // and is to, from now on
		e.state.Mark = ""
	} else { // it is as it was: down, by a person's doing
		e.state.Mark, e.saved = stopped, state{}
	}
	s.mu.Unlock()
	return errors.Join(err, s.save(context.WithoutCancel(ctx), e, i.ID()))
}

// Restart stops a container and starts it.
func (s *Supervisor) Restart(ctx context.Context, id string, grace time.Duration) error {
	i, err := s.cfg.Engine.Inspect(ctx, id)
	if err != nil {
		return err
	}
	_, _ = s.mark(ctx, i, turning) // the next daemon need not know
	err = s.cfg.Engine.Stop(ctx, i.ID(), grace)
	if err == nil || errors.Is(err, engine.ErrNotRunning) {
		err = s.Start(ctx, i.ID())
	}
	if err != nil { // it may run: then its policy holds
		_, unmarked := s.mark(context.WithoutCancel(ctx), i, "")
		err = errors.Join(err, unmarked)
	}
	return err
}

// Remove removes a container as the engine does.
func (s *Supervisor) Remove(ctx context.Context, id string, force bool) error {
	i, err := s.cfg.Engine.Inspect(ctx, id)
	if err != nil || !force && i.Status != engine.Stopped {
		return s.cfg.Engine.Remove(ctx, id, force)
	}
	_, _ = s.mark(ctx, i, stopped) // the next daemon does not find it
	err = s.cfg.Engine.Remove(ctx, i.ID(), force)
	if errors.Is(err, engine.ErrRunning) { // since a moment ago: then its policy holds
		_, unmarked := s.mark(context.WithoutCancel(ctx), i, "")
		err = errors.Join(err, unmarked)
	}
	return err
}

// Unhealthy has a container that runs and is not well stopped and started again, unless its policy would not
// start it: then it runs on.
func (s *Supervisor) Unhealthy(ctx context.Context, i *engine.Info, grace time.Duration) error {
	s.mu.Lock()
	e := s.entry(i)
	_, again, _ := next(policyOf(i), e.state, ending{known: true, status: unstarted})
	again = again && !e.busy
	s.mu.Unlock()
	if !again {
		return nil
	}
	_, unmarked := s.mark(ctx, i, ill)
	s.mu.Lock()
	again = e.state.Mark == ill
	s.mu.Unlock()
	if !again { // a person wants it otherwise
		return unmarked
	}
	err := s.cfg.Engine.Stop(ctx, i.ID(), grace)
	if err == nil || errors.Is(err, engine.ErrNotRunning) {
		s.look(i.ID(), false)
		return unmarked
	}
	s.mu.Lock()
	if e.state.Mark == ill && ctx.Err() == nil { // else it may be stopping
		e.state.Mark = ""
		s.keep(e, i)
	}
	s.mu.Unlock()
	return errors.Join(err, unmarked)
}

// SetPolicy gives a container another policy. One that has ended, and that no policy was to start, stays down
// until a person starts it.
func (s *Supervisor) SetPolicy(ctx context.Context, i *engine.Info, policy string) error {
	p, err := spec.ParseRestart(policy)
	if err != nil {
		return err
	}
	if p.Kind == spec.RestartNo {
		policy = ""
	}
	s.mu.Lock()
	e := s.entry(i)
	s.mu.Unlock()
	e.turn.Lock()
	defer e.turn.Unlock()
	s.mu.Lock()
	if policy == "" {
		e.off()
	} else if policyOf(i).Kind == spec.RestartNo { // nobody has kept its mark
		if e.state.Mark = ""; i.Status == engine.Stopped {
			e.state.Mark = over
		}
	}
	s.mu.Unlock()
	if err := s.save(ctx, e, i.ID()); err != nil {
		return err
	}
	return s.cfg.Engine.Relabel(ctx, i.ID(), map[string]string{LabelPolicy: policy})
}
