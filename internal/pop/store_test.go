package pop_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"dewpoint/internal/pop"
	"dewpoint/internal/pop/local"
	"dewpoint/testkit"

	"github.com/opencontainers/go-digest"
)

// bed is a PoP in virtual time over a real directory.
type bed struct {
	t      *testing.T
	hub    *local.Hub
	dir    string
	mu     sync.Mutex
	coords map[string]pop.Coordinator // of each node the last
}

// inBed runs f when the coordinator has settled.
func inBed(t *testing.T, f func(t *testing.T, b *bed)) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		b := &bed{t: t, hub: local.NewHub(), dir: dir, coords: map[string]pop.Coordinator{}}
		b.open(pop.StoreConfig{Node: "first"})
		time.Sleep(time.Minute)
		f(t, b)
	})
}

// open is cfg.Node's store. cfg.FS may be set.
func (b *bed) open(cfg pop.StoreConfig) *pop.Store {
	b.t.Helper()
	c, err := b.hub.Join(pop.Config{Node: cfg.Node})
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { c.Close() })
	b.mu.Lock()
	b.coords[cfg.Node] = c
	b.mu.Unlock()
	if cfg.FS == nil {
		cfg.FS = pop.NewDir(b.dir, 0)
	}
	cfg.Coord = c
	st, err := pop.OpenStore(b.t.Context(), cfg)
	if err != nil {
		b.t.Fatal(err)
	}
	return st
}

func (b *bed) node(name string) *pop.Store { return b.open(pop.StoreConfig{Node: name}) }

// sweep has everything deleted that may go after the time of grace.
func (b *bed) sweep(st *pop.Store) (freed int64) {
	b.t.Helper()
	for range 3 {
		n, err := st.Sweep(b.t.Context())
		if err != nil {
			b.t.Error(err)
		}
		freed += n
		time.Sleep(3 * time.Minute)
	}
	return freed
}

// files are the names of all files in some directories of the store.
func (b *bed) files(dirs ...string) []string {
	var all []string
	for _, d := range dirs {
		ents, err := os.ReadDir(filepath.Join(b.dir, d))
		if err != nil {
			b.t.Error(err)
		}
		for _, e := range ents {
			all = append(all, d+"/"+e.Name())
		}
	}
	return all
}

func is(t *testing.T, what string, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("%s: %v, not %v", what, err, want)
	}
}

// publish puts a layer of an image into the store.
func publish(t *testing.T, st *pop.Store, tar []byte, image string) digest.Digest {
	t.Helper()
	ctx, id := t.Context(), digest.FromBytes(tar)
	d, err := st.Draft(ctx, id, st.Above(ctx, id)+1)
	if err == nil {
		_, err = d.Write(tar)
	}
	if err == nil {
		err = d.Publish(ctx, pop.Layer{Size: int64(len(tar)), Image: image, Cost: 1}, []byte("table"))
	}
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func TestOneNodePublishesAnotherUses(t *testing.T) {
	inBed(t, func(t *testing.T, b *bed) {
		ctx, x, y := t.Context(), b.node("x"), b.node("y")
		tar := bytes.Repeat([]byte("0123456789abcdef"), (2*pop.SumBytes+16)/16)
		_, err := y.Use(ctx, digest.FromBytes(tar))
		is(t, "before it is there", err, pop.ErrUnknown)
		id := publish(t, x, tar, "r/i")
		l, err := y.Use(ctx, id)
		if err != nil {
			t.Fatal(err)
		}
		if table, err := y.Table(ctx, l); err != nil || string(table) != "table" {
			t.Errorf("table %q, %v", table, err)
		}
		f, err := y.Open(ctx, l)
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(io.NewSectionReader(f, 0, l.Size))
		if err = errors.Join(err, f.Close()); err != nil || !bytes.Equal(got, tar) {
			t.Errorf("%d bytes, %v", len(got), err)
		}
		if err := y.Verify(ctx, l, 0); err != nil || l.Node != "x" || len(l.Sums) != 3*32 {
			t.Errorf("%+v: %v", l, err)
		}
		if x.ID() != y.ID() || !slices.Equal(slices.Concat(y.Used()...), []digest.Digest{id}) ||
			len(x.Used()) != 0 {
			t.Errorf("stores %s and %s, in use %v and %v", x.ID(), y.ID(), x.Used(), y.Used())
		}
		if err := y.Unuse(ctx, id); err != nil || len(y.Used()) != 0 || len(b.files("refs/y")) != 0 {
			t.Errorf("in use %v, %v, %v", y.Used(), b.files("refs/y"), err)
		}
	})
}

func TestTwoPublishers(t *testing.T) {
	inBed(t, func(t *testing.T, b *bed) {
		ctx, x, y := t.Context(), b.node("x"), b.node("y")
		tar := []byte("the same")
		id := digest.FromBytes(tar)
		drafts := []*pop.Draft{}
		for i, st := range []*pop.Store{x, y, x} { // x once more under the token that it had
			d, err := st.Draft(ctx, id, uint64(1+i%2))
			if err == nil {
				_, err = d.Write(tar)
			}
			if err != nil {
				t.Fatal(err)
			}
			drafts = append(drafts, d)
		}
		for _, d := range drafts {
			if err := d.Publish(ctx, pop.Layer{Size: int64(len(tar))}, nil); err != nil {
				t.Error(err)
			}
		}
		l, err := y.Use(ctx, id)
		if err != nil || l.Node != "x" {
			t.Errorf("%+v, %v", l, err)
		}
		if got := b.files("layers", "fill", "trash"); len(got) != 3 {
			t.Errorf("the second leaves %v", got)
		}
	})
}

// The record of a layer that nobody finished is made dead before its files go: its writer cannot publish.
func TestSweptBeforePublished(t *testing.T) {
	inBed(t, func(t *testing.T, b *bed) {
		ctx, x, y := t.Context(), b.node("x"), b.node("y")
		d, err := x.Draft(ctx, digest.FromString("a"), 1)
		if err == nil {
			_, err = d.Write([]byte("a"))
		}
		if err != nil {
			t.Fatal(err)
		}
		if freed := b.sweep(y); freed != 1 {
			t.Errorf("%d bytes were freed", freed)
		}
		if err := d.Publish(ctx, pop.Layer{Size: 1}, nil); err == nil || y.HasLayer(ctx, digest.FromString("a")) {
			t.Errorf("published without data: %v", err)
		}
		if err := d.Abandon(ctx); err != nil {
			t.Error(err)
		}
	})
}

func TestTakeOver(t *testing.T) {
	inBed(t, func(t *testing.T, b *bed) {
		ctx, x, y := t.Context(), b.node("x"), b.node("y")
		id := digest.FromString("abcdef")
		d, err := x.Draft(ctx, id, 41)
		for _, part := range []string{"abc", "d"} {
			if err == nil {
				_, err = d.Write([]byte(part))
			}
			if err == nil && part == "abc" {
				err = d.Checkpoint(ctx, []byte(`{"so":"far"}`))
			}
		}
		if err = errors.Join(err, d.Close()); err != nil {
			t.Fatal(err)
		}
		if n := y.Above(ctx, id); n != 41 {
			t.Errorf("tokens above %d", n)
		}
		b.sweep(y) // leaves what has a checkpoint
		c, err := y.Checkpoint(ctx, id)
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(c.Data)
		if err = errors.Join(err, c.Close()); err != nil || string(got) != "abc" ||
			string(c.Record) != `{"so":"far"}` {
			t.Errorf("%q with %s, %v", got, c.Record, err)
		}
		publish(t, y, []byte("abcdef"), "")
		_, err = x.Checkpoint(ctx, id)
		is(t, "of what is published", err, pop.ErrUnknown)
		b.sweep(x)
		if got := b.files("layers", "fill", "trash"); len(got) != 3 {
			t.Errorf("left: %v", got)
		}
	})
}

func TestOtherDirectories(t *testing.T) {
	for what, files := range map[string]map[string]string{
		"not empty":       {"photos.txt": "x"},
		"newer":           {"dewpoint.json": `{"version":2,"id":"x"}`},
		"of something":    {"dewpoint.json": "\x00"},
		"of nothing":      {"dewpoint.json": ""},
		"with a stranger": {"layers.tar": "x", ".hidden": "x"},
	} {
		dir := t.TempDir()
		for name, content := range files {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		c, err := local.New(pop.Config{Node: "x"})
		if err != nil {
			t.Fatal(err)
		}
		_, err = pop.OpenStore(t.Context(), pop.StoreConfig{FS: pop.NewDir(dir, 0), Coord: c, Node: "x"})
		is(t, what, err, pop.ErrNotStore)
		c.Close()
	}
}

// mounts that are being made at the same time become one store.
func TestManyMakeOneStore(t *testing.T) {
	inBed(t, func(t *testing.T, b *bed) {
		b.dir = filepath.Join(b.dir, "new")
		if err := os.Mkdir(b.dir, 0o700); err != nil {
			t.Fatal(err)
		}
		ids := make(chan string, 8)
		for i := range cap(ids) {
			go func() { ids <- b.node(fmt.Sprint("n", i)).ID() }()
		}
		first := <-ids
		for range cap(ids) - 1 {
			if id := <-ids; id != first {
				t.Errorf("stores %s and %s", first, id)
			}
		}
		if got := b.files("."); slices.ContainsFunc(got, func(n string) bool {
			return strings.HasPrefix(n, "./.")
		}) {
			t.Errorf("left: %v", got)
		}
	})
}

// hooked calls before ahead of each call that changes something, one at a time; an error is the call's.
type hooked struct {
	pop.FS
	before func(op, name string) error
	mu     sync.Mutex
}

func (h *hooked) do(op, name string, f func() error) error {
	h.mu.Lock()
	err := h.before(op, name)
	h.mu.Unlock()
	if err != nil {
		return err
	}
	return f()
}

func (h *hooked) WriteFile(ctx context.Context, name string, b []byte) error {
	return h.do("write", name, func() error { return h.FS.WriteFile(ctx, name, b) })
}

func (h *hooked) Mkdir(ctx context.Context, name string) error {
	return h.do("mkdir", name, func() error { return h.FS.Mkdir(ctx, name) })
}

func (h *hooked) Rename(ctx context.Context, from, to string) error {
	return h.do("rename", from, func() error { return h.FS.Rename(ctx, from, to) })
}

func (h *hooked) Link(ctx context.Context, from, to string) error {
	return h.do("link", to, func() error { return h.FS.Link(ctx, from, to) })
}

func (h *hooked) Remove(ctx context.Context, name string) error {
	return h.do("remove", name, func() error { return h.FS.Remove(ctx, name) })
}

func (h *hooked) Append(ctx context.Context, name string) (f pop.File, err error) {
	err = h.do("append", name, func() (err error) {
		f, err = h.FS.Append(ctx, name)
		return err
	})
	return &hookedFile{f, h, name}, err
}

func (h *hooked) Make(ctx context.Context, name string) error {
	return h.do("append", name, func() error { return h.FS.Make(ctx, name) })
}

type hookedFile struct {
	pop.File
	h    *hooked
	name string
}

func (f *hookedFile) WriteAt(b []byte, off int64) (n int, err error) {
	err = f.h.do("write at", f.name, func() (err error) {
		n, err = f.File.WriteAt(b, off)
		return err
	})
	return n, err
}

func (f *hookedFile) Sync() error { return f.h.do("sync", f.name, f.File.Sync) }

var errDied = errors.New("the node has died")

// A node dies ahead of each of its steps in turn. Others find nothing half, and in the end nothing left over.
func TestDiesAtEveryStep(t *testing.T) {
	testkit.Long(t)
	for left, died := 0, true; died; left++ {
		inBed(t, func(t *testing.T, b *bed) { died = diesAfter(t, b, left) })
		if t.Failed() {
			t.Fatalf("it died after %d steps", left)
		}
		if !died && left < 30 {
			t.Errorf("a life of %d steps is no test", left)
		}
	}
}

func diesAfter(t *testing.T, b *bed, left int) (died bool) {
	fsys := &hooked{FS: pop.NewDir(b.dir, 0), before: func(string, string) error {
		if left--; left < 0 {
			died = true
			return errDied
		}
		return nil
	}}
	c, err := b.hub.Join(pop.Config{Node: "mortal"})
	if err != nil {
		t.Fatal(err)
	}
	cfg := pop.StoreConfig{FS: fsys, Coord: c, Node: "mortal", Capacity: 10, Forget: 10 * time.Minute}
	if err := aLife(t.Context(), cfg); err != nil && !errors.Is(err, errDied) {
		t.Error(err)
	}
	c.Close()
	cfg.FS, cfg.Node = nil, "heir"
	heir := b.open(cfg)
	layers, err := heir.Layers(t.Context())
	if err != nil {
		t.Error(err)
	}
	for _, l := range layers {
		if err := heir.Verify(t.Context(), l, 0); err != nil {
			t.Errorf("%s is visible: %v", l.Name, err)
		}
	}
	for range 8 { // the mortal is forgotten meanwhile
		b.sweep(heir)
	}
	layers, err = heir.Layers(t.Context())
	if got := b.files("layers", "fill", "trash"); err != nil || len(got) != 3*len(layers) {
		t.Errorf("left beside %d layers: %v, %v", len(layers), got, err)
	}
	for _, name := range b.files(".", "nodes") {
		if strings.HasPrefix(filepath.Base(name), ".") {
			t.Errorf("left: %s", name)
		}
	}
	return died
}

// aLife does a bit of everything, until something fails.
func aLife(ctx context.Context, cfg pop.StoreConfig) error {
	st, err := pop.OpenStore(ctx, cfg)
	if err != nil {
		return err
	}
	if err := st.Beat(ctx); err != nil {
		return err
	}
	for i, tar := range []string{"first", "second", "third"} {
		id := digest.FromString(tar)
		d, err := st.Draft(ctx, id, 1)
		if err != nil {
			return err
		}
		if _, err = d.Write([]byte(tar)); err == nil {
			err = d.Checkpoint(ctx, []byte("{}"))
		}
		if err == nil && i < 2 {
			err = d.Publish(ctx, pop.Layer{Size: int64(len(tar))}, []byte("table"))
		}
		if err = errors.Join(err, d.Close()); err != nil {
			return err
		}
	}
	id := digest.FromString("first")
	l, err := st.Use(ctx, id)
	if err != nil {
		return err
	}
	if _, err := st.Evict(ctx, 0); err != nil { // the second
		return err
	}
	if err := st.Quarantine(ctx, l); err != nil {
		return err
	}
	if err := st.Unuse(ctx, id); err != nil {
		return err
	}
	for range 2 {
		if _, err := st.Sweep(ctx); err != nil {
			return err
		}
		time.Sleep(3 * time.Minute)
	}
	return nil
}

// A node that has used a store takes no other for it, and makes none where it
// was: its file system may not be mounted.
func TestStoreIsTheOneThatWas(t *testing.T) {
	cfg := func(dir, id string) pop.StoreConfig {
		coord, err := local.New(pop.Config{Node: "n1"})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { coord.Close() })
		return pop.StoreConfig{FS: pop.NewDir(dir, 0), Coord: coord, Node: "n1", ID: id}
	}
	dir := t.TempDir()
	st, err := pop.OpenStore(t.Context(), cfg(dir, ""))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := pop.OpenStore(t.Context(), cfg(dir, st.ID())); err != nil {
		t.Error(err)
	}
	empty := t.TempDir()
	if _, err := pop.OpenStore(t.Context(), cfg(empty, st.ID())); !errors.Is(err, pop.ErrNotMounted) {
		t.Errorf("an empty directory: %v", err)
	}
	if left, _ := os.ReadDir(empty); len(left) > 0 {
		t.Errorf("it has %v in it now", left)
	}
	if _, err := pop.OpenStore(t.Context(), cfg(empty, "")); err != nil {
		t.Fatal(err)
	}
	if _, err := pop.OpenStore(t.Context(), cfg(empty, st.ID())); !errors.Is(err, pop.ErrNotMounted) {
		t.Errorf("another store: %v", err)
	}
}
