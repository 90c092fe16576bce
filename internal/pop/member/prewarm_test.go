package member

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"dewpoint/internal/fetch"
	"dewpoint/internal/image"
	"dewpoint/internal/pop"
	"dewpoint/testkit"
	"dewpoint/testkit/pulltrace"
	"dewpoint/testkit/registrytest"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"
)

// prewarmEngine is an engine as prewarming needs it: it mounts layers, and forgets images.
type prewarmEngine struct {
	n *popNode // set before anything is deployed

	mu      sync.Mutex
	images  []string
	refuse  error    // unless nil, what Register returns
	noted   []string // what each image's registering has found in the file of those that are prewarmed
	mounted map[digest.Digest]bool
	stands  map[digest.Digest]bool // containers do
}

func (e *prewarmEngine) Register(ctx context.Context, img *image.Image) error {
	noted, _ := os.ReadFile(e.n.member.cfg.Prewarm.Path)
	e.mu.Lock()
	e.noted = append(e.noted, string(noted))
	err := e.refuse
	e.mu.Unlock()
	if err != nil {
		return err
	}
	for _, l := range img.Layers {
		if _, err := e.n.Files(ctx, l.DiffID); err != nil {
			return err
		}
		e.n.use(l.DiffID)
		e.mu.Lock()
		e.mounted[l.DiffID] = true
		e.mu.Unlock()
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.images = append(e.images, img.Ref.String())
	return nil
}

func (e *prewarmEngine) Unmount(_ context.Context, ids ...digest.Digest) (busy []digest.Digest, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, id := range ids {
		if e.stands[id] {
			busy = append(busy, id)
		} else {
			delete(e.mounted, id)
		}
	}
	return busy, nil
}

func (e *prewarmEngine) Forget(_ context.Context, ref image.Reference) error {
	e.mu.Lock()
	e.images = slices.DeleteFunc(e.images, func(s string) bool { return s == ref.String() })
	e.mu.Unlock()
	return e.n.catalog.Forget(ref)
}

func (e *prewarmEngine) has(p registrytest.Pushed) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Contains(e.images, e.n.ref(p.Ref).String())
}

func (e *prewarmEngine) refuses(err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.refuse = err
}

// prewarming is a node that prewarms so many images, each that was deployed once elsewhere.
func (s *popBed) prewarming(name string, images int, change ...func(*PrewarmConfig)) (*popNode,
	*prewarmEngine) {
	e := &prewarmEngine{mounted: map[digest.Digest]bool{}, stands: map[digest.Digest]bool{}}
	e.n = s.node(name, func(c *Config) {
		c.CollectEvery = cmp.Or(s.collect, 200*time.Millisecond)
		c.Prewarm = PrewarmConfig{Images: images, After: 1, Engine: e,
			Path: filepath.Join(s.t.TempDir(), "prepared")}
		for _, fn := range change {
			fn(&c.Prewarm)
		}
	})
	return e.n, e
}

// referenceNames are the references of a node in the store.
func (s *popBed) referenceNames(name string) (names []string) {
	s.t.Helper()
	references, err := os.ReadDir(filepath.Join(s.store, "refs", name))
	if err != nil {
		s.t.Fatal(err)
	}
	for _, m := range references {
		names = append(names, m.Name())
	}
	return names
}

func (s *popBed) references(name string) int { return len(s.referenceNames(name)) }

// awaitPrewarmed waits until an image is prewarmed: its layers are mounted and referenced.
func (s *popBed) awaitPrewarmed(e *prewarmEngine, p registrytest.Pushed) {
	s.t.Helper()
	e.n.eventually("an image is ready", func() bool { return e.has(p) && s.references(e.n.name) > 0 })
}

// awaitInactive has the store need room until an image is prewarmed, and neither mounted nor referenced.
func (s *popBed) awaitInactive(e *prewarmEngine, p registrytest.Pushed) {
	s.t.Helper()
	s.awaitPrewarmed(e, p)
	e.n.eventually("an image is inactive", func() bool {
		e.n.must(e.n.member.cfg.Coord.Publish(s.t.Context(), pop.Event{Kind: pop.Pressed}))
		e.mu.Lock()
		mounted := len(e.mounted)
		e.mu.Unlock()
		return e.has(p) && mounted == 0 && s.references(e.n.name) == 0
	})
}

// An image that another node has deployed is prewarmed, and deactivated when the store needs room; who
// mounts its layers then references them, and fetches those that have left the store unnoticed.
func TestPrewarmedLayersAreReferencedBeforeTheyAreMounted(t *testing.T) {
	s := newPoPBed(t)
	a := s.node("a", nil)
	b, e := s.prewarming("b", 4)
	p := a.push("app", 1, 2)
	ids := []digest.Digest{}
	for _, l := range a.bring(p) {
		ids = append(ids, l.Layer.DiffID)
	}
	s.awaitInactive(e, p)
	if h := b.member.hitsNow(); h.Store != 0 {
		t.Errorf("what nobody deployed counts: %+v", h)
	}
	if err := s.hide(ids[1]); err != nil {
		t.Fatal(err)
	}
	f, err := b.Files(t.Context(), ids[0])
	if err != nil || s.references("b") != 1 || f.Data != s.data(b.published(ids[0])) {
		t.Errorf("%+v, %v, %d references", f, err, s.references("b"))
	}
	sent := s.served(p)
	f, err = b.Files(t.Context(), ids[1])
	if err != nil || s.served(p) == sent {
		t.Errorf("what has left the store: %+v, %v", f, err)
	}
}

// What is prewarmed is in use, so a start asks for no more, and goes when the store has no other room: it can
// be evicted then.
func TestPrewarmGoesForRoom(t *testing.T) {
	s := newPoPBed(t)
	a := s.node("a", nil)
	s.collect = time.Hour // what is told works at once, not in the next round
	b, e := s.prewarming("b", 4)
	p := a.push("app", 1, 2)
	layers := a.bring(p)
	s.awaitPrewarmed(e, p)
	b.must(a.catalog.Forget(a.ref(p.Ref)))
	for _, l := range layers {
		a.published(l.Layer.DiffID)
		if !b.HasLayer(l.Layer.DiffID) || b.member.prewarmed.isInactive(l.Layer.DiffID) {
			t.Errorf("layer %s is not in use", l.Layer.DiffID)
		}
	}
	a.eventually("it is evicted", func() bool {
		_, err := a.member.Prune(t.Context(), func(digest.Digest) bool { return false })
		return err == nil &&
			!slices.ContainsFunc(layers, func(l fetch.LayerProgress) bool {
				return a.member.usable().HasLayer(t.Context(), l.Layer.DiffID)
			})
	})
	b.eventually("it is taken back", func() bool { return !e.has(p) && s.references("b") == 0 })
}

// An image is prewarmed once it was deployed elsewhere for the second time; what this node deploys, or has,
// is no reason. Of those that are prewarmed the one goes that was deployed elsewhere least lately.
func TestPrewarmByDemand(t *testing.T) {
	testkit.Long(t)
	s := newPoPBed(t)
	a := s.node("a", nil)
	b, e := s.prewarming("b", 2)
	b.member.prewarmed.mu.Lock()
	b.member.prewarmed.cfg.After = prewarmAfter
	b.member.prewarmed.mu.Unlock()
	p, q, r := a.push("app", 1), a.push("seldom", 2), a.push("new", 3)
	demand := func(p registrytest.Pushed) int {
		b.member.prewarmed.mu.Lock()
		defer b.member.prewarmed.mu.Unlock()
		if i := b.member.prewarmed.demandFor(b.ref(p.Ref).String()); i >= 0 {
			return b.member.prewarmed.demand[i].times
		}
		return 0
	}
	a.bring(q)
	b.eventually("it is heard of", func() bool { return demand(q) == 1 })
	a.bring(p)
	a.bring(p)
	s.awaitPrewarmed(e, p)
	if e.has(q) || demand(q) != 1 || demand(p) != 0 {
		t.Errorf("of an image that was deployed once, %d times is known, and %d of the other", demand(q), demand(p))
	}
	a.bring(q)
	s.awaitPrewarmed(e, q)
	a.bring(p) // and stays for it
	b.eventually("it is heard of", func() bool {
		b.member.prewarmed.mu.Lock()
		defer b.member.prewarmed.mu.Unlock()
		return b.member.prewarmed.images[1].String() == b.ref(p.Ref).String()
	})
	a.bring(r)
	a.bring(r)
	s.awaitPrewarmed(e, r)
	b.eventually("one goes", func() bool { return !e.has(q) })
	b.bring(q)
	b.bring(q)
	a.bring(q)
	last := a.push("last", 4)
	a.bring(last)
	b.eventually("it is heard of", func() bool { return demand(last) == 1 })
	b.member.prewarmed.mu.Lock()
	images := fmt.Sprint(b.member.prewarmed.images)
	b.member.prewarmed.mu.Unlock()
	if !e.has(p) || !strings.Contains(images, p.Ref) || demand(q) != 0 {
		t.Errorf("what is deployed elsewhere went; what this node has is counted %d times", demand(q))
	}
}

// What is deployed here, and removed, while a node waits for the quiet to prewarm it does not come back by
// itself.
func TestPrewarmMetMeanwhile(t *testing.T) {
	s := newPoPBed(t)
	a := s.node("a", nil)
	b, e := s.prewarming("b", 4)
	ctx, done := context.WithCancel(t.Context())
	busy, err := b.Pull(ctx, b.ref(b.push("busy", 3).Ref), fetch.Options{}) // is under way until done
	b.must(err)
	b.must(busy.WaitComplete(ctx))
	p, q := a.push("app", 1), a.push("other", 2)
	a.bring(p)
	wishes := func() int { return len(b.member.prewarmed.wishes()) }
	b.eventually("it is heard of", func() bool { return wishes() == 1 })
	b.eventually("it is waited for the quiet", func() bool { return len(b.member.prewarmed.news) == 0 })
	b.member.prewarmed.met(b.ref(p.Ref).String())
	a.bring(q)
	b.eventually("another is heard of", func() bool { return wishes() == 1 })
	done()
	s.awaitPrewarmed(e, q)
	if e.has(p) {
		t.Error("it is prewarmed, though nobody wants it any more")
	}
}

// On a trace that is like a registry's, most of a node's first hits are of what it has prewarmed, and that
// is not much. Other rules are logged beside.
func TestPrewarmOfATrace(t *testing.T) {
	testkit.Long(t)
	t.Parallel()
	zone, err := pulltrace.ZoneNamed("dal")
	if err != nil {
		t.Fatal(err)
	}
	var trace bytes.Buffer
	path := filepath.Join(t.TempDir(), "trace.json")
	if err := errors.Join(pulltrace.Generate(&trace, zone, 0.004, 1),
		os.WriteFile(path, trace.Bytes(), 0o600)); err != nil {
		t.Fatal(err)
	}
	for _, cfg := range []PrewarmConfig{{Images: 16}, {Images: 16, After: 1}, {Images: 16, After: 3},
		{Images: 8}, {Images: 64}} {
		ready, made := replayPrewarmed(t, cfg, path)
		t.Logf("%d images after %d: %.2f of the first hits are of what is ready, %.2f are prewarmed a deployment",
			cfg.Images, cfg.After, ready, made)
		if cfg.Images == 16 && cfg.After == 0 && (ready < 0.6 || made > 0.4) {
			t.Errorf("%.2f of the first hits are of what is ready, %.2f are prewarmed a deployment", ready, made)
		}
	}
}

// replayPrewarmed deploys what a trace has pulled on five nodes in turn, which prewarm images in between.
func replayPrewarmed(t *testing.T, cfg PrewarmConfig, path string) (ready, made float64) {
	r, err := pulltrace.NewReader(path)
	if err != nil {
		t.Fatal(err)
	}
	const nodes = 5
	var have [nodes]map[string]bool
	var all [nodes]*prewarmed
	for i := range nodes {
		have[i], all[i] = map[string]bool{}, newPrewarmed(cfg)
	}
	known := map[string]bool{}
	var deployed, first, hits, prepared float64
	for {
		q, err := r.Read()
		if errors.Is(err, io.EOF) {
			return hits / first, prepared / deployed
		}
		if err != nil {
			t.Fatal(err)
		}
		if q.Blob {
			continue
		}
		ref, err := image.ParseReference("registry.example/" + q.Image + ":" + q.ID)
		if err != nil {
			t.Fatal(err)
		}
		at := int(deployed) % nodes
		deployed++
		isReady := func(i int) bool {
			return slices.ContainsFunc(all[i].images, func(r image.Reference) bool {
				return r.String() == ref.String()
			})
		}
		if !have[at][ref.String()] && known[ref.String()] {
			first++
			if isReady(at) {
				hits++
			}
		}
		known[ref.String()], have[at][ref.String()] = true, true
		all[at].adopt(&image.Image{Ref: ref})
		for i, node := range all {
			node.stays(ref.String())
			node.heard(pop.Event{Kind: pop.Deployed, Key: ref.String(), Node: fmt.Sprint(at)}, fmt.Sprint(i))
			for range node.wishes() {
				node.met(ref.String())
				if !have[i][ref.String()] && !isReady(i) {
					node.note(ref)
					node.surplus()
					prepared++
				}
			}
		}
	}
}

// An image is noted before it is known: a node that is killed then does not take it for one that was deployed
// there. What cannot be prewarmed leaves nothing.
func TestPrewarmFails(t *testing.T) {
	s := newPoPBed(t)
	a := s.node("a", nil)
	b, e := s.prewarming("b", 4)
	e.refuses(errors.New("refused"))
	p := a.push("app", 1, 2)
	layers := a.bring(p)
	b.eventually("it was tried", func() bool { e.mu.Lock(); defer e.mu.Unlock(); return len(e.noted) > 0 })
	b.eventually("nothing is left", func() bool {
		return b.catalog.Get(b.ref(p.Ref)) == nil && !b.HasLayer(layers[0].Layer.DiffID) &&
			!b.HasLayer(layers[1].Layer.DiffID)
	})
	e.refuses(nil)
	a.bring(p) // else it is tried again in a while
	s.awaitPrewarmed(e, p)
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, noted := range e.noted {
		if !strings.Contains(noted, p.Ref) {
			t.Errorf("it is made known, and noted is %s", noted)
		}
	}
}

// A node whose disk is full prewarms nothing, and uses nothing of the store for it; when there is room, it
// does.
func TestPrewarmNeedsRoom(t *testing.T) {
	testkit.NeedRoot(t, "it mounts a small file system")
	s := newPoPBed(t)
	a := s.node("a", nil)
	b, e := s.prewarming("b", 4)
	b.must(unix.Mount("tmpfs", b.dir, "tmpfs", 0, "size=64k,nr_inodes=4"))
	t.Cleanup(func() { unix.Unmount(b.dir, unix.MNT_DETACH) })
	p := a.push("app", 1, 2, 3)
	layers := a.bring(p)
	b.eventually("it is tried", func() bool { return s.references("b") > 0 })
	b.eventually("all is let go of", func() bool {
		return s.references("b") == 0 &&
			!slices.ContainsFunc(layers, func(l fetch.LayerProgress) bool { return b.HasLayer(l.Layer.DiffID) })
	})
	if e.has(p) {
		t.Error("it is ready")
	}
	b.must(unix.Mount("tmpfs", b.dir, "tmpfs", unix.MS_REMOUNT, "size=64m,nr_inodes=1000"))
	a.bring(p) // else it is tried again in a while
	s.awaitPrewarmed(e, p)
}

// What is inactive while the store is away is fetched when it is deployed, and is as any other then. A
// coordinator that has lost its memory changes nothing.
func TestPrewarmWhileTheStoreIsAway(t *testing.T) {
	testkit.Long(t)
	t.Parallel()
	s := newPoPBed(t)
	a := s.node("a", nil)
	b, e := s.prewarming("b", 4)
	p, q := a.push("app", 1, 2), a.push("other", 3)
	a.bring(p)
	a.bring(q)
	s.awaitPrewarmed(e, p)
	s.awaitPrewarmed(e, q)
	s.awaitInactive(e, p)
	aside := s.store + "-aside"
	b.must(os.Rename(s.store, aside))
	b.must(os.Mkdir(s.store, 0o700))
	b.eventually("it is noticed", func() bool { return b.member.usable() == nil })
	sent := s.served(p)
	layers := b.bring(p)
	for _, l := range layers {
		f, err := b.Files(t.Context(), l.Layer.DiffID)
		if err != nil || !strings.HasPrefix(f.Data, b.dir) || b.member.prewarmed.isInactive(l.Layer.DiffID) {
			t.Errorf("%+v, %v", f, err)
		}
	}
	if s.served(p) == sent {
		t.Error("the registry was not asked")
	}
	b.must(os.Remove(s.store))
	b.must(os.Rename(aside, s.store))
	b.eventually("it is back", func() bool { return b.member.usable() != nil })
	s.hub.Forget()
	id := a.bring(q)[0].Layer.DiffID
	f, err := b.Files(t.Context(), id)
	if err != nil || f.Data != s.data(b.published(id)) || s.references("b") == 0 {
		t.Errorf("what is deactivated: %+v, %v, %d references", f, err, s.references("b"))
	}
}

// What is deployed of an image that is prewarmed comes out of the store, and counts; from then on it is as
// any other.
func TestPrewarmIsDeployed(t *testing.T) {
	testkit.Long(t)
	s := newPoPBed(t)
	a := s.node("a", nil)
	b, e := s.prewarming("b", 1)
	p, q := a.push("app", 1, 2), a.push("other", 3)
	a.bring(p)
	s.awaitPrewarmed(e, p)
	sent, referenced := s.served(p), s.referenceNames("b")
	for _, l := range b.bring(p) {
		if l.From != (fetch.Origins{PoP: l.Layer.Size}) {
			t.Errorf("%+v", l.From)
		}
	}
	if h := b.member.hitsNow(); h.Store != 2 || s.served(p) != sent || !slices.Equal(s.referenceNames("b"), referenced) {
		t.Errorf("%+v, references %q and %q", h, referenced, s.referenceNames("b"))
	}
	b.member.copies.mu.Lock()
	if len(b.member.uses) > 0 { // which would have it copied near too soon
		t.Errorf("the first deployment of what was ready counts as one more: %v", b.member.uses)
	}
	b.member.copies.mu.Unlock()
	a.bring(q)
	b.eventually("the other image is ready", func() bool { return e.has(q) })
	if !e.has(p) {
		t.Error("what was deployed went for what is ready")
	}
}

// When the store needs room, layers are deactivated that no container stands on, though an image here has
// them: they can be evicted then. Others stay in use.
func TestIdleLayersAreDeactivated(t *testing.T) {
	s := newPoPBed(t)
	a := s.node("a", nil)
	b, e := s.prewarming("b", -1)
	p, q := a.push("idle", 1, 2), a.push("used", 3, 4)
	ids := map[string][]digest.Digest{}
	for _, img := range []registrytest.Pushed{p, q} {
		for _, l := range a.bring(img) {
			a.published(l.Layer.DiffID)
			ids[img.Ref] = append(ids[img.Ref], l.Layer.DiffID)
		}
		b.bring(img)
		b.must(e.Register(t.Context(), b.catalog.Get(b.ref(img.Ref))))
	}
	e.mu.Lock()
	for _, id := range ids[q.Ref] {
		e.stands[id] = true
	}
	e.mu.Unlock()
	b.eventually("what is idle is deactivated", func() bool { // pulls hold layers for a moment
		b.must(b.member.deactivateIdle(t.Context(), b.member.usable(), 0))
		return b.member.prewarmed.isInactive(ids[p.Ref][0]) && b.member.prewarmed.isInactive(ids[p.Ref][1])
	})
	if b.member.prewarmed.isInactive(ids[q.Ref][0]) || b.member.prewarmed.isInactive(ids[q.Ref][1]) {
		t.Error("what a container stands on is deactivated")
	}
	a.eventually("it is evicted", func() bool { // once the hub is settled
		_, err := a.member.Prune(t.Context(), a.inUse)
		return err == nil && !a.member.usable().HasLayer(t.Context(), ids[p.Ref][0]) &&
			!a.member.usable().HasLayer(t.Context(), ids[p.Ref][1])
	})
	for _, id := range ids[q.Ref] {
		if !a.member.usable().HasLayer(t.Context(), id) {
			t.Error("what is in use was evicted")
		}
	}
	b.eventually("it is let go of", func() bool { return !b.HasLayer(ids[p.Ref][0]) && !b.HasLayer(ids[p.Ref][1]) })
	b.bring(p)
	if f, err := b.Files(t.Context(), ids[p.Ref][0]); err != nil {
		t.Errorf("%+v, %v", f, err)
	}
}

// So many images are prewarmed and no more; one whose layer is evicted is not prewarmed any more.
func TestPrewarmIsTakenBack(t *testing.T) {
	testkit.Long(t)
	s := newPoPBed(t)
	a := s.node("a", nil)
	b, e := s.prewarming("b", 2)
	var all []registrytest.Pushed
	for i := range 3 {
		all = append(all, a.push(fmt.Sprint("app", i), uint64(i+1)))
		a.bring(all[i])
		s.awaitPrewarmed(e, all[i])
	}
	b.eventually("the oldest goes", func() bool { return !e.has(all[0]) && e.has(all[1]) })
	id := b.catalog.Get(b.ref(all[2].Ref)).Layers[0].DiffID
	rec, err := a.member.usable().Record(t.Context(), id)
	if err == nil {
		err = a.member.usable().Quarantine(t.Context(), rec)
	}
	if err != nil {
		t.Fatal(err)
	}
	b.eventually("it is taken back", func() bool { return !e.has(all[2]) && !b.HasLayer(id) })
	if !e.has(all[1]) {
		t.Error("the other one went with it")
	}
}
