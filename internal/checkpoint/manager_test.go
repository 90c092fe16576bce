package checkpoint

import (
	"archive/tar"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	specs "github.com/opencontainers/runtime-spec/specs-go"

	"dewpoint/internal/checkpoint/hooks"
	"dewpoint/internal/checkpoint/store"
	"dewpoint/internal/engine"
	"dewpoint/internal/image"
	"dewpoint/internal/pop"
	"dewpoint/internal/pop/local"

	"go.uber.org/goleak"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fake is an engine that dumps, and the containers and layers of a node.
type fake struct {
	dir     string // writable layer
	below   string // the saved layer that it lies on
	err     error  // of Probe
	dumpErr error
	info    engine.Info
	spec    *specs.Spec
	layers  map[digest.Digest]bool
	tar     []byte // of the last of them
	made    time.Time
	frozen  atomic.Bool
	takes   time.Duration // of a dump
	// A dump tells when it is going, and waits until it may go on; nil does not.
	going, goOn chan bool
}

func (f *fake) Name() string { return "criu" }

func (f *fake) Probe(context.Context) (Ability, error) { return someAbility(), f.err }

func (f *fake) Dump(ctx context.Context, _ Container, dir string, frozen func(context.Context) error) (Dumped,
	error) {
	if f.dumpErr != nil {
		return Dumped{}, f.dumpErr
	}
	if err := os.WriteFile(filepath.Join(dir, "pages-1.img"), make([]byte, 8192), 0o600); err != nil {
		return Dumped{}, err
	}
	if err := os.WriteFile(filepath.Join(dir, "inventory.img"), []byte("x"), 0o600); err != nil {
		return Dumped{}, err
	}
	if f.frozen.Swap(true) {
		return Dumped{}, errors.New("two dumps of one container at once")
	}
	defer f.frozen.Store(false)
	if f.going != nil {
		close(f.going)
		<-f.goOn
	}
	time.Sleep(f.takes)
	return Dumped{Processes: 1, Pages: 8192, Paused: time.Millisecond}, frozen(ctx)
}

func (f *fake) Inspect(context.Context, string) (*engine.Info, error) { i := f.info; return &i, nil }
func (f *fake) SpecOf(context.Context, string) (*specs.Spec, error)   { return f.spec, nil }
func (f *fake) TaskMade(string) time.Time                             { return f.made }
func (f *fake) Plan(engine.Spec) (*specs.Spec, error)                 { return f.spec, nil }
func (f *fake) Upper(context.Context, string) (string, error)         { return f.dir, nil }
func (f *fake) Below(context.Context, string, *image.Image) (string, error) {
	return f.below, nil
}
func (f *fake) Exec(context.Context, string, engine.ExecSpec) (int, error) { return 0, nil }
func (f *fake) Extend(context.Context, *image.Image, digest.Digest) (func(), error) {
	return func() {}, nil
}

func (f *fake) Add(_ context.Context, path string, id digest.Digest, size int64) error {
	b, err := os.ReadFile(path)
	if err == nil && (digest.FromBytes(b) != id || int64(len(b)) != size) {
		err = errors.New("the tar is not what its name says")
	}
	f.layers[id], f.tar = true, b
	return err
}

func (f *fake) Bring(_ context.Context, id digest.Digest, _ int64) error {
	if !f.layers[id] {
		return errors.New("the layer is not here")
	}
	return nil
}

func (f *fake) UploadLayer(context.Context, digest.Digest) error { return nil }
func (f *fake) WorkDir(string) string                            { return f.dir }

// known is the one image that there is.
type known struct{ img *image.Image }

func (k known) Image(context.Context, string, digest.Digest) *image.Image { return k.img }

// audience keeps what it is told.
type audience struct {
	unmade      []string
	quarantined int
}

func (a *audience) Made(string, store.Record)       {}
func (a *audience) Unmade(name string, why error)   { a.unmade = append(a.unmade, name+": "+why.Error()) }
func (a *audience) Quarantined(store.Record, error) { a.quarantined++ }
func (a *audience) Lost(string, error, bool)        {}

func newManager(t *testing.T, labels map[string]string) (*Manager, *fake, engine.Spec) {
	t.Helper()
	return newManagerOf(t, labels, store.Config{Node: "n1"})
}

// newManagerOf is newManager on the node that the store is of.
func newManagerOf(t *testing.T, labels map[string]string, cfg store.Config) (*Manager, *fake, engine.Spec) {
	t.Helper()
	f := &fake{dir: t.TempDir(), layers: map[digest.Digest]bool{}, spec: someSpec("one")}
	f.spec.Mounts = f.spec.Mounts[:2] // without the volume
	f.info = engine.Info{Name: "one", Image: "app:1", Status: engine.Running, Pid: uint32(os.Getpid())}
	img := someImage()
	img.Spec.Config = ocispec.ImageConfig{Labels: labels}
	dir := t.TempDir()
	cfg.Dir = cmp.Or(cfg.Dir, filepath.Join(dir, "store"))
	s, err := store.Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	m := New(Config{Engines: []Engine{f}, Containers: f, Layers: f, Store: s, Dir: dir, Node: cfg.Node,
		Images: known{img}})
	return m, f, engine.Spec{Name: "two", Image: img}
}

// TestOwnersInPoP has a container of each of several callers saved on one node of a PoP: on another one, too,
// each starts from his own, and everybody from what is for all.
func TestOwnersInPoP(t *testing.T) {
	hub, dir := local.NewHub(), t.TempDir()
	join := func(name string) (*Manager, *fake, engine.Spec) {
		c, err := hub.Join(pop.Config{Node: name})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		shared, err := pop.OpenStore(t.Context(), pop.StoreConfig{FS: pop.NewDir(dir, 0), Coord: c, Node: name})
		if err != nil {
			t.Fatal(err)
		}
		return newManagerOf(t, nil, store.Config{Node: name, PoP: func() *pop.Store { return shared }})
	}
	one, f, _ := join("n1")
	two, _, s := join("n2")
	ctx := t.Context()
	save := func(owner string, o Options) string {
		t.Helper()
		f.info.Labels = map[string]string{LabelOwner: owner}
		o.Boot = 2
		r, _, err := one.Checkpoint(ctx, "one", o)
		if err == nil {
			err = one.Publish(ctx, r)
		}
		if err != nil {
			t.Fatal(err)
		}
		return r.ID
	}
	from := func(owner string) (id, why string) {
		t.Helper()
		s.Labels = map[string]string{LabelOwner: owner}
		p, err := two.Plan(ctx, s, Auto, false)
		if err != nil {
			t.Fatal(err)
		}
		if p.Record != nil {
			id = p.Record.ID
		}
		return id, p.Why
	}
	admins := save("", Options{})
	if id, why := from("token:ci"); id != "" || why != "it belongs to an administrator" {
		t.Errorf("a caller starts from an administrator's: %.8s, %q", id, why)
	}
	two, _, s = join("n3") // nobody has looked there yet
	ci := save("token:ci", Options{})
	for owner, want := range map[string]string{"": admins, "token:ci": ci, "token:other": ""} {
		if id, why := from(owner); id != want ||
			(want == "") != (why == "none of 2 checkpoints fits: it belongs to token:ci (1); it belongs to an administrator (1)") {
			t.Errorf("%q starts from %.8s, want %.8s: %s", owner, id, want, why)
		}
	}
	two, _, s = join("n4")
	shared := save("", Options{Share: true})
	for _, owner := range []string{"", "token:ci", "token:other"} {
		if id, _ := from(owner); id != shared {
			t.Errorf("%q starts from %.8s, want what is for all", owner, id)
		}
	}
	for i, owner := range []string{"token:a", "token:a", "token:a", "token:b"} { // more than are kept of one
		f.info.Labels = map[string]string{LabelOwner: owner}
		err := os.WriteFile(filepath.Join(f.dir, "state"), []byte{byte(i)}, 0o600)
		if err == nil {
			_, _, err = one.Checkpoint(ctx, "one", Options{})
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	all, err := one.List(ctx)
	if err != nil {
		t.Fatal(err)
	}
	owners := map[string]int{}
	for _, k := range all {
		owners[k.Owner]++
	}
	if !maps.Equal(owners, map[string]int{"": 1, "token:ci": 1, Anyone: 1, "token:a": 2, "token:b": 1}) {
		t.Errorf("one caller's take another's place: %v", owners)
	}
}

// TestPublishPending makes checkpoints while the PoP's store is away: they are there when it is back, but not
// those that others have taken the place of meanwhile.
func TestPublishPending(t *testing.T) {
	c, err := local.NewHub().Join(pop.Config{Node: "n1"})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	shared, err := pop.OpenStore(t.Context(),
		pop.StoreConfig{FS: pop.NewDir(t.TempDir(), 0), Coord: c, Node: "n1"})
	if err != nil {
		t.Fatal(err)
	}
	var there *pop.Store
	cfg := store.Config{Dir: t.TempDir(), Node: "n1", PoP: func() *pop.Store { return there }}
	m, f, _ := newManagerOf(t, nil, cfg)
	ctx := t.Context()
	save := func(m *Manager, f *fake, arg string) store.Record {
		t.Helper()
		f.spec.Process.Args = []string{arg}
		r, _, err := m.Checkpoint(ctx, "one", Options{})
		if err == nil {
			err = m.Publish(ctx, r)
		}
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	r := save(m, f, "a")
	if err := os.WriteFile(filepath.Join(f.dir, "state"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	lacks := save(m, f, "b") // its writable layer will not be there
	there = shared
	m, _, _ = newManagerOf(t, nil, cfg)
	if err := m.PublishPending(ctx); !errors.Is(err, store.ErrNoUpper) ||
		strings.Contains(err.Error(), r.ID[:12]) || !strings.Contains(err.Error(), "it is tried again") {
		t.Errorf("what lacks its layer: %v", err)
	}
	if err := m.PublishPending(ctx); err != nil {
		t.Errorf("tried again at once: %v", err)
	}
	where := map[string]bool{}
	all, err := m.List(ctx)
	for _, k := range all {
		where[k.ID] = k.PoP
	}
	if err != nil || !maps.Equal(where, map[string]bool{r.ID: true, lacks.ID: false}) {
		t.Errorf("%v, %v", where, err)
	}
}

func TestMakeAndUse(t *testing.T) {
	m, f, s := newManager(t, nil)
	if err := os.WriteFile(filepath.Join(f.dir, "state"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	ctx := t.Context()
	r, d, err := m.Checkpoint(ctx, "one", Options{Boot: 2})
	if err != nil || d.Processes != 1 || r.Upper == nil || !m.Holds(r.Upper.DiffID) || r.Boot != 2 ||
		r.Data.Pages != 8192 {
		t.Fatalf("%+v, %+v, %v", r, d, err)
	}
	p, err := m.Plan(ctx, s, Auto, false)
	if err != nil || p.Record == nil || p.Record.ID != r.ID {
		t.Fatalf("%+v, %v", p, err)
	}
	prep := p.Begin(ctx)
	defer prep.Release()
	if err := p.Bring(ctx, prep); err != nil || prep.Restore.Upper != r.Upper.DiffID {
		t.Fatalf("%+v, %v", prep, err)
	}
	dir, err := prep.Restore.Images(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dir, "pages-1.img")); err != nil {
		t.Error(err)
	}
	p.Restored(ctx, 0.2)
	if all, err := m.List(ctx); err != nil || len(all) != 1 || all[0].RestoreTime != 0.2 || all[0].Unfit != "" {
		t.Errorf("%+v, %v", all, err)
	}
	if gone, err := m.Prune(ctx, map[string]bool{r.Manifest: true}); err != nil || len(gone) != 0 {
		t.Errorf("prune took %v, %v", gone, err)
	}
	prep.Release()
	if err := m.Remove(ctx, r.ID[:8]); err != nil {
		t.Error(err)
	}
	if err := m.Remove(ctx, r.ID); !errors.Is(err, ErrNone) || m.Holds(r.Upper.DiffID) {
		t.Errorf("removed twice: %v", err)
	}
}

// TestGivenUp is a restore that is given up while its memory comes: nothing stays in use.
func TestGivenUp(t *testing.T) {
	m, _, s := newManagerOf(t, nil, store.Config{Node: "n1", CacheIdle: time.Nanosecond})
	m.cfg.RestoreLazy = []string{"lazy"}
	for _, above := range []int64{1 << 30, 1, 8192} { // whole, late, late for one at once
		m.cfg.LazyAbove = above
		if _, _, err := m.Checkpoint(t.Context(), "one", Options{Boot: 2}); err != nil {
			t.Fatal(err)
		}
		for _, wait := range []bool{false, true} {
			if err := m.cfg.Store.Tidy(t.Context()); err != nil { // what is unpacked goes
				t.Fatal(err)
			}
			p, err := m.Plan(t.Context(), s, Auto, false)
			if err != nil || p.Record == nil {
				t.Fatalf("%+v, %v", p, err)
			}
			prep := p.Begin(t.Context())
			if wait {
				_, _ = prep.Restore.Images(t.Context()) // memory that is none fails where it comes late
			}
			prep.Release()
			if err := m.cfg.Store.Tidy(t.Context()); err != nil || m.cfg.Store.HasUnpacked(p.Record.ID) ||
				len(m.serving.claimed) > 0 {
				t.Errorf("above %d, waited %v: unpacked and in use: %v, claimed: %v, %v", above, wait,
					m.cfg.Store.HasUnpacked(p.Record.ID), m.serving.claimed, err)
			}
		}
	}
}

// TestMemoryLost is memory that does not come: whoever waits for it is told.
func TestMemoryLost(t *testing.T) {
	m, _, s := newManager(t, nil)
	r, _, err := m.Checkpoint(t.Context(), "one", Options{Boot: 2})
	if err != nil {
		t.Fatal(err)
	}
	p, err := m.Plan(t.Context(), s, Auto, false)
	if err != nil || p.Record == nil {
		t.Fatalf("%+v, %v", p, err)
	}
	if err := m.cfg.Store.Drop(r.ID); err != nil {
		t.Fatal(err)
	}
	prep := p.Begin(t.Context())
	defer prep.Release()
	if err := p.Bring(t.Context(), prep); err != nil {
		t.Errorf("its memory is told of when it is waited for: %v", err)
	}
	if dir, err := prep.Restore.Images(t.Context()); !errors.Is(err, store.ErrUnknown) || dir != "" {
		t.Errorf("%q, %v", dir, err)
	}
}

// TestOfRestored saves a container that was itself restored: its layer has what it was restored with, and
// what it has written since.
func TestOfRestored(t *testing.T) {
	m, f, _ := newManager(t, nil)
	first, _, err := m.Checkpoint(t.Context(), "one", Options{Boot: 2})
	if err != nil {
		t.Fatal(err)
	}
	f.below = t.TempDir()
	f.info.Labels = map[string]string{LabelRestored: first.ID}
	for path, text := range map[string]string{filepath.Join(f.below, "old"): "1",
		filepath.Join(f.below, "both"): "1", filepath.Join(f.dir, "both"): "2", filepath.Join(f.dir, "new"): "2"} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	r, _, err := m.Checkpoint(t.Context(), "one", Options{})
	if err != nil || r.Upper == nil || r.Boot != 2 {
		t.Fatalf("%+v, %v", r, err)
	}
	got := map[string]string{}
	for a := tar.NewReader(bytes.NewReader(f.tar)); ; {
		h, err := a.Next()
		if err != nil {
			break
		}
		text, err := io.ReadAll(a)
		if err != nil || got[h.Name] != "" {
			t.Errorf("%s comes twice, or %v", h.Name, err)
		}
		got[h.Name] = string(text)
	}
	if want := map[string]string{"./": "", "old": "1", "both": "2", "new": "2"}; !maps.Equal(got, want) {
		t.Errorf("its layer is %v, not %v", got, want)
	}
	if left, err := filepath.Glob(filepath.Join(m.cfg.Dir, "store", "scratch-*")); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

func TestNothingWritten(t *testing.T) {
	m, _, _ := newManager(t, nil)
	if r, _, err := m.Checkpoint(t.Context(), "one", Options{}); err != nil || r.Upper != nil {
		t.Errorf("%+v, %v", r, err)
	}
}

// TestDecision is what is chosen, by how long booting takes.
func TestDecision(t *testing.T) {
	m, f, s := newManager(t, nil)
	ctx := t.Context()
	if _, _, err := m.Checkpoint(ctx, "one", Options{}); err != nil {
		t.Fatal(err)
	}
	plan := func(mode string) *Plan {
		t.Helper()
		p, err := m.Plan(ctx, s, mode, false)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	if p := plan(Auto); p.Record != nil || !strings.Contains(p.Why, "not known") {
		t.Errorf("booting was never measured: %+v", p)
	}
	plan(Auto).Booted(ctx, 0.05)
	if p := plan(Auto); p.Record != nil ||
		!strings.Contains(p.Why, "restoring takes about 0.15 s, booting 0.05 s") {
		t.Errorf("booting is faster: %+v", p)
	}
	if p := plan(Always); p.Record == nil {
		t.Errorf("always: %+v", p)
	}
	if p := plan(Never); p.Record != nil || p.Why != "" {
		t.Errorf("never: %+v", p)
	}
	for range 5 {
		plan(Auto).Booted(ctx, 3)
	}
	if p := plan(Auto); p.Record == nil {
		t.Errorf("booting is slow: %+v", p)
	}
	f.spec = someSpec("one")
	if p := plan(Auto); p.Record != nil || !strings.HasPrefix(p.Why, "mounts differ") {
		t.Errorf("another container: %+v", p)
	}
	if _, err := m.Plan(ctx, s, Always, false); !errors.Is(err, ErrRestore) {
		t.Errorf("always, and it does not fit: %v", err)
	}
	if st := m.Stats(); st.Slower != 4 || st.Unfit != 2 {
		t.Errorf("counted %+v", st)
	}
}

// TestWhyOnce says what several checkpoints lack once.
func TestWhyOnce(t *testing.T) {
	m, f, s := newManager(t, nil)
	for _, zone := range []string{"a", "b"} {
		f.spec = someSpec("one")
		f.spec.Mounts = f.spec.Mounts[:2]
		f.spec.Process.Env = append(f.spec.Process.Env, "ZONE="+zone)
		if zone == "b" {
			f.spec.Process.Cwd = "/tmp"
		}
		if _, _, err := m.Checkpoint(t.Context(), "one", Options{}); err != nil {
			t.Fatal(err)
		}
	}
	f.spec = someSpec("one")
	f.spec.Mounts = f.spec.Mounts[:2]
	p, err := m.Plan(t.Context(), s, Auto, false)
	if want := "none of 2 checkpoints fits: environment differs: ZONE; working directory /tmp, here / (1)"; err != nil || p.Why != want {
		t.Errorf("%q, %v, want %q", p.Why, err, want)
	}
}

// TestWhyNotYet says that the checkpoint is still being made.
func TestWhyNotYet(t *testing.T) {
	m, f, s := newManager(t, nil)
	f.going, f.goOn = make(chan bool), make(chan bool)
	var g errgroup.Group
	g.Go(func() error {
		_, _, err := m.Checkpoint(t.Context(), "one", Options{Boot: 9})
		return err
	})
	<-f.going
	p, err := m.Plan(t.Context(), s, Auto, false)
	if err != nil || p.Record != nil || p.Why != "a checkpoint that fits is still being made" {
		t.Errorf("while it is being made: %+v, %v", p, err)
	}
	if _, err := m.Plan(t.Context(), s, Always, false); !errors.Is(err, ErrRestore) ||
		!strings.Contains(err.Error(), "still being made") {
		t.Errorf("always: %v", err)
	}
	f.spec = someSpec("one")
	if p, err := m.Plan(t.Context(), s, Auto, false); err != nil || p.Why != "" {
		t.Errorf("of another kind: %+v, %v", p, err)
	}
	f.spec.Mounts = f.spec.Mounts[:2]
	close(f.goOn)
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	if p, err := m.Plan(t.Context(), s, Auto, false); err != nil || p.Record == nil || len(m.making.kinds) > 0 {
		t.Errorf("once it is made: %+v, %v, %v", p, err, m.making.kinds)
	}
}

// TestTriedAgain measures anew, now and then, what was slow: as it is when many start at once.
func TestTriedAgain(t *testing.T) {
	m, _, s := newManager(t, nil)
	ctx := t.Context()
	if _, _, err := m.Checkpoint(ctx, "one", Options{Boot: 1}); err != nil {
		t.Fatal(err)
	}
	tried := 0
	for i := range enough + 2*tryEvery {
		p, err := m.Plan(ctx, s, Auto, false)
		if err != nil {
			t.Fatal(err)
		}
		if p.Record != nil {
			tried++
			p.Restored(ctx, 5)
		} else if i == 0 {
			t.Fatalf("the first start: %+v", p)
		}
	}
	if tried != enough+2 {
		t.Errorf("tried %d times in %d starts", tried, enough+2*tryEvery)
	}
	if p, err := m.Plan(ctx, s, Always, false); err != nil {
		t.Error(err)
	} else {
		p.Restored(ctx, 0.2)
	}
	if p, err := m.Plan(ctx, s, Auto, false); err != nil || p.Record == nil ||
		p.Patience(time.Hour, time.Second) != patience*5*time.Second ||
		p.Patience(time.Hour, 7*time.Second) != patience*7*time.Second {
		t.Errorf("what was slow by accident: %+v, %v", p, err)
	}
}

// TestNeverFaster is a container that boots faster than any is restored: it is not tried again.
func TestNeverFaster(t *testing.T) {
	m, _, s := newManager(t, nil)
	if _, _, err := m.Checkpoint(t.Context(), "one", Options{Boot: 0.1}); err != nil {
		t.Fatal(err)
	}
	for i, mode := range append([]string{Always}, slices.Repeat([]string{Auto}, enough+2*tryEvery)...) {
		p, err := m.Plan(t.Context(), s, mode, false)
		if err != nil || (p.Record != nil) != (mode == Always) {
			t.Fatalf("start %d: %+v, %v", i, p, err)
		}
		if p.Record != nil {
			p.Restored(t.Context(), 0.2)
		}
	}
}

// TestUnable is a node that cannot do it.
func TestUnable(t *testing.T) {
	m, f, s := newManager(t, nil)
	f.err = ErrUnable
	if _, err := m.Plan(t.Context(), s, Always, false); !errors.Is(err, ErrRestore) ||
		!strings.Contains(err.Error(), ErrUnable.Error()) {
		t.Errorf("always: %v", err)
	}
	if p, err := m.Plan(t.Context(), s, Auto, true); err != nil || p.Record != nil ||
		p.Why != ErrUnable.Error() {
		t.Errorf("a checkpoint is wanted: %+v, %v", p, err)
	}
	if _, _, err := m.Checkpoint(t.Context(), "one", Options{}); !errors.Is(err, ErrUnable) {
		t.Errorf("checkpoint: %v", err)
	}
}

// TestUnsavedOptions has no checkpoint made, though a label asks for it, of what none keeps.
func TestUnsavedOptions(t *testing.T) {
	for _, readonly := range []bool{false, true} {
		m, f, s := newManager(t, map[string]string{LabelCheckpoint: "auto"})
		f.spec.Root = &specs.Root{Readonly: readonly}
		if p, err := m.Plan(t.Context(), s, Auto, false); err != nil || p.Booted(t.Context(), 9) == readonly {
			t.Errorf("read-only root %t: %v", readonly, err)
		}
	}
}

// TestRefusedBefore says to who insists why there is nothing to restore.
func TestRefusedBefore(t *testing.T) {
	m, f, s := newManager(t, nil)
	plan, err := m.Plan(t.Context(), s, Auto, true)
	if err != nil {
		t.Fatal(err)
	}
	f.dumpErr = errors.New("it holds a device")
	if err := plan.Make(t.Context(), "one", 1); err == nil {
		t.Fatal("a checkpoint was made")
	}
	if _, err := m.Plan(t.Context(), s, Always, false); err == nil ||
		!strings.Contains(err.Error(), "could not be made") || !strings.Contains(err.Error(), "it holds a device") {
		t.Errorf("always: %v", err)
	}
}

func TestWanted(t *testing.T) {
	for name, c := range map[string]struct {
		label, auto string
		own         map[string]string
		asked       bool
		seconds     float64
		wanted      bool
	}{
		"nobody asks":              {},
		"who deploys":              {asked: true, wanted: true},
		"the image":                {label: "auto", wanted: true},
		"the image, and it is off": {label: "auto", auto: "manual"},
		"the container":            {own: map[string]string{LabelCheckpoint: "auto"}, wanted: true},
		"the container, not this": {label: "never", own: map[string]string{LabelCheckpoint: "auto"},
			wanted: true},
		"the image, not here": {label: "auto", own: map[string]string{LabelCheckpoint: ""}},
		"slow, and its label goes": {label: "never", auto: "measured", own: map[string]string{LabelCheckpoint: ""},
			seconds: 3, wanted: true},
		"measured and quick":        {auto: "measured", seconds: 0.3},
		"measured and slow":         {auto: "measured", seconds: 3, wanted: true},
		"measured, but never":       {label: "never", auto: "measured", seconds: 3},
		"measured, but it is one's": {label: "stateful", auto: "measured", seconds: 3},
	} {
		t.Run(name, func(t *testing.T) {
			m, _, s := newManager(t, map[string]string{LabelCheckpoint: c.label})
			if c.auto != "" {
				m.cfg.Auto = c.auto
			}
			s.Labels = c.own
			p, err := m.Plan(t.Context(), s, Auto, c.asked)
			if err != nil || p.Booted(t.Context(), c.seconds) != c.wanted {
				t.Errorf("a checkpoint is to be made: %v, want %v; %v", !c.wanted, c.wanted, err)
			}
		})
	}
}

func TestRefused(t *testing.T) {
	for says, c := range map[string]struct {
		label    string
		change   func(f *fake)
		stateful bool
	}{
		"label dewpoint.checkpoint=never":    {label: "never", stateful: true},
		"label dewpoint.checkpoint=stateful": {label: "stateful"},
		"its label dewpoint.checkpoint=never": {change: func(f *fake) {
			f.info.Labels = map[string]string{LabelCheckpoint: "never"}
		}},
		"writes to the volume /data": {change: func(f *fake) { f.spec = someSpec("one") }},
		"what no checkpoint keeps: read-only root": {stateful: true, change: func(f *fake) {
			f.spec.Root = &specs.Root{Readonly: true}
		}},
	} {
		m, f, _ := newManager(t, map[string]string{LabelCheckpoint: c.label})
		if c.change != nil {
			c.change(f)
		}
		_, _, err := m.Checkpoint(t.Context(), "one", Options{Stateful: c.stateful})
		var unfit *UnfitError
		if !errors.As(err, &unfit) || !strings.Contains(unfit.What, says) || unfit.Remedy == "" {
			t.Errorf("%q: %v", says, err)
		}
	}
	m, f, _ := newManager(t, map[string]string{LabelCheckpoint: "stateful"})
	f.spec = someSpec("one")
	if r, _, err := m.Checkpoint(t.Context(), "one", Options{Stateful: true}); err != nil || !r.Stateful {
		t.Errorf("told that it is fine: %+v, %v", r, err)
	}
	f.info.Status = engine.Stopped
	if _, _, err := m.Checkpoint(t.Context(), "one", Options{}); !errors.Is(err, engine.ErrNotRunning) {
		t.Errorf("what does not run: %v", err)
	}
}

// TestDress gives containers agents by the image's labels and by their own.
func TestDress(t *testing.T) {
	agents := map[string]string{hooks.LabelAgents: "node,python"}
	for name, c := range map[string]struct {
		image, own map[string]string
		agents     bool
		dumpable   bool
	}{
		"no labels":     {dumpable: true},
		"the image":     {image: agents, agents: true, dumpable: true},
		"the container": {own: agents, agents: true, dumpable: true},
		"taken away":    {image: agents, own: map[string]string{hooks.LabelAgents: ""}, dumpable: true},
		"never":         {image: agents, own: map[string]string{LabelCheckpoint: "never"}},
		"not never": {image: map[string]string{LabelCheckpoint: "never"},
			own: map[string]string{LabelCheckpoint: "", hooks.LabelAgents: "node"}, agents: true, dumpable: true},
		"of the image wrong": {image: map[string]string{hooks.LabelAgents: "ruby"}, own: agents, agents: true,
			dumpable: true},
	} {
		t.Run(name, func(t *testing.T) {
			m, _, s := newManager(t, c.image)
			s.Labels = c.own
			if err := m.Dress(&s); err != nil {
				t.Fatal(err)
			}
			active := slices.ContainsFunc(s.Env, func(kv string) bool {
				return strings.HasPrefix(kv, "NODE_OPTIONS=--require="+hooks.AgentsDir)
			})
			if s.Dumpable != c.dumpable || active != c.agents || len(s.Mounts) != map[bool]int{true: 2}[c.agents] {
				t.Errorf("dumpable %v, environment %q, mounts %v", s.Dumpable, s.Env, s.Mounts)
			}
			info := &engine.Info{Pid: 1 << 30, Labels: c.own}
			if err := m.Created(s.Image, info); (err != nil) != c.agents {
				t.Errorf("prepared: %v", err) // there is no such process to prepare anything in
			}
		})
	}
	m, _, s := newManager(t, nil)
	s.Labels = map[string]string{hooks.LabelAfter: `sh -c "`}
	if err := m.Dress(&s); err == nil || !strings.Contains(err.Error(), hooks.LabelAfter) {
		t.Errorf("an open quote: %v", err)
	}
}

// TestAtOnce saves a container several times at once: one after the other, and who
// gives up waiting does not wait.
func TestAtOnce(t *testing.T) {
	m, f, _ := newManager(t, nil)
	f.takes = 20 * time.Millisecond
	var g errgroup.Group
	for range 4 {
		g.Go(func() error {
			_, _, err := m.Checkpoint(t.Context(), "one", Options{})
			return err
		})
	}
	if err := g.Wait(); err != nil {
		t.Error(err)
	}
	done, err := m.making.turn(t.Context(), "one")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if _, _, err := m.Checkpoint(ctx, "one", Options{}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("while another is being made: %v", err)
	}
	done()
	if _, _, err := m.Checkpoint(t.Context(), "one", Options{}); err != nil || len(m.making.dumping) > 0 {
		t.Errorf("%v, still dumped: %v", err, m.making.dumping)
	}
}

// TestUnmade tells of a checkpoint that was asked for and could not be made; of one that nobody
// asked for, or of a container that has gone, it does not.
func TestUnmade(t *testing.T) {
	m, f, s := newManager(t, nil)
	var told audience
	m.cfg.Audience = &told
	unfit := &UnfitError{"it uses io_uring", "none"}
	for _, c := range []struct {
		asked bool
		err   error
	}{{true, unfit}, {false, unfit}, {true, engine.ErrNotRunning}} {
		p, err := m.Plan(t.Context(), s, Auto, c.asked)
		if err != nil {
			t.Fatal(err)
		}
		f.dumpErr = c.err
		if err := p.Make(t.Context(), "one", 1); !errors.Is(err, c.err) {
			t.Errorf("%v", err)
		}
	}
	if len(told.unmade) != 1 || !strings.Contains(told.unmade[0], "one: ") || !strings.Contains(told.unmade[0], "io_uring") {
		t.Errorf("told.unmade %q", told.unmade)
	}
}

// TestFailedDump leaves nothing.
func TestFailedDump(t *testing.T) {
	m, f, _ := newManager(t, nil)
	f.dumpErr = &UnfitError{"it uses io_uring", "none"}
	if _, _, err := m.Checkpoint(t.Context(), "one", Options{}); !errors.As(err, new(*UnfitError)) {
		t.Errorf("%v", err)
	}
	f.dumpErr, f.dir = nil, filepath.Join(f.dir, "gone")
	if _, _, err := m.Checkpoint(t.Context(), "one", Options{}); !errors.Is(err, os.ErrNotExist) ||
		f.frozen.Load() {
		t.Errorf("%v, frozen %v", err, f.frozen.Load())
	}
	if all, err := m.List(t.Context()); err != nil || len(all) != 0 {
		t.Errorf("%+v, %v", all, err)
	}
	left, err := filepath.Glob(filepath.Join(m.cfg.Dir, "store", "*"))
	if err != nil || len(left) != 1 { // the cache
		t.Errorf("left: %v, %v", left, err)
	}
}

// TestHeldWhileSaved keeps others off a container until its dump has ended.
func TestHeldWhileSaved(t *testing.T) {
	m, f, _ := newManager(t, nil)
	var held atomic.Bool
	m.cfg.Hold = func(_ context.Context, id string) (func(), error) {
		held.Store(engine.Name(id) == "one")
		return func() { held.Store(false) }, nil
	}
	f.going, f.goOn = make(chan bool), make(chan bool)
	var g errgroup.Group
	g.Go(func() error { _, _, err := m.Checkpoint(t.Context(), "one", Options{}); return err })
	<-f.going
	if !held.Load() {
		t.Error("it is not held while it is saved")
	}
	close(f.goOn)
	if err := g.Wait(); err != nil || held.Load() {
		t.Errorf("%v, it is held: %v", err, held.Load())
	}
	busy := errors.New("busy")
	m.cfg.Hold = func(context.Context, string) (func(), error) { return nil, busy }
	if _, _, err := m.Checkpoint(t.Context(), "one", Options{}); !errors.Is(err, busy) {
		t.Errorf("it is saved, and cannot be held: %v", err)
	}
}

// TestQuarantine counts failures, of which the checkpoint may be guilty: what boots afterwards becomes ready.
func TestQuarantine(t *testing.T) {
	m, _, s := newManager(t, nil)
	var told audience
	m.cfg.Audience = &told
	ctx := t.Context()
	if _, _, err := m.Checkpoint(ctx, "one", Options{Boot: 5}); err != nil {
		t.Fatal(err)
	}
	fail := func(why error) *Plan {
		t.Helper()
		p, err := m.Plan(ctx, s, Auto, false)
		if err != nil || p.Record == nil {
			t.Fatalf("%+v, %v", p, err)
		}
		p.Failed(why)
		return p
	}
	for range 3 {
		fail(errors.New("nothing answers")) // nor when it has booted
		for _, other := range []error{store.ErrUnknown, store.ErrDamaged, store.ErrNoPoP, pop.ErrStoreAway,
			unix.ENOSPC} {
			fail(fmt.Errorf("its memory: %w", other)).Booted(ctx, 5)
		}
	}
	for range 3 {
		fail(errors.New("no")).Booted(ctx, 5)
	}
	if p, err := m.Plan(ctx, s, Auto, false); err != nil || p.Record != nil ||
		!strings.Contains(p.Why, "quarantined after 3 failures") || told.quarantined != 1 {
		t.Errorf("%+v, %v, told.quarantined %d times", p, err, told.quarantined)
	}
}

// TestVolume starts nothing unasked from memory that is older than the files that it has open.
func TestVolume(t *testing.T) {
	m, f, s := newManager(t, nil)
	f.spec = someSpec("one")
	ctx := t.Context()
	if _, _, err := m.Checkpoint(ctx, "one", Options{Boot: 5, Stateful: true}); err != nil {
		t.Fatal(err)
	}
	if p, err := m.Plan(ctx, s, Auto, false); err != nil || p.Record != nil ||
		!strings.Contains(p.Why, "what is in the volume /data may be newer") {
		t.Errorf("auto: %+v, %v", p, err)
	}
	if p, err := m.Plan(ctx, s, Always, false); err != nil || p.Record == nil {
		t.Errorf("always: %+v, %v", p, err)
	}
}

// TestOtherImage says why none fits when the image of that name is another one now.
func TestOtherImage(t *testing.T) {
	m, f, s := newManager(t, nil)
	ctx := t.Context()
	f.info.Image = s.Image.Ref.String()
	if _, _, err := m.Checkpoint(ctx, "one", Options{Boot: 5}); err != nil {
		t.Fatal(err)
	}
	img := *s.Image
	img.Desc.Digest = digest.FromString("another manifest")
	s.Image = &img
	if p, err := m.Plan(ctx, s, Auto, false); err != nil || p.Record != nil ||
		!strings.Contains(p.Why, "it has changed") {
		t.Errorf("%+v, %v", p, err)
	}
	img.Ref.Tag = "never-saved"
	if p, err := m.Plan(ctx, s, Auto, false); err != nil || p.Why != "" {
		t.Errorf("%+v, %v", p, err)
	}
}

// TestLimit has no container start that would be killed for its memory.
func TestLimit(t *testing.T) {
	m, _, s := newManager(t, nil)
	ctx := t.Context()
	r, _, err := m.Checkpoint(ctx, "one", Options{Boot: 5})
	if err != nil {
		t.Fatal(err)
	}
	s.Memory = r.Data.Pages - 1
	if _, err := m.Plan(ctx, s, Always, false); !errors.Is(err, ErrRestore) ||
		!strings.Contains(err.Error(), "MiB of memory are more than the limit") {
		t.Errorf("too little: %v", err)
	}
	s.Memory = r.Data.Pages
	if p, err := m.Plan(ctx, s, Auto, false); err != nil || p.Record == nil {
		t.Errorf("enough: %+v, %v", p, err)
	}
}

func TestTimes(t *testing.T) {
	path := filepath.Join(t.TempDir(), "times")
	a := openTimes(path)
	for _, s := range []float64{9, 1, 2, 3} {
		if err := a.add("x", s); err != nil {
			t.Fatal(err)
		}
	}
	if got := openTimes(path).median("x"); got != 3 {
		t.Errorf("the median of 1 2 3 9 is %v", got)
	}
	if err := os.WriteFile(path, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := openTimes(path).median("x"); got != 0 {
		t.Errorf("of what cannot be read: %v", got)
	}
}
