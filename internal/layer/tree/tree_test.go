package tree

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/pkg/archive"
	"golang.org/x/sys/unix"

	"dewpoint/internal/layer/toc"
	"dewpoint/testkit"
	"dewpoint/testkit/treetest"
)

// extract unpacks a tar into dir, all but the sync, which would wait for all that
// others write to the disk.
func extract(dir string, data io.ReaderAt) error {
	x, err := New(dir, data)
	if err != nil {
		return err
	}
	defer x.Close()
	if err := feed(x, data); err != nil {
		return err
	}
	return x.Seal()
}

func feed(x *Extractor, data io.ReaderAt) error {
	scan := toc.NewScanner(data)
	for {
		e, err := scan.Next()
		if err == io.EOF {
			return nil
		}
		if err == nil {
			err = x.Add(e)
		}
		if err != nil {
			return err
		}
	}
}

// file puts data into a file, out of which the kernel can copy.
func file(t testing.TB, data []byte) *os.File {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "data"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if _, err := f.Write(data); err != nil {
		t.Fatal(err)
	}
	return f
}

func snapshot(t testing.TB, dir string) treetest.Tree {
	t.Helper()
	s, err := treetest.Snapshot(dir)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func applied(t testing.TB, layer []byte) treetest.Tree {
	t.Helper()
	dir := t.TempDir()
	_, err := archive.Apply(context.Background(), dir, bytes.NewReader(layer),
		archive.WithConvertWhiteout(archive.OverlayConvertWhiteout))
	if err != nil {
		t.Fatalf("containerd's applier: %v", err)
	}
	return snapshot(t, dir)
}

// TestLikeContainerd compares with containerd's applier, from a file and from
// another kind of reader.
func TestLikeContainerd(t *testing.T) {
	testkit.NeedRoot(t, "it makes devices and files of other users")
	for _, c := range treetest.Cases() {
		t.Run(c.Name, func(t *testing.T) {
			like := c.Tar
			if c.Own != "" {
				like = c.Same
			}
			want := applied(t, like)
			for name, data := range map[string]io.ReaderAt{"file": file(t, c.Tar), "reader": bytes.NewReader(c.Tar)} {
				dir := t.TempDir()
				if err := extract(dir, data); err != nil {
					t.Fatal(err)
				}
				for _, d := range treetest.Diff(want, snapshot(t, dir), c.Skip(want)) {
					t.Errorf("from a %s: %s", name, d)
				}
			}
		})
	}
}

// TestUmask runs under a creation mask that forbids everything, and one that
// forbids nothing, by pretending to have read it.
func TestUmask(t *testing.T) {
	testkit.NeedRoot(t, "it makes devices and files of other users")
	old := unix.Umask(0o777)
	defer unix.Umask(old)
	tarball := new(treetest.Archive).Dir("d").File("d/f", "x").
		Add(tar.Header{Name: "fifo", Typeflag: tar.TypeFifo, Mode: 0o622}, "").File("i/f", "y").Bytes()
	dir := t.TempDir()
	if err := extract(dir, bytes.NewReader(tarball)); err != nil {
		t.Fatal(err)
	}
	got := snapshot(t, dir)
	for path, mode := range map[string]string{"d": "755", "d/f": "644", "fifo": "622", "i": "755"} {
		if got[path]["mode"] != mode {
			t.Errorf("%s has mode %s, want %s", path, got[path]["mode"], mode)
		}
	}
}

// TestHoles checks that holes take no room.
func TestHoles(t *testing.T) {
	testkit.NeedRoot(t, "it makes devices and files of other users")
	layer := new(treetest.Archive).PAXSparse("1.0", treetest.Sparse{Name: "s", Size: 64 << 20,
		Segs: []treetest.Segment{{Off: 32 << 20, Data: "middle"}}}).Bytes()
	dir := t.TempDir()
	if err := extract(dir, bytes.NewReader(layer)); err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	if err := unix.Stat(filepath.Join(dir, "s"), &st); err != nil {
		t.Fatal(err)
	}
	if st.Size != 64<<20 || st.Blocks*512 > 1<<20 {
		t.Fatalf("size %d, on disk %d", st.Size, st.Blocks*512)
	}
}

// TestParent gives an implied directory the attributes of the layer below.
func TestParent(t *testing.T) {
	testkit.NeedRoot(t, "it makes devices and files of other users")
	dir := t.TempDir()
	data := bytes.NewReader(nil)
	x, err := New(dir, data)
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	x.Parent = func(name string) (*toc.Entry, bool) {
		return &toc.Entry{Name: name, Type: toc.Directory, Mode: 0o1750, UID: 5, GID: 6, ModTime: treetest.Time},
			name == "a"
	}
	if err := x.Add(&toc.Entry{Name: "a/b/c", Type: toc.Fifo}); err != nil {
		t.Fatal(err)
	}
	if err := x.Seal(); err != nil {
		t.Fatal(err)
	}
	got := snapshot(t, dir)
	if a := got["a"]; a["mode"] != "1750" || a["owner"] != "5:6" ||
		a["mtime"] != fmt.Sprintf("%d.000000000", treetest.Time.Unix()) {
		t.Errorf("known parent: %v", a)
	}
	if b := got["a/b"]; b["mode"] != "755" || b["owner"] != "0:0" || b["mtime"] != "0.000000000" {
		t.Errorf("unknown parent: %v", b)
	}
}

// TestDeep goes deeper than a walk keeps open, there and back.
func TestDeep(t *testing.T) {
	testkit.NeedRoot(t, "it makes devices and files of other users")
	var a treetest.Archive
	deep := strings.Repeat("d/", 3*maxOpen)
	a.File(deep+"bottom", "1").File("d/top", "2").File(deep+"again", "3").Link("link", deep+"again").
		File(deep+"d/more", "4").Symlink(deep+"d", "nowhere").File(strings.Repeat("d/", maxOpen)+"edge", "5")
	dir := t.TempDir()
	if err := extract(dir, bytes.NewReader(a.Bytes())); err != nil {
		t.Fatal(err)
	}
	want := applied(t, a.Bytes())
	implied := func(_, field string) bool { return field == "mtime" }
	for _, d := range treetest.Diff(want, snapshot(t, dir), implied) {
		t.Error(d)
	}
}

// TestRefused feeds entries that must not leave the target directory.
func TestRefused(t *testing.T) {
	testkit.NeedRoot(t, "it makes devices and files of other users")
	outside := t.TempDir()
	file := func(name string) *toc.Entry { return &toc.Entry{Name: name} }
	link := &toc.Entry{Name: "out", Type: toc.Symlink, Link: outside}
	for name, c := range map[string]struct {
		entries []*toc.Entry
		want    error
	}{
		"parent":            {[]*toc.Entry{file("../x")}, toc.ErrUnsafe},
		"parent inside":     {[]*toc.Entry{file("a/../x")}, toc.ErrUnsafe},
		"absolute":          {[]*toc.Entry{file("/x")}, toc.ErrUnsafe},
		"dots":              {[]*toc.Entry{file("a/..")}, toc.ErrUnsafe},
		"zero byte":         {[]*toc.Entry{file("a\x00b/c")}, toc.ErrUnsafe},
		"through a symlink": {[]*toc.Entry{link, file("out/x")}, toc.ErrUnsafe},
		"directory through": {[]*toc.Entry{link, {Name: "out/d", Type: toc.Directory}}, toc.ErrUnsafe},
		"opaque through": {[]*toc.Entry{link, {Name: "out", Type: toc.Opaque}, file("out/x"),
			{Name: "../o", Type: toc.Opaque}}, toc.ErrUnsafe},
		"whiteout through": {[]*toc.Entry{link, {Name: "out/x", Type: toc.Whiteout}}, toc.ErrUnsafe},
		"link through": {[]*toc.Entry{link, {Name: "x", Type: toc.Hardlink, Link: "out/secret"}},
			toc.ErrUnsafe},
		"link out":        {[]*toc.Entry{{Name: "x", Type: toc.Hardlink, Link: "../secret"}}, toc.ErrUnsafe},
		"link to nothing": {[]*toc.Entry{{Name: "x", Type: toc.Hardlink, Link: "y"}}, toc.ErrCorrupt},
		"link to itself":  {[]*toc.Entry{file("x"), {Name: "x", Type: toc.Hardlink, Link: "x"}}, toc.ErrCorrupt},
		"link to directory": {[]*toc.Entry{{Name: "d", Type: toc.Directory},
			{Name: "x", Type: toc.Hardlink, Link: "d"}}, toc.ErrCorrupt},
		"link to a whiteout": {[]*toc.Entry{{Name: "w", Type: toc.Whiteout},
			{Name: "x", Type: toc.Hardlink, Link: "w"}}, toc.ErrCorrupt},
		"below a file": {[]*toc.Entry{file("f"), file("f/x")}, toc.ErrCorrupt},
		"root a file":  {[]*toc.Entry{file("")}, toc.ErrCorrupt},
		"no such type": {[]*toc.Entry{{Name: "x", Type: 99}}, toc.ErrCorrupt},
		"data cut short": {[]*toc.Entry{{Name: "x", Size: 9, Ranges: []toc.Range{{Length: 9}}}},
			io.ErrUnexpectedEOF},
		"range too long": {[]*toc.Entry{{Name: "x", Size: 1, Ranges: []toc.Range{{Length: 2}}}},
			toc.ErrCorrupt},
		"ranges overlap": {[]*toc.Entry{{Name: "x", Size: 2, Ranges: []toc.Range{{Length: 1}, {Length: 1}}}},
			toc.ErrCorrupt},
	} {
		t.Run(name, func(t *testing.T) {
			if err := os.WriteFile(filepath.Join(outside, "secret"), nil, 0o600); err != nil {
				t.Fatal(err)
			}
			if err := refusal(t.TempDir(), c.entries); !errors.Is(err, c.want) {
				t.Errorf("got %v, want %v", err, c.want)
			}
			if got := snapshot(t, outside); len(got) != 2 || got["secret"]["nlink"] != "1" {
				t.Errorf("outside: %v", got)
			}
		})
	}
}

// refusal unpacks entries without data until an error.
func refusal(dir string, entries []*toc.Entry) error {
	x, err := New(dir, strings.NewReader("x"))
	if err != nil {
		return err
	}
	defer x.Close()
	for _, e := range entries {
		if err := x.Add(e); err != nil {
			return err
		}
	}
	return x.Seal()
}

// TestClose gives up in the middle and counts descriptors.
func TestClose(t *testing.T) {
	testkit.NeedRoot(t, "it makes devices and files of other users")
	before := descriptors(t)
	x, err := New(t.TempDir(), strings.NewReader(""))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"a/b/c", strings.Repeat("d/", 2*maxOpen) + "e", "f"} {
		if err := x.Add(&toc.Entry{Name: name}); err != nil {
			t.Fatal(err)
		}
	}
	if n := descriptors(t) - before; n > maxOpen+2 {
		t.Errorf("%d descriptors are open", n)
	}
	x.Close()
	x.Close()
	if after := descriptors(t); after != before {
		t.Errorf("%d descriptors before, %d after", before, after)
	}
}

func descriptors(t *testing.T) int {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(fds)
}

// slow gives a few bytes at a time, as a file that is still being written.
type slow struct{ r io.ReaderAt }

func (s slow) ReadAt(b []byte, off int64) (int, error) {
	n, err := s.r.ReadAt(b[:min(len(b), 700)], off)
	if err == nil && n < len(b) {
		err = io.EOF
	}
	return n, err
}

func TestShortReads(t *testing.T) {
	testkit.NeedRoot(t, "it makes devices and files of other users")
	layer := new(treetest.Archive).File("a", treetest.Text(100)).File("b", treetest.Text(300_000)).File("c",
		treetest.Text(5000)).Bytes()
	dir := t.TempDir()
	x, err := New(dir, slow{bytes.NewReader(layer)})
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	if err := errors.Join(feed(x, bytes.NewReader(layer)), x.Seal()); err != nil {
		t.Fatal(err)
	}
	for _, d := range treetest.Diff(applied(t, layer), snapshot(t, dir), func(path, _ string) bool {
		return path == "."
	}) {
		t.Error(d)
	}
}

// FuzzExtract unpacks whatever the scanner lets pass and looks for damage
// outside the target.
func FuzzExtract(f *testing.F) {
	testkit.NeedRoot(f, "it makes devices and files of other users")
	for _, c := range treetest.Cases() {
		if len(c.Tar) < 64<<10 {
			f.Add(c.Tar)
		}
	}
	f.Fuzz(func(t *testing.T, layer []byte) {
		parent := t.TempDir()
		dir := filepath.Join(parent, "x")
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		x, err := New(dir, bytes.NewReader(layer))
		if err != nil {
			t.Fatal(err)
		}
		defer x.Close()
		if feed(x, bytes.NewReader(layer)) == nil {
			if err := x.Seal(); err != nil && !errors.As(err, new(unix.Errno)) {
				t.Fatal(err)
			}
		}
		if left, err := os.ReadDir(parent); err != nil || len(left) != 1 {
			t.Fatalf("outside the target: %v, %v", left, err)
		}
	})
}
