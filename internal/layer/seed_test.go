package layer_test

import (
	"bytes"
	"errors"
	"os"
	"testing"

	"dewpoint/internal/image"
	"dewpoint/internal/layer"
	"dewpoint/internal/layer/presence"
	"dewpoint/testkit"
)

// A fill goes on on another node from where one was cut, and from wrong bytes.
func TestSeed(t *testing.T) {
	testkit.Long(t)
	tarball := makeTar(t, 24<<20, 9)
	for _, c := range []image.Compression{image.Gzip, image.Zstd} {
		t.Run(string(c), func(t *testing.T) {
			s := pack(t, tarball, c)
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
		})
	}
}

// What another node has kept serves a layer, too, that is mounted and lacks some of its bytes. What of it is
// wrong is nobody's lie.
func TestSeedOfMountedLayer(t *testing.T) {
	s := pack(t, makeTar(t, 9<<20, 10), image.Zstd)
	seed := cutSeed(t, s, int64(len(s.blob))*2/3)
	for _, wrong := range []bool{false, true} {
		store := open(t, t.TempDir(),
			layer.Config{Server: newShower(), Lied: func(*layer.Partial, error) {
				t.Error("the layer is said to have lied")
			}})
		p, err := store.Begin(s.layer, table(t, s.tar), layer.Origin{})
		if err == nil {
			err = p.Put(5*presence.Page, s.tar[5*presence.Page:9*presence.Page])
		}
		if err != nil {
			t.Fatal(err)
		}
		src := &prepared{source: source{blob: s.blob}}
		src.prepare = func(f *layer.Fill) (layer.Way, error) { return layer.Way{}, f.Seed(seed(wrong)) }
		checkData(t, mustComplete(t, store, s.layer, src), s)
		if sent, all := src.sent.Load(), int64(len(s.blob)); wrong != (sent > all/2) {
			t.Errorf("%d bytes of %d were fetched again; wrong ones: %v", sent, all, wrong)
		}
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
	if err != nil || c.Size < int64(len(s.tar))/2 && c.To < at-1<<20 {
		t.Fatalf("a checkpoint of %d bytes, and from %d up to %d of the compressed ones: %v", c.Size, c.From, c.To,
			err)
	}
	data, err := os.ReadFile(c.Data)
	if err != nil {
		t.Fatal(err)
	}
	var blob []byte
	if c.To > 0 {
		if blob, err = os.ReadFile(c.Blob); err != nil {
			t.Fatal(err)
		}
	}
	return func(wrong bool) layer.Seed {
		seed := layer.Seed{Record: c.Record, From: c.From, To: c.To}
		data, blob := bytes.Clone(data[:c.Size]), bytes.Clone(blob[c.From:c.To])
		if of := append(data[:len(data):len(data)], blob...); wrong {
			of[len(of)/2] ^= 1
			data, blob = of[:len(data)], of[len(data):]
		}
		if seed.Data = bytes.NewReader(data); c.To > 0 {
			seed.Blob = bytes.NewReader(blob)
		}
		return seed
	}
}
