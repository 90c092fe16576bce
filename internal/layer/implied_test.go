package layer_test

import (
	"archive/tar"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"dewpoint/internal/image"
	"dewpoint/internal/layer"
	"dewpoint/testkit/treetest"
)

// TestImplied has directories that are described before, after and never,
// that are replaced, and whose names are no text.
func TestImplied(t *testing.T) {
	var a treetest.Archive
	a.File("tmp/x", "1").Dir("before").File("before/x", "2").File("after/x", "3").Dir("after")
	a.File("gone/deep/x", "4").File("gone", "a file").File("n\xff\\\"\n/in/x", "5").File("é/.wh..wh..opq",
		"").File("w/.wh.x", "")
	a.Add(tar.Header{Name: "link", Typeflag: tar.TypeSymlink, Linkname: "tmp"}, "")
	want := []string{"n\xff\\\"\n", "n\xff\\\"\n/in", "tmp", "w", "é"}
	s := pack(t, a.Bytes(), image.Gzip)
	for _, cfg := range []layer.Config{{}, {Tree: true}} {
		t.Run(fmt.Sprintf("tree %v", cfg.Tree), func(t *testing.T) {
			dir := t.TempDir()
			store := open(t, dir, cfg)
			l := mustComplete(t, store, s.layer, &source{blob: s.blob})
			check := func(when string) {
				t.Helper()
				got := slices.Sorted(slices.Values(l.Files().Implied))
				if !slices.Equal(got, want) {
					t.Errorf("%s: %q, want %q", when, got, want)
				}
			}
			check("filled")
			store.Close()
			store = open(t, dir, cfg)
			defer store.Close()
			var err error
			if l, err = store.Get(s.layer.DiffID); err != nil {
				t.Fatal(err)
			}
			check("opened")
		})
	}
}

// Records of layers without such directories have no word of them, as those
// that were written before the word was known.
func TestNoneImplied(t *testing.T) {
	var a treetest.Archive
	s := pack(t, a.Dir("d").File("d/x", "1").Bytes(), image.Gzip)
	dir := t.TempDir()
	store := open(t, dir, layer.Config{})
	mustComplete(t, store, s.layer, &source{blob: s.blob})
	store.Close()
	b, err := os.ReadFile(filepath.Join(dir, s.layer.DiffID.Encoded(), "layer.json"))
	if err != nil || strings.Contains(string(b), "implied") {
		t.Errorf("%s, %v", b, err)
	}
	store = open(t, dir, layer.Config{})
	defer store.Close()
	if l, err := store.Get(s.layer.DiffID); err != nil || l.Files().Implied != nil {
		t.Errorf("%v, %v", l, err)
	}
}
