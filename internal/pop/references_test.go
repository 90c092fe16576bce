package pop_test

import (
	"maps"
	"slices"
	"testing"
	"time"

	"dewpoint/internal/pop"

	"github.com/opencontainers/go-digest"
)

// The layers of an image have few references between them, and what of it is used no
// more goes, though it was referenced with what is.
func TestMarkedTogether(t *testing.T) {
	inBed(t, func(t *testing.T, b *bed) {
		ctx := t.Context()
		x, y := b.open(pop.StoreConfig{Node: "x", Capacity: 10}), b.node("y")
		ids := fill(t, x, 7)
		have, err := y.UseAll(ctx, y.Lookups(ctx, ids))
		if err != nil || len(have) != 7 || len(b.files("refs/y")) != 2 {
			t.Fatalf("%d layers, %v, references %v", len(have), err, b.files("refs/y"))
		}
		b.hub.Cut("y", true)
		time.Sleep(time.Minute) // the coordinator takes y for dead: references are all there is
		evicts(t, x, 0, 0, pop.AllInUse)
		if err := y.Unuse(ctx, ids[1], ids[4]); err != nil {
			t.Error(err)
		}
		if e := evicts(t, x, 0, 2, pop.AllInUse); !slices.Contains(e.Layers, ids[1]) ||
			!slices.Contains(e.Layers, ids[4]) {
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

// Of layers that are referenced together some may not be there: these are not in use then,
// nor said to have been seen.
func TestSomeAreNotThere(t *testing.T) {
	inBed(t, func(t *testing.T, b *bed) {
		x, y := b.node("x"), b.node("y")
		ids := append(fill(t, x, 2), digest.FromString("not there"))
		lookups := y.Lookups(t.Context(), ids)
		have, err := y.UseAll(t.Context(), lookups)
		is(t, "one that is not there", err, pop.ErrUnknown)
		var all []digest.Digest
		for id, g := range lookups {
			if l, err := g.Record(); err == nil && l.DiffID == id {
				all = append(all, id)
			}
		}
		slices.Sort(all)
		want := slices.Sorted(slices.Values(ids[:2]))
		if got := slices.Sorted(maps.Keys(have)); !slices.Equal(got, want) || !slices.Equal(all, want) {
			t.Errorf("there are %v, seen were %v, not %v", got, all, want)
		}
		if got := slices.Concat(y.Used()...); !slices.Equal(got, want) || len(b.files("refs/y")) != 1 {
			t.Errorf("in use: %v, references %v", got, b.files("refs/y"))
		}
	})
}

// What a look has shown of a layer that was evicted, or replaced, before it was referenced is not believed.
func TestLookedTooSoon(t *testing.T) {
	inBed(t, func(t *testing.T, b *bed) {
		ctx := t.Context()
		x, y := b.node("x"), b.node("y")
		ids := fill(t, x, 3)
		lookups := y.Lookups(ctx, ids)
		for id, g := range lookups {
			rec, err := g.Record()
			if err == nil && id != ids[2] {
				err = x.Quarantine(ctx, rec)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		fill(t, x, 1) // ids[0] anew
		now, err := x.Record(ctx, ids[0])
		if err != nil {
			t.Fatal(err)
		}
		have, err := y.UseAll(ctx, lookups)
		is(t, "one that went", err, pop.ErrUnknown)
		if len(have) != 2 || have[ids[0]] == nil || have[ids[0]].Name != now.Name || have[ids[2]] == nil {
			t.Errorf("there are %v", have)
		}
	})
}
