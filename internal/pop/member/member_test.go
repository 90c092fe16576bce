package member

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"dewpoint/internal/fetch"
	"dewpoint/internal/fetch/link"
	"dewpoint/internal/layer"
	"dewpoint/internal/pop"
	"dewpoint/internal/pop/local"
	"dewpoint/testkit"
	"dewpoint/testkit/registrytest"

	"github.com/opencontainers/go-digest"
)

// popBed is a PoP whose nodes are pullers in this process: one registry, one
// directory as the store, one hub.
type popBed struct {
	t       testing.TB
	reg     *registrytest.Server
	hub     *local.Hub
	store   string
	packs   bool          // nodes to come keep packs
	every   int64         // of the nodes' layer.Config.Interval
	tree    bool          // of the nodes to come: their layer.Config.Tree
	collect time.Duration // of the nodes to come that prewarm images
}

func newPoPBed(t testing.TB) *popBed {
	return &popBed{t: t, reg: registrytest.New(t), hub: local.NewHub(), store: t.TempDir()}
}

// popNode is one of its nodes. KeepPoP runs.
type popNode struct {
	*bed
	member *Member
	name   string

	mu       sync.Mutex
	used     map[digest.Digest]bool // what containers stand on
	damaged  []digest.Digest
	replaced []digest.Digest
	letGo    []digest.Digest
}

const (
	leaseTTL  = 500 * time.Millisecond
	cacheSize = 1 << 30 // bytes that a node's own layers may take
)

// node joins a node; change may change its configuration before.
func (s *popBed) node(name string, change func(*Config)) *popNode {
	s.t.Helper()
	n := s.boot(name, change)
	n.eventually("the store is open", func() bool { return n.member.usable() != nil })
	return n
}

// boot is node, which need not have opened the store yet.
func (s *popBed) boot(name string, change func(*Config)) *popNode {
	t := s.t
	t.Helper()
	n := &popNode{bed: &bed{t: t, reg: s.reg, dir: filepath.Join(t.TempDir(), "layers")}, name: name,
		used: map[digest.Digest]bool{}}
	var err error
	n.layers, err = layer.Open(layer.Config{Dir: n.dir, Interval: s.every, Tree: s.tree})
	n.must(err)
	t.Cleanup(func() { n.must(n.layers.Close()) })
	n.catalog, err = fetch.OpenCatalog(t.TempDir(), nil)
	n.must(err)
	coord, err := s.hub.Join(pop.Config{Node: name, TTL: leaseTTL})
	n.must(err)
	t.Cleanup(func() { coord.Close() })
	dir := pop.NewDir(s.store, 0)
	cfg := Config{Node: name, Coord: coord, Dir: dir,
		Store: opener(func(ctx context.Context) (*pop.Store, error) {
			return pop.OpenStore(ctx, pop.StoreConfig{FS: dir, Coord: coord, Node: name, Grace: time.Second})
		}),
		Audience: ear{n: n},
		Pending:  filepath.Join(t.TempDir(), "pending"),
		Capacity: cacheSize, Layers: n.layers, Catalog: n.catalog,
		Link: link.New(link.Config{Inflaters: 1}),
	}
	if s.packs {
		cfg.PackDir = t.TempDir()
	}
	if change != nil {
		change(&cfg)
	}
	n.Puller = fetch.NewPuller(fetch.Config{Registry: newClient(t, s.reg), Layers: n.layers, Catalog: n.catalog,
		Link: cfg.Link, Packs: fetch.PackConfig{Dir: cfg.PackDir}, Cache: fetch.CacheConfig{Capacity: cacheSize}})
	n.member = New(cfg, n.Puller)
	n.Join(n.member)
	t.Cleanup(func() { n.must(n.Close()); n.member.Close() })
	ctx, cancel := context.WithCancel(context.Background())
	var kept sync.WaitGroup
	kept.Go(func() { n.must(n.member.Run(ctx, n.inUse)) })
	t.Cleanup(func() { cancel(); kept.Wait() })
	return n
}

// opener opens a store.
type opener func(context.Context) (*pop.Store, error)

func (o opener) OpenStore(ctx context.Context) (*pop.Store, error) { return o(ctx) }

// fits says whether a cache has room.
type fits func() bool

func (f fits) Fits(int64) bool { return f() }

// ear notes which layers are damaged, and replaced, and which the node let go of.
type ear struct {
	deaf
	n *popNode
}

func (e ear) Damaged(id digest.Digest, _ error) { e.n.note(&e.n.damaged, id) }

func (e ear) LetGo(id digest.Digest, _ string) { e.n.note(&e.n.letGo, id) }

func (e ear) Replaced(id digest.Digest) { e.n.note(&e.n.replaced, id) }

func (n *popNode) note(list *[]digest.Digest, id digest.Digest) {
	n.mu.Lock()
	defer n.mu.Unlock()
	*list = append(*list, id)
}

func (n *popNode) inUse(id digest.Digest) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.used[id]
}

// use says that a container stands on a layer.
func (n *popNode) use(id digest.Digest) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.used[id] = true
}

// bring pulls an image whole and says where each of its layers came from.
func (n *popNode) bring(p registrytest.Pushed) []fetch.LayerProgress {
	n.t.Helper()
	ctx, cancel := context.WithCancel(n.t.Context())
	defer cancel()
	pull, err := n.Pull(ctx, n.ref(p.Ref), fetch.Options{})
	n.must(err)
	n.must(pull.WaitComplete(ctx))
	return pull.Progress()
}

// published waits until the store has the layer, and returns its record.
func (n *popNode) published(id digest.Digest) *pop.Layer {
	n.t.Helper()
	var rec *pop.Layer
	n.eventually("the layer is in the store", func() bool {
		var err error
		rec, err = n.member.usable().Record(n.t.Context(), id)
		return err == nil
	})
	return rec
}

// data is the path of a layer's tar in the store.
func (s *popBed) data(l *pop.Layer) string { return filepath.Join(s.store, l.Data()) }

// hide takes a layer's record out of the store.
func (s *popBed) hide(id digest.Digest) error {
	return os.Remove(filepath.Join(s.store, "layers", id.Encoded()+".json"))
}

// flip changes a byte in the middle of a file.
func (s *popBed) flip(path string) {
	s.t.Helper()
	b, err := os.ReadFile(path)
	if err == nil {
		b[len(b)/2] ^= 0x10
		err = os.WriteFile(path, b, 0o600)
	}
	if err != nil {
		s.t.Fatal(err)
	}
}

// served is how many bytes of an image's layers the registry has sent.
func (s *popBed) served(p registrytest.Pushed) int64 {
	var sum int64
	for _, l := range p.Layers {
		sum += s.reg.Served(l.Digest)
	}
	return sum
}

func size(p registrytest.Pushed) int64 {
	var sum int64
	for _, l := range p.Layers {
		sum += l.Size
	}
	return sum
}

// What one node has fetched, the other takes out of the store.
func TestSecondNodeAsksNoRegistry(t *testing.T) {
	s := newPoPBed(t)
	a, b := s.node("a", nil), s.node("b", nil)
	p := a.push("app", 1, 2)
	for _, l := range a.bring(p) {
		if l.From.Registry != l.Layer.Size || l.From.PoP != 0 || l.From.Local != 0 {
			t.Errorf("the first node: %+v of %d", l.From, l.Layer.Size)
		}
		a.published(l.Layer.DiffID)
	}
	sent := s.served(p)
	for _, l := range b.bring(p) {
		if l.From != (fetch.Origins{PoP: l.Layer.Size}) {
			t.Errorf("the second node: %+v of %d", l.From, l.Layer.Size)
		}
	}
	if more := s.served(p) - sent; more != 0 || sent != size(p) {
		t.Errorf("the registry sent %d bytes to the first node, of %d, and %d to the second", sent, size(p), more)
	}
	if h := b.member.hitsNow(); h.Store != 2 || h.Registry != 0 || h.StoreBytes != size(p) {
		t.Errorf("hits of the second node: %+v", h)
	}
	if references, err := os.ReadDir(filepath.Join(s.store, "refs", "b")); err != nil || len(references) != 1 {
		t.Errorf("an image of two layers has the references %v, %v", references, err)
	}
}

// A node that has just booted waits for the store, which takes its time to open, and not for long.
func TestBootWaitsForTheStore(t *testing.T) {
	testkit.Long(t)
	t.Parallel()
	s := newPoPBed(t)
	a := s.node("a", nil)
	p := a.push("app", 1, 2)
	for _, l := range a.bring(p) {
		a.published(l.Layer.DiffID)
	}
	sent := s.served(p)
	for took, want := range map[time.Duration]bool{300 * time.Millisecond: true, time.Hour: false} {
		name := "slow"
		if !want {
			name = "hangs"
		}
		b := s.boot(name, func(cfg *Config) {
			store := cfg.Store
			cfg.Store = opener(func(ctx context.Context) (*pop.Store, error) {
				select {
				case <-time.After(took):
					return store.OpenStore(ctx)
				case <-ctx.Done():
					return nil, context.Cause(ctx)
				}
			})
		})
		began := time.Now()
		for _, l := range b.bring(p) {
			if stored := l.From == (fetch.Origins{PoP: l.Layer.Size}); stored != want {
				t.Errorf("where the store opens after %v: %+v of %d", took, l.From, l.Layer.Size)
			}
		}
		if d := time.Since(began); d > 2*storePatience {
			t.Errorf("it took %v", d)
		}
		if got := s.served(p) > sent; got == want {
			t.Errorf("where the store opens after %v the registry was asked: %v", took, got)
		}
		sent = s.served(p)
	}
}

// A node that is told that files are damaged does not use them, though it still sees their record: neither
// what it has attached nor what it attaches then.
func TestDamagedFilesAreDenied(t *testing.T) {
	s := newPoPBed(t)
	a, b, c := s.node("a", nil), s.node("b", nil), s.node("c", nil)
	p := a.push("app", 1)
	rec := a.published(a.bring(p)[0].Layer.DiffID)
	b.bring(p)
	at := func(n *popNode) string {
		l, err := n.layers.Peek(rec.DiffID)
		if err != nil {
			return ""
		}
		return filepath.Base(l.At)
	}
	if at(b) != filepath.Base(rec.Data()) {
		t.Fatalf("b has it at %q", at(b))
	}
	a.must(a.member.cfg.Coord.Publish(t.Context(),
		pop.Event{Kind: pop.Damaged, Key: rec.DiffID.String(), Name: rec.Name}))
	for _, n := range []*popNode{b, c} { // the record is where it was
		n.eventually("it is told", func() bool { return n.member.usable().Denies(rec.Name) })
		n.eventually("it is let go of", func() bool { return at(n) != filepath.Base(rec.Data()) })
		for _, l := range n.bring(p) {
			if at(n) == filepath.Base(rec.Data()) {
				t.Errorf("%s uses it: %+v", n.name, l.From)
			}
		}
	}
}

// Of one image, a layer is here, one in the store, and one at the registry.
func TestOriginsOfMixedImage(t *testing.T) {
	s := newPoPBed(t)
	a, b := s.node("a", nil), s.node("b", nil)
	b.bring(b.push("one", 1))
	for _, l := range a.bring(a.push("two", 2)) {
		a.published(l.Layer.DiffID)
	}
	got := b.bring(b.push("all", 1, 2, 3))
	for i, want := range []fetch.Origins{{Local: got[0].Layer.Size}, {PoP: got[1].Layer.Size},
		{Registry: got[2].Layer.Size}} {
		if got[i].From != want {
			t.Errorf("layer %d: %+v, want %+v", i, got[i].From, want)
		}
	}
}

// A layer of the store counts once, though the registry had to be asked what the image is.
func TestStoreHitsCountOnce(t *testing.T) {
	s := newPoPBed(t)
	a, b := s.node("a", nil), s.node("b", nil)
	p := a.push("app", 1, 2)
	layers := a.bring(p)
	for _, l := range layers {
		a.published(l.Layer.DiffID)
	}
	a.eventually("the image's record", func() bool {
		_, err := a.member.usable().Image(t.Context(), a.ref(p.Ref).String())
		return err == nil
	})
	a.must(s.hide(layers[1].Layer.DiffID))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	pull, err := b.Pull(ctx, b.ref(p.Ref), fetch.Options{Local: true})
	b.must(err)
	b.must(pull.WaitComplete(ctx))
	if h := b.member.hitsNow(); h.Store != 1 || h.StoreBytes != layers[0].Layer.Size || h.Registry != 1 ||
		h.Local != 0 {
		t.Errorf("of two layers, one in the store: %+v", h)
	}
}

// Without the coordinator a node fetches for itself, which counts too.
func TestFetchingAloneCounts(t *testing.T) {
	s := newPoPBed(t)
	a := s.node("a", nil)
	s.hub.Cut("a", true)
	p := a.push("app", 1)
	a.bring(p)
	if h := a.member.hitsNow(); h.Registry != 1 || h.RegistryBytes != size(p) {
		t.Errorf("%+v", h)
	}
}

// A store whose file system is unmounted under the node is away, though there is a directory; nothing is
// written there, and when it is back, so is the node.
func TestStoreIsUnmounted(t *testing.T) {
	testkit.Long(t)
	t.Parallel()
	s := newPoPBed(t)
	a, b := s.node("a", nil), s.node("b", nil)
	p := a.push("app", 1)
	id := a.bring(p)[0].Layer.DiffID
	a.published(id)
	aside := s.store + "-aside"
	a.must(os.Rename(s.store, aside))
	a.must(os.Mkdir(s.store, 0o700))
	t.Cleanup(func() { os.RemoveAll(aside) })
	for _, n := range []*popNode{a, b} {
		n.eventually("it is noticed", func() bool { return n.member.usable() == nil })
		if now := n.member.State(); !now.StoreAway {
			t.Error("the store is not away")
		}
		if got, err := n.member.Status(t.Context()); err != nil || !errors.Is(got.Away, pop.ErrNotMounted) {
			t.Errorf("away: %v, %v", got.Away, err)
		}
	}
	b.bring(p)
	if h := b.member.hitsNow(); h.Store != 0 || h.Registry != 1 {
		t.Errorf("%+v", h)
	}
	if left, err := os.ReadDir(s.store); err != nil || len(left) > 0 {
		t.Errorf("written where nothing is mounted: %v, %v", left, err)
	}
	a.must(os.Remove(s.store))
	a.must(os.Rename(aside, s.store))
	b.eventually("it is back", func() bool { return b.member.usable() != nil })
	for _, l := range b.bring(b.push("other", 1, 2)) {
		b.published(l.Layer.DiffID)
	}
}

// verifyAll verifies the store and returns what was damaged.
func (n *popNode) verifyAll(ids ...digest.Digest) (whole int, damaged []Verified) {
	n.t.Helper()
	n.must(n.member.Verify(n.t.Context(), ids, func(v Verified) error {
		if v.Damage != nil {
			damaged = append(damaged, v)
		} else {
			whole++
		}
		return nil
	}))
	return whole, damaged
}

// A flipped byte is found. The node has the layer itself and puts it back.
func TestDamageIsReplacedFromOwnCopy(t *testing.T) {
	s := newPoPBed(t)
	a := s.node("a", nil)
	p := a.push("app", 1, 2)
	layers := a.bring(p)
	bad := a.published(layers[0].Layer.DiffID)
	a.published(layers[1].Layer.DiffID)
	good, err := os.ReadFile(s.data(bad))
	a.must(err)
	if whole, damaged := a.verifyAll(); whole != 2 || len(damaged) != 0 {
		t.Fatalf("%d whole, %v damaged, of a good store", whole, damaged)
	}
	s.flip(s.data(bad))
	sent := s.served(p)
	whole, damaged := a.verifyAll()
	if whole != 1 || len(damaged) != 1 || damaged[0].DiffID != bad.DiffID || !damaged[0].Replaced ||
		!errors.Is(damaged[0].Damage, pop.ErrDamaged) {
		t.Fatalf("%d whole, %+v", whole, damaged)
	}
	rec := a.published(bad.DiffID)
	if now, err := os.ReadFile(s.data(rec)); err != nil || !bytes.Equal(now, good) || rec.Name == bad.Name {
		t.Errorf("%s instead of %s: its bytes are right %t, %v", rec.Name, bad.Name, bytes.Equal(now, good), err)
	}
	n := a.member.Stats()
	if len(a.damaged) != 1 || len(a.replaced) != 1 || n.Damaged != 1 || n.Replaced != 1 {
		t.Errorf("reported: %v damaged, %v replaced, %+v", a.damaged, a.replaced, n)
	}
	if s.served(p) != sent {
		t.Error("the registry was asked for what is here")
	}
}

// The same of a layer that the node only uses: it comes anew.
func TestDamageIsFetchedAnew(t *testing.T) {
	s := newPoPBed(t)
	a, b := s.node("a", nil), s.node("b", nil)
	p := a.push("app", 1)
	id := a.bring(p)[0].Layer.DiffID
	bad := a.published(id)
	good, err := os.ReadFile(s.data(bad))
	a.must(err)
	b.bring(p)
	_, err = a.layers.Remove(id, func(*layer.Layer) bool { return true })
	a.must(err)
	s.flip(s.data(bad))
	if _, damaged := b.verifyAll(id); len(damaged) != 1 || !damaged[0].Replaced {
		t.Fatalf("%+v", damaged)
	}
	rec := b.published(id)
	if now, err := os.ReadFile(s.data(rec)); err != nil || !bytes.Equal(now, good) {
		t.Errorf("the store is right again: %t, %v", bytes.Equal(now, good), err)
	}
	if n := s.served(p); n != 2*size(p) {
		t.Errorf("the registry sent %d bytes of %d", n, size(p))
	}
	have, err := b.layers.Get(id)
	b.must(err)
	if now, err := os.ReadFile(have.Files().Data); err != nil || !bytes.Equal(now, good) {
		t.Errorf("what starts on the node from now on reads right bytes: %t, %v", bytes.Equal(now, good), err)
	}
}

// Who uses a layer that another node finds damaged lets go of it.
func TestDamageIsLetGoOfElsewhere(t *testing.T) {
	s := newPoPBed(t)
	a, b := s.node("a", nil), s.node("b", nil)
	p := a.push("app", 1)
	id := a.bring(p)[0].Layer.DiffID
	bad := a.published(id)
	b.bring(p)
	s.flip(s.data(bad))
	if _, damaged := a.verifyAll(); len(damaged) != 1 {
		t.Fatalf("%+v", damaged)
	}
	b.eventually("the layer is not read from the damaged file", func() bool {
		l, err := b.layers.Peek(id)
		return err == nil && l.At != s.data(bad)
	})
	b.eventually("it is told that the node let go of it", func() bool {
		b.mu.Lock()
		defer b.mu.Unlock()
		return slices.Equal(b.letGo, []digest.Digest{id})
	})
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.letGo) > 0 {
		t.Errorf("the node that has a copy of its own let go of %q", a.letGo)
	}
	b.bring(p)
	if _, damaged := b.verifyAll(); len(damaged) != 0 {
		t.Errorf("%+v", damaged)
	}
}

// A record that cannot be read is damage as well.
func TestBrokenRecordIsReplaced(t *testing.T) {
	s := newPoPBed(t)
	a := s.node("a", nil)
	id := a.bring(a.push("app", 1))[0].Layer.DiffID
	a.published(id)
	a.must(os.WriteFile(filepath.Join(s.store, "layers", id.Encoded()+".json"), []byte(`{"version":1,`), 0o600))
	if whole, damaged := a.verifyAll(); len(damaged) != 1 || !damaged[0].Replaced || whole != 1 {
		t.Fatalf("%d whole, %+v", whole, damaged)
	}
	a.published(id)
}

// Verification goes on by itself: what is due is read, and a flipped byte found.
func TestVerificationInBackground(t *testing.T) {
	s := newPoPBed(t)
	a := s.node("a", func(c *Config) { c.Verify = 20 * time.Millisecond })
	id := a.bring(a.push("app", 1))[0].Layer.DiffID
	bad := a.published(id)
	ctx, cancel := context.WithCancel(t.Context())
	var done sync.WaitGroup
	done.Go(func() { a.member.VerifyInBackground(ctx) })
	defer done.Wait()
	defer cancel()
	a.eventually("the layer was verified", func() bool { return a.member.Stats().Verified > 0 })
	if v, err := a.member.usable().Verified(t.Context(), bad); err != nil || v.Node != "a" || v.Name != bad.Name {
		t.Errorf("the note: %+v, %v", v, err)
	}
	s.flip(s.data(bad))
	a.eventually("the damage was found, and is gone", func() bool { return a.member.Stats().Replaced == 1 })
	cancel()
	done.Wait()
	if whole, damaged := a.verifyAll(); whole != 1 || len(damaged) != 0 {
		t.Errorf("%d whole, %+v", whole, damaged)
	}
}

// Pruning takes out what no node uses, and nothing else.
func TestPrunePoP(t *testing.T) {
	s := newPoPBed(t)
	a, b := s.node("a", nil), s.node("b", nil)
	kept := a.bring(a.push("kept", 1))[0].Layer.DiffID
	gone := a.bring(a.push("gone", 2))[0].Layer.DiffID
	a.published(kept)
	a.published(gone)
	b.use(kept)
	b.bring(b.push("kept", 1))
	time.Sleep(leaseTTL) // the coordinator remembers for so long
	done, err := a.member.Prune(t.Context(), nobody)
	a.must(err)
	if len(done.Layers) != 1 || done.Layers[0] != gone || done.Why != "" || a.member.Stats().Evicted != 1 {
		t.Errorf("%+v", done)
	}
	st := a.member.usable()
	if !st.HasLayer(t.Context(), kept) || st.HasLayer(t.Context(), gone) {
		t.Error("the wrong one")
	}
}

// A node that wants what was evicted a moment ago takes it out of the store, not over the link, and its
// files are there once.
func TestEvictedComesBack(t *testing.T) {
	s := newPoPBed(t)
	a, b := s.node("a", nil), s.node("b", nil)
	p := a.push("app", 1)
	id := a.bring(p)[0].Layer.DiffID
	a.published(id)
	time.Sleep(leaseTTL) // the coordinator remembers for so long
	done, err := a.member.Prune(t.Context(), nobody)
	a.must(err)
	if len(done.Layers) != 1 || a.member.usable().HasLayer(t.Context(), id) {
		t.Fatalf("not evicted: %+v", done)
	}
	sent := s.served(p)
	for _, l := range b.bring(p) {
		if l.From != (fetch.Origins{PoP: l.Layer.Size}) {
			t.Errorf("it came from %+v", l.From)
		}
	}
	files, err := filepath.Glob(filepath.Join(s.store, "*", id.Encoded()+"*"))
	if more := s.served(p) - sent; more != 0 || err != nil || len(files) != 3 {
		t.Errorf("the registry sent %d bytes; the store has %v, %v", more, files, err)
	}
}

// What a node has pruned it does not use from then on, so that another may evict it at once.
func TestPruneTakesMarks(t *testing.T) {
	testkit.Long(t)
	t.Parallel()
	s := newPoPBed(t)
	a, b := s.node("a", nil), s.node("b", nil)
	p := a.push("app", 1)
	id := a.bring(p)[0].Layer.DiffID
	a.published(id)
	b.bring(p)
	b.eventually("the pull has let go of it", func() bool { return !b.Holds().Held(id) })
	for _, inUse := range []bool{true, false} {
		_, err := b.Prune(t.Context(), func(digest.Digest) bool { return inUse })
		b.must(err)
		seen, err := a.member.Status(t.Context())
		a.must(err)
		if slices.Contains(seen.Users[id.String()], "b") != inUse {
			t.Errorf("in use: %v; users: %v", inUse, seen.Users)
		}
	}
}

// One node is the GC leader for all, and another when it has gone.
func TestOneLeadsGC(t *testing.T) {
	s := newPoPBed(t)
	often := func(c *Config) { c.CollectEvery = 20 * time.Millisecond }
	leader := func(n *popNode) string {
		h, held, err := n.member.cfg.Coord.Holder(t.Context(), leaderLease)
		n.must(err)
		if !held {
			return ""
		}
		return h.Holder.Node
	}
	var b *popNode
	t.Run("both", func(t *testing.T) {
		first := *s
		first.t = t
		a := first.node("a", often)
		a.eventually("a is the GC leader", func() bool { return leader(a) == "a" })
		b = s.node("b", often)
		h, _, err := b.member.cfg.Coord.Holder(t.Context(), leaderLease)
		b.must(err)
		time.Sleep(10 * 20 * time.Millisecond)
		if again, held, err := b.member.cfg.Coord.Holder(t.Context(), leaderLease); err != nil || !held ||
			again.Token != h.Token {
			t.Errorf("while a lives: %+v, then %+v, %v", h, again, err)
		}
	})
	b.eventually("b is the GC leader after a", func() bool { return leader(b) == "b" })
}

// When the GC leader needs room and finds none, every node is told to let go of what it can.
func TestAllAreTold(t *testing.T) {
	s := newPoPBed(t)
	a, c := s.node("a", nil), s.node("c", nil)
	id := a.bring(a.push("x", 1))[0].Layer.DiffID
	a.published(id)
	c.use(id)
	c.bring(c.push("x", 1))
	b := s.node("b", func(c *Config) {
		c.CollectEvery = 20 * time.Millisecond
		dir, coord := c.Dir, c.Coord
		c.Store = opener(func(ctx context.Context) (*pop.Store, error) {
			return pop.OpenStore(ctx,
				pop.StoreConfig{FS: dir, Coord: coord, Node: "b", Grace: time.Second, Capacity: 1})
		})
	})
	for _, n := range []*popNode{a, b, c} {
		n.eventually(n.name+" is told", func() bool { return n.member.pressed.Load() > 0 })
	}
	if !c.member.usable().HasLayer(t.Context(), id) {
		t.Error("what is in use was evicted")
	}
}

// The status has what each node does and uses.
func TestPoPStatus(t *testing.T) {
	s := newPoPBed(t)
	a, b := s.node("a", nil), s.node("b", nil)
	p := a.push("app", 1)
	id := a.bring(p)[0].Layer.DiffID
	a.published(id)
	b.bring(p)
	b.member.announce(t.Context())
	a.eventually("the hub is settled", func() bool { ok, _ := a.member.cfg.Coord.Settled(t.Context()); return ok })
	got, err := a.member.Status(t.Context())
	a.must(err)
	if got.Node != "a" || got.Path != s.store || got.Store == "" || got.Away != nil || got.Lost != nil ||
		!got.Settled || len(got.Members) != 2 || len(got.Layers) != 1 {
		t.Errorf("%+v", got)
	}
	if of := got.Members[1]; got.Most != got.Total || got.Most == 0 || of.Capacity != cacheSize {
		t.Errorf("the store is to hold %d bytes of %d, b %d", got.Most, got.Total, of.Capacity)
	}
	if users := got.Users[id.String()]; len(users) != 1 || users[0] != "b" {
		t.Errorf("used by %v", users)
	}
	if h := got.Members[1].Hits; h.Store != 1 || h.StoreBytes != size(p) {
		t.Errorf("hits of b: %+v", h)
	}
	s.hub.Cut("a", true)
	got, err = a.member.Status(t.Context())
	if err != nil || !errors.Is(got.Lost, pop.ErrAway) || len(got.Layers) != 1 {
		t.Errorf("without the coordinator: %+v, %v", got, err)
	}
}

// The kernel mounts no index that another node wrote: each is built of the layer's table, whatever lies
// beside it in the store, and is what the whole layer gives.
func TestIndexesAreBuiltHere(t *testing.T) {
	s := newPoPBed(t)
	a, b := s.node("a", nil), s.node("b", nil)
	p := a.push("app", 1)
	rec := a.published(a.bring(p)[0].Layer.DiffID)
	file := filepath.Join(s.store, "layers", rec.Name+".index")
	if _, err := os.Stat(file); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("an index was published: %v", err)
	}
	hostile := []byte("\x01j[]what the kernel's parser takes amiss")
	a.must(os.WriteFile(file, hostile, 0o600))
	record := filepath.Join(s.store, "layers", rec.DiffID.Encoded()+".json")
	raw, err := os.ReadFile(record)
	a.must(err)
	raw = bytes.Replace(raw, []byte(`{`), fmt.Appendf(nil, `{"index":%q,`, digest.FromBytes(hostile)), 1)
	a.must(os.WriteFile(record, raw, 0o600))
	index := func(n *popNode) []byte {
		n.bring(p)
		l, err := n.layers.Get(rec.DiffID)
		n.must(err)
		if n != a && l.At == "" {
			t.Errorf("%s has it not from the store", n.name)
		}
		raw, err := os.ReadFile(l.Files().Index)
		n.must(err)
		return raw
	}
	if !bytes.Equal(index(b), index(a)) {
		t.Error("b has another index")
	}
}

// A layer that is deployed often is copied, once nothing is being deployed.
func TestHotLayersAreCopiedBehindDeployments(t *testing.T) {
	s := newPoPBed(t)
	var asked atomic.Bool
	a, b := s.node("a", nil),
		s.node("b", func(c *Config) { c.Cache = fits(func() bool { asked.Store(true); return true }) })
	p := a.push("app", 1)
	id := a.bring(p)[0].Layer.DiffID
	a.published(id)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	pull, err := b.Pull(ctx, b.ref(p.Ref), fetch.Options{})
	b.must(err)
	b.must(pull.WaitComplete(ctx))
	for range hotUses {
		b.bring(p)
	}
	time.Sleep(prewarmQuiet + 200*time.Millisecond)
	if asked.Load() {
		t.Error("it is copied while something is deployed")
	}
	cancel()
	b.eventually("it is copied", func() bool { l, err := b.layers.Peek(id); return err == nil && l.At == "" })
}

// A layer that was let go of after it was prewarmed comes again before it is mounted.
func TestLetGoOfComesAgain(t *testing.T) {
	s := newPoPBed(t)
	a, b := s.node("a", nil), s.node("b", nil)
	p := a.push("app", 1)
	id := a.bring(p)[0].Layer.DiffID
	a.published(id)
	pull, err := b.Pull(t.Context(), b.ref(p.Ref), fetch.Options{})
	b.must(err)
	b.must(pull.Wait(t.Context()))
	b.must(b.layers.Detach(id)) // as when its tar could not be opened for a moment
	b.must(pull.WaitLayer(t.Context(), 0))
	if !b.has(id) {
		t.Error("it is ready and not there")
	}
}
