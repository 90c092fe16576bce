package snapshot_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/snapshots"

	"dewpoint/internal/layer/mount"
	"dewpoint/internal/snapshot"
	"dewpoint/testkit/snapshottest"
)

func TestReboot(t *testing.T) { onEach(t, rebooted) }

func rebooted(b *bed) {
	t := b.t
	used, idle := b.layer("a", "used"), b.layer("a", "idle")
	top := b.pull(used)
	b.pull(idle)
	b.written("c", top, "b", "mine")
	b.reboot()
	if b.mounted() != 1 {
		t.Errorf("%d layers are mounted at start, want the one in use", b.mounted())
	}
	m, err := b.Mounts(background, "c")
	if err != nil {
		t.Fatal(err)
	}
	dir := b.mount(m)
	b.want(filepath.Join(dir, "a"), "used")
	b.want(filepath.Join(dir, "b"), "mine")
	b.unmount(dir)
	dir = b.mount(b.prepare("d", idle.String()))
	b.want(filepath.Join(dir, "a"), "idle")
	b.unmount(dir)
	if len(b.InUse()) != 2 {
		t.Errorf("in use: %v", b.InUse())
	}
}

// A restart of dewd alone finds its mounts and leaves them.
func TestRestartKeepsMounts(t *testing.T) {
	b := newBed(t)
	m := b.prepare("c", b.pull(b.layer("a", "x"), b.layer("b", "y")))
	dir := b.mount(m)
	before := mountTable(t, b.root())
	b.Close()
	b.open()
	again, err := b.Mounts(background, "c")
	if err != nil || again[0].Options[2] != m[0].Options[2] {
		t.Errorf("%v, %v; want %v", again, err, m)
	}
	if after := mountTable(t, b.root()); after != before {
		t.Errorf("mounts were\n%sand are\n%s", before, after)
	}
	b.want(filepath.Join(dir, "a"), "x")
	b.unmount(dir)
}

// What dewd may leave when it is killed between two steps.
func TestLeftovers(t *testing.T) {
	b := newBed(t)
	id := b.layer("a", "x")
	b.pull(id)
	b.Close()
	stray := filepath.Join(b.root(), "m", "2")
	orphan := filepath.Join(b.root(), "snapshots", "77", "fs", "dir")
	for _, dir := range []string{stray, orphan} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	f, err := b.store.Files(id)
	if err == nil {
		err = b.backend.Mount(background, f, stray)
	}
	if err != nil {
		t.Fatal(err)
	}
	b.open()
	for _, dir := range []string{stray, filepath.Join(b.root(), "snapshots", "77")} {
		if _, err := os.Stat(dir); !os.IsNotExist(err) {
			t.Errorf("%s: %v, want it gone", dir, err)
		}
	}
	other := b.layer("a", "other")
	dir := b.mount(b.prepare("c", b.pull(other)))
	b.want(filepath.Join(dir, "a"), "other")
	b.unmount(dir)
}

// The directory of an id that was used in a transaction that never ended.
func TestReusedID(t *testing.T) {
	b := newBed(t)
	if err := os.MkdirAll(filepath.Join(b.root(), "snapshots", "1", "fs", "old"), 0o700); err != nil {
		t.Fatal(err)
	}
	m := b.prepare("c", "")
	if left, err := os.ReadDir(m[0].Source); err != nil || len(left) != 0 {
		t.Errorf("%v, %v", left, err)
	}
}

func TestMissingLayerSaysSo(t *testing.T) {
	b := newBed(t)
	id := b.layer("a", "x")
	b.prepare("c", b.pull(id))
	b.shut()
	if err := b.store.Forget(id); err != nil {
		t.Fatal(err)
	}
	b.open()
	if _, err := b.Mounts(background, "c"); !errors.Is(err, snapshot.ErrNotHere) {
		t.Errorf("mounts: %v", err)
	}
	if _, err := b.Prepare(background, "d", id.String()); !errors.Is(err, snapshot.ErrNotHere) {
		t.Errorf("prepare: %v", err)
	}
	if _, err := b.Stat(background, "d"); err == nil {
		t.Error("a snapshot that cannot be mounted stays")
	}
}

func TestSecondProcess(t *testing.T) {
	b := newBed(t)
	_, err := snapshot.New(background, snapshot.Config{
		Root: b.root(), Layers: b.store, Backend: b.backend, LockWait: 50 * time.Millisecond,
	})
	if !errors.Is(err, snapshot.ErrInUse) {
		t.Errorf("second snapshotter: %v", err)
	}
}

func TestLabelsOfImageLayersStay(t *testing.T) {
	b := newBed(t)
	id := b.layer("a", "x")
	top := b.pull(id)
	info, err := b.Update(background, snapshots.Info{Name: top, Labels: map[string]string{
		"mine": "1", snapshot.LabelLayer: "sha256:forged",
	}})
	if err != nil || info.Labels[snapshot.LabelLayer] != id.String() || info.Labels["mine"] != "1" {
		t.Errorf("%v, %v", info, err)
	}
	if _, err := b.Update(background, info, "labels."+snapshot.LabelLayer); err == nil {
		t.Error("the label of an image layer was changed")
	}
	b.prepare("forged", "", snapshots.WithLabels(map[string]string{snapshot.LabelLayer: id.String()}))
	info, err = b.Stat(background, "forged")
	if err != nil || info.Labels[snapshot.LabelLayer] != "" {
		t.Errorf("%v, %v", info, err)
	}
	b.reboot()
	if !b.InUse()[id] {
		t.Error("the layer was lost")
	}
}

// A mount that cannot be undone now is undone later, and its number is not
// given to another layer meanwhile.
func TestBusyMount(t *testing.T) {
	b := newBed(t)
	top := b.pull(b.layer("a", "x"))
	b.backend.FailUnmount(syscall.EBUSY)
	if err := b.Remove(background, top); err != nil {
		t.Fatal(err)
	}
	if b.mounted() != 1 || len(b.InUse()) != 0 {
		t.Errorf("%d mounts, in use %v", b.mounted(), b.InUse())
	}
	dir := b.mount(b.prepare("c", b.pull(b.layer("a", "other"))))
	b.want(filepath.Join(dir, "a"), "other")
	b.unmount(dir)
	b.backend.FailUnmount(nil)
	if err := b.Cleanup(background); err != nil {
		t.Error(err)
	}
	under, err := snapshottest.MountsUnder(filepath.Join(b.root(), "m"))
	if err != nil || len(under) != 1 || filepath.Base(under[0]) != "2" {
		t.Errorf("%v, %v", under, err)
	}
}

// Somebody unmounts a layer behind our back.
func TestLostMountComesBack(t *testing.T) {
	b := newBed(t)
	top := b.pull(b.layer("a", "x"))
	if err := snapshottest.UnmountAll(b.root()); err != nil {
		t.Fatal(err)
	}
	dir := b.mount(b.prepare("c", top))
	defer b.unmount(dir)
	b.want(filepath.Join(dir, "a"), "x")
}

// mountTable is what the kernel says of the mounts below a directory, with
// their ids.
func mountTable(t *testing.T, dir string) string {
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	for line := range strings.Lines(string(text)) {
		if strings.Contains(line, " "+dir+"/") {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines, "")
}

// Where a layer is being mounted anew, cleaning up leaves it alone; what an
// earlier process has left there goes.
func TestCleanupBesideMountingAnew(t *testing.T) {
	b := newBed(t)
	aside := filepath.Join(b.root(), "m", mount.AsidePrefix+"1")
	if err := os.Mkdir(aside, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := b.Cleanup(background); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(aside); err != nil {
		t.Errorf("the mount point of a layer went: %v", err)
	}
	b.Close()
	b.open()
	if _, err := os.Stat(aside); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("what another process left stays: %v", err)
	}
}
