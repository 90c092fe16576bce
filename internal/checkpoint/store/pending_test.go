package store_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"dewpoint/internal/checkpoint/store"
	"dewpoint/internal/pop"
)

// What a node has made is pending for the PoP's store until it is there, whatever becomes of the daemon.
func TestPendingUploads(t *testing.T) {
	b, ctx := newPoP(t), t.Context()
	dir, st := t.TempDir(), b.shared("x", nil)
	var there *pop.Store // nil: the store is away
	restart := func() *store.Store {
		t.Helper()
		return open(t, store.Config{Dir: dir, Node: "x", PoP: func() *pop.Store { return there }})
	}
	pending := func(what string, x *store.Store, want ...store.Record) {
		t.Helper()
		got := x.PendingUploads()
		for i := range max(len(got), len(want)) {
			if i >= len(got) || i >= len(want) || got[i].ID != want[i].ID {
				t.Fatalf("%s: %d are pending, want %d", what, len(got), len(want))
			}
		}
	}
	x := restart()
	one := put(t, x, "one", nil)
	two := put(t, x, "two", func(r *store.Record) { r.Key = "other" })
	put(t, x, "taken", func(r *store.Record) { r.Node = "y" }) // another node's
	pending("while the store is away", x)
	there = st
	pending("while who made them may still be at it", x)
	x = restart()
	pending("after a restart", x, one, two)

	if err := x.Publish(ctx, one.ID); err != nil || x.Settle(ctx, one.ID, nil) {
		t.Error(err)
	}
	pending("when one is there", restart(), two)
	for _, err := range []error{store.ErrNoPoP, pop.ErrStoreAway} {
		for range 30 {
			if !x.Settle(ctx, two.ID, err) {
				t.Fatalf("given up, after %v", err)
			}
		}
	}
	off, cancel := context.WithCancel(ctx)
	cancel()
	for range 30 {
		if !x.Settle(off, two.ID, context.Canceled) {
			t.Fatal("given up by one who was called off")
		}
	}
	pending("at once", x)
	pending("when it was away for long", restart(), two)
	tries := 0
	for x = restart(); len(x.PendingUploads()) > 0 && tries < 100; x = restart() { // which do not forget
		tries++
		if again := x.Settle(ctx, two.ID, errors.New("no")); again != (tries < 10) {
			t.Errorf("after %d tries: %v", tries, again)
		}
	}
	if tries != 10 {
		t.Errorf("tried %d times", tries)
	}
	for _, hopeless := range []error{store.ErrQuarantined, store.ErrDamaged, store.ErrUnknown} {
		r := put(t, x, hopeless.Error(), func(r *store.Record) { r.Key = "third" })
		if x.Settle(ctx, r.ID, hopeless) {
			t.Errorf("%v, and it is tried again", hopeless)
		}
	}
	last := put(t, x, "last", nil)
	if err := x.Remove(ctx, last.ID); err != nil || x.Settle(ctx, last.ID, errors.New("no")) {
		t.Errorf("what is removed is pending: %v", err)
	}
	if left, err := filepath.Glob(filepath.Join(dir, "*.owed")); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

// A note that cannot be read is a debt; one of what is not here is none.
func TestPendingDamaged(t *testing.T) {
	b := newPoP(t)
	dir, st := t.TempDir(), b.shared("x", nil)
	cfg := store.Config{Dir: dir, Node: "x", PoP: func() *pop.Store { return st }}
	r := put(t, open(t, cfg), "one", nil)
	stray := filepath.Join(dir, r.ID[:63]+"x.owed")
	for _, path := range []string{filepath.Join(dir, r.ID+".owed"), stray} {
		if err := os.WriteFile(path, []byte("{"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if got := open(t, cfg).PendingUploads(); len(got) != 1 || got[0].ID != r.ID {
		t.Errorf("pending: %+v", got)
	}
	if _, err := os.Stat(stray); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("it stays: %v", err)
	}
}

// What later ones have taken the place of is told.
func TestSuperseded(t *testing.T) {
	b, ctx := newPoP(t), t.Context()
	x, _ := b.node("x")
	y, _ := b.node("y")
	old := put(t, x, "old", nil)
	for i, text := range []string{"new", "newer"} {
		if x.Superseded(ctx, old) {
			t.Errorf("by %d", i)
		}
		if err := y.Publish(ctx, put(t, y, text, nil).ID); err != nil {
			t.Fatal(err)
		}
	}
	if !x.Superseded(ctx, old) {
		t.Error("two later ones are there")
	}
	if other := put(t, x, "other", func(r *store.Record) { r.Key = "other" }); x.Superseded(ctx, other) {
		t.Error("by what has another key")
	}
}
