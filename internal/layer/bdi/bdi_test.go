package bdi

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"dewpoint/testkit/mounttest"
	"dewpoint/testkit/treetest"
)

func TestMain(m *testing.M) { mounttest.Main(m) }

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// newMount returns a directory, and what mounts an EROFS image there.
func newMount(t *testing.T) (target string, mount func() error) {
	t.Helper()
	var a treetest.Archive
	a.File("file", "body")
	f, err := mounttest.Layer(t.TempDir(), mounttest.File(t, a.Bytes()), false)
	check(t, err)
	target = t.TempDir()
	t.Cleanup(func() { unix.Unmount(target, unix.MNT_DETACH) })
	return target, func() error { return unix.Mount(f.Index, target, "erofs", unix.MS_RDONLY, "device="+f.Data) }
}

// of is Of the mount at target.
func of(t *testing.T, target string) string {
	t.Helper()
	root, err := os.Open(target)
	check(t, err)
	defer root.Close()
	name, err := Of(root)
	check(t, err)
	return name
}

func readAhead(t *testing.T, name string) int {
	t.Helper()
	kib, err := ReadAhead(name)
	check(t, err)
	return kib
}

// The kernel tells a mount's device: that of another process's mount of the
// same moment is left alone.
func TestWithoutReadAhead(t *testing.T) {
	other, mountOther := newMount(t)
	target, mount := newMount(t)
	names, err := Without(target, func() error { return errors.Join(mountOther(), mount()) })
	check(t, err)
	if want := []string{of(t, target)}; !slices.Equal(names, want) {
		t.Errorf("%q, the mount has %q", names, want)
	}
	if n := readAhead(t, of(t, target)); n != 0 {
		t.Errorf("%d KiB are read ahead", n)
	}
	if n := readAhead(t, of(t, other)); n == 0 {
		t.Error("the other mount has lost its read-ahead")
	}
	check(t, SetReadAhead(names[0], 64))
	if n := readAhead(t, names[0]); n != 64 {
		t.Errorf("%d KiB are read ahead, not 64", n)
	}
}

// Where the kernel does not tell, the mount's device is among those that came.
func TestWithoutReadAheadOlderKernel(t *testing.T) {
	before, mountBefore := newMount(t)
	check(t, mountBefore())
	target, mount := newMount(t)
	names, err := without(mount, func() (string, error) { return "", unix.ENOTTY })
	check(t, err)
	if !slices.Contains(names, of(t, target)) || slices.Contains(names, of(t, before)) {
		t.Errorf("%q, the mount has %q", names, of(t, target))
	}
	if n := readAhead(t, of(t, target)); n != 0 {
		t.Errorf("%d KiB are read ahead", n)
	}
}

func TestFailures(t *testing.T) {
	if _, err := Without(t.TempDir(), func() error { return unix.EPERM }); !errors.Is(err, unix.EPERM) {
		t.Errorf("a mount that is refused: %v", err)
	}
	untold := func() (string, error) { return "", unix.ENOTTY }
	if names, err := without(func() error { return nil }, untold); err == nil {
		t.Errorf("nothing was mounted, and found is %q", names)
	}
	for _, name := range []string{"erofs-none", "..", "", filepath.Join("..", "..", "none")} {
		if err := SetReadAhead(name, 0); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("set of %q: %v", name, err)
		}
		if _, err := ReadAhead(name); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("read of %q: %v", name, err)
		}
	}
}
