package simtest

import (
	"testing"
	"testing/synctest"
	"time"

	"dewpoint/internal/pop"
	"dewpoint/internal/pop/local"
	"dewpoint/internal/pop/session"

	"github.com/opencontainers/go-digest"
)

// A node stands on a layer and is cut off from the coordinator when the servers lose power: nothing but its
// reference in the store can protect the layer from another node that evicts.
func TestReferencesSurviveAPowerCut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		disk, hub := NewDisk(1<<30, lag), local.NewHub()
		open := func(node string) *pop.Store {
			cfg, err := session.Defaults(pop.Config{Node: node, TTL: ttl})
			if err != nil {
				t.Fatal(err)
			}
			coord := session.New(cfg, hub.Line(cfg))
			t.Cleanup(func() { coord.Close() })
			s, err := pop.OpenStore(ctx, pop.StoreConfig{FS: disk.Client(node, 1, Faults{}), Coord: coord, Node: node,
				Grace: grace, Forget: forget, Policy: "lru"})
			if err != nil {
				t.Fatal(err)
			}
			return s
		}
		a, b := open("a"), open("b")
		data := []byte("a layer")
		id := digest.FromBytes(data)
		d, err := a.Draft(ctx, id, 1)
		if err == nil {
			_, err = d.Write(data)
		}
		if err == nil {
			err = d.Publish(ctx, pop.Layer{Size: int64(len(data))}, []byte("table"))
		}
		if err != nil {
			t.Fatal(err)
		}
		l, err := a.Use(ctx, id)
		if err != nil {
			t.Fatal(err)
		}

		hub.Cut("a", true)
		time.Sleep(4 * ttl) // what a has told the coordinator is forgotten
		disk.PowerCut("refs", func() bool { return true })
		if e, err := b.Evict(ctx, 1<<30); err != nil || len(e.Layers) > 0 {
			t.Errorf("evicted %v: %v", e, err)
		}
		for range 4 {
			time.Sleep(grace)
			if _, err := b.Sweep(ctx); err != nil {
				t.Fatal(err)
			}
		}
		disk.Look(func() {
			if _, ok := disk.Peek(l.Data()); !ok {
				t.Error("the layer that a stands on is gone")
			}
		})
	})
}
