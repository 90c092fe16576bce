package layer_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"dewpoint/internal/durable"
	"dewpoint/internal/image"
	"dewpoint/internal/layer"
	"dewpoint/internal/layer/presence"
	"dewpoint/testkit"

	"golang.org/x/sys/unix"
)

// badDisk fails syncs as Linux reports writes that did not reach the disk: once, and never again.
type badDisk struct {
	root string

	mu    sync.Mutex
	syncs int
	fails func(n int, path string) bool // whether the sync of that number is to fail; with mu held
	lost  map[uint64]*os.File           // all data when a sync has failed, open: no other file gets their inodes
	seen  chan struct{}                 // closed when one has
}

func newBadDisk(t *testing.T, root string, fails func(n int, path string) bool) *badDisk {
	d := &badDisk{root: root, fails: fails, lost: map[uint64]*os.File{}, seen: make(chan struct{})}
	durable.FailSync(d.sync)
	t.Cleanup(func() {
		durable.FailSync(nil)
		for _, f := range d.lost {
			f.Close()
		}
	})
	return d
}

func (d *badDisk) sync(path string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.syncs++
	if !d.fails(d.syncs, path) {
		return nil
	}
	all, _ := filepath.Glob(filepath.Join(d.root, "*", "data"))
	for _, path := range all {
		if f, err := os.Open(path); err == nil {
			d.lost[inode(path)] = f
		}
	}
	if len(d.lost) > 0 {
		select {
		case <-d.seen:
		default:
			close(d.seen)
		}
	}
	return unix.EIO
}

// has reports whether the layer's data is a file that it has lost.
func (d *badDisk) has(l *layer.Layer) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.lost[inode(l.Files().Data)] != nil
}

func (d *badDisk) count() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.syncs
}

func inode(path string) uint64 {
	fi, err := os.Stat(path)
	if err != nil {
		return 0
	}
	return fi.Sys().(*syscall.Stat_t).Ino
}

// halting is a source whose first streams stop in the middle of the blob, each until its gate is closed.
type halting struct {
	source
	gates chan chan struct{} // nil, or closed, for no halt
}

func (s *halting) Open(ctx context.Context, f *layer.Fill, off int64) (io.ReadCloser, error) {
	r, err := s.source.Open(ctx, f, off)
	select {
	case gate := <-s.gates:
		return &halted{r, ctx, gate, int64(len(s.blob)) / 2}, err
	default:
		return r, err
	}
}

type halted struct {
	io.ReadCloser
	ctx  context.Context
	gate chan struct{}
	left int64
}

func (r *halted) Read(b []byte) (int, error) {
	if r.left <= 0 {
		select {
		case <-r.gate:
		case <-r.ctx.Done():
			return 0, r.ctx.Err()
		}
		return r.ReadCloser.Read(b)
	}
	n, err := r.ReadCloser.Read(b[:min(int64(len(b)), r.left)])
	r.left -= int64(n)
	return n, err
}

// halts gives a source that stops in the middle of its first streams.
func halts(want sample, gates ...chan struct{}) *halting {
	s := &halting{source: source{blob: want.blob}, gates: make(chan chan struct{}, len(gates))}
	for _, g := range gates {
		s.gates <- g
	}
	return s
}

// Whichever sync fails, once: the layer is complete only in files that were written after it, and so it is
// for the next process.
func TestFailedSyncFillsOnceMore(t *testing.T) {
	testkit.Long(t)
	tarball := makeTar(t, 4<<20, 21)
	for _, c := range []struct {
		name     string
		want     sample
		tree     bool
		imported bool
	}{
		{"gzip", pack(t, tarball, image.Gzip), false, false},
		{"zstd", pack(t, tarball, image.Zstd), false, false},
		{"tree", pack(t, tarball, image.Gzip), true, false},
		{"import", pack(t, tarball, image.Gzip), false, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			for at := 1; failSync(t, c.want, c.tree, c.imported, at); at++ {
			}
		})
	}
}

// failSync is false if there are fewer than at syncs.
func failSync(t *testing.T, want sample, tree, imported bool, at int) bool {
	t.Helper()
	dir := t.TempDir()
	cfg := layer.Config{Interval: 256 << 10, Tree: tree}
	s := open(t, dir, cfg)
	disk := newBadDisk(t, dir, func(n int, _ string) bool { return n == at })
	gate := make(chan struct{})
	src := halts(want, gate)
	fill := s.Fill
	if imported {
		fill = s.Import
	}
	f := fill(t.Context(), want.layer, src)
	testkit.Eventually(t, "progress", func() bool { return disk.count() > 2 })
	close(gate)
	l, err := f.WaitComplete(t.Context())
	if err != nil {
		t.Fatalf("sync %d failed: %v", at, err)
	}
	durable.FailSync(nil)
	check := func(l *layer.Layer) {
		t.Helper()
		switch {
		case !l.Complete():
			t.Errorf("sync %d failed: the layer is not complete", at)
		case tree:
			if fi, err := os.Stat(filepath.Join(l.Files().Tree, "d0", "f0")); err != nil || fi.Size() == 0 {
				t.Errorf("sync %d failed: the tree: %v", at, err)
			}
		default:
			checkData(t, l, want)
			if f.Progress().Again && disk.has(l) {
				t.Errorf("sync %d failed, and the layer is complete in the same file", at)
			}
		}
	}
	check(l)
	if n := int(src.opens.Load()); f.Progress().Again != (n == 2) {
		t.Errorf("sync %d failed: fetched %d times, and again is %v", at, n, f.Progress().Again)
	}
	s.Close()
	s = open(t, dir, cfg)
	defer s.Close()
	if l, err = s.Get(want.layer.DiffID); err != nil {
		t.Fatalf("after sync %d failed: %v", at, err)
	}
	check(l)
	return disk.count() >= at
}

// A sync of the data that fails, and reports nothing when it is tried again, is not forgotten: neither while
// the layer arrives nor when it is there.
func TestFailedSyncIsNotForgotten(t *testing.T) {
	want := pack(t, makeTar(t, 4<<20, 22), image.Gzip)
	for _, when := range []string{"arrives", "is readable"} {
		t.Run(when, func(t *testing.T) {
			dir := t.TempDir()
			s := open(t, dir, layer.Config{Interval: 256 << 10})
			defer s.Close()
			early := when == "arrives"
			failed := false
			disk := newBadDisk(t, dir, func(_ int, path string) bool {
				whole := inode(filepath.Join(filepath.Dir(path), "layer.boot")) != 0
				now := filepath.Base(path) == "data" && whole != early && !failed
				failed = failed || now
				return now
			})
			first, second := make(chan struct{}), make(chan struct{})
			if !early {
				close(first)
			}
			f := s.Fill(t.Context(), want.layer, halts(want, first, second))
			<-disk.seen
			l, err := s.Get(want.layer.DiffID)
			if early != errors.Is(err, layer.ErrUnknown) {
				t.Errorf("the layer: %v", err)
			}
			if !early { // who mounts it now is not refused
				checkData(t, l, want)
				for _, name := range []string{"layer.boot", "layer.json", "progress", "progress.boot"} {
					path := filepath.Join(dir, l.DiffID.Encoded(), name)
					testkit.Eventually(t, name+" goes", func() bool { return inode(path) == 0 })
				}
			}
			close(second)
			again, err := f.WaitComplete(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if !f.Progress().Again || again == l || disk.has(again) {
				t.Error("the layer is complete in files that the disk has lost")
			}
			checkData(t, again, want)
			if have, err := s.Get(want.layer.DiffID); have != again || err != nil {
				t.Errorf("the store has another layer: %v", err)
			}
			if early {
				close(first)
			}
		})
	}
}

// A disk that loses a layer twice fails its fill, and leaves nothing to go on from.
func TestFailedSyncTwice(t *testing.T) {
	testkit.Long(t)
	want := pack(t, makeTar(t, 4<<20, 23), image.Gzip)
	for _, when := range []string{"arrives", "is readable"} {
		t.Run(when, func(t *testing.T) {
			dir := t.TempDir()
			cfg := layer.Config{Interval: 256 << 10}
			s := open(t, dir, cfg)
			var held []*os.File // no other file gets their inodes
			defer func() {
				for _, f := range held {
					f.Close()
				}
			}()
			last := map[uint64]bool{} // each file's first sync of that time fails
			newBadDisk(t, dir, func(_ int, path string) bool {
				whole := inode(filepath.Join(filepath.Dir(path), "layer.boot")) != 0
				ino := inode(path)
				if filepath.Base(path) != "data" || whole != (when != "arrives") || last[ino] {
					return false
				}
				if f, err := os.Open(path); err == nil {
					held = append(held, f)
				}
				last[ino] = true
				return true
			})
			gates := []chan struct{}{make(chan struct{}), make(chan struct{})}
			if when != "arrives" {
				close(gates[0])
				close(gates[1])
			}
			f := s.Fill(t.Context(), want.layer, halts(want, gates...))
			_, err := f.WaitComplete(t.Context())
			if !errors.Is(err, unix.EIO) || !strings.Contains(fmt.Sprint(err), "dmesg") {
				t.Errorf("the fill ended with %v", err)
			}
			if _, err := f.Wait(t.Context()); !errors.Is(err, unix.EIO) {
				t.Errorf("the layer is readable: %v", err)
			}
			if _, err := s.Get(want.layer.DiffID); !errors.Is(err, layer.ErrUnknown) {
				t.Errorf("the store has the layer: %v", err)
			}
			durable.FailSync(nil)
			s.Close()
			if left, _ := filepath.Glob(filepath.Join(dir, "*", "*")); len(left) > 0 {
				t.Errorf("left: %q", left)
			}
			s = open(t, dir, cfg)
			defer s.Close()
			src := &source{blob: want.blob}
			checkData(t, mustComplete(t, s, want.layer, src), want)
			if src.sent.Load() != int64(len(want.blob)) {
				t.Errorf("%d bytes of %d were fetched", src.sent.Load(), len(want.blob))
			}
		})
	}
}

// A partial layer that is lost leaves its mounts, which get what they lack from the one that replaces it.
func TestFailedSyncOfPartial(t *testing.T) {
	for _, tree := range []bool{false, true} {
		t.Run(fmt.Sprintf("tree=%v", tree), func(t *testing.T) {
			tarball := makeTar(t, 4<<20, 24)
			want := pack(t, tarball, image.Gzip)
			dir := t.TempDir()
			server := &mounted{shower: newShower()}
			defer server.close()
			s := open(t, dir, layer.Config{Interval: 256 << 10, Server: server, Tree: tree, LazyTree: tree})
			defer s.Close()
			p, err := s.Begin(want.layer, table(t, tarball), layer.Origin{})
			if err != nil {
				t.Fatal(err)
			}
			if err := p.Put(0, tarball[:64<<10]); err != nil {
				t.Fatal(err)
			}
			failed := false
			disk := newBadDisk(t, dir, func(_ int, path string) bool {
				now := filepath.Base(path) == "data" && !failed
				failed = failed || now
				return now
			})
			first, second := make(chan struct{}), make(chan struct{})
			defer close(first)
			f := s.Fill(t.Context(), want.layer, halts(want, first, second))
			testkit.Eventually(t, "fetched twice", func() bool { return f.Progress().Again })
			end := int64(len(tarball))
			if s.Partial(want.layer.DiffID) != p { // who waits for bytes gets them
				t.Error("the lost layer is not served any more")
			}
			at := (end - 1) / presence.Page * presence.Page
			if err := p.Put(at, tarball[at:]); err != nil {
				t.Error(err)
			}
			if from, _ := p.Absent(at, end); from < end {
				t.Error("what was put is absent")
			}
			close(second)
			l, err := f.WaitComplete(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if !f.Progress().Again || s.Partial(want.layer.DiffID) != nil {
				t.Error("the lost layer is still the store's partial one")
			}
			if !tree && disk.has(l) {
				t.Error("the layer is complete in the file that the disk has lost")
			}
			if !p.Whole() {
				t.Error("mounts of the lost layer lack bytes")
			}
		})
	}
}

// A fill beside its place that is cut leaves nothing there.
func TestCutFillBesideItsPlace(t *testing.T) {
	tarball := makeTar(t, 4<<20, 25)
	want := pack(t, tarball, image.Gzip)
	dir := t.TempDir()
	server := &mounted{shower: newShower()}
	defer server.close()
	s := open(t, dir, layer.Config{Interval: 256 << 10, Server: server})
	defer s.Close()
	if _, err := s.Begin(want.layer, table(t, tarball), layer.Origin{}); err != nil {
		t.Fatal(err)
	}
	failed := false
	newBadDisk(t, dir, func(_ int, path string) bool {
		now := filepath.Base(path) == "data" && !failed
		failed = failed || now
		return now
	})
	ctx, cut := context.WithCancel(t.Context())
	defer cut()
	first, second := make(chan struct{}), make(chan struct{})
	defer close(first)
	defer close(second)
	f := s.Fill(ctx, want.layer, halts(want, first, second))
	beside := func() []string {
		found, _ := filepath.Glob(filepath.Join(dir, "import-*"))
		return found
	}
	testkit.Eventually(t, "it is filled beside its place", func() bool { return len(beside()) == 1 })
	cut()
	if _, err := f.WaitComplete(t.Context()); err == nil {
		t.Error("a fill that was cut is complete")
	}
	if left := beside(); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}
