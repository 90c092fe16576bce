package fetch

import (
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"dewpoint/internal/image"
	"dewpoint/internal/layer"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sync/errgroup"
)

// ordered gives a bed's cache a policy.
func (b *bed) ordered(policy, path string) {
	b.order = newOrder(CacheConfig{Policy: policy, Capacity: 1 << 20, Path: path}, slog.New(slog.DiscardHandler))
}

// hotAndCold pulls an image four times, and then two others once.
func (b *bed) hotAndCold() (hot digest.Digest, cold []digest.Digest) {
	p := b.push("hot", 1)
	for range 4 {
		hot = b.pull(p).Layers[0].DiffID
	}
	for i, name := range []string{"cold", "colder"} {
		cold = append(cold, b.pull(b.push(name, uint64(2+i))).Layers[0].DiffID)
	}
	return hot, cold
}

// collects asserts that one layer goes, and which.
func (b *bed) collects(id digest.Digest) {
	b.t.Helper()
	freed, err := b.Collect(b.t.Context(), 1, nobody)
	if err != nil || len(freed.Layers) != 1 || b.has(id) {
		b.t.Errorf("%v went, and not %s: %v", freed.Layers, id, err)
	}
}

// What goes first is the policy's to say.
func TestCollectByPolicy(t *testing.T) {
	for policy, first := range map[string]string{"lru": "hot", "gdsf": "cold", "s3fifo": "cold"} {
		t.Run(policy, func(t *testing.T) {
			b := newBed(t)
			b.ordered(policy, "")
			hot, cold := b.hotAndCold()
			if first == "hot" {
				b.collects(hot)
				b.collects(cold[0])
				return
			}
			b.collects(cold[0])
			b.collects(cold[1])
			if !b.has(hot) {
				t.Error("what is used often went before what was used once")
			}
		})
	}
}

// Who prunes while the node evicts by itself is told of no trouble.
func TestOrderIsSavedAtOnce(t *testing.T) {
	b := newBed(t)
	b.ordered("gdsf", filepath.Join(t.TempDir(), "cache.policy"))
	var g errgroup.Group
	for range 8 {
		g.Go(func() error {
			for range 20 {
				if err := b.order.save(); err != nil {
					return err
				}
			}
			return nil
		})
	}
	b.must(g.Wait())
}

// Uses are remembered by the next process; where that is not possible, layers go by how long ago they were
// used.
func TestOrderOutlivesTheProcess(t *testing.T) {
	for name, damage := range map[string]bool{"kept": false, "damaged": true} {
		t.Run(name, func(t *testing.T) {
			b, path := newBed(t), filepath.Join(t.TempDir(), "cache.policy")
			b.ordered("gdsf", path)
			hot, cold := b.hotAndCold()
			b.order.look(b.layers.Layers(), b.cfg.Catalog.Sharing())
			b.must(b.order.save())
			if damage {
				b.must(os.WriteFile(path, []byte(`{"version":`), 0o600))
			}
			b.ordered("gdsf", path)
			if damage {
				b.collects(hot)
				return
			}
			b.collects(cold[0])
		})
	}
}

// What other clients of containerd use counts, once for each time.
func TestOrderCountsOtherClients(t *testing.T) {
	b := newBed(t)
	b.ordered("lru", "")
	first, second := b.pull(b.push("a", 1)).Layers[0].DiffID, b.pull(b.push("b", 2)).Layers[0].DiffID
	look := func() { b.order.look(b.layers.Layers(), nil) }
	look()
	if _, err := b.layers.Get(first); err != nil { // of the same deployment
		t.Fatal(err)
	}
	look()
	if id, _ := b.order.next(nil); id != first {
		t.Errorf("%s is to go first", id)
	}
	for id := range b.order.seen {
		b.order.seen[id] = time.Now().Add(-2 * useGap)
	}
	if _, err := b.layers.Get(first); err != nil {
		t.Fatal(err)
	}
	b.order.seen[second] = time.Now()
	look()
	if id, _ := b.order.next(nil); id != second {
		t.Errorf("%s is to go first", id)
	}
}

// A layer that has gone without the policy is forgotten, and one that other images have is worth more.
func TestOrderKnowsWhatIsHere(t *testing.T) {
	b := newBed(t)
	b.ordered("gdsf", "")
	shared := b.pull(b.push("a", 1, 2)).Layers
	b.pull(b.push("b", 1, 3))
	b.order.look(b.layers.Layers(), b.cfg.Catalog.Sharing())
	if o, ok := b.order.policy.Get(shared[0].DiffID.String()); !ok || o.Images != 2 ||
		o.Cost != float64(shared[0].Size) {
		t.Errorf("%+v", o)
	}
	_, err := b.layers.Remove(shared[1].DiffID, func(*layer.Layer) bool { return true })
	b.must(err)
	b.order.look(b.layers.Layers(), nil)
	if _, ok := b.order.policy.Get(shared[1].DiffID.String()); ok {
		t.Error("it has gone, and is in the order")
	}
	b.order.used([]image.Layer{shared[1]}, b.layers.Peek) // not here
	if _, ok := b.order.policy.Get(shared[1].DiffID.String()); ok {
		t.Error("what is not here is in the order")
	}
}
