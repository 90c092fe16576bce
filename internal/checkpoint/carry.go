package checkpoint

import (
	"context"
	"fmt"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"dewpoint/internal/engine"
)

// A Carrier is an Engine that works from within a container, which has to carry
// it from its start on. What it has dumped is started by a command in the
// application's place.
type Carrier interface {
	Engine

	// Carry changes what a container that will boot is made by, so that it can be
	// dumped. What is shared with others of s stays as it is. An *UnfitError says
	// why a container of s cannot carry the engine; s is as it was then.
	Carry(s *engine.Spec) error

	// Revive changes what a container is made by, so that it starts from what Dump
	// has written to dir, which stays until the container is made.
	Revive(s *engine.Spec, dir string) error

	// Awake returns once the processes of a started container that was made by
	// Revive run on. Its error says that they do not.
	Awake(ctx context.Context, name string) error

	// Bare is a container's specification without what Carry has added to it.
	Bare(o *specs.Spec) *specs.Spec
}

// LabelCarries is on containers that carry an engine: its name.
const LabelCarries = "dewpoint.checkpoint.carries"

// able is an engine that works here.
type able struct {
	Ability
	engine Engine
}

// carrier is the engine if containers have to carry it, else nil. a may be nil.
func (a *able) carrier() Carrier {
	if a == nil {
		return nil
	}
	c, _ := a.engine.(Carrier)
	return c
}

// probe finds the first engine that works. It stays the one until the daemon
// ends: what was started for one is of no use to another.
func (m *Manager) probe(ctx context.Context) (*able, error) {
	m.probing.Lock()
	defer m.probing.Unlock()
	engines := m.cfg.Engines
	if m.chosen != nil {
		engines = []Engine{m.chosen}
	}
	var why []error
	for _, e := range engines {
		a, err := e.Probe(ctx)
		if err == nil {
			if m.chosen == nil {
				m.chosen, m.passedOver = e, why
			}
			found := &able{a, e}
			m.able.Store(found)
			return found, nil
		}
		why = append(why, err)
		if ctx.Err() != nil {
			break
		}
	}
	m.able.Store(nil)
	if len(why) == 1 {
		return nil, why[0]
	}
	return nil, unable(why)
}

// PassedOver are why the engines do not work that were to be used rather than the
// one that is; nothing before there is one.
func (m *Manager) PassedOver() []error {
	m.probing.Lock()
	defer m.probing.Unlock()
	return m.passedOver
}

// unable is why none of several engines works.
type unable []error

func (u unable) Error() string {
	var why []string
	for _, err := range u {
		why = append(why, Cause(err))
	}
	return ErrUnable.Error() + ": " + strings.Join(why, "; ")
}

func (u unable) Unwrap() []error { return u }

// Cause is what an error of Probe says, without ErrUnable's words.
func Cause(err error) string { return strings.TrimPrefix(err.Error(), ErrUnable.Error()+": ") }

// bare finds out whether the engine can dump a container, as far as that was
// decided when it was made, and leaves of its specification what is its own.
func (c *subject) bare() error {
	carries, carrier := c.info.Labels[LabelCarries], c.able.carrier()
	switch {
	case carrier == nil && carries == "":
		return nil
	case carrier == nil || carries != "" && carries != carrier.Name():
		return &UnfitError{fmt.Sprintf("it was started for checkpoints by %s, and this node makes them by %s now",
			carries, c.able.Engine), "start it anew"}
	case c.info.Labels[LabelRestored] != "":
		return &UnfitError{"it was itself started from a checkpoint, which " + carrier.Name() +
			" cannot save again", "start one with --restore never --checkpoint"}
	case carries == "":
		return &UnfitError{"it was not started for checkpoints by " + carrier.Name() +
			", which this node makes them by",
			"start it with --checkpoint, or label its image " + LabelCheckpoint + "=auto"}
	}
	c.spec = carrier.Bare(c.spec)
	return nil
}

// Carry changes what a container that boots is made by, if a checkpoint is to be
// made of it by an engine that it has to carry, and reports whether it did. That
// it cannot carry it is told as Config.Unmade; it boots all the same.
func (p *Plan) Carry(s *engine.Spec) bool {
	if p == nil || p.carrier == nil || !p.asked {
		return false
	}
	if err := p.carrier.Carry(s); err != nil {
		p.Uncarried(s.Name, err)
		return false
	}
	label(s, LabelCarries, p.carrier.Name())
	return true
}

// Uncarried says that the container boots without the engine that it was to carry.
func (p *Plan) Uncarried(name string, why error) {
	p.asked = false
	if p.m.cfg.Audience != nil {
		p.m.cfg.Audience.Unmade(name, why)
	}
}

// Revive changes what a container is made by so that it starts from what Bring has brought.
func (p *Plan) Revive(ctx context.Context, s *engine.Spec, prep *Prepared) error {
	s.Restore = prep.Restore
	label(s, LabelRestored, p.Record.ID)
	if p.carrier == nil {
		return nil
	}
	dir, err := prep.Restore.Images(ctx)
	if err != nil {
		return err
	}
	s.Restore = &engine.Restore{Upper: prep.Restore.Upper}
	if s.Restore.Upper == "" {
		s.Restore = nil
	}
	label(s, LabelCarries, p.carrier.Name())
	return p.carrier.Revive(s, dir)
}

// label adds one to the container's, which others may share.
func label(s *engine.Spec, key, value string) {
	all := map[string]string{key: value}
	for k, v := range s.Labels {
		if k != key {
			all[k] = v
		}
	}
	s.Labels = all
}
