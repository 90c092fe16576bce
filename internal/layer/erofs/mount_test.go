package erofs_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/containerd/containerd/v2/pkg/archive"
	"golang.org/x/sys/unix"

	"dewpoint/internal/layer/erofs"
	"dewpoint/internal/layer/toc"
	"dewpoint/testkit"
	"dewpoint/testkit/treetest"
)

// mounted makes the index of the tar in the file data and mounts the pair.
func mounted(t *testing.T, data string) string {
	t.Helper()
	testkit.NeedRoot(t, "it mounts a file system")
	f, err := os.Open(data)
	check(t, err)
	defer f.Close()
	st, err := f.Stat()
	check(t, err)
	list, err := toc.Read(f)
	check(t, err)
	var index bytes.Buffer
	check(t, erofs.Build(&index, list, erofs.Options{UUID: erofs.UUID(data), DataSize: st.Size(), Data: f}))
	check(t, os.WriteFile(data+".index", index.Bytes(), 0o600))
	return mountPair(t, data+".index", data)
}

func mountPair(t *testing.T, index, data string) string {
	t.Helper()
	target := t.TempDir()
	check(t, unix.Mount(index, target, "erofs", unix.MS_RDONLY, "device="+data))
	t.Cleanup(func() { check(t, unix.Unmount(target, 0)) })
	return target
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func writeTar(t *testing.T, tar []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "data")
	check(t, os.WriteFile(path, tar, 0o600))
	return path
}

// applied unpacks a tar as containerd does under its overlayfs snapshotter.
func applied(t *testing.T, tar []byte) string {
	t.Helper()
	dir := t.TempDir()
	_, err := archive.Apply(context.Background(), dir, bytes.NewReader(tar),
		archive.WithConvertWhiteout(archive.OverlayConvertWhiteout))
	check(t, err)
	return dir
}

func snapshot(t *testing.T, root string) treetest.Tree {
	t.Helper()
	s, err := treetest.Snapshot(root)
	check(t, err)
	return s
}

// The layer alone, as mounted, is what containerd's applier makes of it.
func TestLayerAgainstContainerd(t *testing.T) {
	testkit.Long(t)
	for _, c := range treetest.Cases() {
		t.Run(c.Name, func(t *testing.T) {
			same := c.Tar
			if c.Own != "" {
				same = c.Same
			}
			got := snapshot(t, mounted(t, writeTar(t, c.Tar)))
			want := snapshot(t, applied(t, same))
			for _, d := range treetest.Diff(want, got, c.Skip(want)) {
				t.Error(d)
			}
		})
	}
}

// The layer over another one, merged by overlayfs.
func TestMergedAgainstContainerd(t *testing.T) {
	for _, c := range treetest.Cases() {
		if c.Lower == nil {
			continue
		}
		t.Run(c.Name, func(t *testing.T) {
			same := c.Tar
			if c.Own != "" {
				same = c.Same
			}
			got := snapshot(t, overlay(t, mounted(t, writeTar(t, c.Tar)), mounted(t, writeTar(t, c.Lower))))
			want := snapshot(t, overlay(t, applied(t, same), applied(t, c.Lower)))
			for _, d := range treetest.Diff(want, got, c.Skip(want)) {
				t.Error(d)
			}
		})
	}
}

func overlay(t *testing.T, upper, lower string) string {
	t.Helper()
	target := t.TempDir()
	check(t, unix.Mount("overlay", target, "overlay", unix.MS_RDONLY,
		fmt.Sprintf("lowerdir=%s:%s", upper, lower)))
	t.Cleanup(func() { check(t, unix.Unmount(target, 0)) })
	return target
}
