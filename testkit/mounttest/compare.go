package mounttest

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/containerd/containerd/v2/pkg/archive"

	"dewpoint/internal/layer/mount"
	"dewpoint/internal/layer/toc"
	"dewpoint/internal/spec"
	"dewpoint/testkit/treetest"
)

// Backends are all that there are, made without asking whether they work here.
func Backends(t testing.TB) []mount.Backend {
	t.Helper()
	var all []mount.Backend
	for _, name := range spec.Mounts {
		b, err := mount.New(name)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, b)
	}
	return all
}

// Compare checks that a stack of layers, given as the names of tar files,
// bottom first, is the same tree under overlayfs whichever backend mounts it
// and when containerd's applier unpacks it. Left out are the root's attributes,
// which containerd takes from no layer, and the times of directories that a
// layer does not describe, which containerd makes anew.
func Compare(t *testing.T, layers []string) {
	t.Helper()
	implied := map[string]bool{}
	for _, l := range layers {
		for _, path := range impliedBy(t, l) {
			implied[path] = true
		}
	}
	skip := func(path, field string) bool { return path == "." || field == "mtime" && implied[path] }
	Matches(t, layers, Applied(t, layers), skip)
}

func impliedBy(t testing.TB, layer string) []string {
	t.Helper()
	data, err := os.Open(layer)
	if err != nil {
		t.Fatal(err)
	}
	defer data.Close()
	table, err := toc.Read(data)
	if err != nil {
		t.Fatal(err)
	}
	whole, err := table.Tree()
	if err != nil {
		t.Fatal(err)
	}
	return whole.Implied()
}

// Matches checks that every backend shows the stack of layers as the tree want.
// Fields that skip reports, if it is not nil, are not compared.
func Matches(t *testing.T, layers []string, want treetest.Tree, skip func(path, field string) bool) {
	t.Helper()
	files := make([]mount.Files, len(layers))
	dir := Memory(t)
	for i, l := range layers {
		f, err := Layer(filepath.Join(dir, name(i)), l, true)
		if err != nil {
			t.Fatalf("layer %d, %s: %v", i, l, err)
		}
		f.Index = onDisk(t, f.Index)
		files[i] = f
	}
	for _, b := range Backends(t) {
		t.Run(b.Name(), func(t *testing.T) {
			for _, d := range treetest.Diff(want, Stacked(t, b, files), skip) {
				t.Error(d)
			}
		})
	}
}

// onDisk copies a file out of the memory file system, which EROFS does not read from.
func onDisk(t testing.TB, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return File(t, b)
}

// Stacked is the tree that overlayfs shows of layers mounted by b, bottom first.
func Stacked(t testing.TB, b mount.Backend, files []mount.Files) treetest.Tree {
	t.Helper()
	dir := short(t)
	lower := make([]string, len(files))
	for i, f := range files {
		lower[i] = filepath.Join(dir, name(i))
		Mounted(t, b, f, lower[i])
	}
	return snapshot(t, Overlay(t, lower))
}

// Applied is the tree that overlayfs shows of layers which containerd's applier
// unpacked as for its overlay snapshotter: the lowest one into a plain
// directory, the others with whiteouts converted and missing parents copied.
func Applied(t testing.TB, layers []string) treetest.Tree {
	t.Helper()
	dir := Memory(t)
	var lower, above []string
	for i, l := range layers {
		root := filepath.Join(dir, name(i))
		if err := os.Mkdir(root, 0o755); err != nil {
			t.Fatal(err)
		}
		var opts []archive.ApplyOpt
		if i > 0 {
			opts = append(opts, archive.WithConvertWhiteout(archive.OverlayConvertWhiteout),
				archive.WithParents(above))
		}
		if err := apply(root, l, opts); err != nil {
			t.Fatalf("containerd's applier, layer %d, %s: %v", i, l, err)
		}
		lower = append(lower, root)
		above = append([]string{root}, above...)
	}
	return snapshot(t, Overlay(t, lower))
}

func apply(root, layer string, opts []archive.ApplyOpt) error {
	f, err := os.Open(layer)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = archive.Apply(context.Background(), root, f, opts...)
	return err
}

func snapshot(t testing.TB, dir string) treetest.Tree {
	t.Helper()
	s, err := treetest.Snapshot(dir)
	if err != nil {
		t.Fatal(err)
	}
	return s
}
