package mount_test

import (
	"archive/tar"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	ctrmount "github.com/containerd/containerd/v2/core/mount"
	"golang.org/x/sys/unix"

	"dewpoint/internal/layer/mount"
	"dewpoint/testkit/mounttest"
	"dewpoint/testkit/treetest"
)

// oneFile is a layer whose only file has the content, ready for all backends.
func oneFile(t testing.TB, content string) mount.Files {
	t.Helper()
	return prepared(t, new(treetest.Archive).Dir("d").File("d/file", content).Bytes())
}

func prepared(t testing.TB, layer []byte) mount.Files {
	t.Helper()
	f, err := mounttest.Layer(t.TempDir(), mounttest.File(t, layer), true)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func each(t *testing.T, run func(t *testing.T, b mount.Backend)) {
	for _, b := range mounttest.Backends(t) {
		t.Run(b.Name(), func(t *testing.T) { run(t, b) })
	}
}

func content(t testing.TB, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func isMounted(t *testing.T, target string) bool {
	t.Helper()
	there, err := mount.Mounted(target)
	if err != nil {
		t.Fatal(err)
	}
	return there
}

// TestLifecycle mounts, mounts again, finds, unmounts, unmounts again.
func TestLifecycle(t *testing.T) {
	ctx := context.Background()
	each(t, func(t *testing.T, b mount.Backend) {
		f, dir := oneFile(t, "content"), t.TempDir()
		target := filepath.Join(dir, "1")
		if err := b.Mount(ctx, f, target); !errors.Is(err, os.ErrNotExist) {
			t.Fatalf("mount on what does not exist: %v", err)
		}
		if err := os.Mkdir(target, 0o700); err != nil {
			t.Fatal(err)
		}
		if isMounted(t, target) {
			t.Fatal("a plain directory counts as mounted")
		}
		for range 2 {
			if err := b.Mount(ctx, f, target); err != nil {
				t.Fatal(err)
			}
		}
		if got := content(t, target+"/d/file"); got != "content" {
			t.Fatalf("read %q", got)
		}
		if err := os.WriteFile(target+"/d/file", nil, 0); !errors.Is(err, unix.EROFS) {
			t.Fatalf("write: %v", err)
		}
		list, err := mount.List(dir)
		if err != nil || len(list) != 1 || list[0].Target != target || !isMounted(t, target) {
			t.Fatalf("listed %+v, %v", list, err)
		}
		for range 2 {
			if err := b.Unmount(target); err != nil {
				t.Fatal(err)
			}
		}
		if list, err := mount.List(dir); err != nil || len(list) != 0 || isMounted(t, target) {
			t.Fatalf("still listed: %+v, %v", list, err)
		}
		if err := b.Unmount(filepath.Join(dir, "nowhere")); err != nil {
			t.Fatal(err)
		}
	})
}

// TestOccupied finds another layer at the target.
func TestOccupied(t *testing.T) {
	each(t, func(t *testing.T, b mount.Backend) {
		target := filepath.Join(t.TempDir(), "1")
		mounttest.Mounted(t, b, oneFile(t, "one"), target)
		if err := b.Mount(context.Background(), oneFile(t, "two"), target); !errors.Is(err, mount.ErrOccupied) {
			t.Fatalf("got %v", err)
		}
	})
}

// TestConcurrent mounts at one target from many goroutines; one mount results.
func TestConcurrent(t *testing.T) {
	each(t, func(t *testing.T, b mount.Backend) {
		f, dir := oneFile(t, "x"), t.TempDir()
		var wg sync.WaitGroup
		for i := range 16 {
			wg.Go(func() {
				target := filepath.Join(dir, string(rune('a'+i%4)))
				if err := errors.Join(os.MkdirAll(target, 0o700), b.Mount(context.Background(), f, target)); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		list, err := mount.List(dir)
		if err != nil || len(list) != 4 {
			t.Errorf("%d mounts, %v", len(list), err)
		}
		for _, in := range list {
			if err := b.Unmount(in.Target); err != nil {
				t.Error(err)
			}
		}
	})
}

// TestInUse unmounts a layer that a stack and an open file still use.
func TestInUse(t *testing.T) {
	each(t, func(t *testing.T, b mount.Backend) {
		target := filepath.Join(t.TempDir(), "1")
		mounttest.Mounted(t, b, oneFile(t, "content"), target)
		merged := mounttest.Overlay(t, []string{target})
		open, err := os.Open(target + "/d/file")
		if err != nil {
			t.Fatal(err)
		}
		defer open.Close()
		if err := b.Unmount(target); err != nil {
			t.Fatal(err)
		}
		if isMounted(t, target) {
			t.Error("still mounted")
		}
		if got := content(t, merged+"/d/file"); got != "content" {
			t.Errorf("the stack reads %q", got)
		}
		buf := make([]byte, 7)
		if _, err := open.Read(buf); err != nil || string(buf) != "content" {
			t.Errorf("the open file reads %q, %v", buf, err)
		}
	})
}

// TestOddPaths has characters in its paths that end or escape mount options.
func TestOddPaths(t *testing.T) {
	f := oneFile(t, "content")
	dir := filepath.Join(t.TempDir(), "a,b:c d\\e\n")
	moved := mount.Files{Index: filepath.Join(dir, "in,dex"), Data: filepath.Join(dir, "da,ta"),
		Tree: filepath.Join(dir, "tr,ee")}
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	for from, to := range map[string]string{f.Index: moved.Index, f.Data: moved.Data, f.Tree: moved.Tree} {
		if err := os.Rename(from, to); err != nil {
			t.Fatal(err)
		}
	}
	each(t, func(t *testing.T, b mount.Backend) {
		target := filepath.Join(dir, "target,"+b.Name())
		mounttest.Mounted(t, b, moved, target)
		if got := content(t, target+"/d/file"); got != "content" {
			t.Errorf("read %q", got)
		}
		if err := b.Mount(context.Background(), moved, target); err != nil {
			t.Errorf("mount again: %v", err)
		}
		if list, err := mount.List(dir); err != nil || len(list) != 1 || list[0].Target != target {
			t.Errorf("listed %+v, %v", list, err)
		}
	})
}

// TestSizes mounts layers without contents, one of them without an end marker,
// and layers whose tar ends within a block.
func TestSizes(t *testing.T) {
	layers := map[string][]byte{"no bytes": nil, "end marker": make([]byte, 1024)}
	for _, size := range []int{1, 700, 70_001} {
		last := treetest.Text(size)
		layers[last] = new(treetest.Archive).File("last", last).Bytes()[:512+size]
	}
	for last, layer := range layers {
		f := prepared(t, layer)
		each(t, func(t *testing.T, b mount.Backend) {
			target := filepath.Join(t.TempDir(), "1")
			mounttest.Mounted(t, b, f, target)
			if len(layer) > 1024 || len(last) == 1 {
				if got := content(t, filepath.Join(target, "last")); got != last {
					t.Errorf("%d bytes read as %d, wrong", len(last), len(got))
				}
			}
		})
	}
}

// TestFlags sees that a layer's mount keeps its setuid programs and devices to
// itself while overlayfs above it shows them as ever.
func TestFlags(t *testing.T) {
	each(t, func(t *testing.T, b mount.Backend) {
		target := filepath.Join(t.TempDir(), "1")
		var a treetest.Archive
		mounttest.Mounted(t, b, prepared(t, a.Add(device("null", 1, 3), "").Bytes()), target)
		merged := mounttest.Overlay(t, []string{target})
		if err := os.WriteFile(target+"/null", []byte("x"), 0); !errors.Is(err, unix.EACCES) &&
			!errors.Is(err, unix.EROFS) {
			t.Errorf("device on the layer's mount: %v", err)
		}
		if err := os.WriteFile(merged+"/null", []byte("x"), 0); err != nil {
			t.Errorf("device through overlayfs: %v", err)
		}
		var st unix.Statfs_t
		if err := unix.Statfs(target, &st); err != nil || st.Flags&unix.ST_NOSUID == 0 ||
			st.Flags&unix.ST_RDONLY == 0 {
			t.Errorf("flags %#x, %v", st.Flags, err)
		}
		if err := unix.Statfs(merged, &st); err != nil || st.Flags&unix.ST_NOSUID != 0 {
			t.Errorf("flags of the stack %#x, %v", st.Flags, err)
		}
		// A view of one layer is a bind mount with options of its own.
		view := ctrmount.Mount{Type: "bind", Source: target, Options: []string{"ro", "rbind"}}
		if err := view.Mount(merged); err != nil {
			t.Fatal(err)
		}
		defer unix.Unmount(merged, 0)
		if err := unix.Statfs(merged, &st); err != nil || st.Flags&unix.ST_NOSUID != 0 ||
			st.Flags&unix.ST_RDONLY == 0 {
			t.Errorf("flags of a view %#x, %v", st.Flags, err)
		}
	})
}

// TestManyLayers stacks 127 layers under short numeric paths.
func TestManyLayers(t *testing.T) {
	const layers = 127
	files := make([]mount.Files, layers)
	for i := range files {
		n := string(rune('a'+i/26)) + string(rune('a'+i%26))
		files[i] = prepared(t,
			new(treetest.Archive).File("own"+n, n).File("top", n).Dir("dir").File("dir/"+n, n).Bytes())
	}
	each(t, func(t *testing.T, b mount.Backend) {
		got := mounttest.Stacked(t, b, files)
		if n := len(got); n != 2*layers+3 {
			t.Errorf("%d names, want %d", n, 2*layers+3)
		}
		want := got["ownew"]["sum"] // of the last layer, whose number is 126
		if got["top"]["sum"] != want || want == "" {
			t.Error("the uppermost layer does not show")
		}
	})
}

// TestLoopDevicesGo sees that no loop device outlives its mount.
func TestLoopDevicesGo(t *testing.T) {
	b, err := mount.New(mount.Loop)
	if err != nil {
		t.Fatal(err)
	}
	f, target := oneFile(t, "x"), t.TempDir()
	if err := b.Mount(context.Background(), f, target); err != nil {
		t.Fatal(err)
	}
	if n := len(loopsOn(t, f)); n != 2 {
		t.Fatalf("%d loop devices while mounted", n)
	}
	if err := b.Unmount(target); err != nil {
		t.Fatal(err)
	}
	if left := loopsOn(t, f); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
	f.Data += ".gone"
	if err := b.Mount(context.Background(), f, target); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("mount without data: %v", err)
	}
	if left := loopsOn(t, f); len(left) != 0 {
		t.Errorf("left behind by a failed mount: %v", left)
	}
}

// loopsOn lists the loop devices over a layer's files.
func loopsOn(t *testing.T, f mount.Files) []string {
	t.Helper()
	all, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		t.Fatal(err)
	}
	var on []string
	for _, path := range all {
		b, err := os.ReadFile(path)
		if name := strings.TrimSpace(string(b)); err == nil && (name == f.Index || name == f.Data) {
			on = append(on, path)
		}
	}
	return on
}

func device(name string, major, minor int64) tar.Header {
	return tar.Header{Name: name, Typeflag: tar.TypeChar, Mode: 0o666, Devmajor: major, Devminor: minor}
}
