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
	"sync/atomic"
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

// readyEngine is an engine as making images ready needs it: it mounts layers, and forgets images.
type readyEngine struct {
	n *siteNode // set before anything is deployed

	mu      sync.Mutex
	images  []string
	refuse  error    // unless nil, what Register returns
	noted   []string // what each image's registering has found in the file of those that are ready
	mounted map[digest.Digest]bool
	stands  map[digest.Digest]bool // containers do
}

func (e *readyEngine) Register(ctx context.Context, img *image.Image) error {
	noted, _ := os.ReadFile(e.n.site.cfg.Prepare.Path)
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

func (e *readyEngine) Unmount(_ context.Context, ids ...digest.Digest) (busy []digest.Digest, err error) {
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

func (e *readyEngine) Forget(_ context.Context, ref image.Reference) error {
	e.mu.Lock()
	e.images = slices.DeleteFunc(e.images, func(s string) bool { return s == ref.String() })
	e.mu.Unlock()
	return e.n.catalog.Forget(ref)
}

func (e *readyEngine) has(p registrytest.Pushed) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Contains(e.images, e.n.ref(p.Ref).String())
}

func (e *readyEngine) refuses(err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.refuse = err
}

// preparing is a node that makes so many images ready, each that was deployed once elsewhere.
func (s *siteBed) preparing(name string, images int, change ...func(*PrewarmConfig)) (*siteNode,
	*readyEngine) {
	e := &readyEngine{mounted: map[digest.Digest]bool{}, stands: map[digest.Digest]bool{}}
	e.n = s.node(name, func(c *Config) {
		c.House = cmp.Or(s.house, 200*time.Millisecond)
		c.Prepare = PrewarmConfig{Images: images, After: 1, Engine: e,
			Path: filepath.Join(s.t.TempDir(), "prepared")}
		for _, fn := range change {
			fn(&c.Prepare)
		}
	})
	return e.n, e
}

// markNames are the marks of a node in the store.
func (s *siteBed) markNames(name string) (names []string) {
	s.t.Helper()
	marks, err := os.ReadDir(filepath.Join(s.store, "refs", name))
	if err != nil {
		s.t.Fatal(err)
	}
	for _, m := range marks {
		names = append(names, m.Name())
	}
	return names
}

func (s *siteBed) marks(name string) int { return len(s.markNames(name)) }

// awaitReady waits until an image is ready: its layers are mounted and marked.
func (s *siteBed) awaitReady(e *readyEngine, p registrytest.Pushed) {
	s.t.Helper()
	e.n.eventually("an image is ready", func() bool { return e.has(p) && s.marks(e.n.name) > 0 })
}

// awaitRest has the store need room until an image is ready, and neither mounted nor marked.
func (s *siteBed) awaitRest(e *readyEngine, p registrytest.Pushed) {
	s.t.Helper()
	s.awaitReady(e, p)
	e.n.eventually("an image rests", func() bool {
		e.n.must(e.n.site.cfg.Coord.Publish(s.t.Context(), pop.Event{Kind: pop.Pressed}))
		e.mu.Lock()
		mounted := len(e.mounted)
		e.mu.Unlock()
		return e.has(p) && mounted == 0 && s.marks(e.n.name) == 0
	})
}

// An image that another node has deployed is made ready, and rests when the store needs room; who mounts its
// layers then marks them, and fetches those that have left the store unnoticed.
func TestReadyLayersAreMarkedBeforeTheyAreMounted(t *testing.T) {
	s := newSiteBed(t)
	a := s.node("a", nil)
	b, e := s.preparing("b", 4)
	p := a.push("app", 1, 2)
	ids := []digest.Digest{}
	for _, l := range a.bring(p) {
		ids = append(ids, l.Layer.DiffID)
	}
	s.awaitRest(e, p)
	if h := b.site.hitsNow(); h.Store != 0 {
		t.Errorf("what nobody deployed counts: %+v", h)
	}
	if err := s.hide(ids[1]); err != nil {
		t.Fatal(err)
	}
	f, err := b.Files(t.Context(), ids[0])
	if err != nil || s.marks("b") != 1 || f.Data != s.data(b.published(ids[0])) {
		t.Errorf("%+v, %v, %d marks", f, err, s.marks("b"))
	}
	sent := s.served(p)
	f, err = b.Files(t.Context(), ids[1])
	if err != nil || s.served(p) == sent {
		t.Errorf("what has left the store: %+v, %v", f, err)
	}
}

// What is ready is in use, so a start asks for no more, and goes when the store has no other room: it can be
// evicted then.
func TestReadyGoesForRoom(t *testing.T) {
	s := newSiteBed(t)
	a := s.node("a", nil)
	s.house = time.Hour // what is told works at once, not in the next round
	b, e := s.preparing("b", 4)
	p := a.push("app", 1, 2)
	layers := a.bring(p)
	s.awaitReady(e, p)
	b.must(a.catalog.Forget(a.ref(p.Ref)))
	for _, l := range layers {
		a.published(l.Layer.DiffID)
		if !b.Has(l.Layer.DiffID) || b.site.ready.rests(l.Layer.DiffID) {
			t.Errorf("layer %s is not in use", l.Layer.DiffID)
		}
	}
	a.eventually("it is evicted", func() bool {
		_, err := a.site.Prune(t.Context(), func(digest.Digest) bool { return false })
		return err == nil &&
			!slices.ContainsFunc(layers, func(l fetch.LayerProgress) bool {
				return a.site.usable().Has(t.Context(), l.Layer.DiffID)
			})
	})
	b.eventually("it is taken back", func() bool { return !e.has(p) && s.marks("b") == 0 })
}

// An image is made ready once it was deployed elsewhere for the second time; what this node deploys, or has,
// is no reason. Of those that are ready the one goes that was deployed elsewhere least lately.
func TestReadyByDemand(t *testing.T) {
	s := newSiteBed(t)
	a := s.node("a", nil)
	b, e := s.preparing("b", 2)
	b.site.ready.mu.Lock()
	b.site.ready.cfg.After = prepareAfter
	b.site.ready.mu.Unlock()
	p, q, r := a.push("app", 1), a.push("seldom", 2), a.push("new", 3)
	demand := func(p registrytest.Pushed) int {
		b.site.ready.mu.Lock()
		defer b.site.ready.mu.Unlock()
		if i := b.site.ready.demandFor(b.ref(p.Ref).String()); i >= 0 {
			return b.site.ready.demand[i].times
		}
		return 0
	}
	a.bring(q)
	b.eventually("it is heard of", func() bool { return demand(q) == 1 })
	a.bring(p)
	a.bring(p)
	s.awaitReady(e, p)
	if e.has(q) || demand(q) != 1 || demand(p) != 0 {
		t.Errorf("of an image that was deployed once, %d times is known, and %d of the other", demand(q), demand(p))
	}
	a.bring(q)
	s.awaitReady(e, q)
	a.bring(p) // and stays for it
	b.eventually("it is heard of", func() bool {
		b.site.ready.mu.Lock()
		defer b.site.ready.mu.Unlock()
		return b.site.ready.images[1].String() == b.ref(p.Ref).String()
	})
	a.bring(r)
	a.bring(r)
	s.awaitReady(e, r)
	b.eventually("one goes", func() bool { return !e.has(q) })
	b.bring(q)
	b.bring(q)
	a.bring(q)
	last := a.push("last", 4)
	a.bring(last)
	b.eventually("it is heard of", func() bool { return demand(last) == 1 })
	b.site.ready.mu.Lock()
	images := fmt.Sprint(b.site.ready.images)
	b.site.ready.mu.Unlock()
	if !e.has(p) || !strings.Contains(images, p.Ref) || demand(q) != 0 {
		t.Errorf("what is deployed elsewhere went; what this node has is counted %d times", demand(q))
	}
}

// What is deployed here, and removed, while a node waits for the quiet to make it ready does not come back by
// itself.
func TestReadyMetMeanwhile(t *testing.T) {
	s := newSiteBed(t)
	a := s.node("a", nil)
	b, e := s.preparing("b", 4)
	ctx, done := context.WithCancel(t.Context())
	busy, err := b.Pull(ctx, b.ref(b.push("busy", 3).Ref), fetch.Options{}) // is under way until done
	b.must(err)
	b.must(busy.WaitComplete(ctx))
	p, q := a.push("app", 1), a.push("other", 2)
	a.bring(p)
	wishes := func() int { return len(b.site.ready.wishes()) }
	b.eventually("it is heard of", func() bool { return wishes() == 1 })
	b.eventually("it is waited for the quiet", func() bool { return len(b.site.ready.news) == 0 })
	b.site.ready.met(b.ref(p.Ref).String())
	a.bring(q)
	b.eventually("another is heard of", func() bool { return wishes() == 1 })
	done()
	s.awaitReady(e, q)
	if e.has(p) {
		t.Error("it is made ready, though nobody wants it any more")
	}
}

// waited is for how long something has waited for a processor.
type waited func() time.Duration

func (w waited) Waited() time.Duration { return w() }

// Nothing is made ready while processes wait for the processors.
func TestReadyWhenIdle(t *testing.T) {
	s := newSiteBed(t)
	a := s.node("a", nil)
	began := time.Now()
	var pressed atomic.Bool
	pressed.Store(true)
	asked := make(chan bool, 1000)
	b, e := s.preparing("b", 4, func(c *PrewarmConfig) {
		c.Processors = waited(func() time.Duration {
			select {
			case asked <- true:
			default:
			}
			if pressed.Load() {
				return time.Since(began)
			}
			return 0
		})
	})
	p := a.push("app", 1)
	id := a.bring(p)[0].Layer.DiffID
	a.published(id)
	for range 20 { // four times as long as it would take

		select {
		case <-asked:
		case <-time.After(testkit.Limit):
			t.Fatal("nobody asks for the pressure")
		}
	}
	if e.has(p) || b.Has(id) {
		t.Error("it is ready")
	}
	pressed.Store(false)
	s.awaitReady(e, p)
}

// On a trace that is like a registry's, most of a node's first hits are of what it has made ready, and that
// is not much. Other rules are logged beside.
func TestReadyOfATrace(t *testing.T) {
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
		ready, made := replayReady(t, cfg, path)
		t.Logf("%d images after %d: %.2f of the first hits are of what is ready, %.2f are made ready a deployment",
			cfg.Images, cfg.After, ready, made)
		if cfg.Images == 16 && cfg.After == 0 && (ready < 0.6 || made > 0.4) {
			t.Errorf("%.2f of the first hits are of what is ready, %.2f are made ready a deployment", ready, made)
		}
	}
}

// replayReady deploys what a trace has pulled on five nodes in turn, which make images ready in between.
func replayReady(t *testing.T, cfg PrewarmConfig, path string) (ready, made float64) {
	r, err := pulltrace.NewReader(path)
	if err != nil {
		t.Fatal(err)
	}
	const nodes = 5
	var have [nodes]map[string]bool
	var all [nodes]*prepared
	for i := range nodes {
		have[i], all[i] = map[string]bool{}, newPrepared(cfg)
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
					node.surplus(0)
					prepared++
				}
			}
		}
	}
}

// An image is noted before it is known: a node that is killed then does not take it for one that was deployed
// there. What cannot be made ready leaves nothing.
func TestReadyFails(t *testing.T) {
	s := newSiteBed(t)
	a := s.node("a", nil)
	b, e := s.preparing("b", 4)
	e.refuses(errors.New("refused"))
	p := a.push("app", 1, 2)
	layers := a.bring(p)
	b.eventually("it was tried", func() bool { e.mu.Lock(); defer e.mu.Unlock(); return len(e.noted) > 0 })
	b.eventually("nothing is left", func() bool {
		return b.catalog.Get(b.ref(p.Ref)) == nil && !b.Has(layers[0].Layer.DiffID) &&
			!b.Has(layers[1].Layer.DiffID)
	})
	e.refuses(nil)
	a.bring(p) // else it is tried again in a while
	s.awaitReady(e, p)
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, noted := range e.noted {
		if !strings.Contains(noted, p.Ref) {
			t.Errorf("it is made known, and noted is %s", noted)
		}
	}
}

// A node whose disk is full makes nothing ready, and uses nothing of the store for it; when there is room, it
// does.
func TestReadyNeedsRoom(t *testing.T) {
	s := newSiteBed(t)
	a := s.node("a", nil)
	b, e := s.preparing("b", 4)
	b.must(unix.Mount("tmpfs", b.dir, "tmpfs", 0, "size=64k,nr_inodes=4"))
	t.Cleanup(func() { unix.Unmount(b.dir, unix.MNT_DETACH) })
	p := a.push("app", 1, 2, 3)
	layers := a.bring(p)
	b.eventually("it is tried", func() bool { return s.marks("b") > 0 })
	b.eventually("all is let go of", func() bool {
		return s.marks("b") == 0 &&
			!slices.ContainsFunc(layers, func(l fetch.LayerProgress) bool { return b.Has(l.Layer.DiffID) })
	})
	if e.has(p) {
		t.Error("it is ready")
	}
	b.must(unix.Mount("tmpfs", b.dir, "tmpfs", unix.MS_REMOUNT, "size=64m,nr_inodes=1000"))
	a.bring(p) // else it is tried again in a while
	s.awaitReady(e, p)
}

// What rests while the store is away is fetched when it is deployed, and is as any other then. A coordinator
// that has lost its memory changes nothing.
func TestReadyWhileTheStoreIsAway(t *testing.T) {
	s := newSiteBed(t)
	a := s.node("a", nil)
	b, e := s.preparing("b", 4)
	p, q := a.push("app", 1, 2), a.push("other", 3)
	a.bring(p)
	a.bring(q)
	s.awaitReady(e, p)
	s.awaitReady(e, q)
	s.awaitRest(e, p)
	aside := s.store + "-aside"
	b.must(os.Rename(s.store, aside))
	b.must(os.Mkdir(s.store, 0o700))
	b.eventually("it is noticed", func() bool { return b.site.usable() == nil })
	sent := s.served(p)
	layers := b.bring(p)
	for _, l := range layers {
		f, err := b.Files(t.Context(), l.Layer.DiffID)
		if err != nil || !strings.HasPrefix(f.Data, b.dir) || b.site.ready.rests(l.Layer.DiffID) {
			t.Errorf("%+v, %v", f, err)
		}
	}
	if s.served(p) == sent {
		t.Error("the registry was not asked")
	}
	b.must(os.Remove(s.store))
	b.must(os.Rename(aside, s.store))
	b.eventually("it is back", func() bool { return b.site.usable() != nil })
	s.hub.Forget()
	id := a.bring(q)[0].Layer.DiffID
	f, err := b.Files(t.Context(), id)
	if err != nil || f.Data != s.data(b.published(id)) || s.marks("b") == 0 {
		t.Errorf("what rests: %+v, %v, %d marks", f, err, s.marks("b"))
	}
}

// What is deployed of an image that is ready comes out of the store, and counts; from then on it is as any
// other.
func TestReadyIsDeployed(t *testing.T) {
	s := newSiteBed(t)
	a := s.node("a", nil)
	b, e := s.preparing("b", 1)
	p, q := a.push("app", 1, 2), a.push("other", 3)
	a.bring(p)
	s.awaitReady(e, p)
	sent, marked := s.served(p), s.markNames("b")
	for _, l := range b.bring(p) {
		if l.From != (fetch.Origins{PoP: l.Layer.Size}) {
			t.Errorf("%+v", l.From)
		}
	}
	if h := b.site.hitsNow(); h.Store != 2 || s.served(p) != sent || !slices.Equal(s.markNames("b"), marked) {
		t.Errorf("%+v, marks %q and %q", h, marked, s.markNames("b"))
	}
	b.site.copies.mu.Lock()
	if len(b.site.uses) > 0 { // which would have it copied near too soon
		t.Errorf("the first deployment of what was ready counts as one more: %v", b.site.uses)
	}
	b.site.copies.mu.Unlock()
	a.bring(q)
	b.eventually("the other image is ready", func() bool { return e.has(q) })
	if !e.has(p) {
		t.Error("what was deployed went for what is ready")
	}
}

// When the store needs room, layers rest that no container stands on, though an image here has them: they can
// be evicted then. Others stay in use.
func TestIdleLayersRest(t *testing.T) {
	s := newSiteBed(t)
	a := s.node("a", nil)
	b, e := s.preparing("b", -1)
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
	b.eventually("what is idle rests", func() bool { // pulls hold layers for a moment
		b.must(b.site.restIdle(t.Context(), b.site.usable(), 0))
		return b.site.ready.rests(ids[p.Ref][0]) && b.site.ready.rests(ids[p.Ref][1])
	})
	if b.site.ready.rests(ids[q.Ref][0]) || b.site.ready.rests(ids[q.Ref][1]) {
		t.Error("what a container stands on rests")
	}
	a.eventually("it is evicted", func() bool { // once the hub is settled
		_, err := a.site.Prune(t.Context(), a.inUse)
		return err == nil && !a.site.usable().Has(t.Context(), ids[p.Ref][0]) &&
			!a.site.usable().Has(t.Context(), ids[p.Ref][1])
	})
	for _, id := range ids[q.Ref] {
		if !a.site.usable().Has(t.Context(), id) {
			t.Error("what is in use was evicted")
		}
	}
	b.eventually("it is let go of", func() bool { return !b.Has(ids[p.Ref][0]) && !b.Has(ids[p.Ref][1]) })
	b.bring(p)
	if f, err := b.Files(t.Context(), ids[p.Ref][0]); err != nil {
		t.Errorf("%+v, %v", f, err)
	}
}

// So many images are ready and no more; one whose layer is evicted is not ready any more.
func TestReadyIsTakenBack(t *testing.T) {
	s := newSiteBed(t)
	a := s.node("a", nil)
	b, e := s.preparing("b", 2)
	var all []registrytest.Pushed
	for i := range 3 {
		all = append(all, a.push(fmt.Sprint("app", i), uint64(i+1)))
		a.bring(all[i])
		s.awaitReady(e, all[i])
	}
	b.eventually("the oldest goes", func() bool { return !e.has(all[0]) && e.has(all[1]) })
	id := b.catalog.Get(b.ref(all[2].Ref)).Layers[0].DiffID
	rec, err := a.site.usable().Record(t.Context(), id)
	if err == nil {
		err = a.site.usable().Quarantine(t.Context(), rec)
	}
	if err != nil {
		t.Fatal(err)
	}
	b.eventually("it is taken back", func() bool { return !e.has(all[2]) && !b.Has(id) })
	if !e.has(all[1]) {
		t.Error("the other one went with it")
	}
}
