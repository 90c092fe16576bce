package store_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"dewpoint/internal/checkpoint/store"
	"dewpoint/internal/pop"
	"dewpoint/testkit"
)

// follower is a node that is told of what happens in the PoP, and counts how often it looks.
type follower struct {
	*store.Store
	shared *pop.Store
	fs     *counted
	told   atomic.Bool // whether it believes so
	deaf   atomic.Bool // whether it is not told
}

// every is how long a look holds in any case.
const every = 20 * time.Millisecond

// follow makes one, of a PoP in which everybody sees at once what has changed.
func (b *nodes) follow(node string) *follower {
	b.t.Helper()
	f := &follower{fs: &counted{FS: pop.NewDir(b.dir, 0)}}
	c, err := b.hub.Join(pop.Config{Node: node})
	if err != nil {
		b.t.Fatal(err)
	}
	st, err := pop.OpenStore(b.t.Context(),
		pop.StoreConfig{FS: f.fs, Coord: c, Node: node, Grace: 100 * time.Millisecond})
	if err != nil {
		b.t.Fatal(err)
	}
	f.shared = st
	f.told.Store(true)
	f.Store = open(b.t, store.Config{Dir: b.t.TempDir(), Node: node, PoP: func() *pop.Store {
		return st
	}, Told: f.told.Load})
	f.LookEvery(every)
	ctx, cancel := context.WithCancel(context.Background())
	events, err := c.Subscribe(ctx)
	if err != nil {
		b.t.Fatal(err)
	}
	var work sync.WaitGroup
	work.Go(func() { f.Follow(ctx) })
	work.Go(func() {
		for e := range events {
			if !f.deaf.Load() {
				f.Heard(e)
			}
		}
	})
	b.t.Cleanup(func() { cancel(); work.Wait(); c.Close() })
	return f
}

// comes waits until what f has of a manifest reads so, and starts do not look any more.
func (f *follower) comes(t *testing.T, manifest, want string) {
	t.Helper()
	var got string
	var reads int64
	for deadline := time.Now().Add(testkit.Limit); time.Now().Before(deadline); {
		time.Sleep(4 * every) // a look of a moment ago holds in any case
		before := f.fs.reads.Load()
		all, err := f.List(t.Context(), manifest)
		if err != nil {
			t.Fatal(err)
		}
		got = ""
		for _, l := range all {
			got += fmt.Sprintf("%v %d;", l.PoP, l.Failures)
		}
		if reads = f.fs.reads.Load() - before; got == want && reads == 0 {
			return
		}
	}
	t.Fatalf("it has %q, not %q, and a start reads %d directories", got, want, reads)
}

// A start does not look into the PoP's store at all, while this node is told of what happens there.
func TestStartsDoNotLook(t *testing.T) {
	t.Parallel()
	b, ctx := newPoP(t), t.Context()
	x, _ := b.node("x")
	y := b.follow("y")
	r := put(t, x, "text", nil)
	y.comes(t, r.Manifest, "")
	for _, c := range []struct {
		do   func() error
		want string
	}{
		{func() error { return x.Publish(ctx, r.ID) }, "true 0;"},
		{func() error { x.Fail(ctx, r.ID, "no"); return nil }, "true 1;"},
		{func() error { x.Succeeded(ctx, r.ID); return nil }, "true 0;"},
		{func() error { return x.Remove(ctx, r.ID) }, ""},
	} {
		if err := c.do(); err != nil {
			t.Fatal(err)
		}
		y.comes(t, r.Manifest, c.want)
	}
}

// While nobody tells it anything, each start looks, unless somebody has just done so; when it is told again,
// it has seen all.
func TestLooksWhileNobodyTells(t *testing.T) {
	t.Parallel()
	b, ctx := newPoP(t), t.Context()
	x, _ := b.node("x")
	y := b.follow("y")
	r := put(t, x, "text", nil)
	y.comes(t, r.Manifest, "")
	y.deaf.Store(true)
	y.told.Store(false)
	if err := x.Publish(ctx, r.ID); err != nil {
		t.Fatal(err)
	}
	time.Sleep(4 * every) // what was seen before holds no longer
	all, err := y.List(ctx, r.Manifest)
	if err != nil || len(all) != 1 {
		t.Errorf("%+v, %v", all, err)
	}
	served := false // by the look that was made for it
	for end := time.Now().Add(testkit.Limit); !served && time.Now().Before(end); time.Sleep(4 * every) {
		before := y.fs.reads.Load()
		y.Look(ctx)
		looked := y.fs.reads.Load()
		all, err = y.List(ctx, r.Manifest)
		served = looked > before && y.fs.reads.Load() == looked
	}
	if !served || err != nil || len(all) != 1 {
		t.Errorf("after a look, %+v, %v, and what it saw served: %v", all, err, served)
	}
	if err := x.Remove(ctx, r.ID); err != nil {
		t.Fatal(err)
	}
	y.deaf.Store(false)
	y.told.Store(true)
	y.Heard(pop.Event{Kind: pop.Resync})
	y.comes(t, r.Manifest, "")
}

// What is out of sight for a moment, since somebody was about to evict it, is not taken to be gone for good.
func TestReturns(t *testing.T) {
	t.Parallel()
	b, ctx := newPoP(t), t.Context()
	x, _ := b.node("x")
	y := b.follow("y")
	r := put(t, x, "text", nil)
	if err := x.Publish(ctx, r.ID); err != nil {
		t.Fatal(err)
	}
	y.comes(t, r.Manifest, "true 0;")
	record := filepath.Join(b.dir, "layers", r.ID+".json")
	if err := os.Rename(record, record+".aside"); err != nil {
		t.Fatal(err)
	}
	y.Heard(pop.Event{Kind: pop.Resync})
	y.comes(t, r.Manifest, "")
	if err := os.Rename(record+".aside", record); err != nil {
		t.Fatal(err)
	}
	y.Heard(pop.Event{Kind: pop.Returned, Key: "sha256:" + r.ID})
	y.comes(t, r.Manifest, "true 0;")
}
