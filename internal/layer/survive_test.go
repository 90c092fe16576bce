package layer_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"dewpoint/internal/image"
	"dewpoint/internal/layer"
	"dewpoint/internal/layer/mount"
	"dewpoint/internal/spec"
	"dewpoint/testkit"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"
)

func nobody(digest.Digest) bool { return false }

// A power cut leaves what was fsynced and nothing else: the durable record and
// the bytes it vouches for are enough to go on from.
func TestResumeAfterPowerCut(t *testing.T) {
	testkit.Long(t)
	const bound, interval = 4 << 20, 512 << 10 // the defaults are 8 and 4 MiB
	tarball := makeTar(t, 24<<20, 20)
	for _, c := range []image.Compression{image.Plain, image.Gzip, image.Zstd} {
		t.Run(string(c), func(t *testing.T) {
			dir, want := t.TempDir(), pack(t, tarball, c)
			s := open(t, dir, layer.Config{Interval: interval})
			src := &source{blob: want.blob, cut: int64(len(want.blob)) * 9 / 10}
			ctx, cancel := context.WithCancel(context.Background())
			_, err := s.Fill(ctx, want.layer, src).Wait(ctx)
			cancel()
			if !errors.Is(err, errCut) {
				t.Fatal(err)
			}
			s.Close()
			powerCut(t, filepath.Join(dir, want.layer.DiffID.Encoded()))
			s = open(t, dir, layer.Config{Interval: interval})
			defer s.Close()
			rest := &source{blob: want.blob}
			checkData(t, mustComplete(t, s, want.layer, rest), want)
			if again := src.sent.Load() + rest.sent.Load() - int64(len(want.blob)); again > bound {
				t.Errorf("%d bytes were fetched again, at most %d should be", again, bound)
			}
		})
	}
}

// powerCut takes away what counts for one boot only, and garbles what is
// longer than the durable record says.
func powerCut(t *testing.T, dir string) {
	t.Helper()
	if err := os.Remove(filepath.Join(dir, "progress.boot")); err != nil {
		t.Fatal(err)
	}
	os.Remove(filepath.Join(dir, "layer.boot"))
	for name, at := range layer.DurableSizes(t, dir) {
		f, err := os.OpenFile(filepath.Join(dir, name), os.O_RDWR, 0)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		fi, err := f.Stat()
		if err != nil {
			t.Fatal(err)
		}
		if n := fi.Size() - at; n > 0 {
			if _, err := f.WriteAt(make([]byte, n), at); err != nil {
				t.Fatal(err)
			}
		}
		f.Close()
	}
}

// A layer that was mounted before it was complete stays whole and mounted
// when the process dies and the next one opens the store, without its source,
// on every backend; and prune does not take it.
func TestReadableLayerOutlivesItsProcess(t *testing.T) {
	testkit.NeedRoot(t, "it mounts file systems")
	want := pack(t, makeTar(t, 4<<20, 21), image.Gzip)
	for _, backend := range spec.Mounts {
		t.Run(backend, func(t *testing.T) {
			dir := t.TempDir()
			s := open(t, filepath.Join(dir, "store"), layer.Config{Tree: backend == mount.Tree})
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			b, err := mount.New(backend)
			if err != nil {
				t.Fatal(err)
			}
			l, err := s.Fill(ctx, want.layer, &source{blob: want.blob}).WaitComplete(ctx)
			if err != nil {
				t.Fatal(err)
			}
			at := filepath.Join(dir, "m")
			if err := errors.Join(os.Mkdir(at, 0o755), b.Mount(ctx, l.Files(), at)); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { unix.Unmount(at, unix.MNT_DETACH) })
			before := names(t, at)
			s.Close()
			layer.MakeIncomplete(t, filepath.Dir(filepath.Join(l.Files().Index)))

			s = open(t, filepath.Join(dir, "store"), layer.Config{Tree: backend == mount.Tree})
			defer s.Close()
			l, err = s.Fill(ctx, want.layer, &source{cut: 1}).WaitComplete(ctx) // the source is dead
			if err != nil || !l.Complete() {
				t.Fatalf("the next process: %v", err)
			}
			if _, err := s.RemovePartial(nobody, 0); err != nil {
				t.Fatal(err)
			}
			if got := names(t, at); got != before {
				t.Errorf("the mount shows %s, before %s", got, before)
			}
			if err := b.Mount(ctx, l.Files(), at); err != nil {
				t.Errorf("mounting it again: %v", err)
			}
		})
	}
}

func names(t *testing.T, dir string) string {
	t.Helper()
	all, err := filepath.Glob(filepath.Join(dir, "*", "*"))
	if err != nil || len(all) == 0 {
		t.Fatalf("%s shows nothing: %v", dir, err)
	}
	return fmt.Sprint(all)
}

// A node whose mount backend changes has layers of the other form, which it
// leaves alone until nobody uses them.
func TestOtherForm(t *testing.T) {
	want := pack(t, makeTar(t, 1<<20, 22), image.Gzip)
	dir := t.TempDir()
	s := open(t, dir, layer.Config{})
	file := mustComplete(t, s, want.layer, &source{blob: want.blob})
	s.Close()
	s = open(t, dir, layer.Config{Tree: true})
	defer s.Close()
	if _, err := s.Get(want.layer.DiffID); !errors.Is(err, layer.ErrUnknown) {
		t.Fatalf("a file passes for a tree: %v", err)
	}
	tree := mustComplete(t, s, want.layer, &source{blob: want.blob})
	if _, err := os.Stat(filepath.Join(tree.Files().Tree, "d0")); err != nil {
		t.Error(err)
	}
	checkData(t, file, want) // it may still be mounted
	if _, err := s.RemovePartial(func(digest.Digest) bool { return true }, 0); err != nil {
		t.Fatal(err)
	}
	checkData(t, file, want)
	if _, err := s.RemovePartial(nobody, time.Hour); err != nil {
		t.Fatal(err)
	}
	checkData(t, file, want)
	if n, err := s.RemovePartial(nobody, 0); err != nil || n == 0 {
		t.Errorf("%d bytes freed, %v", n, err)
	}
	if _, err := os.Stat(file.Files().Data); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the other form is still there: %v", err)
	}
	if _, err := s.Get(want.layer.DiffID); err != nil {
		t.Error(err)
	}
}

// A layer that two want does not depend on the source of the first.
func TestAnotherSource(t *testing.T) {
	want := pack(t, makeTar(t, 6<<20, 51), image.Gzip)
	s := open(t, t.TempDir(), layer.Config{})
	defer s.Close()
	bad := &source{blob: want.blob, cut: int64(len(want.blob)) / 3, gate: make(chan struct{})}
	first := s.Fill(t.Context(), want.layer, bad)
	second := s.Fill(t.Context(), want.layer, &source{blob: want.blob})
	close(bad.gate)
	for _, f := range []*layer.Fill{first, second} {
		l, err := f.WaitComplete(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		checkData(t, l, want)
	}
}

// After the clock was set back layers have not been used in the future, their order is as it
// was, and what cut pulls left is old.
func TestClockThatWasSetBack(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, layer.Config{})
	var ids []digest.Digest
	for i := range 3 {
		want := pack(t, makeTar(t, 1<<20, uint64(30+i)), image.Gzip)
		ids = append(ids, mustComplete(t, s, want.layer, &source{blob: want.blob}).DiffID)
	}
	s.Close()
	ahead := time.Now().Add(56 * 365 * 24 * time.Hour)
	for i, id := range ids { // the last was used first
		when := ahead.Add(-time.Duration(i) * time.Hour)
		if err := os.Chtimes(filepath.Join(dir, id.Encoded(), "layer.json"), when, when); err != nil {
			t.Fatal(err)
		}
	}
	cut := filepath.Join(dir, digest.FromString("cut").Encoded())
	if err := errors.Join(os.Mkdir(cut, 0o755), os.Chtimes(cut, ahead, ahead)); err != nil {
		t.Fatal(err)
	}
	s = open(t, dir, layer.Config{})
	defer s.Close()
	for i, id := range ids {
		l, err := s.Peek(id)
		if err != nil {
			t.Fatal(err)
		}
		if age := time.Since(l.Used()); age < time.Duration(i)*time.Hour ||
			age > time.Duration(i)*time.Hour+time.Minute {
			t.Errorf("layer %d was used %v ago", i, age)
		}
	}
	if _, err := s.RemovePartial(nobody, 24*time.Hour); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(cut); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("what a cut pull left stays: %v", err)
	}
}
