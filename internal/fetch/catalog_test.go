package fetch

import (
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"dewpoint/internal/image"
	"dewpoint/testkit/registrytest"
)

func reopen(t *testing.T, c *Catalog) *Catalog {
	t.Helper()
	again, err := OpenCatalog(c.dir, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return again
}

func TestCatalogSurvivesARestart(t *testing.T) {
	b := newBed(t)
	a, z := b.pull(b.push("a", 1, 2)), b.pull(b.push("z", 1, 3))
	c := reopen(t, b.cfg.Catalog)
	if got := c.Get(a.Ref); !reflect.DeepEqual(got, a) {
		t.Errorf("got %+v", got)
	}
	chain := a.ChainIDs()
	if ids := c.Chain(chain[1]); len(ids) != 2 || ids[0] != a.Layers[0].DiffID || ids[1] != a.Layers[1].DiffID {
		t.Error(ids)
	}
	if found := c.WithLayer(a.Layers[0].DiffID); len(found) != 2 || found[0].Ref != a.Ref ||
		found[1].Ref != z.Ref {
		t.Error(found)
	}
	if found := c.WithLayer(z.Layers[1].DiffID); len(found) != 1 || found[0].Ref != z.Ref {
		t.Error(found)
	}

	if err := c.Forget(a.Ref); err != nil {
		t.Fatal(err)
	}
	if err := c.Forget(a.Ref); err != nil {
		t.Error("forgotten twice:", err)
	}
	for _, c := range []*Catalog{c, reopen(t, c)} {
		if c.Get(a.Ref) != nil || c.Chain(chain[1]) != nil {
			t.Error("the image is still known")
		}
		if c.Chain(chain[0]) == nil || c.Get(z.Ref) == nil {
			t.Error("what another image shares was forgotten")
		}
	}
}

func TestDamagedRecordIsDropped(t *testing.T) {
	b := newBed(t)
	img := b.pull(b.push("a", 1))
	files, _ := filepath.Glob(filepath.Join(b.cfg.Catalog.dir, "*.json"))
	raw, err := os.ReadFile(files[0])
	b.must(err)
	for _, spoilt := range [][]byte{nil, raw[:len(raw)/2], []byte(`{"ref":"x"}`)} {
		b.must(os.WriteFile(files[0], spoilt, 0o600))
		c := reopen(t, b.cfg.Catalog)
		if c.Get(img.Ref) != nil || there(files[0]) {
			t.Errorf("a record of %d bytes stays", len(spoilt))
		}
		b.must(c.Put(img))
		if reopen(t, c).Get(img.Ref) == nil {
			t.Error("the record cannot be made anew")
		}
	}
}

func TestPutFollowsAMovedTag(t *testing.T) {
	b := newBed(t)
	old := b.pull(b.push("a", 1))
	moved := b.pull(b.push("a", 2))
	if old.Ref != moved.Ref || old.Desc.Digest == moved.Desc.Digest {
		t.Fatal("the tag did not move")
	}
	if got := reopen(t, b.cfg.Catalog).Get(old.Ref); got.Desc.Digest != moved.Desc.Digest {
		t.Error("the catalog has the old image")
	}
	b.cfg.Catalog.backdate()
	b.must(b.cfg.Catalog.Sweep(func(*image.Image) bool { return false }))
	if b.cfg.Catalog.Chain(old.ChainIDs()[0]) != nil || b.cfg.Catalog.Chain(moved.ChainIDs()[0]) == nil {
		t.Error("chains are not those of the records")
	}
}

// One manifest in two registries: each reference is served from its own.
func TestManifestKeepsToItsRegistry(t *testing.T) {
	other := registrytest.New(t)
	b := newBed(t, other)
	here, elsewhere := b.push("a", 1), pushTo(other, "b", image.Gzip, 1)
	if here.Digest != elsewhere.Digest {
		t.Fatal("two manifests")
	}
	img := b.pull(here)
	c := b.cfg.Catalog
	for range 10 {
		got := c.Manifest(b.ref(elsewhere.Ref), here.Digest)
		if got == nil || got.Ref != b.ref(elsewhere.Ref) || len(got.Layers) != 1 {
			t.Fatalf("%+v", got)
		}
		if img.Ref != b.ref(here.Ref) {
			t.Fatal("the record was changed")
		}
	}
	b.pull(elsewhere)
	for range 10 { // whatever the order of a map is
		for _, ref := range []image.Reference{b.ref(here.Ref), b.ref(elsewhere.Ref)} {
			if got := c.Manifest(ref, here.Digest); got == nil || got.Ref != ref {
				t.Fatalf("%s: %+v", ref, got)
			}
		}
	}
	if c.Manifest(img.Ref, img.ConfigD.Digest) != nil {
		t.Error("a manifest that nobody resolved is known")
	}
}

func TestSweepSparesWhatWasJustAskedFor(t *testing.T) {
	b := newBed(t)
	img := b.pull(b.push("a", 1))
	c := b.cfg.Catalog
	gone := func(*image.Image) bool { return true }
	b.must(c.Sweep(gone))
	c.backdate()
	if c.Get(img.Ref) == nil { // which asks for it
		t.Fatal("a new record was swept")
	}
	b.must(c.Sweep(gone))
	if c.Get(img.Ref) == nil {
		t.Fatal("a record that was asked for was swept")
	}
	c.backdate()
	b.must(c.Sweep(gone))
	if c.Get(img.Ref) != nil || c.Chain(img.ChainIDs()[0]) != nil || reopen(t, c).Get(img.Ref) != nil {
		t.Error("a record that nobody asks for stays")
	}
}

// What is put soon is known at once, and recorded; what was forgotten meanwhile is not.
func TestCatalogPutSoon(t *testing.T) {
	b := newBed(t)
	img := b.pull(b.push("app", 1))
	dir := t.TempDir()
	c, err := OpenCatalog(dir, nil)
	b.must(err)
	wait := c.PutSoon(img)
	if c.Get(img.Ref) != img || c.Chain(img.ChainIDs()[0]) == nil {
		t.Error("it is not known")
	}
	b.must(wait())
	b.must(c.PutSoon(img)())
	again, err := OpenCatalog(dir, nil)
	b.must(err)
	if again.Get(img.Ref) == nil {
		t.Error("it was not recorded")
	}
	c.writing.Lock()
	b.must(c.Forget(img.Ref))
	wait = c.PutSoon(img)
	b.must(c.Forget(img.Ref))
	c.writing.Unlock()
	b.must(wait())
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("recorded though forgotten: %v, %v", left, err)
	}
}
