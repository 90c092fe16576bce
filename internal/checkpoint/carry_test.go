package checkpoint

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"dewpoint/internal/engine"
)

// carried is an engine that containers carry.
type carried struct {
	*fake
	refuses error // of Carry
	awake   error
	revived string // directory
}

func (c *carried) Name() string { return "dmtcp" }

func (c *carried) Probe(context.Context) (Ability, error) {
	a := someAbility()
	a.Engine = "dmtcp"
	return a, c.err
}

func (c *carried) Carry(s *engine.Spec) error {
	if c.refuses == nil {
		s.Entrypoint = []string{"carry", "/app", "serve"}
	}
	return c.refuses
}

func (c *carried) Revive(s *engine.Spec, dir string) error {
	c.revived = dir
	s.Entrypoint = []string{"restart"}
	return nil
}

func (c *carried) Awake(context.Context, string) error { return c.awake }

func (c *carried) Bare(o *specs.Spec) *specs.Spec {
	bare, p := *o, *o.Process
	p.Args = p.Args[1:]
	bare.Process = &p
	return &bare
}

// newCarried is a node whose CRIU does not work.
func newCarried(t *testing.T) (*Manager, *fake, *carried, engine.Spec) {
	m, f, s := newManager(t, nil)
	f.err = ErrUnable
	c := &carried{fake: &fake{}}
	m.cfg.Engines = []Engine{f, c}
	return m, f, c, s
}

func TestCarried(t *testing.T) {
	m, f, c, s := newCarried(t)
	ctx := t.Context()
	p, err := m.Plan(ctx, s, Auto, true)
	if err != nil {
		t.Fatal(err)
	}
	first := s
	if !p.Carry(&first) || first.Labels[LabelCarries] != "dmtcp" ||
		!slices.Equal(first.Entrypoint, []string{"carry", "/app", "serve"}) {
		t.Fatalf("what is to be saved: %+v", first)
	}
	app := f.spec
	dressed, process := *app, *app.Process
	dressed.Process, process.Args = &process, append([]string{"carry"}, process.Args...)
	f.spec, f.info.Labels = &dressed, first.Labels
	r, _, err := m.Checkpoint(ctx, "one", Options{Boot: 9})
	if err != nil || r.Engine != "dmtcp" || !slices.Equal(r.Args, app.Process.Args) {
		t.Fatalf("%+v, %v", r, err)
	}
	f.spec = app
	if p, err = m.Plan(ctx, s, Always, true); err != nil || p.Record == nil || p.Record.ID != r.ID {
		t.Fatalf("%+v, %v", p, err)
	}
	prep := p.Begin(ctx)
	defer prep.Release()
	if err := p.Bring(ctx, prep); err != nil {
		t.Fatal(err)
	}
	clone := s
	if err := p.Revive(ctx, &clone, prep); err != nil || clone.Restore != nil ||
		clone.Labels[LabelRestored] != r.ID || clone.Labels[LabelCarries] != "dmtcp" ||
		clone.Entrypoint[0] != "restart" {
		t.Errorf("%+v, %v", clone, err)
	}
	if _, err := os.Stat(filepath.Join(c.revived, "pages-1.img")); err != nil {
		t.Error(err)
	}
	c.awake = errors.New("it sleeps")
	if err := p.After(ctx, "two"); !errors.Is(err, c.awake) {
		t.Errorf("it does not wake up: %v", err)
	}
	if all, err := m.List(ctx); err != nil || len(all) != 1 || all[0].Unfit != "" {
		t.Errorf("%+v, %v", all, err)
	}
	m.chosen, m.cfg.Engines = nil, []Engine{&fake{}} // CRIU works after the next start
	if all, err := m.List(ctx); err != nil || len(all) != 1 || all[0].Unfit != "engine dmtcp, here criu" {
		t.Errorf("%+v, %v", all, err)
	}
	if p, err := m.Plan(ctx, s, Auto, true); err != nil || p.Record != nil ||
		p.Why != "engine dmtcp, here criu" || p.Carry(&s) {
		t.Errorf("%+v, %v", p, err)
	}
}

// What nobody wants saved carries nothing, and what cannot carry boots.
func TestNotCarried(t *testing.T) {
	m, _, c, s := newCarried(t)
	var told audience
	m.cfg.Audience = &told
	carry := func(asked bool) bool {
		p, err := m.Plan(t.Context(), s, Auto, asked)
		if err != nil {
			t.Fatal(err)
		}
		spec := s
		is := p.Carry(&spec)
		if !is && spec.Entrypoint != nil {
			t.Errorf("it is %+v", spec)
		}
		if p.Booted(t.Context(), 1) != is {
			t.Errorf("carried: %v, and a checkpoint is made: %v", is, !is)
		}
		return is
	}
	if carry(false) || len(told.unmade) > 0 || !carry(true) {
		t.Errorf("who asks decides, and nobody is told.unmade: %q", told.unmade)
	}
	c.refuses = &UnfitError{"it is the host's", "do"}
	if carry(true) || !slices.Equal(told.unmade, []string{"two: it is the host's: do"}) {
		t.Errorf("told.unmade %q", told.unmade)
	}
	var none *Plan
	if none.Carry(&s) {
		t.Error("no plan carries")
	}
}

// TestOfAnotherEngine refuses containers that were not made for the engine.
func TestOfAnotherEngine(t *testing.T) {
	m, f, _, _ := newCarried(t)
	refused := func(says string, labels map[string]string) {
		t.Helper()
		f.info.Labels = labels
		_, _, err := m.Checkpoint(t.Context(), "one", Options{})
		var unfit *UnfitError
		if !errors.As(err, &unfit) || !strings.Contains(unfit.What, says) || unfit.Remedy == "" {
			t.Errorf("%q: %v", says, err)
		}
	}
	refused("not started for checkpoints by dmtcp", nil)
	refused("started for checkpoints by other, and this node makes them by dmtcp",
		map[string]string{LabelCarries: "other"})
	refused("which dmtcp cannot save again", map[string]string{LabelCarries: "dmtcp", LabelRestored: "x"})
	m.chosen, m.cfg.Engines = nil, []Engine{&fake{}}
	refused("started for checkpoints by dmtcp, and this node makes them by criu",
		map[string]string{LabelCarries: "dmtcp"})
}

// TestEngineStays asks no other once there is one, and says why it is not the preferred one.
func TestEngineStays(t *testing.T) {
	m, f, c, _ := newCarried(t)
	f.err = errors.Join(ErrUnable)
	c.err = ErrUnable
	if _, err := m.Probe(t.Context()); !errors.Is(err, ErrUnable) || len(m.PassedOver()) > 0 {
		t.Errorf("none works: %v", err)
	}
	f.err, c.err = unable{errors.New("CRIU is missing")}, nil
	for range 2 {
		if a, err := m.Probe(t.Context()); err != nil || a.Engine != "dmtcp" {
			t.Errorf("%+v, %v", a, err)
		}
		f.err = nil // from now on it would
	}
	if why := m.PassedOver(); len(why) != 1 || Cause(why[0]) != "CRIU is missing" {
		t.Errorf("passed over %v", why)
	}
	c.err = ErrUnable
	if _, err := m.Probe(t.Context()); !errors.Is(err, ErrUnable) || m.able.Load() != nil {
		t.Errorf("it does not any more: %v", err)
	}
}

func TestAllReasons(t *testing.T) {
	m, f, c, s := newCarried(t)
	f.err, c.err = unable{errors.New("CRIU is missing")}, unable{errors.New("DMTCP is not installed")}
	want := ErrUnable.Error() + ": CRIU is missing; DMTCP is not installed"
	if p, err := m.Plan(t.Context(), s, Auto, true); err != nil || p.Why != want || p.Carry(&s) {
		t.Errorf("%+v, %v, want %s", p, err, want)
	}
}
