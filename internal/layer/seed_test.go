package layer_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"testing"

	"dewpoint/internal/image"
	"dewpoint/internal/layer"
	"dewpoint/testkit"
)

// A fill goes on on another node from where one was cut, and from wrong bytes.
func TestSeed(t *testing.T) {
	testkit.Long(t)
	tarball := makeTar(t, 24<<20, 9)
	s := pack(t, tarball, image.Gzip)
	seed := cutSeed(t, s, int64(len(s.blob))*2/3)
	for _, wrong := range []bool{false, true} {
		src := &prepared{source: source{blob: s.blob}}
		src.prepare = func(f *layer.Fill) (layer.Way, error) { return layer.Way{}, f.Seed(seed(wrong)) }
		store := open(t, t.TempDir(), layer.Config{})
		checkData(t, mustComplete(t, store, s.layer, src), s)
		if sent := src.sent.Load(); !wrong && sent > int64(len(s.blob))/2 {
			t.Errorf("%d bytes of %d were fetched again", sent, len(s.blob))
		}
		if sent := src.sent.Load(); wrong && sent < int64(len(s.blob)) {
			t.Errorf("%d bytes of %d were fetched after wrong ones", sent, len(s.blob))
		}
	}
}

// A fill goes on by the word of another node with what it has of the layer itself, and not with more.
func TestSeedOfOwnData(t *testing.T) {
	testkit.Long(t)
	tarball := makeTar(t, 24<<20, 9)
	s := pack(t, tarball, image.Gzip)
	given := cutSeed(t, s, int64(len(s.blob))*2/3)(false)
	given.Data = nil
	for name, c := range map[string]struct {
		here   int // bytes of the tar
		wrong  bool
		spares bool
	}{
		"most":       {here: len(s.tar) - 1<<20, spares: true},
		"too little": {here: 1 << 20},
		"wrong":      {here: len(s.tar) - 1<<20, wrong: true},
	} {
		t.Run(name, func(t *testing.T) {
			tar := bytes.Clone(s.tar)
			if c.wrong {
				tar[1<<20] ^= 1
			}
			src := &prepared{source: source{blob: s.blob}, tar: tar, cutTar: int64(c.here)}
			src.prepare = func(f *layer.Fill) (layer.Way, error) {
				if src.cutTar > 0 {
					return layer.Way{Tar: true}, nil
				}
				src.tar = nil
				if err := f.Seed(given); err != nil && c.spares {
					t.Error(err)
				}
				return layer.Way{}, nil
			}
			checkData(t, mustComplete(t, open(t, t.TempDir(), layer.Config{}), s.layer, src), s)
			if sent := src.sent.Load(); c.spares != (sent < int64(len(s.blob))/2) {
				t.Errorf("%d bytes of %d were fetched again", sent, len(s.blob))
			}
		})
	}
}

// What another node says of a place where no fill can go on is refused, and the layer is fetched.
func TestSeedOutsideTheLayer(t *testing.T) {
	s := pack(t, makeTar(t, 12<<20, 26), image.Gzip)
	given := cutSeed(t, s, int64(len(s.blob))*3/4)(false)
	for name, change := range map[string]func(point map[string]any, record map[string]any){
		"behind its end":    func(p, r map[string]any) { p["In"], r["blob_at"] = 1<<40, 1<<40 },
		"bytes of nothing":  func(p, r map[string]any) { p["In"], r["blob_at"] = 0, 0 },
		"no known encoding": func(_, r map[string]any) { r["compression"] = "x" },
	} {
		t.Run(name, func(t *testing.T) {
			var record map[string]any
			if err := json.Unmarshal(given.Record, &record); err != nil {
				t.Fatal(err)
			}
			point := record["point"].(map[string]any)
			if _, ok := point["In"]; !ok {
				t.Fatal("a point has no In")
			}
			change(point, record)
			b, err := json.Marshal(record)
			if err != nil {
				t.Fatal(err)
			}
			src := &prepared{source: source{blob: s.blob}}
			src.prepare = func(f *layer.Fill) (layer.Way, error) {
				if err := f.Seed(layer.Seed{Record: b, Data: bytes.NewReader(s.tar)}); !errors.Is(err, layer.ErrUnknown) {
					t.Errorf("the seed: %v", err)
				}
				return layer.Way{}, nil
			}
			checkData(t, mustComplete(t, open(t, t.TempDir(), layer.Config{}), s.layer, src), s)
		})
	}
}

// cutSeed gives the checkpoint of a fill that is cut at a byte of the blob, with a wrong byte in it on
// demand.
func cutSeed(t *testing.T, s sample, at int64) func(wrong bool) layer.Seed {
	t.Helper()
	store := open(t, t.TempDir(), layer.Config{Interval: 1 << 20})
	f := store.Fill(t.Context(), s.layer, &source{blob: s.blob, cut: at})
	if _, err := f.WaitComplete(t.Context()); !errors.Is(err, errCut) {
		t.Fatal(err)
	}
	c, err := f.Checkpoint()
	if err != nil || c.Size < int64(len(s.tar))/2 {
		t.Fatalf("a checkpoint of %d bytes: %v", c.Size, err)
	}
	data, err := os.ReadFile(c.Data)
	if err != nil {
		t.Fatal(err)
	}
	return func(wrong bool) layer.Seed {
		data := bytes.Clone(data[:c.Size])
		if wrong {
			data[len(data)/2] ^= 1
		}
		return layer.Seed{Record: c.Record, Data: bytes.NewReader(data)}
	}
}
