package pop_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"dewpoint/internal/pop"

	"github.com/opencontainers/go-digest"
)

// checkpoint puts one into the store that stands on upper.
func checkpoint(t *testing.T, st *pop.Store, data string, upper digest.Digest) digest.Digest {
	t.Helper()
	ctx, id := t.Context(), digest.FromString("checkpoint of "+data)
	d, err := st.Draft(ctx, id, st.Above(ctx, id)+1)
	if err == nil {
		_, err = d.Write([]byte(data))
	}
	if err == nil {
		err = d.Publish(ctx,
			pop.Layer{Size: int64(len(data)), Cost: 3, Checkpoint: []byte(`{"what":"it is"}`), Upper: upper}, nil)
	}
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func names(layers []*pop.Layer) []digest.Digest {
	var all []digest.Digest
	for _, l := range layers {
		all = append(all, l.DiffID)
	}
	slices.Sort(all)
	return all
}

func sorted(ids ...digest.Digest) []digest.Digest {
	slices.Sort(ids)
	return ids
}

func TestCheckpointsBesideLayers(t *testing.T) {
	inBed(t, func(t *testing.T, b *bed) {
		ctx, x, y := t.Context(), b.node("x"), b.node("y")
		plain, upper := publish(t, x, []byte("layer"), "r/i"), publish(t, x, []byte("upper"), "r/i")
		id := checkpoint(t, x, "memory", upper)
		for range 2 {
			layers, err := y.Layers(ctx)
			if err != nil || !slices.Equal(names(layers), sorted(plain, upper)) {
				t.Errorf("layers %v, %v", names(layers), err)
			}
			all, err := y.Checkpoints(ctx)
			if err != nil || !slices.Equal(names(all), []digest.Digest{id}) ||
				string(all[0].Checkpoint) != `{"what":"it is"}` || all[0].Upper != upper {
				t.Errorf("checkpoints %+v, %v", all, err)
			}
			objects, err := y.Objects(ctx)
			if err != nil || len(objects) != 3 {
				t.Errorf("objects %v, %v", names(objects), err)
			}
		}
		l, release, err := y.Hold(ctx, id)
		if err == nil {
			err = y.Verify(ctx, l, 0)
		}
		if err != nil {
			t.Fatal(err)
		}
		_, again, err := y.Hold(ctx, id)
		if err != nil {
			t.Fatal(err)
		}
		release()
		if err := y.Unuse(ctx, id); err != nil || len(b.files("refs/y")) != 1 {
			t.Errorf("what is held is not referenced: %v, %v", b.files("refs/y"), err)
		}
		if again(); len(b.files("refs/y")) != 0 || len(y.Used()) != 0 {
			t.Errorf("referenced: %v, %v", b.files("refs/y"), y.Used())
		}
		_, _, err = y.Hold(ctx, digest.FromString("none"))
		is(t, "none", err, pop.ErrUnknown)
	})
}

// A layer that a checkpoint stands on stays as long as it does, and goes with it.
func TestUpperIsEvictedWithItsCheckpoint(t *testing.T) {
	inBed(t, func(t *testing.T, b *bed) {
		ctx := t.Context()
		st := b.open(pop.StoreConfig{Node: "x", Capacity: 40, High: 0.9, Low: 0.8, Policy: "lru"})
		upper := publish(t, st, []byte("0123456789"), "")
		one, two := checkpoint(t, st, "abcdefghij", upper), checkpoint(t, st, "ABCDEFGHIJ", upper)
		last := publish(t, st, []byte("last layer"), "")
		touch := func(ids ...digest.Digest) {
			for _, id := range ids {
				l, err := st.Record(ctx, id)
				if err == nil {
					err = st.Touch(ctx, "", "", l)
				}
				if err != nil {
					t.Fatal(err)
				}
			}
		}
		touch(upper, last, one, two)
		// upper was used before it
		if got := evicts(t, st, 0, 1, "").Layers; !slices.Equal(got, []digest.Digest{last}) {
			t.Errorf("%v", got)
		}
		if got := evicts(t, st, 10, 1, "").Layers; !slices.Equal(got, []digest.Digest{one}) {
			t.Errorf("%v", got)
		}
		if got := evicts(t, st, 20, 2, "").Layers; !slices.Equal(got, []digest.Digest{two, upper}) {
			t.Errorf("%v", got)
		}
		if freed := b.sweep(st); freed != 40 || len(b.files("layers", "trash")) != 0 {
			t.Errorf("%d bytes freed, left %v", freed, b.files("layers", "trash"))
		}
	})
}

func TestUpperInUseStays(t *testing.T) {
	inBed(t, func(t *testing.T, b *bed) {
		ctx, y := t.Context(), b.node("y")
		st := b.open(pop.StoreConfig{Node: "x", Capacity: 20, Policy: "lru"})
		upper := publish(t, st, []byte("0123456789"), "")
		id := checkpoint(t, st, "abcdefghij", upper)
		if _, err := y.Use(ctx, upper); err != nil {
			t.Fatal(err)
		}
		if got := evicts(t, st, 20, 1, pop.AllInUse).Layers; !slices.Equal(got, []digest.Digest{id}) ||
			!st.HasLayer(ctx, upper) {
			t.Errorf("%v", got)
		}
	})
}

// A checkpoint whose upper layer was damaged is of no use: it leaves the store.
func TestCheckpointWithoutUpper(t *testing.T) {
	inBed(t, func(t *testing.T, b *bed) {
		ctx, x, y := t.Context(), b.node("x"), b.node("y")
		upper := publish(t, x, []byte("upper"), "")
		id, alone := checkpoint(t, x, "memory", upper), checkpoint(t, x, "other memory", "")
		l, err := x.Record(ctx, upper)
		if err == nil {
			err = x.Quarantine(ctx, l)
		}
		if err != nil {
			t.Fatal(err)
		}
		_, release, err := y.Hold(ctx, id)
		if err != nil {
			t.Fatal(err)
		}
		if b.sweep(x); !x.HasLayer(ctx, id) {
			t.Error("gone while it is read")
		}
		if release(); !x.HasLayer(ctx, id) {
			t.Error("gone")
		}
		b.sweep(x)
		if b.sweep(x); x.HasLayer(ctx, id) || !x.HasLayer(ctx, alone) {
			t.Errorf("without its upper: %v; without any: %v", x.HasLayer(ctx, id), x.HasLayer(ctx, alone))
		}
		if got := b.files("layers", "trash", "fill"); len(got) != 3 {
			t.Errorf("left %v", got)
		}
	})
}

func TestFailuresAndOrders(t *testing.T) {
	inBed(t, func(t *testing.T, b *bed) {
		ctx, x, y := t.Context(), b.node("x"), b.open(pop.StoreConfig{Node: "y.example", Forget: time.Hour})
		id, other := checkpoint(t, x, "memory", ""), digest.FromString("other")
		if got, err := y.Failures(ctx); err != nil || len(got) != 0 {
			t.Errorf("%v, %v", got, err)
		}
		_, err := y.Order(ctx, id)
		is(t, "no order", err, pop.ErrUnknown)
		if err := errors.Join(x.NoteFailures(ctx, id, pop.Failures{Count: 2, Why: "it hung"}),
			y.NoteFailures(ctx, id, pop.Failures{Count: 1}),
			y.NoteFailures(ctx, other, pop.Failures{Count: 1}), x.PutOrder(ctx, id, []byte("3 1 2")),
			os.WriteFile(filepath.Join(b.dir, "failed", other.Encoded()+".z"), []byte("{"), 0o600)); err != nil {
			t.Fatal(err)
		}
		got, err := x.Failures(ctx)
		if want := fmt.Sprint(map[string]pop.Failures{"x": {Count: 2, Why: "it hung"},
			"y.example": {Count: 1}}); err != nil || fmt.Sprint(got[id]) != want || len(got[other]) != 1 {
			t.Errorf("%v, %v", got, err)
		}
		if o, err := y.Order(ctx, id); err != nil || string(o) != "3 1 2" {
			t.Errorf("%q, %v", o, err)
		}
		if err := errors.Join(x.NoteFailures(ctx, id, pop.Failures{}),
			x.NoteFailures(ctx, id, pop.Failures{})); err != nil {
			t.Error(err)
		}
		for range 30 {
			b.sweep(y)
		}
		if got := b.files("failed", "orders"); len(got) != 2 { // those of what is there
			t.Errorf("left %v", got)
		}
	})
}

// What left the store since it was damaged can be asked for, until it is there again, is taken out on
// purpose, or nobody has asked for long.
func TestLost(t *testing.T) {
	inBed(t, func(t *testing.T, b *bed) {
		ctx, x, y := t.Context(), b.node("x"), b.open(pop.StoreConfig{Node: "y", Forget: time.Hour})
		for _, end := range []string{"published again", "removed", "forgotten"} {
			id := checkpoint(t, x, "memory "+end, "")
			damaged, err := x.Record(ctx, id)
			if err == nil {
				err = x.Quarantine(ctx, damaged)
			}
			if err != nil {
				t.Fatal(err)
			}
			if lost, err := y.Lost(ctx); err != nil || len(lost) != 1 || lost[0] != id {
				t.Errorf("lost are %v, %v", lost, err)
			}
			sweeps := 1
			switch end {
			case "published again":
				checkpoint(t, x, "memory "+end, "")
			case "removed":
				checkpoint(t, x, "memory "+end, "")
				l, err := x.Record(ctx, id)
				if err == nil {
					err = x.Withdraw(ctx, l)
				}
				if err != nil {
					t.Fatal(err)
				}
				sweeps = 0
			default:
				sweeps = 30
			}
			if lost, err := y.Lost(ctx); err != nil || (len(lost) > 0) != (end == "forgotten") {
				t.Errorf("%s, and lost are %v, %v", end, lost, err)
			}
			for range sweeps {
				b.sweep(y)
			}
			if left := b.files("lost"); len(left) > 0 {
				t.Errorf("%s, and there is %v", end, left)
			}
		}
	})
}
