package toc_test

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"dewpoint/internal/layer/toc"
	"dewpoint/testkit/treetest"
)

// body reads an entry's contents from the tar, as its ranges say.
func body(data []byte, e *toc.Entry) string {
	b := make([]byte, e.Size)
	for _, r := range e.Ranges {
		copy(b[r.File:r.File+r.Length], data[r.Data:])
	}
	return string(b)
}

// sameAsLibrary compares the entries with those that archive/tar gives, read
// with containerd's rules. It returns how many it compared.
func sameAsLibrary(t *testing.T, data []byte) int {
	t.Helper()
	ours := toc.NewScanner(bytes.NewReader(data))
	theirs := tar.NewReader(bytes.NewReader(data))
	for n := 0; ; n++ {
		h, err := theirs.Next()
		skipped := false
		for err == nil && ignored(h) {
			skipped = true
			h, err = theirs.Next()
		}
		var want string
		if err == nil && h.Size < 1<<20 {
			var b strings.Builder
			_, err = io.Copy(&b, theirs)
			want = b.String()
		}
		e, mine := ours.Next()
		if err == nil && mine == nil {
			compare(t, h, e)
			if e.Type == toc.Regular && h.Size < 1<<20 && body(data, e) != want {
				t.Fatalf("entry %d %q: contents differ", n, h.Name)
			}
			continue
		}
		if skipped && errors.Is(mine, toc.ErrLimit) {
			return n
		}
		if err == nil && !mayRefuse(h, mine) {
			t.Fatalf("entry %d %q: refused: %v", n, h.Name, mine)
		}
		if err == io.EOF && mine != io.EOF {
			t.Fatalf("after entry %d: %v, %v, want the end", n, e, mine)
		}
		return n
	}
}

// ignored are headers that containerd's applier passes over.
func ignored(h *tar.Header) bool {
	name := filepath.Clean(h.Name)
	base := filepath.Base(name)
	root := filepath.Join("/", name) == "/" && !strings.Contains(name, "..")
	if !strings.ContainsRune("0123456gS", rune(h.Typeflag)) {
		return false
	}
	return h.Typeflag == tar.TypeXGlobalHeader || root && h.Typeflag != tar.TypeDir ||
		strings.HasPrefix(base, ".wh..wh.") && base != ".wh..wh..opq" && !climbs(h.Name)
}

func climbs(name string) bool {
	depth := 0
	for _, part := range strings.Split(name, "/") {
		switch part {
		case "", ".":
		case "..":
			if depth--; depth < 0 {
				return true
			}
		default:
			depth++
		}
	}
	return false
}

// mayRefuse reports whether containerd's applier fails too, or a rule of ours
// forbids the entry.
func mayRefuse(h *tar.Header, err error) bool {
	if errors.Is(err, toc.ErrUnsafe) {
		return climbs(h.Name) || climbs(h.Linkname) || strings.Contains(h.Name, ".wh.")
	}
	long := func(name string) bool {
		for _, part := range strings.Split(name, "/") {
			if len(part) > 255 {
				return true
			}
		}
		return len(name) > toc.MaxName
	}
	id := func(n int) bool { return n < math.MinInt32 || n > math.MaxUint32 }
	link := h.Typeflag == tar.TypeSymlink || h.Typeflag == tar.TypeLink
	dev := h.Typeflag == tar.TypeChar || h.Typeflag == tar.TypeBlock
	for k := range h.PAXRecords {
		if strings.HasPrefix(k, "SCHILY.xattr.") {
			return true
		}
	}
	return errors.Is(err, toc.ErrLimit) || !strings.ContainsRune("0123456", rune(h.Typeflag)) || long(h.Name) ||
		link && (h.Linkname == "" || long(h.Linkname) || filepath.Join("/", h.Linkname) == "/" ||
			filepath.Join("/", h.Linkname) == filepath.Join("/", h.Name)) ||
		dev && (h.Devmajor < 0 || h.Devminor < 0 || h.Devmajor > 4095 || h.Devminor >= 1<<20) ||
		id(h.Uid) || id(h.Gid) || h.Size > toc.MaxFileSize
}

func compare(t *testing.T, h *tar.Header, e *toc.Entry) {
	t.Helper()
	name := strings.TrimPrefix(filepath.Join("/", h.Name), "/")
	dir, base := filepath.Split(name)
	typ := map[byte]toc.Type{'0': toc.Regular, 'S': toc.Regular, '1': toc.Hardlink, '2': toc.Symlink,
		'3': toc.Char,
		'4': toc.Block, '5': toc.Directory, '6': toc.Fifo}[h.Typeflag]
	if rest, ok := strings.CutPrefix(base, ".wh."); ok {
		if typ, name = toc.Whiteout, filepath.Join(dir, rest); base == ".wh..wh..opq" {
			typ, name = toc.Opaque, strings.TrimSuffix(dir, "/")
		}
	}
	if e.Name != name || e.Type != typ {
		t.Fatalf("%s %q, want %s %q", e.Type, e.Name, typ, name)
	}
	if typ == toc.Whiteout || typ == toc.Opaque {
		return
	}
	mode := uint32(h.Mode) & 0o7777
	if typ == toc.Symlink {
		mode = 0o777
	}
	mtime := h.ModTime
	if mtime.Before(time.Unix(0, 0)) || mtime.After(time.Unix(0, math.MaxInt64)) {
		mtime = time.Unix(0, 0)
	}
	if e.Mode != mode || !e.ModTime.Equal(mtime) {
		t.Fatalf("%q: mode %o, time %v, want %o, %v", name, e.Mode, e.ModTime, mode, mtime)
	}
	if uid, gid := uint32(h.Uid), uint32(h.Gid); uid+1 != 0 && e.UID != uid || gid+1 != 0 && e.GID != gid {
		t.Fatalf("%q: owner %d:%d, want %d:%d", name, e.UID, e.GID, uid, gid)
	}
	if typ == toc.Regular && e.Size != h.Size {
		t.Fatalf("%q: size %d, want %d", name, e.Size, h.Size)
	}
	if typ == toc.Symlink && e.Link != h.Linkname ||
		typ == toc.Hardlink && "/"+e.Link != filepath.Join("/", h.Linkname) {
		t.Fatalf("%q: link to %q, want %q", name, e.Link, h.Linkname)
	}
	if (typ == toc.Char || typ == toc.Block) && (int64(e.Major) != h.Devmajor || int64(e.Minor) != h.Devminor) {
		t.Fatalf("%q: device %d:%d, want %d:%d", name, e.Major, e.Minor, h.Devmajor, h.Devminor)
	}
	for k, v := range e.Xattrs {
		if h.PAXRecords["SCHILY.xattr."+k] != v {
			t.Fatalf("%q: attribute %q is %q", name, k, v)
		}
	}
}

func TestSameAsLibrary(t *testing.T) {
	for _, c := range treetest.Cases() {
		t.Run(c.Name, func(t *testing.T) {
			if n := sameAsLibrary(t, c.Tar); n == 0 && c.Name != "empty" {
				t.Error("nothing compared")
			}
		})
	}
}

func TestSparse(t *testing.T) {
	for _, version := range []string{"GNU", "0.0", "0.1", "1.0"} {
		for _, s := range treetest.SparseFiles() {
			if version[0] == '0' && s.Segs == nil {
				continue
			}
			a := new(treetest.Archive)
			if version == "GNU" {
				a.GNU(s)
			} else {
				a.PAXSparse(version, s)
			}
			data := a.File("next", "after").Bytes()
			list, err := toc.Read(bytes.NewReader(data))
			if err != nil {
				t.Fatalf("%s %s: %v", version, s.Name, err)
			}
			e := list.Entries[0]
			if e.Name != s.Name || body(data, e) != s.Expanded() {
				t.Errorf("%s %s: wrong contents of %q", version, s.Name, e.Name)
			}
			if next := list.Entries[1]; next.Name != "next" || body(data, next) != "after" {
				t.Errorf("%s %s: followed by %q", version, s.Name, next.Name)
			}
		}
	}
}

func segs(pairs ...any) (out []treetest.Segment) {
	for i := 0; i < len(pairs); i += 2 {
		out = append(out, treetest.Segment{Off: int64(pairs[i].(int)), Data: pairs[i+1].(string)})
	}
	return out
}

func TestRefused(t *testing.T) {
	type archive = *treetest.Archive
	file := func() archive { return new(treetest.Archive) }
	name := func(n string) treetest.Raw {
		return treetest.Raw{Name: n, Magic: treetest.MagicUstar, Type: '0'}
	}
	with := func(r treetest.Raw, set func(*treetest.Raw)) treetest.Raw { set(&r); return r }
	for _, c := range []struct {
		what string
		tar  archive
		err  error
		name string
	}{
		{"leaves the root", file().Raw(name("../evil"), "x"), toc.ErrUnsafe, "../evil"},
		{"leaves the root inside", file().Raw(name("a/../../evil"), "x"), toc.ErrUnsafe, "a/../../evil"},
		{"absolute and leaves", file().Raw(name("/../evil"), "x"), toc.ErrUnsafe, "/../evil"},
		{"hard link leaves", file().File("a", "").Link("b", "../../etc/passwd"), toc.ErrUnsafe, "b"},
		{"whiteout of parent", file().File("a/.wh...", ""), toc.ErrUnsafe, "a/.wh..."},
		{"whiteout of nothing", file().File("a/.wh.", ""), toc.ErrUnsafe, "a/.wh."},
		{"through symlink", file().Symlink("l", "/etc").File("l/passwd", "x"), toc.ErrUnsafe, "l/passwd"},
		{"through symlink, deep", file().Symlink("l", "/etc").File("l/a/b/c", "x"), toc.ErrUnsafe, "l/a/b/c"},
		{"whiteout through symlink", file().Symlink("l", "/etc").File("l/.wh.passwd", ""), toc.ErrUnsafe,
			"l/passwd"},
		{"opaque through symlink", file().Symlink("l", "/etc").File("l/.wh..wh..opq", ""), toc.ErrUnsafe, "l"},
		{"hard link through symlink", file().Dir("d").File("d/f", "").Symlink("l", "d").Link("x", "l/f"),
			toc.ErrUnsafe, "x"},
		{"through file", file().File("f", "").File("f/x", "x"), toc.ErrCorrupt, "f/x"},
		{"hard link to nothing", file().Link("b", "missing"), toc.ErrCorrupt, "b"},
		{"hard link to later", file().Link("b", "a").File("a", ""), toc.ErrCorrupt, "b"},
		{"hard link to directory", file().Dir("d").Link("b", "d"), toc.ErrCorrupt, "b"},
		{"hard link to itself", file().File("b", "").Link("b", "b"), toc.ErrCorrupt, "b"},
		{"hard link into what it replaces", file().File("d/f", "").Link("d", "d/f"), toc.ErrCorrupt, "d"},
		{"long component", file().File("a/"+strings.Repeat("n", 256), ""), toc.ErrCorrupt,
			"a/" + strings.Repeat("n", 256)},
		{"long name", file().File(strings.Repeat("d/", 2100)+"f", ""), toc.ErrCorrupt,
			(strings.Repeat("d/", 2100) + "f")[:4095]},
		{"empty symlink", file().Raw(treetest.Raw{Name: "l", Magic: treetest.MagicUstar, Type: '2'}, ""),
			toc.ErrCorrupt, "l"},
		{"unknown type", file().Raw(treetest.Raw{Name: "v", Magic: treetest.MagicUstar, Type: 'V'}, ""),
			toc.ErrCorrupt, "v"},
		{"bad sum", file().Body(strings.Repeat("x", 512)), toc.ErrCorrupt, ""},
		{"negative size", file().Raw(with(name("n"), func(r *treetest.Raw) { r.Size = treetest.Base256(-1, 12) }),
			""), toc.ErrCorrupt, "n"},
		{"huge size", file().Raw(with(name("n"), func(r *treetest.Raw) {
			r.Size = treetest.Base256(math.MaxInt64, 12)
		}), ""), toc.ErrCorrupt, "n"},
		{"large size", file().Raw(with(name("n"), func(r *treetest.Raw) { r.Size = treetest.Base256(1<<45, 12) }),
			""), toc.ErrLimit, "n"},
		{"huge PAX header", file().Raw(treetest.Raw{Name: "x", Magic: treetest.MagicUstar, Type: 'x',
			Size: "77777777777"}, ""), toc.ErrLimit, ""},
		{"bad PAX header", file().Raw(treetest.Raw{Name: "x", Magic: treetest.MagicUstar, Type: 'x'}, "12 path=x"),
			toc.ErrCorrupt, ""},
		{"owner", file().PAX('x', "uid", "9999999999").File("f", ""), toc.ErrCorrupt, "f"},
		{"device", file().Raw(with(name("d"), func(r *treetest.Raw) { r.Type, r.Major = '3', "7777777" }), ""),
			toc.ErrCorrupt, "d"},
		{"large attribute", file().PAX('x', "SCHILY.xattr.user.x", strings.Repeat("v", 70_000)).File("f", ""),
			toc.ErrCorrupt, "f"},
		{"sparse overlap", file().GNU(treetest.Sparse{Name: "s", Size: 100, Segs: segs(0, "abc", 2, "d")}),
			toc.ErrCorrupt, "s"},
		{"sparse beyond", file().GNU(treetest.Sparse{Name: "s", Size: 3, Segs: segs(1, "abc")}), toc.ErrCorrupt,
			"s"},
		{"sparse huge", file().GNU(treetest.Sparse{Name: "s", Size: 1<<33 - 1, Segs: segs(1<<33, "")}),
			toc.ErrCorrupt, "s"},
		{"data after the end", file().Body(strings.Repeat("\x00", 512)).Body("x"), toc.ErrCorrupt, ""},
	} {
		t.Run(c.what, func(t *testing.T) {
			list, err := toc.Read(bytes.NewReader(c.tar.Bytes()))
			if err == nil {
				_, err = list.Tree()
			}
			var e *toc.Error
			if !errors.Is(err, c.err) || !errors.As(err, &e) || e.Name != c.name {
				t.Errorf("%v (%T), want %v of %q", err, err, c.err, c.name)
			}
		})
	}
}

// A cut of an archive is noticed, but at the end of an entry, where
// archives without end markers end.
func TestTruncated(t *testing.T) {
	data := new(treetest.Archive).File("a", treetest.Text(1000)).PAX('x', "path", "long").File("b", "bb").
		GNU(treetest.SparseFiles()[6]).File("c", treetest.Text(700)).Bytes()
	ends := map[int]bool{}
	s := toc.NewScanner(bytes.NewReader(data))
	for e, err := s.Next(); err == nil; e, err = s.Next() {
		r := e.Ranges[len(e.Ranges)-1]
		for end := int(r.Data + r.Length); end <= int(s.Offset()); end++ {
			ends[end] = true
		}
	}
	for n := 0; n < len(data); n += 1 + n%13 {
		_, err := toc.Read(bytes.NewReader(data[:n]))
		clean := n == 0 || ends[n] || n == len(data)-512 || n > len(data)-1024 && n <= len(data)-1024
		if clean != (err == nil) && !specialEnd(data, n, err) {
			t.Fatalf("cut to %d of %d bytes: %v", n, len(data), err)
		}
		if err != nil && !errors.Is(err, toc.ErrCorrupt) {
			t.Fatalf("cut to %d bytes: %v", n, err)
		}
	}
}

// specialEnd allows the end after an extended header, which archive/tar takes
// for the end as well.
func specialEnd(data []byte, n int, err error) bool {
	r := tar.NewReader(bytes.NewReader(data[:n]))
	var lib error
	for lib == nil {
		_, lib = r.Next()
	}
	return (lib == io.EOF) == (err == nil)
}

type failing struct {
	io.ReaderAt
	at  int64
	err error
}

func (f failing) ReadAt(b []byte, off int64) (int, error) {
	if off+int64(len(b)) > f.at {
		return 0, f.err
	}
	return f.ReaderAt.ReadAt(b, off)
}

func TestReaderError(t *testing.T) {
	data := treetest.Cases()[0].Tar
	for at := int64(0); at < int64(len(data)); at += 512 {
		_, err := toc.Read(failing{bytes.NewReader(data), at, iotest.ErrTimeout})
		var e *toc.Error
		if !errors.Is(err, iotest.ErrTimeout) || !errors.As(err, &e) {
			t.Fatalf("reader that fails at %d: %v", at, err)
		}
		if errors.Is(err, toc.ErrCorrupt) {
			t.Fatalf("reader that fails at %d makes the archive corrupt: %v", at, err)
		}
	}
}

// reads counts the bytes that are asked for.
type reads struct {
	io.ReaderAt
	n, calls int64
}

func (r *reads) ReadAt(b []byte, off int64) (int, error) {
	r.n += int64(len(b))
	r.calls++
	return r.ReaderAt.ReadAt(b, off)
}

func TestSkipsContents(t *testing.T) {
	var a treetest.Archive
	for i := range 20 {
		a.File(fmt.Sprint(i), string(make([]byte, 1<<20)))
	}
	r := &reads{ReaderAt: bytes.NewReader(a.Bytes())}
	list, err := toc.Read(r)
	if err != nil || len(list.Entries) != 20 {
		t.Fatal(list, err)
	}
	if r.n > 200<<10 {
		t.Errorf("read %d bytes for 20 headers", r.n)
	}
}

func FuzzScanner(f *testing.F) {
	for _, c := range treetest.Cases() {
		if len(c.Tar) < 12<<10 {
			f.Add(c.Tar)
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		sameAsLibrary(t, fixSums(data))
		if list, err := toc.Read(bytes.NewReader(data)); err == nil {
			_, _ = list.Tree()
		}
	})
}

// fixSums gives every block that has a header's checksum field the right sum,
// so that changes of headers are not all refused for it.
func fixSums(data []byte) []byte {
	data = bytes.Clone(data)
	for b := data; len(b) >= 512; b = b[512:] {
		if b[154] != 0 || b[155] != ' ' {
			continue
		}
		sum := 8 * int(' ')
		for i, c := range b[:512] {
			if i < 148 || i >= 156 {
				sum += int(c)
			}
		}
		copy(b[148:], fmt.Sprintf("%06o", sum))
	}
	return data
}
