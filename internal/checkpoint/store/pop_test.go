package store_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"dewpoint/internal/checkpoint/image"
	"dewpoint/internal/checkpoint/store"
	"dewpoint/internal/pop"
	"dewpoint/internal/pop/local"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"
)

// nodes are those of a PoP: they share a directory.
type nodes struct {
	t   *testing.T
	hub *local.Hub
	dir string
}

func newPoP(t *testing.T) *nodes { return &nodes{t, local.NewHub(), t.TempDir()} }

// flaky is a file system whose files cannot be read while it is away.
type flaky struct {
	pop.FS
	away atomic.Bool
}

type flakyFile struct {
	pop.File
	of *flaky
}

func (f *flaky) Open(ctx context.Context, name string) (pop.File, error) {
	file, err := f.FS.Open(ctx, name)
	return flakyFile{file, f}, err
}

func (f flakyFile) ReadAt(b []byte, at int64) (int, error) {
	if f.of.away.Load() && at > 0 { // the file's first bytes and its end come
		return 0, pop.ErrStoreAway
	}
	return f.File.ReadAt(b, at)
}

// shared is a node's view of the PoP's store.
func (b *nodes) shared(node string, fs pop.FS) *pop.Store {
	b.t.Helper()
	return b.sharedFor(node, fs, 0, 0)
}

// sharedFor is shared with a lease period and a time of grace.
func (b *nodes) sharedFor(node string, fs pop.FS, ttl, grace time.Duration) *pop.Store {
	b.t.Helper()
	c, err := b.hub.Join(pop.Config{Node: node, TTL: ttl})
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { c.Close() })
	if fs == nil {
		fs = pop.NewDir(b.dir, 0)
	}
	st, err := pop.OpenStore(b.t.Context(), pop.StoreConfig{FS: fs, Coord: c, Node: node, Grace: grace})
	if err != nil {
		b.t.Fatal(err)
	}
	return st
}

func (b *nodes) node(name string) (*store.Store, *pop.Store) {
	b.t.Helper()
	st := b.shared(name, nil)
	return open(b.t, store.Config{Dir: b.t.TempDir(), Node: name, PoP: func() *pop.Store { return st }}), st
}

// layer publishes one.
func (b *nodes) layer(st *pop.Store, tar string) *store.Layer {
	b.t.Helper()
	ctx, id := b.t.Context(), digest.FromString(tar)
	d, err := st.Draft(ctx, id, 1)
	if err == nil {
		_, err = d.Write([]byte(tar))
	}
	if err == nil {
		err = d.Publish(ctx, pop.Layer{Size: int64(len(tar))}, nil)
	}
	if err != nil {
		b.t.Fatal(err)
	}
	return &store.Layer{DiffID: id, Size: int64(len(tar))}
}

func (b *nodes) files(dirs ...string) (all []string) {
	for _, d := range dirs {
		all = append(all, files(b.t, filepath.Join(b.dir, d))...)
	}
	return all
}

func TestSharedWithAnotherNode(t *testing.T) {
	b, ctx := newPoP(t), t.Context()
	x, xs := b.node("x")
	y, ys := b.node("y")
	r := put(t, x, "text", func(r *store.Record) {
		r.Upper = &store.Layer{DiffID: digest.FromString("upper"), Size: 5}
	})
	is(t, "without its upper layer", x.Publish(ctx, r.ID), store.ErrNoUpper)
	is(t, "unknown", x.Publish(ctx, strings.Repeat("ab", 32)), store.ErrUnknown)
	b.layer(xs, "upper")
	for range 2 {
		if err := errors.Join(x.Publish(ctx, r.ID), x.SetOrder(ctx, r.ID, []byte("3 1"))); err != nil {
			t.Fatal(err)
		}
	}
	if got := y.Find(ctx, r.Manifest, r.Key); len(got) != 1 || got[0].ID != r.ID || got[0].Local ||
		!got[0].PoP || got[0].Node != "x" || got[0].Upper.DiffID != r.Upper.DiffID {
		t.Fatalf("%+v", got)
	}
	if got := x.Find(ctx, r.Manifest, r.Key); len(got) != 1 || !got[0].Local || !got[0].PoP {
		t.Errorf("%+v", got)
	}
	restorable(t, y, r, "text")
	_, img, release, err := y.Meta(ctx, r, nil)
	if err != nil {
		t.Fatal(err)
	}
	if b, err := img.Chunk(ctx, "pages-1.img", 0); err != nil || len(b) != image.ChunkSize {
		t.Errorf("%d bytes, %v", len(b), err)
	}
	if got := ys.Used(); len(got) != 1 || len(b.files("refs/y")) != 1 {
		t.Errorf("referenced while it is read: %v", got)
	}
	release(nil)
	if got := ys.Used(); len(got) != 0 || len(b.files("refs/y")) != 0 {
		t.Errorf("referenced: %v", got)
	}
	if string(y.Order(ctx, r.ID)) != "3 1" {
		t.Errorf("%q", y.Order(ctx, r.ID))
	}
	// Without its upper layer it is of no use to y, and x has it.
	l, err := xs.Record(ctx, r.Upper.DiffID)
	if err == nil {
		err = xs.Quarantine(ctx, l)
	}
	if got := y.Find(ctx, r.Manifest, r.Key); err != nil || len(got) != 0 ||
		len(x.Find(ctx, r.Manifest, r.Key)) != 1 {
		t.Errorf("%+v, %v", got, err)
	}
	if err := y.Remove(ctx, r.ID); err != nil || xs.HasLayer(ctx, l.DiffID) {
		t.Errorf("%v", err)
	}
	if got, err := x.List(ctx, ""); err != nil || len(got) != 1 || got[0].PoP {
		t.Errorf("%+v, %v", got, err)
	}
}

// counted is a file system that counts how often a directory is read.
type counted struct {
	pop.FS
	reads atomic.Int64
}

func (c *counted) Names(ctx context.Context, name string) ([]string, error) {
	c.reads.Add(1)
	return c.FS.Names(ctx, name)
}

// Who starts many containers does not look into the PoP's store for each, and sees at once what this
// node changes there.
func TestLooksSeldom(t *testing.T) {
	b, ctx := newPoP(t), t.Context()
	fs := &counted{FS: pop.NewDir(b.dir, 0)}
	xs := b.shared("x", fs)
	x := open(t, store.Config{Dir: t.TempDir(), Node: "x", PoP: func() *pop.Store { return xs }})
	r := put(t, x, "text", nil)
	look := func(want string) {
		t.Helper()
		before := fs.reads.Load()
		for range 100 {
			all, err := x.List(ctx, r.Manifest)
			if err != nil || len(all) != 1 {
				t.Fatalf("%+v, %v", all, err)
			}
			if got := fmt.Sprint(all[0].PoP, all[0].Failures); got != want {
				t.Fatalf("in the PoP's store, and failures: %s, not %s", got, want)
			}
		}
		if n := fs.reads.Load() - before; n > 60 { // of 200; a slow machine looks more often
			t.Errorf("100 starts read %d directories", n)
		}
	}
	look("false 0")
	if err := x.Publish(ctx, r.ID); err != nil {
		t.Fatal(err)
	}
	look("true 0")
	x.Fail(ctx, r.ID, "no")
	look("true 1")
	x.Succeeded(ctx, r.ID)
	look("true 0")
	if err := x.Remove(ctx, r.ID); err != nil {
		t.Fatal(err)
	}
	if all, err := x.List(ctx, r.Manifest); err != nil || len(all) != 0 {
		t.Errorf("removed: %+v, %v", all, err)
	}
}

// Who publishes leaves no more than it keeps; who reads an older one goes on.
func TestRetentionInThePoP(t *testing.T) {
	b, ctx := newPoP(t), t.Context()
	x, _ := b.node("x")
	y, _ := b.node("y")
	at := time.Now()
	var all []store.Record
	for i, text := range []string{"one", "two", "three", "another"} {
		r := put(t, x, text, func(r *store.Record) {
			r.Created = at.Add(time.Duration(i) * time.Second)
			if text == "another" {
				r.Key = "another"
			}
		})
		all = append(all, r)
		if i == 2 {
			d, err := y.Open(ctx, all[0])
			if err != nil {
				t.Fatal(err)
			}
			defer d.Close()
			defer func() {
				img, err := image.Open(d, d.Size)
				if err == nil {
					_, err = img.Chunk(ctx, "pages-1.img", 1)
				}
				if err != nil {
					t.Error(err)
				}
			}()
		}
		if err := x.Publish(ctx, r.ID); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := y.List(ctx, ""); err != nil ||
		!slices.Equal(ids(got), []string{all[3].ID, all[2].ID, all[1].ID}) {
		t.Errorf("%+v, %v", ids(got), err)
	}
}

// One node alone that cannot restore a checkpoint does not take it from the others; two do.
func TestQuarantineInThePoP(t *testing.T) {
	b, ctx := newPoP(t), t.Context()
	x, _ := b.node("x")
	y, _ := b.node("y")
	z, zs := b.node("z")
	r := put(t, x, "text", nil)
	if err := x.Publish(ctx, r.ID); err != nil {
		t.Fatal(err)
	}
	for range 9 {
		y.Fail(ctx, r.ID, "it hung")
	}
	if len(y.Find(ctx, r.Manifest, r.Key)) != 0 || len(z.Find(ctx, r.Manifest, r.Key)) != 1 ||
		z.Find(ctx, r.Manifest, r.Key)[0].Failures != 9 {
		t.Errorf("one node: %+v", z.Find(ctx, r.Manifest, r.Key))
	}
	for i := range 3 {
		if got := x.Fail(ctx, r.ID, "it hung"); got != (i == 2) {
			t.Errorf("after %d: %v", i+1, got)
		}
	}
	if zs.HasLayer(ctx, digest.NewDigestFromEncoded(digest.SHA256, r.ID)) ||
		len(z.Find(ctx, r.Manifest, r.Key)) != 0 {
		t.Error("two nodes: it is there")
	}
	is(t, "publish", x.Publish(ctx, r.ID), store.ErrQuarantined)
	x.Succeeded(ctx, r.ID)
	if err := x.Publish(ctx, r.ID); err != nil || len(z.Find(ctx, r.Manifest, r.Key)) != 1 {
		t.Errorf("after a success: %v", err)
	}
}

// flip damages a file.
func flip(t *testing.T, path string) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err == nil {
		b[len(b)/2] ^= 4
		err = os.WriteFile(path, b, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// What another node has found damaged, a checkpoint or what it stands on, is pending again for who made it,
// while it keeps it; what was taken out on purpose stays away.
func TestPendingAgain(t *testing.T) {
	b, ctx := newPoP(t), t.Context()
	x, xs := b.node("x")
	y, _ := b.node("y")
	c, err := b.hub.Join(pop.Config{Node: "z"})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	events, err := c.Subscribe(ctx)
	if err != nil {
		t.Fatal(err)
	}
	told := func(id digest.Digest) string {
		for e := range events {
			if e.Key == id.String() && (e.Kind == pop.Damaged || e.Kind == pop.Evicted) {
				return e.Kind
			}
		}
		return "nothing"
	}
	upper := b.layer(xs, "upper")
	r := put(t, x, "text", func(r *store.Record) { r.Upper = upper })
	id := digest.NewDigestFromEncoded(digest.SHA256, r.ID)
	publish := func() {
		t.Helper()
		if err := x.Publish(ctx, r.ID); err != nil || x.Settle(ctx, r.ID, nil) || len(x.PendingUploads()) > 0 {
			t.Fatal(err)
		}
	}
	publish()
	data := slices.DeleteFunc(b.files("layers"), func(n string) bool {
		return !strings.HasSuffix(n, ".data") || !strings.Contains(n, r.ID[:12])
	})
	if len(data) != 1 {
		t.Fatalf("its data are %v of %v", data, b.files("layers"))
	}
	flip(t, filepath.Join(b.dir, "layers", data[0]))
	_, _, err = y.Unpacked(ctx, r)
	is(t, "unpack", err, image.ErrDamaged)
	if kind := told(id); kind != pop.Damaged {
		t.Errorf("nodes are told %s", kind)
	}
	y.Lost(id) // has not made it
	x.Lost(digest.FromString("another"))
	if len(x.PendingUploads())+len(y.PendingUploads()) > 0 {
		t.Error("it is pending for who has not made it, or for another one")
	}
	for _, lost := range []digest.Digest{id, upper.DiffID} {
		x.Lost(lost)
		if got := x.PendingUploads(); len(got) != 1 || got[0].ID != r.ID {
			t.Errorf("without %s so much is pending: %v", lost, got)
		}
		publish()
	}
	restorable(t, y, r, "text")
	if err := x.Missed(ctx); err != nil || len(x.PendingUploads()) > 0 {
		t.Errorf("all is there, and pending are %v, %v", x.PendingUploads(), err)
	}
	if err := y.Remove(ctx, r.ID); err != nil {
		t.Fatal(err)
	}
	if kind := told(id); kind != pop.Evicted {
		t.Errorf("removed, and nodes are told %s", kind)
	}
	if err := x.Missed(ctx); err != nil || len(x.PendingUploads()) > 0 {
		t.Errorf("what was removed on purpose is pending: %v, %v", x.PendingUploads(), err)
	}
}

// Who was down when what it made was found damaged hears of it at its start.
func TestMissed(t *testing.T) {
	b, ctx := newPoP(t), t.Context()
	dir := t.TempDir()
	xs := b.shared("x", nil)
	up := false
	node := func() *store.Store {
		return open(t, store.Config{Dir: dir, Node: "x", PoP: func() *pop.Store {
			if !up {
				return nil
			}
			return xs
		}})
	}
	y, _ := b.node("y")
	x := node()
	is(t, "without the store", x.Missed(ctx), store.ErrNoPoP)
	up = true
	r := put(t, x, "text", nil)
	if err := x.Publish(ctx, r.ID); err != nil || x.Settle(ctx, r.ID, nil) {
		t.Fatal(err)
	}
	data := slices.DeleteFunc(b.files("layers"), func(n string) bool { return !strings.HasSuffix(n, ".data") })
	flip(t, filepath.Join(b.dir, "layers", data[0]))
	_, _, err := y.Unpacked(ctx, r)
	is(t, "unpack", err, image.ErrDamaged)
	x = node()
	if err := x.Missed(ctx); err != nil || len(x.PendingUploads()) != 1 {
		t.Fatalf("pending are %v, %v", x.PendingUploads(), err)
	}
	if err := x.Publish(ctx, r.ID); err != nil || x.Settle(ctx, r.ID, nil) {
		t.Fatal(err)
	}
	restorable(t, y, r, "text")
	if err := x.Missed(ctx); err != nil || len(x.PendingUploads()) > 0 {
		t.Errorf("it is there again, and pending: %v, %v", x.PendingUploads(), err)
	}
}

func TestDamagedInThePoP(t *testing.T) {
	b, ctx := newPoP(t), t.Context()
	dir := t.TempDir()
	xs := b.shared("x", nil)
	x := open(t, store.Config{Dir: dir, Node: "x", PoP: func() *pop.Store { return xs }})
	y, _ := b.node("y")
	r := put(t, x, "text", nil)
	if err := x.Publish(ctx, r.ID); err != nil {
		t.Fatal(err)
	}
	data := slices.DeleteFunc(b.files("layers"), func(n string) bool { return !strings.HasSuffix(n, ".data") })
	flip(t, filepath.Join(b.dir, "layers", data[0]))
	_, _, err := y.Unpacked(ctx, r)
	is(t, "unpack", err, image.ErrDamaged)
	if got := y.Find(ctx, r.Manifest, r.Key); len(got) != 0 {
		t.Errorf("still there: %+v", got)
	}
	if err := x.Publish(ctx, r.ID); err != nil {
		t.Fatal(err)
	}
	restorable(t, y, r, "text")
	// A record that is no checkpoint's, or another's, is not taken for one.
	records := slices.DeleteFunc(b.files("layers"), func(n string) bool {
		return !strings.HasSuffix(n, ".json")
	})
	name := filepath.Join(b.dir, "layers", records[0])
	text, err := os.ReadFile(name)
	if err == nil {
		err = os.WriteFile(name, []byte(strings.Replace(string(text), `"key":"key"`, `"key":"yek"`, 1)), 0o600)
	}
	z, _ := b.node("z")
	if got, lerr := z.List(ctx, ""); err != nil || lerr != nil || len(got) != 0 {
		t.Errorf("%+v, %v, %v", got, err, lerr)
	}
	// A local copy that is damaged is not published.
	if err := x.Remove(ctx, r.ID); err != nil {
		t.Fatal(err)
	}
	before := b.files("layers", "fill")
	r = put(t, x, "other", nil)
	flip(t, filepath.Join(dir, r.ID+".data"))
	is(t, "publish", x.Publish(ctx, r.ID), store.ErrDamaged)
	if got := b.files("layers", "fill"); !slices.Equal(got, before) {
		t.Errorf("left %v", got)
	}
}

// What one node drops is still there for the others.
func TestDrop(t *testing.T) {
	b, ctx := newPoP(t), t.Context()
	x, _ := b.node("x")
	y, _ := b.node("y")
	r := put(t, x, "text", nil)
	if err := x.Publish(ctx, r.ID); err != nil {
		t.Fatal(err)
	}
	if err := x.Drop(r.ID); err != nil {
		t.Fatal(err)
	}
	is(t, "drop twice", x.Drop(r.ID), store.ErrUnknown)
	if all, err := x.List(ctx, ""); err != nil || len(all) != 1 || all[0].Local || !all[0].PoP {
		t.Errorf("%+v, %v", all, err)
	}
	restorable(t, y, r, "text")
}

// What is cut off in the store is not taken for one that was removed: who fails at it is to count.
func TestTornInThePoP(t *testing.T) {
	b, ctx := newPoP(t), t.Context()
	x, _ := b.node("x")
	y, _ := b.node("y")
	r := put(t, x, "text", nil)
	if err := x.Publish(ctx, r.ID); err != nil {
		t.Fatal(err)
	}
	data := slices.DeleteFunc(b.files("layers"), func(n string) bool { return !strings.HasSuffix(n, ".data") })
	name := filepath.Join(b.dir, "layers", data[0])
	torn := func() {
		t.Helper()
		if _, _, err := y.Unpacked(ctx, r); !errors.Is(err, store.ErrTorn) || errors.Is(err, store.ErrUnknown) {
			t.Errorf("unpack: %v", err)
		}
	}
	if err := os.Truncate(name, r.Data.Size/2); err != nil {
		t.Fatal(err)
	}
	torn()
	if err := os.Remove(name); err != nil {
		t.Fatal(err)
	}
	torn()
	if got := y.Find(ctx, r.Manifest, r.Key); len(got) != 1 {
		t.Errorf("another node may see what this one does not: %+v", got)
	}
	if err := x.Remove(ctx, r.ID); err != nil {
		t.Fatal(err)
	}
	_, _, err := y.Unpacked(ctx, r)
	is(t, "removed", err, store.ErrUnknown)
}

// That the store goes away in the middle is no damage, and leaves nothing.
func TestStoreAway(t *testing.T) {
	b, ctx := newPoP(t), t.Context()
	x, _ := b.node("x")
	fs := &flaky{FS: pop.NewDir(b.dir, 0)}
	ys := b.shared("y", fs)
	gone := false
	dir := t.TempDir()
	y := open(t, store.Config{Dir: dir, Node: "y", PoP: func() *pop.Store {
		if gone {
			return nil
		}
		return ys
	}})
	r := put(t, x, "text", nil)
	if err := x.Publish(ctx, r.ID); err != nil {
		t.Fatal(err)
	}
	_, img, release, err := y.Meta(ctx, r, nil)
	if err != nil {
		t.Fatal(err)
	}
	fs.away.Store(true)
	_, err = img.Chunk(ctx, "pages-1.img", 1)
	is(t, "a chunk", err, pop.ErrStoreAway)
	release(err)
	_, _, err = y.Unpacked(ctx, r)
	is(t, "unpack", err, pop.ErrStoreAway)
	if got := slices.DeleteFunc(files(t, dir), func(n string) bool {
		return strings.Contains(n, "-meta")
	}); len(got) != 0 {
		t.Errorf("left %v", got)
	}
	fs.away.Store(false)
	restorable(t, y, r, "text")
	gone = true
	_, err = y.Open(ctx, r)
	is(t, "no store", err, store.ErrNoPoP)
	own := put(t, y, "own", nil)
	is(t, "publish", y.Publish(ctx, own.ID), store.ErrNoPoP)
	if got, err := y.List(ctx, ""); err != nil || !slices.Equal(ids(got), []string{own.ID}) {
		t.Errorf("%+v, %v", got, err)
	}
}

// A store that hangs costs its patience, and what is on the node is found.
func TestStoreHangs(t *testing.T) {
	b, ctx := newPoP(t), t.Context()
	st := b.shared("x", pop.NewDir(b.dir, 50*time.Millisecond))
	x := open(t, store.Config{Dir: t.TempDir(), Node: "x", PoP: func() *pop.Store { return st }})
	r := put(t, x, "text", nil)
	fifo := filepath.Join(b.dir, "layers", strings.Repeat("ab", 32)+".json") // its opening blocks
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := x.List(ctx, "")
	is(t, "list", err, pop.ErrStoreAway)
	if !slices.Equal(ids(got), []string{r.ID}) || len(x.Find(ctx, r.Manifest, r.Key)) != 1 {
		t.Errorf("%+v", got)
	}
	restorable(t, x, r, "text")
	w, err := os.OpenFile(fifo, os.O_RDWR, 0) // what hangs goes on
	if err == nil {
		_, err = w.WriteString("{}")
	}
	if err := errors.Join(err, w.Close(), os.Remove(fifo)); err != nil {
		t.Error(err)
	}
}
