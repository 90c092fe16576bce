package pop_test

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"os"
	"path"
	"slices"
	"strings"
	"testing"
	"time"

	"dewpoint/internal/pop"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"
)

// fill publishes n layers of ten bytes.
func fill(t *testing.T, st *pop.Store, n int) (ids []digest.Digest) {
	for i := range n {
		ids = append(ids, publish(t, st, []byte(fmt.Sprintf("layer %04d", i)), fmt.Sprintf("r%d/image", i%2)))
	}
	return ids
}

// evicts checks how many layers are evicted, and why not more.
func evicts(t *testing.T, st *pop.Store, want int64, layers int, why string) pop.Eviction {
	t.Helper()
	e, err := st.Evict(t.Context(), want)
	if err != nil || len(e.Layers) != layers || e.Bytes != int64(10*layers) || e.Why != why {
		t.Errorf("evicted %+v, %v; not %d because %q", e, err, layers, why)
	}
	return e
}

func TestWatermarks(t *testing.T) {
	inBed(t, func(t *testing.T, b *bed) {
		st := b.open(pop.StoreConfig{Node: "x", Capacity: 100, High: 0.75, Low: 0.5, Policy: "lru"})
		fill(t, st, 7)
		evicts(t, st, 0, 0, "") // 70 of 100
		evicts(t, st, 5, 0, "") // just high
		e := evicts(t, st, 6, 3, "")
		if st.HasLayer(t.Context(), e.Layers[0]) {
			t.Error("it is visible")
		}
		if st.Trashed(t.Context()) != 30 {
			t.Errorf("%d bytes are in the trash", st.Trashed(t.Context()))
		}
		evicts(t, st, 40, 3, "")
		if freed := b.sweep(st); freed != 60 {
			t.Errorf("%d bytes were freed", freed)
		}
		if got := b.files("layers", "trash"); len(got) != 3 {
			t.Errorf("left: %v", got)
		}
	})
}

// crammed is a distributed file system that is full to the last byte, while it is said to be: it takes a new
// name for a file if that belongs where the file lies, which is one in three, and of some files none.
type crammed struct {
	pop.FS
	full  bool
	never string
}

func (c *crammed) Rename(ctx context.Context, from, to string) error {
	h := fnv.New32a()
	h.Write([]byte(to))
	if c.full && (h.Sum32()%3 > 0 || c.never != "" && strings.Contains(from, c.never)) {
		return &os.LinkError{Op: "rename", Old: from, New: to, Err: unix.ENOSPC}
	}
	return c.FS.Rename(ctx, from, to)
}

// What is full to the last byte is emptied all the same.
func TestFullToTheLastByte(t *testing.T) {
	inBed(t, func(t *testing.T, b *bed) {
		fsys := &crammed{FS: pop.NewDir(b.dir, 0)}
		st := b.open(pop.StoreConfig{Node: "x", FS: fsys, Capacity: 1000, Policy: "lru"})
		ids := fill(t, st, 12)
		fsys.full = true
		if l, err := st.Record(t.Context(), ids[3]); err != nil || st.Quarantine(t.Context(), l) != nil {
			t.Errorf("a damaged layer stays: %v", err)
		}
		fsys.never = ids[0].Encoded()
		if e, err := st.Evict(t.Context(), 1000); len(e.Layers) != 10 || !errors.Is(err, unix.ENOSPC) {
			t.Errorf("evicted %+v, %v; one stays", e, err)
		}
		fsys.never = ""
		evicts(t, st, 1000, 1, pop.AllInUse)
		b.sweep(st)
		if got := b.files("layers", "trash"); len(got) > 0 {
			t.Errorf("left: %v", got)
		}
	})
}

func TestQuota(t *testing.T) {
	inBed(t, func(t *testing.T, b *bed) {
		st := b.open(pop.StoreConfig{Node: "x", Capacity: 1000, Policy: "lru", Quota: map[string]int64{"r1/": 20}})
		ids := fill(t, st, 8) // four of each
		layers, err := st.Layers(t.Context())
		if got := st.Quotas(layers); err != nil || len(got) != 1 ||
			got[0] != (pop.Quota{Prefix: "r1/", Bytes: 40, Most: 20}) {
			t.Errorf("quotas %+v, %v", got, err)
		}
		for _, id := range evicts(t, st, 0, 2, "").Layers {
			if id != ids[1] && id != ids[3] && id != ids[5] && id != ids[7] {
				t.Errorf("%s is of another quota", id)
			}
		}
		evicts(t, st, 0, 0, "")
		more, used := fill(t, st, 12), b.node("y")
		for _, id := range more[8:] {
			if _, err := used.Use(t.Context(), id); err != nil {
				t.Fatal(err)
			}
		}
		evicts(t, st, 0, 4, "") // of the older ones, so that what is in use fits
		st = b.open(pop.StoreConfig{Node: "x", Capacity: 1000, Policy: "lru", Quota: map[string]int64{"r1/": 10}})
		evicts(t, st, 0, 0, pop.OverQuota) // nobody needs the room
	})
}

// touch notes that an image used these layers.
func touch(t *testing.T, st *pop.Store, image string, ids ...digest.Digest) {
	t.Helper()
	layers, err := st.Layers(t.Context())
	for _, id := range ids {
		i := slices.IndexFunc(layers, func(l *pop.Layer) bool { return l.DiffID == id })
		err = errors.Join(err, st.Touch(t.Context(), image, "r", layers[i]))
	}
	if err != nil {
		t.Fatal(err)
	}
}

// A layer of two images is worth more, also in the rounds after the one that learned of it.
func TestSharedLayersGoLater(t *testing.T) {
	inBed(t, func(t *testing.T, b *bed) {
		st := b.open(pop.StoreConfig{Node: "x", Capacity: 100, High: 0.75, Low: 0.5, Policy: "gdsf"})
		ids := fill(t, st, 7)
		touch(t, st, "r/a", ids...)
		touch(t, st, "r/b", ids[0])
		touch(t, st, "r/a", ids[1:]...)
		if e := evicts(t, st, 6, 3, ""); !slices.Equal(e.Layers, ids[1:4]) {
			t.Errorf("first %v go, not %v", e.Layers, ids[1:4])
		}
		if e := evicts(t, st, 36, 3, ""); !slices.Equal(e.Layers, ids[4:]) {
			t.Errorf("then %v go, not %v", e.Layers, ids[4:])
		}
	})
}

// What a layer costs stays known, though nodes use it that do not know.
func TestCostIsTheRecords(t *testing.T) {
	inBed(t, func(t *testing.T, b *bed) {
		st := b.open(pop.StoreConfig{Node: "x", Capacity: 100, High: 0.75, Low: 0.5, Policy: "gdsf"})
		tar := []byte("dear layer")
		d, err := st.Draft(t.Context(), digest.FromBytes(tar), 1)
		if err == nil {
			_, err = d.Write(tar)
		}
		if err == nil {
			err = d.Publish(t.Context(), pop.Layer{Size: int64(len(tar)), Cost: 1000}, []byte("table"))
		}
		if err != nil {
			t.Fatal(err)
		}
		ids := fill(t, st, 6)
		here := []*pop.Layer{{DiffID: digest.FromBytes(tar), Size: int64(len(tar))}} // no cost
		for _, id := range ids {
			here = append(here, &pop.Layer{DiffID: id, Size: 10})
		}
		for range 2 {
			if err := st.Touch(t.Context(), "r/image", "r", here...); err != nil {
				t.Fatal(err)
			}
		}
		evicts(t, st, 36, 6, "")
		if !st.HasLayer(t.Context(), here[0].DiffID) {
			t.Error("what took a thousand times as long went before others")
		}
	})
}

// A use counts though it is the only one since the last round, of a layer that the policy knows from before.
func TestOneUseBetweenRoundsCounts(t *testing.T) {
	for _, policy := range []string{"lru", ""} {
		inBed(t, func(t *testing.T, b *bed) {
			st := b.open(pop.StoreConfig{Node: "x", Capacity: 100, High: 0.75, Low: 0.5, Policy: policy})
			ids := fill(t, st, 7)
			touch(t, st, "r/image", ids...)
			if e := evicts(t, st, 6, 3, ""); !slices.Equal(e.Layers, ids[:3]) {
				t.Errorf("first %v go, not %v", e.Layers, ids[:3])
			}
			touch(t, st, "r/image", ids[3])
			if e := evicts(t, st, 36, 3, ""); !slices.Equal(e.Layers, ids[4:]) {
				t.Errorf("%q: then %v go, not %v", policy, e.Layers, ids[4:])
			}
		})
	}
}

// What a node uses stays, whether the coordinator or the store alone knows of it.
func TestUsedIsNotEvicted(t *testing.T) {
	inBed(t, func(t *testing.T, b *bed) {
		ctx := t.Context()
		x, y := b.open(pop.StoreConfig{Node: "x", Capacity: 10}), b.node("y")
		ids := fill(t, x, 2)
		for _, id := range ids {
			if _, err := y.Use(ctx, id); err != nil {
				t.Fatal(err)
			}
		}
		evicts(t, x, 0, 0, pop.AllInUse)
		b.hub.Cut("y", true)
		time.Sleep(time.Minute) // the coordinator takes y for dead
		evicts(t, x, 0, 0, pop.AllInUse)
		if err := y.Unuse(ctx, ids[0]); err != nil {
			t.Error(err)
		}
		evicts(t, x, 0, 1, pop.AllInUse)
		if _, err := y.Use(ctx, ids[1]); err != nil {
			t.Error(err)
		}
		if b.sweep(x) != 10 {
			t.Error("not what is unused is deleted")
		}
	})
}

// A node that says nothing for very long counts no more; one that beats does.
func TestSilentNodesAreForgotten(t *testing.T) {
	inBed(t, func(t *testing.T, b *bed) {
		ctx := t.Context()
		x, y := b.open(pop.StoreConfig{Node: "x", Capacity: 10, Forget: time.Hour}), b.node("y")
		id := fill(t, x, 1)[0]
		if _, err := y.Use(ctx, id); err != nil {
			t.Fatal(err)
		}
		b.hub.Cut("y", true)
		for range 5 {
			time.Sleep(30 * time.Minute)
			if err := y.Beat(ctx); err != nil {
				t.Error(err)
			}
			evicts(t, x, 0, 0, pop.AllInUse)
		}
		time.Sleep(2 * time.Hour)
		evicts(t, x, 0, 1, "")
	})
}

func TestNothingIsEvictedInTheDark(t *testing.T) {
	inBed(t, func(t *testing.T, b *bed) {
		x := b.open(pop.StoreConfig{Node: "x", Capacity: 10})
		fill(t, x, 1)
		dark := func(what string) {
			t.Helper()
			if e, err := x.Evict(t.Context(), 1); err != nil || len(e.Layers) > 0 || e.Why == "" {
				t.Errorf("%s: %+v, %v", what, e, err)
			}
			if n, err := x.Sweep(t.Context()); n > 0 || err != nil {
				t.Errorf("%s: swept %d, %v", what, n, err)
			}
		}
		b.hub.Forget()
		dark("the coordinator has lost its memory")
		time.Sleep(time.Minute)
		b.hub.Cut("x", true)
		dark("the coordinator is away")
		b.hub.Cut("x", false)
		y, err := b.hub.Join(pop.Config{Node: "y"})
		if err != nil {
			t.Fatal(err)
		}
		defer y.Close()
		if _, err := y.Acquire(t.Context(), "evict", 0); err != nil {
			t.Fatal(err)
		}
		dark("another node does it")
	})
}

// References that are made while a layer is taken out of sight bring it back.
func TestPutBack(t *testing.T) {
	inBed(t, func(t *testing.T, b *bed) {
		ctx, y := t.Context(), b.node("y")
		var id digest.Digest
		used := false
		fsys := &hooked{FS: pop.NewDir(b.dir, 0), before: func(op, name string) error {
			if op == "rename" && name == "layers/"+id.Encoded()+".json" && !used {
				used = true
				if _, err := y.Use(ctx, id); err != nil {
					t.Error(err)
				}
			}
			return nil
		}}
		x := b.open(pop.StoreConfig{Node: "x", Capacity: 10, FS: fsys})
		id = fill(t, y, 1)[0]
		events, err := b.coords["first"].Subscribe(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := x.Evict(ctx, 10); err != nil || !used {
			t.Error(err)
		}
		for e := range events { // who has looked meanwhile is told
			if e.Kind == pop.Returned {
				if e.Key != id.String() {
					t.Errorf("told %+v", e)
				}
				break
			}
		}
		l, err := y.Record(ctx, id)
		if err == nil {
			err = y.Verify(ctx, l, 0)
		}
		if err != nil || len(b.files("trash")) != 0 {
			t.Errorf("what came into use is not back: %v, %v", b.files("trash"), err)
		}
	})
}

// What was evicted and not deleted yet comes back to a node that asks, and is told.
func TestRevive(t *testing.T) {
	inBed(t, func(t *testing.T, b *bed) {
		ctx := t.Context()
		x, y := b.open(pop.StoreConfig{Node: "x", Capacity: 10}), b.node("y")
		ids := fill(t, y, 2)
		if _, err := x.Evict(ctx, 20); err != nil || len(b.files("trash")) != 2 {
			t.Fatalf("evicted: %v, %v", b.files("trash"), err)
		}
		if err := y.Revive(ctx, ids[1]); err != nil {
			t.Error(err)
		}
		if x.HasLayer(ctx, ids[0]) || !x.HasLayer(ctx, ids[1]) || len(b.files("trash")) != 1 {
			t.Errorf("the first is there: %v, the second: %v; %v", x.HasLayer(ctx, ids[0]), x.HasLayer(ctx, ids[1]),
				b.files("trash"))
		}
		if err := y.Revive(ctx, ids[1]); err != nil { // nothing of it lies there
			t.Error(err)
		}
		l, err := x.Use(ctx, ids[1])
		if err == nil {
			err = x.Verify(ctx, l, 0)
		}
		if err != nil {
			t.Error(err)
		}
		if err := x.Quarantine(ctx, l); err != nil { // what is damaged stays out
			t.Error(err)
		}
		if err := y.Revive(ctx, ids[1]); err != nil || y.HasLayer(ctx, ids[1]) {
			t.Errorf("damaged files are shown again: %v", err)
		}
		// So it does if another node puts it back while it is being taken out.
		if err := y.Revive(ctx, ids[0]); err != nil {
			t.Error(err)
		}
		back := 0
		z := b.open(pop.StoreConfig{Node: "z", FS: &hooked{FS: pop.NewDir(b.dir, 0), before: func(op, name string) error {
			if op != "rename" || back > 0 || path.Dir(name) != "trash" {
				return nil
			}
			back++
			return y.Revive(ctx, ids[0])
		}}})
		if l, err = z.Record(ctx, ids[0]); err == nil {
			err = z.Quarantine(ctx, l)
		}
		if err != nil || back != 1 || y.HasLayer(ctx, ids[0]) {
			t.Errorf("put back %d times, a damaged layer is in sight: %v, %v", back, y.HasLayer(ctx, ids[0]), err)
		}
	})
}

// A failed Use leaves the reference of what runs already.
func TestFailedUseKeepsTheMark(t *testing.T) {
	inBed(t, func(t *testing.T, b *bed) {
		ctx, x := t.Context(), b.node("x")
		id := fill(t, x, 1)[0]
		var broken bool
		y := b.open(pop.StoreConfig{Node: "y",
			FS: &hooked{FS: pop.NewDir(b.dir, 0), before: func(op, _ string) error {
				if broken && op == "append" {
					l, err := x.Record(ctx, id)
					if err == nil {
						err = x.Quarantine(ctx, l)
					}
					if err != nil {
						t.Error(err)
					}
				}
				return nil
			}}})
		if _, err := y.Use(ctx, id); err != nil {
			t.Fatal(err)
		}
		broken = true
		_, err := y.Use(ctx, id)
		is(t, "a layer that goes meanwhile", err, pop.ErrUnknown)
		if b.sweep(x); len(b.files("refs/y")) != 1 || len(b.files("layers")) != 2 {
			t.Errorf("the files of a container: %v, %v", b.files("refs/y"), b.files("layers"))
		}
		b.coords["y"].Close()
		again := b.node("y") // a later process of the node knows
		if err := again.Unuse(ctx, id); err != nil {
			t.Error(err)
		}
		if b.sweep(x); len(b.files("layers", "trash", "refs/y")) != 0 {
			t.Errorf("left: %v", b.files("layers", "trash", "refs/y"))
		}
	})
}
