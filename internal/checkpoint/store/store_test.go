package store_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"dewpoint/internal/checkpoint/image"
	"dewpoint/internal/checkpoint/store"
	"dewpoint/testkit"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"
)

func is(t *testing.T, what string, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("%s: %v, not %v", what, err, want)
	}
}

func open(t testing.TB, cfg store.Config) *store.Store {
	t.Helper()
	if cfg.Node == "" {
		cfg.Node = "here"
	}
	s, err := store.Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// dump is a directory as an engine leaves it.
func dump(t testing.TB, s *store.Store, text string, pages int) string {
	t.Helper()
	dir, remove, err := s.Scratch()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(remove)
	mem := bytes.Repeat([]byte(text+", "), pages/(len(text)+2)+1)[:pages]
	for i := range mem[:pages/2] { // not all of it compresses
		mem[i] += byte(i * i * 7 >> 8)
	}
	if err := errors.Join(os.WriteFile(filepath.Join(dir, "core.img"), []byte(text), 0o600),
		os.WriteFile(filepath.Join(dir, "pages-1.img"), mem, 0o600)); err != nil {
		t.Fatal(err)
	}
	return dir
}

// sample is the record of a checkpoint whose data file is returned too.
func sample(t testing.TB, s *store.Store, text string) (store.Record, string) {
	t.Helper()
	file, info, err := s.Pack(t.Context(), dump(t, s, text, 700<<10))
	if err != nil {
		t.Fatal(err)
	}
	return store.Record{Image: "registry/image:1", Manifest: "sha256:m", Key: "key", Boot: 3, Restore: 0.2,
		Data: store.Blob{Digest: info.Digest, Size: info.Size, Pages: info.Pages}}, file
}

func put(t testing.TB, s *store.Store, text string, change func(r *store.Record)) store.Record {
	t.Helper()
	r, file := sample(t, s, text)
	if change != nil {
		change(&r)
	}
	r, err := s.Put(t.Context(), r, file)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// files are all names below a directory but the cache's boot file.
func files(t testing.TB, dir string) []string {
	t.Helper()
	var all []string
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		fi, err := e.Info()
		if want := map[bool]os.FileMode{true: 0o700, false: 0o600}[e.IsDir()]; err == nil &&
			fi.Mode().Perm() != want {
			t.Errorf("%s has mode %v", path, fi.Mode())
		}
		name := strings.TrimPrefix(strings.TrimPrefix(path, dir), "/")
		if !e.IsDir() && name != "cache/boot" || e.IsDir() && name != "" && name != "cache" {
			all = append(all, name)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	return all
}

func ids(all []store.Listed) []string {
	out := []string{}
	for _, l := range all {
		out = append(out, l.ID)
	}
	return out
}

// restorable checks that what is unpacked is what was dumped.
func restorable(t testing.TB, s *store.Store, r store.Record, text string) {
	t.Helper()
	dir, release, err := s.Unpacked(t.Context(), r)
	if err != nil {
		t.Errorf("%s: %v", text, err)
		return
	}
	defer release()
	b, err := os.ReadFile(filepath.Join(dir, "core.img"))
	if err != nil || string(b) != text {
		t.Errorf("%q, %v", b, err)
	}
	if fi, err := os.Stat(filepath.Join(dir, "pages-1.img")); err != nil || fi.Size() != 700<<10 {
		t.Errorf("%s: %v", text, err)
	}
}

func TestPutFindOpen(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "checkpoints")
	s := open(t, store.Config{Dir: dir})
	upper := &store.Layer{DiffID: digest.FromString("upper"), Size: 5}
	old := put(t, s, "old", func(r *store.Record) { r.Created = time.Now().Add(-time.Hour); r.Upper = upper })
	r := put(t, s, "new", nil)
	put(t, s, "another key", func(r *store.Record) { r.Key = "other" })
	put(t, s, "another image", func(r *store.Record) { r.Manifest = "sha256:n" })
	for range 2 {
		if got := s.Find(t.Context(), "sha256:m", "key"); !slices.Equal(ids(got), []string{r.ID, old.ID}) ||
			!got[0].Local || got[0].PoP || got[0].Node != "here" || got[0].Boot != 3 {
			t.Errorf("%+v", got)
		}
		if got := s.Find(t.Context(), "sha256:m", "k"); len(got) != 0 {
			t.Errorf("%+v", got)
		}
		for manifest, n := range map[string]int{"": 4, "sha256:m": 3, "sha256:x": 0} {
			if got, err := s.List(t.Context(), manifest); err != nil || len(got) != n {
				t.Errorf("%s: %+v, %v", manifest, got, err)
			}
		}
		restorable(t, s, r, "new")
		restorable(t, s, old, "old")
		if err := s.Verify(t.Context(), r.ID); err != nil {
			t.Error(err)
		}
		if got := s.Uppers(); len(got) != 1 || !got[upper.DiffID] {
			t.Errorf("%v", got)
		}
		s = open(t, store.Config{Dir: dir})
	}
	again, file := sample(t, s, "new")
	if got, err := s.Put(t.Context(), again, file); err != nil || got.ID != r.ID ||
		!got.Created.Equal(r.Created) {
		t.Errorf("%+v, %v", got, err)
	}
	if _, err := os.Stat(file); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the file stays: %v", err)
	}
}

func TestMeta(t *testing.T) {
	s := open(t, store.Config{Dir: t.TempDir()})
	r := put(t, s, "text", nil)
	dir, img, release, err := s.Meta(t.Context(), r,
		func(_ context.Context, dir string, img *image.Reader) error {
			return os.WriteFile(filepath.Join(dir, "more"), []byte(img.Pages()[0].Name), 0o600)
		})
	if err != nil {
		t.Fatal(err)
	}
	ents, err := os.ReadDir(dir)
	if err != nil || len(ents) != 2 || ents[0].Name() != "core.img" || ents[1].Name() != "more" {
		t.Errorf("%v, %v", ents, err)
	}
	if b, err := img.Chunk(t.Context(), "pages-1.img", 2); err != nil || len(b) != (700-512)<<10 {
		t.Errorf("%d bytes, %v", len(b), err)
	}
	is(t, "removed while it is read", s.Remove(t.Context(), r.ID), store.ErrInUse)
	release(context.Canceled)
	dir, _, release, err = s.Meta(t.Context(), r, nil)
	if err != nil {
		t.Fatal(err)
	}
	release(fmt.Errorf("a page of %s: %w", dir, image.ErrDamaged))
	_, _, _, err = s.Meta(t.Context(), r, nil)
	is(t, "damaged as it was read", err, store.ErrUnknown)
}

func TestRemove(t *testing.T) {
	dir := t.TempDir()
	s := open(t, store.Config{Dir: dir})
	r := put(t, s, "text", nil)
	if err := s.SetOrder(t.Context(), r.ID, []byte("3 1 2")); err != nil ||
		string(s.Order(t.Context(), r.ID)) != "3 1 2" {
		t.Errorf("order: %v", err)
	}
	cached, release, err := s.Unpacked(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Remove(t.Context(), r.ID); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Join(cached, "core.img")); err != nil {
		t.Errorf("what is in use went: %v", err)
	}
	release()
	release() // does nothing
	is(t, "removed", s.Remove(t.Context(), r.ID), store.ErrUnknown)
	_, err = s.Open(t.Context(), r)
	is(t, "open", err, store.ErrUnknown)
	is(t, "verify", s.Verify(t.Context(), r.ID), store.ErrUnknown)
	if got := files(t, dir); len(got) != 3 && !strings.HasPrefix(got[0], "cache") {
		t.Errorf("left %v", got)
	}
}

func TestRefused(t *testing.T) {
	dir := t.TempDir()
	s := open(t, store.Config{Dir: dir})
	for what, change := range map[string]func(r *store.Record){
		"size":   func(r *store.Record) { r.Data.Size++ },
		"digest": func(r *store.Record) { r.Data.Digest = "sha256:no" },
		"key":    func(r *store.Record) { r.Key = "" },
		"upper":  func(r *store.Record) { r.Upper = &store.Layer{DiffID: "x"} },
	} {
		r, file := sample(t, s, what)
		change(&r)
		_, err := s.Put(t.Context(), r, file)
		is(t, what, err, store.ErrDamaged)
		if err := os.Remove(file); err != nil {
			t.Error(err)
		}
	}
	if got, _ := s.List(t.Context(), ""); len(got) != 0 {
		t.Errorf("%+v", got)
	}
}

func TestRetention(t *testing.T) {
	dir := t.TempDir()
	s := open(t, store.Config{Dir: dir, Keep: 2})
	var all []string
	at := time.Now()
	for i := range 4 {
		r := put(t, s, fmt.Sprint("number ", i), func(r *store.Record) {
			r.Created = at.Add(time.Duration(i) * time.Second)
		})
		all = append([]string{r.ID}, all...)
	}
	if got, _ := s.List(t.Context(), ""); !slices.Equal(ids(got), all[:2]) {
		t.Errorf("%v of %v", ids(got), all)
	}
	// One that is read stays.
	got, _ := s.List(t.Context(), "")
	d, err := s.Open(t.Context(), got[1].Record)
	if err != nil {
		t.Fatal(err)
	}
	r := put(t, s, "five", func(r *store.Record) { r.Created = at.Add(time.Minute) })
	if now, _ := s.List(t.Context(), ""); !slices.Equal(ids(now), []string{r.ID, all[0], all[1]}) {
		t.Errorf("%v", ids(now))
	}
	if err := errors.Join(d.Close(), d.Close(), s.Tidy(t.Context())); err != nil {
		t.Error(err)
	}
	if now, _ := s.List(t.Context(), ""); !slices.Equal(ids(now), []string{r.ID, all[0]}) {
		t.Errorf("%v", ids(now))
	}
	if got := files(t, dir); len(slices.DeleteFunc(got, func(n string) bool {
		return strings.HasPrefix(n, "scratch-")
	})) != 4 {
		t.Errorf("left %v", got)
	}
}

// The bound is kept by removing what was used least recently, also over a restart.
func TestBound(t *testing.T) {
	dir := t.TempDir()
	s := open(t, store.Config{Dir: dir})
	var all []store.Record
	for i := range 3 {
		all = append(all, put(t, s, fmt.Sprint("number ", i), func(r *store.Record) { r.Key = fmt.Sprint(i) }))
	}
	for n, i := range []int{0, 1, 2, 1, 2, 0} { // what is unpacked is used as well
		if n == 3 {
			d, err := s.Open(t.Context(), all[i])
			if err == nil {
				err = d.Close()
			}
			if err != nil {
				t.Fatal(err)
			}
			continue
		}
		_, release, err := s.Unpacked(t.Context(), all[i])
		if err != nil {
			t.Fatal(err)
		}
		release()
	}
	s = open(t, store.Config{Dir: dir, MaxBytes: all[0].Data.Size*2 + all[0].Data.Size/2})
	if err := s.Tidy(t.Context()); err != nil {
		t.Error(err)
	}
	got, _ := s.List(t.Context(), "")
	if left := ids(got); len(left) != 2 || slices.Contains(left, all[1].ID) {
		t.Errorf("left %v of %v", left, all)
	}
}

func TestFailures(t *testing.T) {
	dir := t.TempDir()
	s := open(t, store.Config{Dir: dir})
	r := put(t, s, "text", nil)
	for i := range 2 {
		if s.Fail(t.Context(), r.ID, "it hung") {
			t.Errorf("quarantined after %d", i+1)
		}
	}
	s.Succeeded(t.Context(), r.ID)
	for i := range 3 {
		s = open(t, store.Config{Dir: dir})
		if got := s.Fail(t.Context(), r.ID, "it hung"); got != (i == 2) {
			t.Errorf("after %d: %v", i+1, got)
		}
	}
	s = open(t, store.Config{Dir: dir})
	if got, _ := s.List(t.Context(), ""); len(got) != 1 || !got[0].Quarantined || got[0].Failures != 3 {
		t.Errorf("%+v", got)
	}
	if got := s.Find(t.Context(), r.Manifest, r.Key); len(got) != 0 {
		t.Errorf("%+v", got)
	}
	if s.Fail(t.Context(), "../../etc/passwd", "") {
		t.Error("no ID")
	}
}

// The first unpacks, the others wait; what is unpacked is shared and idle ones go.
func TestCache(t *testing.T) {
	dir := t.TempDir()
	s := open(t, store.Config{Dir: dir, CacheBytes: 1 << 20})
	one, two := put(t, s, "one", nil), put(t, s, "two", nil)
	var wg sync.WaitGroup
	var mu sync.Mutex
	dirs := map[string]bool{}
	var release []func()
	for range 8 {
		wg.Go(func() {
			d, r, err := s.Unpacked(t.Context(), one)
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			dirs[d] = true
			release = append(release, r)
		})
	}
	wg.Wait()
	if len(dirs) != 1 || len(release) != 8 {
		t.Fatalf("%v", dirs)
	}
	restorable(t, s, two, "two")
	at := func(r store.Record) string { return filepath.Join(dir, "cache", r.ID) }
	there := func(r store.Record) bool { _, err := os.Stat(at(r)); return err == nil }
	if !there(one) || there(two) && s.Tidy(t.Context()) == nil && there(two) {
		t.Errorf("one, in use: %v; two, over the bound: %v", there(one), there(two))
	}
	for _, r := range release {
		r()
	}
	restorable(t, s, two, "two")
	if there(one) || !there(two) {
		t.Errorf("one, idle: %v; two, new: %v", there(one), there(two))
	}
	// It is taken up by the next process of this boot, and by none of another.
	s = open(t, store.Config{Dir: dir})
	if !there(two) {
		t.Error("gone at a start")
	}
	restorable(t, s, two, "two")
	if err := os.WriteFile(filepath.Join(dir, "cache", "boot"), []byte("another"), 0o600); err != nil {
		t.Fatal(err)
	}
	s = open(t, store.Config{Dir: dir, CacheIdle: time.Nanosecond})
	if there(two) {
		t.Error("stays in another boot")
	}
	restorable(t, s, two, "two")
	if err := s.Tidy(t.Context()); err != nil || there(two) {
		t.Errorf("idle: %v, %v", there(two), err)
	}
}

// TestWarm is an unpacked checkpoint that has left the page cache.
func TestWarm(t *testing.T) {
	s := open(t, store.Config{Dir: t.TempDir()})
	r := put(t, s, "one", nil)
	if s.Warm(r.ID) {
		t.Error("warm before it is unpacked")
	}
	dir, release, err := s.Unpacked(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	if !s.Warm(r.ID) {
		t.Error("what was just written is not warm")
	}
	for _, name := range files(t, dir) {
		f, err := os.Open(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(f.Sync(), unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED),
			f.Close()); err != nil {
			t.Fatal(err)
		}
	}
	if s.Warm(r.ID) {
		t.Error("warm, and not in the page cache")
	}
	for range 1000 {
		s.ReadAhead(t.Context(), r.ID)
		if s.Warm(r.ID) {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Error("reading ahead does not warm it")
}

// What was packed need not be unpacked.
func TestAdopt(t *testing.T) {
	dir := t.TempDir()
	s := open(t, store.Config{Dir: dir})
	r, file := sample(t, s, "text")
	r, err := s.Put(t.Context(), r, file)
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{"text", "another"} { // the second comes too late
		from := dump(t, s, text, 700<<10)
		if err := errors.Join(os.Chmod(filepath.Join(from, "core.img"), 0o644), s.Adopt(r, from)); err != nil {
			t.Fatal(err)
		}
		restorable(t, s, r, "text")
		if _, err := os.Stat(from); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("the directory stays: %v", err)
		}
	}
	if got := files(t, filepath.Join(dir, "cache")); len(got) != 4 { // boot, the directory and its files
		t.Errorf("%v", got)
	}
	from := dump(t, s, "text", 10)
	if err := errors.Join(os.Symlink("/etc", filepath.Join(from, "link"))); err != nil ||
		s.Adopt(r, from) == nil {
		t.Errorf("a link is adopted: %v", err)
	}
}

// Who comes first and gives up leaves it to the next.
func TestCacheGivenUp(t *testing.T) {
	s := open(t, store.Config{Dir: t.TempDir()})
	r := put(t, s, "text", nil)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, _, err := s.Unpacked(ctx, r)
	is(t, "cancelled", err, context.Canceled)
	var wg sync.WaitGroup
	for i := range 6 {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i)*time.Millisecond)
			defer cancel()
			if _, release, err := s.Unpacked(ctx, r); err == nil {
				release()
			}
		})
	}
	restorable(t, s, r, "text")
	wg.Wait()
	if got := files(t, filepath.Dir(filepath.Dir(func() string {
		d, f, _ := s.Unpacked(t.Context(), r)
		f()
		return d
	}()))); len(slices.DeleteFunc(got, func(n string) bool { return !strings.HasSuffix(n, ".tmp") })) != 0 {
		t.Errorf("left %v", got)
	}
}

// What is damaged is found as it is used, and is gone then.
func TestDamagedData(t *testing.T) {
	dir := t.TempDir()
	s := open(t, store.Config{Dir: dir, Keep: 9})
	flip := func(r store.Record, at int64) {
		f, err := os.OpenFile(filepath.Join(dir, r.ID+".data"), os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		var b [1]byte
		_, err = f.ReadAt(b[:], at)
		b[0] ^= 16
		_, werr := f.WriteAt(b[:], at)
		if err := errors.Join(err, werr, f.Close()); err != nil {
			t.Fatal(err)
		}
	}
	index, middle, verified := put(t, s, "index", nil), put(t, s, "middle", nil), put(t, s, "verified", nil)
	flip(index, index.Data.Size-20)
	flip(middle, middle.Data.Size/2)
	flip(verified, verified.Data.Size/2)
	_, _, err := s.Unpacked(t.Context(), index)
	is(t, "index", err, image.ErrDamaged)
	_, _, err = s.Unpacked(t.Context(), middle)
	is(t, "middle", err, image.ErrDamaged)
	is(t, "verified", s.Verify(t.Context(), verified.ID), store.ErrDamaged)
	if got, _ := s.List(t.Context(), ""); len(got) != 0 {
		t.Errorf("%+v", got)
	}
	if got := slices.DeleteFunc(files(t, dir), func(n string) bool {
		return strings.HasPrefix(n, "scratch-")
	}); len(got) != 0 {
		t.Errorf("left %v", got)
	}
}

// Whatever lies in the directory that is no whole checkpoint goes at a start.
func TestLeftovers(t *testing.T) {
	dir := t.TempDir()
	s := open(t, store.Config{Dir: dir, Keep: 9})
	good := put(t, s, "good", nil)
	short, noData, noRecord, bad, other, stranger := put(t, s, "short", nil), put(t, s, "no data", nil),
		put(t, s, "no record", nil), put(t, s, "bad", nil), put(t, s, "other", nil), put(t, s, "stranger", nil)
	at := func(r store.Record, end string) string { return filepath.Join(dir, r.ID+end) }
	b, err := os.ReadFile(at(good, ".json"))
	if err := errors.Join(err,
		os.Truncate(at(short, ".data"), short.Data.Size-1), os.Remove(at(noData, ".data")),
		os.Remove(at(noRecord, ".json")),
		os.WriteFile(at(bad, ".json"), []byte(`{"format":1`), 0o600), os.WriteFile(at(other, ".json"), b, 0o600),
		os.WriteFile(at(stranger, ".json"),
			bytes.Replace(bytes.Replace(b, []byte(good.ID), []byte(stranger.ID), 1), []byte(`"key"`), []byte(`"kex"`),
				1), 0o600),
		os.WriteFile(filepath.Join(dir, "pack-1.tmp"), b, 0o600), os.Mkdir(filepath.Join(dir, "scratch-x"), 0o700),
		os.WriteFile(filepath.Join(dir, "scratch-x", "f"), b, 0o600),
		os.WriteFile(filepath.Join(dir, "x.notes"), nil, 0o600),
		os.WriteFile(at(good, ".notes"), []byte("no"), 0o600),
		os.MkdirAll(filepath.Join(dir, "cache", good.ID+".abc.tmp", "d"), 0o700),
		os.WriteFile(filepath.Join(dir, "cache", "x"), nil, 0o600),
	); err != nil {
		t.Fatal(err)
	}
	s = open(t, store.Config{Dir: dir})
	if got, err := s.List(t.Context(), ""); err != nil || !slices.Equal(ids(got), []string{good.ID}) ||
		got[0].Failures != 0 {
		t.Errorf("%+v, %v", got, err)
	}
	if got := files(t, dir); !slices.Equal(got,
		[]string{good.ID + ".data", good.ID + ".json", good.ID + ".notes"}) {
		t.Errorf("left %v", got)
	}
	restorable(t, s, good, "good")
}

// On a disk that is full there is a clear error, and nothing is left.
func TestNoSpace(t *testing.T) {
	testkit.NeedRoot(t, "it mounts a small file system")
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=2m,mode=0700"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	s := open(t, store.Config{Dir: dir})
	r := put(t, s, "fits", nil)
	scratch := dump(t, open(t, store.Config{Dir: t.TempDir()}), "does not fit", 9<<20)
	before := files(t, dir)
	_, _, err := s.Pack(t.Context(), scratch)
	is(t, "pack", err, unix.ENOSPC)
	if got := files(t, dir); !slices.Equal(got, before) {
		t.Errorf("left %v", got)
	}
	fill, err := os.Create(filepath.Join(dir, "fill"))
	if err == nil {
		_, err = fill.Write(make([]byte, 3<<20))
	}
	is(t, "fill", err, unix.ENOSPC)
	defer fill.Close()
	if s.Fail(t.Context(), r.ID, "why") {
		t.Error("quarantined")
	}
	_, _, err = s.Unpacked(t.Context(), r)
	is(t, "unpack", err, unix.ENOSPC)
	if err := fill.Truncate(0); err != nil {
		t.Fatal(err)
	}
	restorable(t, s, r, "fits")
	if got := files(t, filepath.Join(dir, "cache")); len(got) != 4 { // boot, the directory and its files
		t.Errorf("left %v", got)
	}
}
