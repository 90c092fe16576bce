package upper_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"dewpoint/internal/checkpoint/upper"
	"dewpoint/testkit/mounttest"
	"dewpoint/testkit/treetest"
)

func TestMain(m *testing.M) { mounttest.Main(m) }

// overlaid is a writable overlay over a layer, as a container has it.
func overlaid(t *testing.T, layer []byte) (merged, up, tarFile string) {
	t.Helper()
	dir := t.TempDir()
	tarFile = mounttest.File(t, layer)
	b := mounttest.Backends(t)[0]
	f, err := mounttest.Layer(filepath.Join(dir, "layer"), tarFile, true)
	if err != nil {
		t.Fatal(err)
	}
	lower := filepath.Join(dir, "lower")
	mounttest.Mounted(t, b, f, lower)
	merged, up = overlay(t, dir, lower)
	return merged, up, tarFile
}

// overlay mounts a writable overlay below dir over directories, the top one first.
func overlay(t *testing.T, dir, lowers string) (merged, up string) {
	t.Helper()
	merged, up = filepath.Join(dir, "merged"), filepath.Join(dir, "up")
	for _, d := range []string{merged, up, filepath.Join(dir, "work")} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Mount("overlay", merged, "overlay", 0,
		"index=off,lowerdir="+lowers+",upperdir="+up+",workdir="+filepath.Join(dir, "work")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(merged, 0); err != nil {
			t.Error(err)
		}
	})
	return merged, up
}

func below() []byte {
	var a treetest.Archive
	a.Dir("etc").File("etc/one", "below").File("etc/gone", "x").Dir("var").Dir("var/cache").File("var/cache/a",
		"a").File("var/cache/b", "b").
		Dir("opt").Dir("opt/old").File("opt/old/x", "x").File("now-a-dir",
		"file").Dir("now-a-file").File("now-a-file/x", "x").Symlink("lib", "usr/lib")
	return a.Bytes()
}

// TestSameTree changes a container's files in every way and finds the same
// tree when the writable directory's layer lies on the image's.
func TestSameTree(t *testing.T) {
	merged, up, layer := overlaid(t, below())
	change(t, merged)
	want, err := treetest.Snapshot(merged)
	if err != nil {
		t.Fatal(err)
	}
	delete(want, "run/socket")
	var b bytes.Buffer
	info, err := upper.Write(context.Background(), &b, up)
	if err != nil {
		t.Fatal(err)
	}
	if info.Entries < 15 || info.Bytes == 0 {
		t.Errorf("the tar has %+v", info)
	}
	if b.Len() > 3<<20 {
		t.Errorf("holes take room: %d bytes", b.Len())
	}
	mounttest.Matches(t, []string{layer, mounttest.File(t, b.Bytes())}, want, nil)

	var again bytes.Buffer
	if _, err := upper.Write(context.Background(), &again, up); err != nil ||
		!bytes.Equal(b.Bytes(), again.Bytes()) {
		t.Errorf("a second tar of the same differs (%v)", err)
	}
}

func change(t *testing.T, root string) {
	t.Helper()
	at := func(p string) string { return filepath.Join(root, p) }
	noise := make([]byte, 300<<10)
	rand.Read(noise)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(os.WriteFile(at("etc/one"), []byte("above"), 0o640))
	must(os.Remove(at("etc/gone")))
	must(os.RemoveAll(at("var/cache")))
	must(os.Mkdir(at("var/cache"), 0o700)) // opaque
	must(os.WriteFile(at("var/cache/c"), noise, 0o600))
	must(os.RemoveAll(at("opt/old")))
	must(os.Remove(at("now-a-dir")))
	must(os.Mkdir(at("now-a-dir"), 0o755))
	must(os.WriteFile(at("now-a-dir/y"), []byte("y"), 0o644))
	must(os.RemoveAll(at("now-a-file")))
	must(os.WriteFile(at("now-a-file"), nil, 0o644))
	must(os.Link(at("now-a-dir/y"), at("second")))
	must(os.Symlink("/nowhere/"+strings.Repeat("long/", 40), at("link")))
	must(unix.Mkfifo(at("fifo"), 0o600))
	must(unix.Mknod(at("null"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
	must(os.Mkdir(at("run"), 0o1777))
	must(os.Chmod(at("run"), 0o1777|os.ModeSticky))
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: at("run/socket")})
	must(err)
	l.SetUnlinkOnClose(false)
	must(l.Close())
	must(unix.Setxattr(at("etc/one"), "user.note", []byte("a\x00b=\n"), 0))
	must(unix.Setxattr(at("run"), "user.note", []byte("dir"), 0))
	must(os.Lchown(at("link"), 1234, 70000))
	must(unix.UtimesNanoAt(unix.AT_FDCWD, at("second"),
		[]unix.Timespec{{Sec: 1, Nsec: 5}, {Sec: 1_600_000_000, Nsec: 123_456_789}}, unix.AT_SYMLINK_NOFOLLOW))
	must(os.WriteFile(at("/"+strings.Repeat("n", 200)), []byte("long name"), 0o644))
	sparse(t, at("db"), noise, 0, 40<<20, 64<<20)
	sparse(t, at("tail"), nil, 0, 0, 8<<20)
	sparse(t, at("head"), noise, 1<<20, 5<<20+4096*3, 5<<20+4096*3)
	// zeros that were written
	must(os.WriteFile(at("ahead"),
		slices.Concat(make([]byte, 9<<20), noise, make([]byte, 20<<20+5), noise[:100]), 0o600))
	must(os.WriteFile(at("zeros"), make([]byte, 3<<20+1), 0o600))
	must(unix.Setxattr(at("db"), "user.kind", []byte("sparse"), 0))
	must(os.Chown(at("db"), 99, 100))
}

// A file with more runs of zeros than a map has room for keeps its holes, and one with more holes is whole.
func TestManySpans(t *testing.T) {
	// bytes that are written at most
	for most, less := range map[int]int{100: 2 << 20, 5: 6 << 20, 1: 60 << 20} {
		back := upper.SetMaxSpans(most)
		merged, up, layer := overlaid(t, below())
		f, err := os.Create(filepath.Join(merged, "db"))
		if err != nil {
			t.Fatal(err)
		}
		for at := int64(0); at < 4<<20; at += 256 << 10 { // data every 256 KiB, zeros between, and a hole behind
			if _, err := f.WriteAt(append([]byte("data"), make([]byte, 256<<10-4)...), at); err != nil {
				t.Fatal(err)
			}
		}
		_, err = f.WriteAt([]byte("end"), 50<<20)
		if err := errors.Join(err, f.Close()); err != nil {
			t.Fatal(err)
		}
		var b bytes.Buffer
		if _, err := upper.Write(t.Context(), &b, up); err != nil {
			t.Fatal(err)
		}
		back()
		if b.Len() > less || b.Len() < less/4 {
			t.Errorf("with %d runs at most, %d bytes are written", most, b.Len())
		}
		want, err := treetest.Snapshot(merged)
		if err != nil {
			t.Fatal(err)
		}
		mounttest.Matches(t, []string{layer, mounttest.File(t, b.Bytes())}, want, nil)
	}
}

// sparse makes a file of size bytes or more with data at a and b.
func sparse(t *testing.T, path string, data []byte, a, b, size int64) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, off := range []int64{a, b} {
		if _, err := f.WriteAt(data, off); err != nil {
			t.Fatal(err)
		}
	}
	if fi, _ := f.Stat(); fi.Size() < size {
		if err := f.Truncate(size); err != nil {
			t.Fatal(err)
		}
	}
}

func TestNothingWritten(t *testing.T) {
	_, up, _ := overlaid(t, below())
	var b bytes.Buffer
	info, err := upper.Write(context.Background(), &b, up)
	if err != nil || info.Entries != 0 {
		t.Errorf("an empty writable layer gave %+v, %v", info, err)
	}
}

func TestUnfit(t *testing.T) {
	merged, up, _ := overlaid(t, below())
	odd := filepath.Join(merged, "etc", ".wh.odd")
	if err := os.WriteFile(odd, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := upper.Write(context.Background(), &bytes.Buffer{}, up); !errors.Is(err, upper.ErrUnfit) {
		t.Errorf("a name that a layer cannot have: %v", err)
	}
	if err := os.Remove(odd); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setxattr(filepath.Join(up, "etc"), "trusted.overlay.redirect", []byte("/var"),
		0); err != nil {
		t.Fatal(err)
	}
	if _, err := upper.Write(context.Background(), &bytes.Buffer{}, up); !errors.Is(err, upper.ErrUnfit) {
		t.Errorf("a directory that overlayfs has moved: %v", err)
	}
}

// full fails as a disk does.
type full struct{ left int }

func (f *full) Write(p []byte) (int, error) {
	if f.left -= len(p); f.left < 0 {
		return 0, syscall.ENOSPC
	}
	return len(p), nil
}

func TestErrors(t *testing.T) {
	merged, up, _ := overlaid(t, below())
	change(t, merged)
	for _, room := range []int{0, 2000, 400 << 10} {
		if _, err := upper.Write(context.Background(), &full{room}, up); !errors.Is(err, syscall.ENOSPC) {
			t.Errorf("a full disk after %d bytes: %v", room, err)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := upper.Write(ctx, &bytes.Buffer{}, up); !errors.Is(err, context.Canceled) {
		t.Errorf("ended: %v", err)
	}
	if _, err := upper.Write(context.Background(), &bytes.Buffer{}, filepath.Join(up, "none")); !errors.Is(err,
		os.ErrNotExist) {
		t.Errorf("no directory: %v", err)
	}
}
