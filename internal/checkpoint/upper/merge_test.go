package upper_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"dewpoint/internal/checkpoint/upper"
	"dewpoint/testkit/mounttest"
	"dewpoint/testkit/treetest"
)

// again is a writable overlay over a saved layer over an image's.
func again(t *testing.T, image string, saved []byte) (layer, merged, up string) {
	t.Helper()
	dir := t.TempDir()
	var lowers []string
	for i, file := range []string{mounttest.File(t, saved), image} {
		at := filepath.Join(dir, []string{"saved", "image"}[i])
		f, err := mounttest.Layer(at+".layer", file, true)
		if err != nil {
			t.Fatal(err)
		}
		mounttest.Mounted(t, mounttest.Backends(t)[0], f, at)
		lowers = append(lowers, at)
	}
	merged, up = overlay(t, dir, lowers[0]+":"+lowers[1])
	return lowers[0], merged, up
}

// TestMerged changes what a container that stands on a saved layer shows, in every way, and finds the
// same tree when one layer of both lies on the image's.
func TestMerged(t *testing.T) {
	m, up, image := overlaid(t, below())
	change(t, m)
	first := written(t, up)
	layer, merged, up := again(t, image, first)
	changeMore(t, merged)
	want, err := treetest.Snapshot(merged)
	if err != nil {
		t.Fatal(err)
	}
	top := written(t, up)
	var both bytes.Buffer
	info, err := upper.Merge(context.Background(), &both, layer, bytes.NewReader(top))
	if err != nil || info.Entries < 15 || info.Bytes == 0 {
		t.Fatalf("the tar has %+v, %v", info, err)
	}
	if both.Len() > len(top)+len(first) {
		t.Errorf("holes take room: %d bytes of %d and %d", both.Len(), len(first), len(top))
	}
	// overlayfs counts a name that was removed, and of directories that are merged none.
	mounttest.Matches(t, []string{image, mounttest.File(t, both.Bytes())}, want, func(path, field string) bool {
		return path == "second" && (field == "nlink" || field == "same") || path == "var/cache" && field == "nlink"
	})
}

func written(t *testing.T, up string) []byte {
	t.Helper()
	var b bytes.Buffer
	if _, err := upper.Write(context.Background(), &b, up); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// changeMore changes what change has made, and what it has left of the image.
func changeMore(t *testing.T, root string) {
	t.Helper()
	at := func(p string) string { return filepath.Join(root, p) }
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(os.WriteFile(at("etc/one"), []byte("again"), 0o600)) // changed twice
	must(os.WriteFile(at("etc/gone"), []byte("is back"), 0o600))
	must(os.Mkdir(at("opt/old"), 0o700)) // was removed
	must(os.WriteFile(at("opt/old/y"), []byte("y"), 0o600))
	must(os.Remove(at("now-a-file"))) // was a directory of the image's
	must(os.Mkdir(at("now-a-file"), 0o755))
	must(os.RemoveAll(at("now-a-dir"))) // its file y has a second name
	must(os.WriteFile(at("now-a-dir"), []byte("a file again"), 0o600))
	must(os.WriteFile(at("var/cache/d"), []byte("d"), 0o600)) // in an opaque directory
	must(os.Remove(at("link")))
	must(os.RemoveAll(at("run"))) // an attribute and a mode of its own
	must(os.Mkdir(at("run"), 0o755))
	must(os.Chmod(at("db"), 0o640)) // holes
	must(os.Chmod(at("opt"), 0o711))
}

func TestMergeErrors(t *testing.T) {
	_, up, _ := overlaid(t, below())
	top := written(t, up)
	under := t.TempDir()
	if err := os.WriteFile(filepath.Join(under, "x"), make([]byte, 4096), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, room := range []int{0, 2000, 5200} {
		if _, err := upper.Merge(context.Background(), &full{room}, under, bytes.NewReader(top)); !errors.Is(err,
			syscall.ENOSPC) {
			t.Errorf("a full disk after %d bytes: %v", room, err)
		}
	}
	if _, err := upper.Merge(context.Background(), io.Discard, filepath.Join(under, "none"),
		bytes.NewReader(top)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no directory: %v", err)
	}
	cut := append(make([]byte, 257), "ustar"...)
	if _, err := upper.Merge(context.Background(), io.Discard, under,
		bytes.NewReader(append(cut, make([]byte, 4096)...))); err == nil {
		t.Error("what is no tar is merged")
	}
}
