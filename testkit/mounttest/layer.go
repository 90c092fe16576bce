// Package mounttest stacks layers in every way that package mount knows, and
// compares what the kernel shows with the tree that containerd's own applier
// makes of the same layers. It is for tests, which must run as root, best in a
// mount namespace of their own (see Main).
package mounttest

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"dewpoint/internal/layer/erofs"
	"dewpoint/internal/layer/mount"
	"dewpoint/internal/layer/toc"
	"dewpoint/internal/layer/tree"
)

// Layer makes the layer whose tar is the file data ready for every backend:
// its index and, if unpack is set, its tree, in the new directory dir.
func Layer(dir, data string, unpack bool) (mount.Files, error) {
	f := mount.Files{Index: filepath.Join(dir, "index"), Data: data, Tree: filepath.Join(dir, "tree")}
	if err := os.MkdirAll(f.Tree, 0o755); err != nil {
		return f, err
	}
	tar, err := os.Open(data)
	if err != nil {
		return f, err
	}
	defer tar.Close()
	table, err := toc.Read(tar)
	if err != nil {
		return f, err
	}
	if err := writeIndex(f.Index, table, tar); err != nil || !unpack {
		return f, err
	}
	return f, Unpack(f.Tree, table, tar)
}

func writeIndex(path string, table *toc.TOC, tar *os.File) error {
	st, err := tar.Stat()
	if err != nil {
		return err
	}
	out, err := os.Create(path)
	if err != nil {
		return err
	}
	w := bufio.NewWriter(out)
	err = erofs.Build(w, table, erofs.Options{DataSize: st.Size(), Data: tar})
	return errors.Join(err, w.Flush(), out.Close())
}

// Unpack makes the tree of a layer in the existing directory dir. It is not
// synced to disk.
func Unpack(dir string, table *toc.TOC, data io.ReaderAt) error {
	x, err := tree.New(dir, data)
	if err != nil {
		return err
	}
	defer x.Close()
	for _, e := range table.Entries {
		if err := x.Add(e); err != nil {
			return err
		}
	}
	return x.Seal()
}

// Mounted mounts a layer by b on the new directory target for the test's duration.
func Mounted(t testing.TB, b mount.Backend, f mount.Files, target string) {
	t.Helper()
	if err := os.MkdirAll(target, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := b.Mount(context.Background(), f, target); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Unmount(target); err != nil {
			t.Error(err)
		}
	})
}

// Overlay stacks the directories lower, bottom first, read-only, for the
// test's duration, and returns where. Overlayfs numbers the inodes of all
// layers as those of one file system (xino).
func Overlay(t testing.TB, lower []string) string {
	t.Helper()
	merged := t.TempDir()
	names := make([]string, 0, len(lower)+1)
	for i := len(lower) - 1; i >= 0; i-- {
		names = append(names, lower[i])
	}
	if len(names) == 1 {
		names = append(names, t.TempDir()) // overlayfs wants two
	}
	options := "xino=on,lowerdir=" + strings.Join(names, ":")
	if len(options) >= os.Getpagesize() {
		t.Fatalf("overlay of %d layers: options of %d bytes, which the kernel would cut short unasked", len(lower),
			len(options))
	}
	if err := unix.Mount("overlay", merged, "overlay", unix.MS_RDONLY, options); err != nil {
		t.Fatalf("overlay of %d layers: %v", len(lower), err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(merged, 0); err != nil {
			t.Errorf("unmount %s: %v", merged, err)
		}
	})
	return merged
}

// Memory returns a new directory for many small files: in memory where tmpfs
// takes all attributes (Linux 6.6 and newer).
func Memory(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "dewpoint-")
	if err != nil || unix.Setxattr(dir, "user.dewpoint", []byte("1"), 0) != nil {
		os.Remove(dir)
		return t.TempDir()
	}
	unix.Removexattr(dir, "user.dewpoint")
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// File writes data to a new file on disk and returns its name.
func File(t testing.TB, data []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "data")
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// short returns a new directory with a short name: a stack's options must fit a page.
func short(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "d")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func name(i int) string { return fmt.Sprint(i) }
