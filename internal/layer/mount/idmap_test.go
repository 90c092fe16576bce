package mount_test

import (
	"archive/tar"
	"fmt"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"dewpoint/internal/layer/mount"
	"dewpoint/testkit/mounttest"
	"dewpoint/testkit/treetest"
)

// TestIdmap stacks overlayfs on a layer whose owners are shifted.
func TestIdmap(t *testing.T) {
	var a treetest.Archive
	a.File("root", "r").Add(tar.Header{Name: "user", Uid: 7, Gid: 8},
		"u").Add(tar.Header{Name: "beyond", Uid: 70_000}, "b")
	each(t, func(t *testing.T, b mount.Backend) {
		layer, shifted := filepath.Join(t.TempDir(), "1"), t.TempDir()
		mounttest.Mounted(t, b, prepared(t, a.Bytes()), layer)
		if err := mount.Idmap(layer, shifted, "0:100000:65536", "0:200000:65536"); err != nil {
			t.Fatal(err)
		}
		defer mount.Unmount(shifted)
		merged := mounttest.Overlay(t, []string{shifted})
		for name, want := range map[string]string{"root": "100000:200000", "user": "100007:200008",
			"beyond": "65534:200000"} {
			var st unix.Stat_t
			if err := unix.Stat(filepath.Join(merged, name), &st); err != nil {
				t.Fatal(err)
			}
			if got := fmt.Sprintf("%d:%d", st.Uid, st.Gid); got != want {
				t.Errorf("%s belongs to %s, want %s", name, got, want)
			}
		}
		if got := content(t, filepath.Join(merged, "user")); got != "u" {
			t.Errorf("read %q", got)
		}
	})
	if err := mount.Idmap(t.TempDir(), t.TempDir(), "nonsense", "0:0:1"); err == nil {
		t.Error("a map that is none was taken")
	}
}
