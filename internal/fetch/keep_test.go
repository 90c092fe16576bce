package fetch

import (
	"context"
	"math"
	"testing"
	"time"

	"dewpoint/internal/image"

	"github.com/opencontainers/go-digest"
)

func nobody(digest.Digest) bool { return false }

// backdate makes the catalog forget that its records were asked for lately.
func (c *Catalog) backdate() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for ref := range c.asked {
		c.asked[ref] = time.Now().Add(-sweepAfter)
	}
}

// containerd is the Images of a test.
type containerd struct {
	idle   func() (map[string]bool, error)
	remove func(context.Context, []image.Reference) error
}

func (c containerd) Idle() (map[string]bool, error) { return c.idle() }

func (c containerd) Remove(ctx context.Context, refs []image.Reference) error {
	return c.remove(ctx, refs)
}

func TestCollectTakesTheOldestFirst(t *testing.T) {
	b := newBed(t)
	first, second := b.pull(b.push("a", 1)).Layers[0].DiffID, b.pull(b.push("b", 2)).Layers[0].DiffID
	if _, err := b.layers.Get(first); err != nil { // the first is the newer one now
		t.Fatal(err)
	}
	if freed, err := b.Collect(t.Context(), 0, nobody); err != nil || freed.Bytes != 0 ||
		len(freed.Layers) != 0 {
		t.Fatal(freed, err)
	}
	freed, err := b.Collect(t.Context(), 1, nobody)
	if err != nil || len(freed.Layers) != 1 || freed.Bytes < 200<<10 {
		t.Fatal(freed, err)
	}
	if !b.has(first) || b.has(second) {
		t.Error("the layer that was asked for last went first")
	}
}

func TestCollectKeepsWhatIsWanted(t *testing.T) {
	b := newBed(t)
	used, held, loose := b.push("used", 1), b.push("held", 2), b.push("loose", 3)
	usedID, looseID := b.pull(used).Layers[0].DiffID, b.pull(loose).Layers[0].DiffID
	ctx, release := context.WithCancel(t.Context())
	defer release()
	pull, err := b.Pull(ctx, b.ref(held.Ref), Options{})
	b.must(err)
	b.must(pull.WaitComplete(ctx))
	heldID := pull.Image.Layers[0].DiffID

	inUse := func(id digest.Digest) bool { return id == usedID }
	b.fresh = time.Hour
	if freed, err := b.Collect(t.Context(), math.MaxInt64, inUse); err != nil || len(freed.Layers) != 0 {
		t.Errorf("fresh layers went: %v, %v", freed, err)
	}
	b.fresh = 0
	b.cfg.Catalog.backdate()
	if _, err = b.Collect(t.Context(), math.MaxInt64, inUse); err != nil {
		t.Fatal(err)
	}
	if !b.has(usedID) || !b.has(heldID) || b.has(looseID) {
		t.Errorf("used %t, held %t, loose %t", b.has(usedID), b.has(heldID), b.has(looseID))
	}
	if b.cfg.Catalog.Get(b.ref(used.Ref)) == nil || b.cfg.Catalog.Get(b.ref(held.Ref)) == nil {
		t.Error("a record of an image that is here was swept")
	}
	if b.cfg.Catalog.Get(b.ref(loose.Ref)) != nil {
		t.Error("the record of an image that is gone stays")
	}
	release()
	b.eventually("the end of the pull's hold", func() bool { return !b.holds.Held(heldID) })
	if freed, err := b.Collect(t.Context(), math.MaxInt64, inUse); err != nil || len(freed.Layers) != 1 ||
		b.has(heldID) {
		t.Error(freed, err)
	}
}

// A pull that begins while layers are being collected keeps its own.
func TestCollectAsksForHoldsEachTime(t *testing.T) {
	b := newBed(t)
	a, c := b.push("a", 1), b.push("c", 2)
	first, second := b.pull(a).Layers[0].DiffID, b.pull(c)
	ctx, release := context.WithCancel(t.Context())
	defer release()
	inUse := func(id digest.Digest) bool {
		if id == first { // the moment between the first and the second
			b.holds.hold(ctx, &Pull{layers: second.Layers})
		}
		return false
	}
	if _, err := b.Collect(t.Context(), math.MaxInt64, inUse); err != nil {
		t.Fatal(err)
	}
	if b.has(first) || !b.has(second.Layers[0].DiffID) {
		t.Error("the layer of a pull that had begun was removed")
	}
}

func TestCollectTakesAbandonedFillsFirst(t *testing.T) {
	b := newBed(t)
	whole := b.pull(b.push("a", 1)).Layers[0].DiffID
	id := func(s string) digest.Digest { return digest.FromString(s) }
	stale := b.leave(id("stale"), 100<<10, 25*time.Hour)
	old := b.leave(id("old"), 100<<10, 7*time.Hour)
	recent := b.leave(id("recent"), 100<<10, 2*time.Hour)
	used := b.leave(id("used"), 100<<10, 48*time.Hour)
	cut := b.leave(id("cut"), 100<<10, 0)
	inUse := func(d digest.Digest) bool { return d == id("used") }

	if freed, err := b.Collect(t.Context(), 0, inUse); err != nil || freed.Bytes < 100<<10 || there(stale) ||
		!there(old) {
		t.Fatalf("a day later: %v, %v, stale %t, old %t", freed, err, there(stale), there(old))
	}
	if freed, err := b.Collect(t.Context(), 1, inUse); err != nil || freed.Bytes < 100<<10 || there(old) ||
		!there(recent) || !b.has(whole) {
		t.Fatalf("little wanted: %v, %v, old %t, recent %t", freed, err, there(old), there(recent))
	}
	if _, err := b.Collect(t.Context(), math.MaxInt64, inUse); err != nil || there(recent) || b.has(whole) ||
		!there(cut) || !there(used) {
		t.Fatalf("all wanted: %v, recent %t, cut %t, used %t", err, there(recent), there(cut), there(used))
	}
	if freed, err := b.Prune(t.Context(), inUse); err != nil || freed.Bytes < 100<<10 || there(cut) ||
		!there(used) {
		t.Fatalf("prune: %v, %v, cut %t, used %t", freed, err, there(cut), there(used))
	}
}

func TestCollectKeepsWhatIsCopiedIntoTheStore(t *testing.T) {
	b := newBed(t)
	id := b.pull(b.push("a", 1)).Layers[0].DiffID
	b.holds.PinLayer(id, 1)
	b.holds.PinLayer(id, 1)
	b.holds.PinLayer(id, -1)
	if _, err := b.Collect(t.Context(), math.MaxInt64, nobody); err != nil || !b.has(id) {
		t.Error("it went", err)
	}
	b.holds.PinLayer(id, -1)
	if _, err := b.Collect(t.Context(), math.MaxInt64, nobody); err != nil || b.has(id) {
		t.Error("it stays", err)
	}
}

// What images claim goes with these, if all of them are idle; what is being pulled, and what an image in use
// has, stays.
func TestCollectRetiresIdleImages(t *testing.T) {
	b := newBed(t)
	b.fresh = 0
	refs, ids := map[string]string{}, map[string]digest.Digest{}
	for seed, name := range []string{"used", "pulled", "idle", "newer"} {
		p := b.push(name, uint64(seed+1))
		refs[name], ids[name] = b.ref(p.Ref).String(), b.pull(p).Layers[0].DiffID
	}
	known := map[string]bool{refs["used"]: false, refs["pulled"]: true, refs["idle"]: true, refs["newer"]: true}
	ctx, release := context.WithCancel(t.Context())
	defer release()
	if err := b.enter(ctx, b.ref(refs["pulled"])); err != nil {
		t.Fatal(err)
	}
	var removed []string
	waited := make(chan error, 1)
	b.cfg.Images = containerd{
		idle: func() (map[string]bool, error) { return known, nil },
		remove: func(_ context.Context, refs []image.Reference) error {
			for _, r := range refs {
				removed = append(removed, r.String())
				delete(known, r.String())
				go func() { waited <- b.enter(ctx, r) }() // who pulls it now waits until it has gone
				select {
				case <-waited:
					t.Error("a pull of an image that is being removed goes on")
				case <-time.After(20 * time.Millisecond):
				}
			}
			return nil
		},
	}
	inUse := func(id digest.Digest) bool {
		for name, of := range ids {
			if _, there := known[refs[name]]; of == id && there {
				return true
			}
		}
		return false
	}
	freed, err := b.Collect(t.Context(), 1, inUse)
	if err != nil || len(freed.Layers) != 1 || freed.Bytes == 0 {
		t.Fatal(freed, err)
	}
	if err := <-waited; err != nil {
		t.Error(err)
	}
	for name, stays := range map[string]bool{"used": true, "pulled": true, "idle": false, "newer": true} {
		if b.has(ids[name]) != stays {
			t.Errorf("%s is here: %t", name, !stays)
		}
	}
	if len(removed) != 1 || removed[0] != refs["idle"] {
		t.Errorf("containerd was to forget %q", removed)
	}
	if freed, err := b.Collect(t.Context(), math.MaxInt64, inUse); err != nil || len(freed.Layers) != 0 {
		t.Errorf("a prune removed what images have: %v, %v", freed, err)
	}
}

// refusing is a PoP whose store is to get all layers of this node, which may have been refused.
type refusing struct {
	alone
	refused bool
}

func (r *refusing) Pending(_ digest.Digest, refused bool) bool { return !(refused && r.refused) }

// A layer that the PoP's store is to get stays in a full cache while it is on its way, and goes last while
// the store would not take it.
func TestCollectTakesPendingLayersLast(t *testing.T) {
	b := newBed(t)
	pop := &refusing{alone: alone{b.layers}}
	b.Join(pop)
	img := b.pull(b.push("app", 1))
	id := img.Layers[0].DiffID
	registered := true
	b.cfg.Images = containerd{
		idle:   func() (map[string]bool, error) { return map[string]bool{img.Ref.String(): true}, nil },
		remove: func(context.Context, []image.Reference) error { registered = false; return nil },
	}
	collect := func() bool {
		registered = true
		_, err := b.Collect(t.Context(), 1, func(digest.Digest) bool { return registered })
		b.must(err)
		return !b.has(id)
	}
	b.eventually("nobody holds it", func() bool { return !b.holds.Held(id) && !b.isPulled(img.Ref) })
	if collect() {
		t.Fatal("a layer on its way to the store was removed")
	}
	pop.refused = true
	l, err := b.layers.Peek(id)
	b.must(err)
	idle := map[string]bool{img.Ref.String(): true}
	first := &collection{cache: b.cache, idle: idle}
	last := &collection{cache: b.cache, idle: idle, refused: true}
	if len(first.onlyIdle(l)) != 0 || len(last.onlyIdle(l)) != 1 {
		t.Error("what is pending does not go last")
	}
	if !collect() {
		t.Error("a layer that the store would not take stays, and the cache is full")
	}
}
