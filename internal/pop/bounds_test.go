package pop_test

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"dewpoint/internal/pop"

	"github.com/opencontainers/go-digest"
)

// The index that an earlier version published beside a layer goes with it.
func TestOldIndexGoesWithItsLayer(t *testing.T) {
	inBed(t, func(t *testing.T, b *bed) {
		st := b.open(pop.StoreConfig{Node: "x", Capacity: 100, Forget: 10 * time.Minute})
		l, err := st.Record(t.Context(), publish(t, st, []byte("layer"), ""))
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{l.Name, digest.FromString("lost").Encoded() + ".7.ABCDEFGH"} {
			if err := os.WriteFile(filepath.Join(b.dir, "layers", name+".index"), []byte("old"), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if e, err := st.Evict(t.Context(), 100); err != nil || len(e.Layers) != 1 {
			t.Fatal(e, err)
		}
		for range 6 {
			b.sweep(st)
		}
		if left := b.files("layers", "trash"); len(left) != 0 {
			t.Errorf("left: %v", left)
		}
	})
}

// Packs count, and go when they were not used for longest.
func TestPacksAreEvicted(t *testing.T) {
	inBed(t, func(t *testing.T, b *bed) {
		st := b.open(pop.StoreConfig{Node: "x", Capacity: 100, High: 0.75, Low: 0.5, Policy: "lru"})
		old, hot := digest.FromString("old"), digest.FromString("hot")
		for _, m := range []digest.Digest{old, hot} {
			if err := st.PutPack(t.Context(), m, strings.NewReader(strings.Repeat("p", 20))); err != nil {
				t.Fatal(err)
			}
		}
		ids := fill(t, st, 3)
		evicts(t, st, 0, 0, "") // 70 of 100
		if err := st.TouchPack(t.Context(), old, 20); err != nil {
			t.Fatal(err)
		}
		touch(t, st, "r/image", ids...)
		if err := st.TouchPack(t.Context(), hot, 20); err != nil {
			t.Fatal(err)
		}
		if e, err := st.Evict(t.Context(), 6); err != nil || e.Bytes != 30 || len(e.Layers) != 1 ||
			e.Layers[0] != ids[0] {
			t.Errorf("%+v, %v: the old pack and the first layer are to go", e, err)
		}
		_, err := st.Pack(t.Context(), old)
		is(t, "the old pack", err, pop.ErrUnknown)
		if f, err := st.Pack(t.Context(), hot); err != nil {
			t.Error(err)
		} else {
			f.Close()
		}
	})
}

// imageRecord is as much of an image's record as a store looks at.
func imageRecord(t *testing.T, note string, layers ...digest.Digest) []byte {
	t.Helper()
	cfg, err := json.Marshal(map[string]any{"rootfs": map[string]any{"type": "layers", "diff_ids": layers},
		"author": note})
	if err == nil {
		cfg, err = json.Marshal(map[string]any{"config": cfg})
	}
	if err != nil {
		t.Fatal(err)
	}
	return cfg
}

// A record is written over another, longer one, and one that is half written is none.
func TestImageIsWrittenOver(t *testing.T) {
	inBed(t, func(t *testing.T, b *bed) {
		st, ref := b.node("x"), "r/image:1"
		long, short := imageRecord(t, strings.Repeat("long", 100)), imageRecord(t, "short")
		for _, rec := range [][]byte{long, short, long} {
			if err := st.PutImage(t.Context(), ref, rec); err != nil {
				t.Fatal(err)
			}
			if got, err := st.Image(t.Context(), ref); err != nil || !bytes.Equal(got, rec) {
				t.Errorf("%s, %v", got, err)
			}
		}
		file := filepath.Join(b.dir, b.files("images")[0])
		if err := os.Truncate(file, 100); err != nil {
			t.Fatal(err)
		}
		_, err := st.Image(t.Context(), ref)
		is(t, "half of one", err, pop.ErrDamaged)
		if err := st.PutImage(t.Context(), ref, short); err != nil {
			t.Fatal(err)
		}
		if got, err := st.Image(t.Context(), ref); err != nil || !bytes.Equal(got, short) {
			t.Errorf("%s, %v", got, err)
		}
		if files := b.files("images"); len(files) != 1 {
			t.Errorf("%v", files)
		}
	})
}

// What a reference was resolved to goes when the store has long not had all of its layers.
func TestImagesGoWithTheirLayers(t *testing.T) {
	inBed(t, func(t *testing.T, b *bed) {
		st := b.open(pop.StoreConfig{Node: "x", Capacity: 1000, Policy: "lru", Forget: time.Hour})
		ids := fill(t, st, 2)
		for ref, rec := range map[string][]byte{"whole": imageRecord(t, "", ids[1]),
			"half": imageRecord(t, "", ids...), "odd": []byte(`{"config":"e30="}`)} {
			if err := st.PutImage(t.Context(), ref, rec); err != nil {
				t.Fatal(err)
			}
		}
		has := func(ref string) bool {
			_, err := st.Image(t.Context(), ref)
			return err == nil
		}
		b.sweep(st)
		if !has("whole") || !has("half") || !has("odd") {
			t.Error("one has gone at once")
		}
		touch(t, st, "r/image", ids...)
		if e, err := st.Evict(t.Context(), 930); err != nil || len(e.Layers) != 0 {
			t.Fatal(e, err) // just high
		}
		if e, err := st.Evict(t.Context(), 931); err != nil || len(e.Layers) != 2 {
			t.Fatal(e, err)
		}
		publish(t, st, []byte("layer 0001"), "") // comes again
		for range 10 {
			b.sweep(st)
		}
		if !has("whole") || has("half") || has("odd") {
			t.Errorf("whole is there: %v; half: %v; odd: %v", has("whole"), has("half"), has("odd"))
		}
	})
}

// A layer of several images is worth more, whether or not anybody has deployed them since.
func TestSharedByRecords(t *testing.T) {
	inBed(t, func(t *testing.T, b *bed) {
		st := b.open(pop.StoreConfig{Node: "x", Capacity: 100, High: 0.75, Low: 0.5, Policy: "gdsf"})
		ids := fill(t, st, 7)
		shared := slices.Min(ids) // it would go first
		for ref, layers := range map[string][]digest.Digest{"r/a": ids, "r/b": {shared}, "r/c": {shared}} {
			if err := st.PutImage(t.Context(), ref, imageRecord(t, ref, layers...)); err != nil {
				t.Fatal(err)
			}
		}
		b.sweep(st)
		if e := evicts(t, st, 40, 6, ""); slices.Contains(e.Layers, shared) {
			t.Errorf("the layer of three images goes with %v", e.Layers)
		}
	})
}

// Whether there is room is known before anything is written.
func TestRoom(t *testing.T) {
	inBed(t, func(t *testing.T, b *bed) {
		st := b.open(pop.StoreConfig{Node: "x", Capacity: 1000, High: 0.9, Low: 0.5})
		ctx := t.Context()
		if err := st.Room(ctx, 900); err != nil {
			t.Error(err)
		}
		is(t, "more than the store is to hold", st.Room(ctx, 901), pop.ErrFull)
		total, _, err := st.Space(ctx)
		if err != nil {
			t.Fatal(err)
		}
		is(t, "more than there is", b.node("y").Room(ctx, total), pop.ErrFull)
		fill(t, st, 10)
		if n, err := st.Spare(ctx); err != nil || n != 800 {
			t.Errorf("100 bytes are there, and 900 may be: %d, %v", n, err)
		}
	})
}

// A neighbour who publishes other bytes than the layer's, with sums that fit them, is found out.
func TestLyingNeighbour(t *testing.T) {
	inBed(t, func(t *testing.T, b *bed) {
		a, other := b.node("a"), b.node("b")
		id, lie := digest.FromString("the layer"), []byte("not it at all")
		d, err := a.Draft(t.Context(), id, 1)
		if err == nil {
			_, err = d.Write(lie)
		}
		if err == nil {
			err = d.Publish(t.Context(), pop.Layer{Size: int64(len(lie))}, []byte("table"))
		}
		if err != nil {
			t.Fatal(err)
		}
		l, err := other.Record(t.Context(), id)
		if err != nil {
			t.Fatal(err)
		}
		is(t, "verified", other.Verify(t.Context(), l, 0), pop.ErrDamaged)
	})
}
