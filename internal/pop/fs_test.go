package pop_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"dewpoint/internal/pop"
	"dewpoint/internal/pop/local"
	"dewpoint/testkit"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"
)

// answers waits until the directory is not taken to be away any more.
func answers(t *testing.T, d *pop.Dir, name string) {
	t.Helper()
	testkit.Retry(t, "it comes back", func() error {
		_, err := d.ReadFile(t.Context(), name)
		return err
	})
}

func write(t *testing.T, dir, name, content string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestDir(t *testing.T) {
	ctx, dir := t.Context(), t.TempDir()
	d := pop.NewDir(dir, 0)
	check := func(what string, err error) {
		t.Helper()
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	check("mkdir", d.Mkdir(ctx, "a/b"))
	check("write", d.WriteFile(ctx, "a/b/f", []byte("one")))
	check("replace", d.WriteFile(ctx, "a/b/f", []byte("two")))
	check("link", d.Link(ctx, "a/b/f", "a/g"))
	is(t, "link to what is there", d.Link(ctx, "a/b/f", "a/g"), fs.ErrExist)
	check("rename", d.Rename(ctx, "a/b/f", "a/h"))
	check("remove", d.Remove(ctx, "a/g"))
	is(t, "remove what is not there", d.Remove(ctx, "a/g"), fs.ErrNotExist)
	is(t, "rename what is not there", d.Rename(ctx, "a/g", "a/x"), fs.ErrNotExist)
	names, err := d.Names(ctx, "a")
	slices.Sort(names)
	if err != nil || !slices.Equal(names, []string{"b", "h"}) {
		t.Errorf("names %q, %v", names, err)
	}
	if b, err := d.ReadFile(ctx, "a/h"); err != nil || string(b) != "two" {
		t.Errorf("%q, %v", b, err)
	}
	check("make what is there", d.Make(ctx, "a/h"))
	check("make", d.Make(ctx, "a/empty"))
	if size, err := d.Reach(ctx, "a/empty"); err != nil || size != 0 {
		t.Errorf("%d bytes, %v", size, err)
	}
	is(t, "make in what is not there", d.Make(ctx, "x/y"), fs.ErrNotExist)
	if size, err := d.Reach(ctx, "a/h"); err != nil || size != 3 {
		t.Errorf("%d bytes, %v", size, err)
	}
	_, err = d.Reach(ctx, "a/g")
	is(t, "reach what is not there", err, fs.ErrNotExist)
	f, err := d.Append(ctx, "a/h")
	if err != nil {
		t.Fatal(err)
	}
	if _, err = f.WriteAt([]byte("ice"), 3); err == nil {
		err = f.Sync()
	}
	check("write at", err)
	b := make([]byte, 10)
	if n, err := f.ReadAt(b, 2); n != 4 || err != io.EOF || string(b[:n]) != "oice" {
		t.Errorf("%q, %v", b[:n], err)
	}
	if n, err := f.Size(); n != 6 || err != nil {
		t.Errorf("%d bytes, %v", n, err)
	}
	check("close", f.Close())
	if total, free, err := d.Space(ctx); err != nil || free <= 0 || total < free {
		t.Errorf("%d of %d free, %v", free, total, err)
	}
}

// A file whose opening blocks stands for a file system that hangs.
func TestPatience(t *testing.T) {
	testkit.Long(t)
	dir := t.TempDir()
	write(t, dir, "good", "")
	fifo := filepath.Join(dir, "hangs")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	d := pop.NewDir(dir, 10*time.Millisecond)
	const many = 65 // one more than may hang
	errs := make([]error, many)
	var wg sync.WaitGroup
	for i := range errs {
		wg.Go(func() { _, errs[i] = d.ReadFile(t.Context(), "hangs") })
	}
	wg.Wait()
	for _, err := range errs {
		is(t, "a call that hangs", err, pop.ErrStoreAway)
	}
	is(t, "away", d.Away(), pop.ErrStoreAway)
	_, err := d.ReadFile(t.Context(), "good")
	is(t, "a call while it is away", err, pop.ErrStoreAway)
	// What hangs goes on as soon as somebody writes.
	w, err := os.OpenFile(fifo, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	answers(t, d, "good")
	if d.Away() != nil {
		t.Error(d.Away())
	}
	w.Close() // and now those that hung read the end
}

// A real EIO is that of reading a process's memory where there is none.
func TestReadError(t *testing.T) {
	testkit.Long(t)
	dir := t.TempDir()
	write(t, dir, "good", "")
	if err := os.Symlink("/proc/self/mem", filepath.Join(dir, "bad")); err != nil {
		t.Fatal(err)
	}
	d := pop.NewDir(dir, 0)
	_, err := d.ReadFile(t.Context(), "bad")
	is(t, "EIO", err, unix.EIO)
	is(t, "EIO", err, pop.ErrStoreAway)
	answers(t, d, "good")
}

// A full store takes nothing more, says why, and goes on giving what it has.
func TestFull(t *testing.T) {
	testkit.NeedRoot(t, "it mounts a small file system")
	dir := t.TempDir()
	if err := unix.Mount("none", dir, "tmpfs", 0, "size=1m"); err != nil {
		t.Fatal(err)
	}
	defer unix.Unmount(dir, unix.MNT_DETACH)
	c, err := local.New(pop.Config{Node: "x"})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ctx, fsys := t.Context(), pop.NewDir(dir, 0)
	st, err := pop.OpenStore(ctx, pop.StoreConfig{FS: fsys, Coord: c, Node: "x"})
	if err != nil {
		t.Fatal(err)
	}
	id := publish(t, st, []byte("small"), "")
	for _, full := range []int{2 << 20, 900 << 10} { // the second has room, its table has none
		big, table := bytes.Repeat([]byte{1}, full), noise(512<<10)
		d, err := st.Draft(ctx, digest.FromBytes(big), 1)
		if err != nil {
			t.Fatal(err)
		}
		if _, err = d.Write(big); err == nil {
			err = d.Publish(ctx, pop.Layer{Size: int64(full)}, table)
		}
		is(t, fmt.Sprint(full), err, unix.ENOSPC)
		if errors.Is(err, pop.ErrStoreAway) || fsys.Away() != nil {
			t.Errorf("a full store is not away: %v", err)
		}
		if err := d.Abandon(ctx); err != nil || st.HasLayer(ctx, digest.FromBytes(big)) {
			t.Errorf("abandoned: %v", err)
		}
	}
	l, err := st.Use(ctx, id)
	if err == nil {
		err = st.Verify(ctx, l, 0)
	}
	if err != nil {
		t.Errorf("what was there: %v", err)
	}
	publish(t, st, noise(512<<10), "") // there is room again
}

// noise cannot be compressed.
func noise(n int) []byte {
	b := make([]byte, 0, n)
	for i := 0; len(b) < n; i++ {
		sum := digest.FromString(fmt.Sprint(i)).Encoded()
		for k := 0; k < len(sum); k += 2 {
			var x byte
			fmt.Sscanf(sum[k:k+2], "%02x", &x)
			b = append(b, x)
		}
	}
	return b[:n]
}

// hostile is a store in which others put what they like.
func hostile(f *testing.F) (*pop.Store, string) {
	dir := f.TempDir()
	c, err := local.New(pop.Config{Node: "x"})
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { c.Close() })
	st, err := pop.OpenStore(f.Context(), pop.StoreConfig{FS: pop.NewDir(dir, 0), Coord: c, Node: "x"})
	if err != nil {
		f.Fatal(err)
	}
	return st, dir
}

const (
	emptyHex = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
	aRecord  = `{"version":1,"diff_id":"sha256:` + emptyHex + `","size":0,"name":"` + emptyHex +
		`.1.A","table":"sha256:` + emptyHex + `","sums":""}`
)

func FuzzRecord(f *testing.F) {
	st, dir := hostile(f)
	id := digest.NewDigestFromEncoded(digest.SHA256, emptyHex)
	for _, seed := range []string{aRecord, "", "null", "{}",
		strings.Replace(aRecord, `"size":0`, `"size":9223372036854775807`, 1),
		strings.Replace(aRecord, `.1.A"`, `.1.../../dewpoint"`, 1),
		strings.Replace(aRecord, `"size":0`, `"size":-1`, 1)} {
		f.Add([]byte(seed), []byte(seed))
	}
	write2 := func(name string, b []byte) {
		if err := os.WriteFile(filepath.Join(dir, name), b, 0o600); err != nil {
			f.Fatal(err)
		}
	}
	f.Fuzz(func(t *testing.T, record, table []byte) {
		ctx := t.Context()
		write2("layers/"+emptyHex+".json", record)
		write2("layers/"+emptyHex+".1.A.table", table)
		write2("layers/"+emptyHex+".1.A.data", nil)
		l, err := st.Record(ctx, id)
		if err != nil {
			is(t, "a bad record", err, pop.ErrDamaged)
			return
		}
		if filepath.Dir(filepath.Clean(l.Data())) != "layers" || !strings.HasPrefix(l.Name, emptyHex) {
			t.Errorf("the data would be %q", l.Data())
		}
		if _, err := st.Layers(ctx); err != nil {
			t.Error(err)
		}
		if table, err := st.Table(ctx, l); err == nil && digest.FromBytes(table) != l.Table {
			t.Error("another table")
		}
		_ = st.Verify(ctx, l, 0)
	})
}

// FuzzNotes takes what other nodes have noted in the store: what they could not restore, that they live, what
// they have verified, and which store it is.
func FuzzNotes(f *testing.F) {
	st, dir := hostile(f)
	id := digest.NewDigestFromEncoded(digest.SHA256, emptyHex)
	for _, seed := range []string{`{"count":1,"why":"x"}`, `{"boot":"a","beat":1}`, `{"count":-1}`, "null", "[]",
		`{"node":"n","at":1,"name":"` + emptyHex + `.1.A"}`, `{"version":1,"id":"../x"}`} {
		f.Add([]byte(seed))
	}
	for _, d := range []string{"failed", "nodes", "verified", "layers"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o700); err != nil {
			f.Fatal(err)
		}
	}
	empty, l := f.TempDir(), &pop.Layer{DiffID: id, Name: emptyHex + ".1.A"}
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, file := range []string{filepath.Join(dir, "failed", emptyHex+".n"), filepath.Join(dir, "nodes", "n.json"),
			filepath.Join(dir, "verified", emptyHex), filepath.Join(empty, "dewpoint.json")} {
			if err := os.WriteFile(file, b, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		all, err := st.Failures(t.Context())
		if err != nil || len(all[id]) > 1 || len(all[id]) == 1 && all[id]["n"].Count <= 0 {
			t.Errorf("%+v, %v", all, err)
		}
		if v, err := st.Verified(t.Context(), l); err == nil && v.Name != l.Name {
			t.Errorf("%+v", v)
		}
		_ = st.Listen(t.Context())
		_, err = pop.OpenStore(t.Context(), pop.StoreConfig{FS: pop.NewDir(empty, 0), Node: "x", ID: "a"})
		if err == nil && !strings.Contains(string(b), `"a"`) {
			t.Error("another store is taken for it")
		}
	})
}

func FuzzCheckpoint(f *testing.F) {
	st, dir := hostile(f)
	write := func(name string, b []byte) {
		if err := os.WriteFile(filepath.Join(dir, name), b, 0o600); err != nil {
			f.Fatal(err)
		}
	}
	id := digest.NewDigestFromEncoded(digest.SHA256, emptyHex)
	for _, seed := range []string{`{"version":1,"name":"` + emptyHex + `.1.A","size":3,"record":{}}`, "", "null",
		`{"version":1,"name":"` + emptyHex + `.1.A","size":9223372036854775807}`,
		`{"version":1,"name":"` + emptyHex + `.1./../../x","size":-3}`} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		write("fill/"+emptyHex+".json", b)
		write("layers/"+emptyHex+".1.A.data", []byte("four"))
		st.Above(t.Context(), id)
		c, err := st.Checkpoint(t.Context(), id)
		if err != nil {
			return
		}
		defer c.Close()
		if got, err := io.ReadAll(c.Data); err != nil || int64(len(got)) != c.Size || c.Size > 4 {
			t.Errorf("%d bytes of %d, %v", len(got), c.Size, err)
		}
	})
}
