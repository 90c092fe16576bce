package snapshot_test

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/containerd/containerd/v2/core/snapshots"
)

// A container in a user namespace sees files of the image as its own, and
// nothing is copied up for it.
func TestUserNamespace(t *testing.T) { onEach(t, userNamespace) }

func userNamespace(b *bed) {
	t := b.t
	mapped := snapshots.WithLabels(map[string]string{
		snapshots.LabelSnapshotUIDMapping: "0:100000:65536",
		snapshots.LabelSnapshotGIDMapping: "0:200000:65536",
	})
	top := b.pull(b.layer("a", "x"), b.layer("b", "y"))
	dir := b.mount(b.prepare("c", top, mapped))
	defer b.unmount(dir)
	for _, path := range []string{dir, filepath.Join(dir, "a"), filepath.Join(dir, "b")} {
		fi, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		if st := fi.Sys().(*syscall.Stat_t); st.Uid != 100000 || st.Gid != 200000 {
			t.Errorf("%s belongs to %d:%d", path, st.Uid, st.Gid)
		}
	}
	upper, err := b.Upper(background, "c")
	if err != nil {
		t.Fatal(err)
	}
	if copied, err := os.ReadDir(upper); err != nil || len(copied) != 0 {
		t.Errorf("copied up: %v, %v", copied, err)
	}
}

func TestBadMapping(t *testing.T) {
	b := newBed(t)
	for _, m := range []string{"0:1", "a:b:c", "1:1:1", "0:-1:5", ""} {
		labels := map[string]string{snapshots.LabelSnapshotUIDMapping: m, snapshots.LabelSnapshotGIDMapping: m}
		_, err := b.Prepare(background, "c"+m, "", snapshots.WithLabels(labels))
		if (err == nil) != (m == "") {
			t.Errorf("mapping %q: %v", m, err)
		}
		if _, err := b.Stat(background, "c"+m); err == nil && m != "" {
			t.Errorf("mapping %q left a snapshot", m)
		}
	}
}

// containerd 1.x, or one that was not told of remap-ids, changes the owners
// itself and stands the container on the result.
func TestRemappedByContainerd(t *testing.T) {
	b := newBed(t)
	top := b.pull(b.layer("a", "x"), b.layer("b", "y"))
	dir := b.mount(b.prepare("remap", top))
	for _, path := range []string{dir, filepath.Join(dir, "a"), filepath.Join(dir, "b")} {
		if err := os.Lchown(path, 100000, 200000); err != nil {
			t.Fatal(err)
		}
	}
	b.unmount(dir)
	b.commit("remapped", "remap")
	m := b.prepare("c", "remapped", snapshots.WithLabels(map[string]string{
		snapshots.LabelSnapshotUIDMapping: "0:100000:65536",
		snapshots.LabelSnapshotGIDMapping: "0:200000:65536",
	}))
	for _, o := range m[0].Options {
		if strings.Contains(o, "map=") {
			t.Errorf("%s: mapped twice", o)
		}
	}
	dir = b.mount(m)
	defer b.unmount(dir)
	for _, path := range []string{dir, filepath.Join(dir, "a")} {
		fi, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		if st := fi.Sys().(*syscall.Stat_t); st.Uid != 100000 || st.Gid != 200000 {
			t.Errorf("%s belongs to %d:%d", path, st.Uid, st.Gid)
		}
	}
}
