package pop_test

import (
	"maps"
	"slices"
	"testing"
	"time"

	"dewpoint/internal/pop"

	"github.com/opencontainers/go-digest"
)

// The layers of an image have few marks between them, and what of it is used no
// more goes, though it was marked with what is.
func TestMarkedTogether(t *testing.T) {
	inBed(t, func(t *testing.T, b *bed) {
		ctx := t.Context()
		x, y := b.open(pop.StoreConfig{Node: "x", Capacity: 10}), b.node("y")
		ids := fill(t, x, 7)
		have, err := y.UseAll(ctx, ids, nil)
		if err != nil || len(have) != 7 || len(b.files("refs/y")) != 2 {
			t.Fatalf("%d layers, %v, marks %v", len(have), err, b.files("refs/y"))
		}
		b.hub.Cut("y", true)
		time.Sleep(time.Minute) // the coordinator takes y for dead: marks are all there is
		evicts(t, x, 0, 0, pop.AllInUse)
		if err := y.Unuse(ctx, ids[1], ids[4]); err != nil {
			t.Error(err)
		}
		if e := evicts(t, x, 0, 2, pop.AllInUse); !slices.Contains(e.Layers, ids[1]) || !slices.Contains(e.Layers, ids[4]) {
			t.Errorf("evicted %v", e.Layers)
		}
		b.coords["y"].Close()
		again := b.node("y") // a later process of the node knows what stays
		left := slices.Concat(again.Used()...)
		if slices.Sort(left); len(left) != 5 || slices.Contains(left, ids[1]) {
			t.Errorf("in use: %v", left)
		}
		if err := again.Unuse(ctx, left...); err != nil || len(b.files("refs/y")) != 0 || len(again.Used()) != 0 {
			t.Errorf("left: %v, %v, %v", b.files("refs/y"), again.Used(), err)
		}
	})
}

// Of layers that are marked together some may not be there: these are not in use then,
// nor said to have been seen.
func TestSomeAreNotThere(t *testing.T) {
	inBed(t, func(t *testing.T, b *bed) {
		x, y := b.node("x"), b.node("y")
		ids := append(fill(t, x, 2), digest.FromString("not there"))
		seen := make(chan digest.Digest, 3)
		have, err := y.UseAll(t.Context(), ids, func(id digest.Digest, l *pop.Layer, err error) {
			if err == nil && l.DiffID == id {
				seen <- id
			}
		})
		is(t, "one that is not there", err, pop.ErrUnknown)
		close(seen)
		var all []digest.Digest
		for id := range seen {
			all = append(all, id)
		}
		slices.Sort(all)
		want := slices.Sorted(slices.Values(ids[:2]))
		if got := slices.Sorted(maps.Keys(have)); !slices.Equal(got, want) || !slices.Equal(all, want) {
			t.Errorf("there are %v, seen were %v, not %v", got, all, want)
		}
		if got := slices.Concat(y.Used()...); !slices.Equal(got, want) || len(b.files("refs/y")) != 1 {
			t.Errorf("in use: %v, marks %v", got, b.files("refs/y"))
		}
	})
}
