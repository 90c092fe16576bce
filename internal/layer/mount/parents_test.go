package mount_test

import (
	"archive/tar"
	"bytes"
	"path/filepath"
	"testing"

	"dewpoint/internal/layer/mount"
	"dewpoint/internal/layer/toc"
	"dewpoint/internal/layer/tree"
	"dewpoint/testkit/mounttest"
	"dewpoint/testkit/treetest"
)

// TestParents has an upper layer with directories that only the layers below
// describe.
func TestParents(t *testing.T) {
	dir := func(a *treetest.Archive, name string, mode int64, uid int, xattr string) {
		a.Add(tar.Header{Name: name + "/", Typeflag: tar.TypeDir, Mode: mode, Uid: uid,
			PAXRecords: map[string]string{"SCHILY.xattr.user.x": xattr}}, "")
	}
	var bottom, middle, top treetest.Archive
	dir(&bottom, "a", 0o700, 5, "a")
	dir(&bottom, "a/b", 0o1777, 6, "b")
	dir(&bottom, "e", 0o711, 7, "e")
	dir(&bottom, "e/f", 0o2755, 8, "f")
	dir(&bottom, "gone", 0o700, 9, "g")
	dir(&middle, "a", 0o750, 10, "newer")
	middle.File("gone", "a file instead")
	top.File("a/b/new", "1").File("only/here", "2").File("gone/in", "3")
	dir(&top, "e", 0o755, 11, "top")
	top.File("e/f/new", "4")
	layers := [][]byte{bottom.Bytes(), middle.Bytes(), top.Bytes()}

	var names []string
	var files []mount.Files
	for _, l := range layers {
		names = append(names, mounttest.File(t, l))
		files = append(files, prepared(t, l))
	}
	want := mounttest.Applied(t, names)
	table, err := toc.Read(bytes.NewReader(layers[2]))
	if err != nil {
		t.Fatal(err)
	}
	whole, err := table.Tree()
	if err != nil {
		t.Fatal(err)
	}
	times := func(path, field string) bool { return path == "." || field == "mtime" }
	each(t, func(t *testing.T, b mount.Backend) {
		at, between := t.TempDir(), t.TempDir()
		targets := []string{filepath.Join(at, "1"), filepath.Join(at, "2"), filepath.Join(at, "3")}
		for i, target := range targets {
			mounttest.Mounted(t, b, files[i], target)
		}
		n, err := tree.Parents(between, targets[2], whole.Implied(), []string{targets[1], targets[0]})
		if err != nil || n != 3 {
			t.Fatalf("%d directories made, %v", n, err)
		}
		got, err := treetest.Snapshot(mounttest.Overlay(t, append(targets, between)))
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range treetest.Diff(want, got, times) {
			t.Error(d)
		}
	})
}
