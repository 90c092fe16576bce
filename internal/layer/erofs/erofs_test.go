package erofs_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"dewpoint/internal/layer/erofs"
	"dewpoint/internal/layer/toc"
	"dewpoint/testkit"
	"dewpoint/testkit/treetest"
)

func index(t testing.TB, tar []byte) []byte {
	t.Helper()
	list, err := toc.Read(bytes.NewReader(tar))
	check(t, err)
	var b bytes.Buffer
	check(t, erofs.Build(&b, list, erofs.Options{
		UUID: erofs.UUID("sha256:x"), DataSize: int64(len(tar)), Data: bytes.NewReader(tar),
	}))
	return b.Bytes()
}

func TestDeterministic(t *testing.T) {
	for _, c := range treetest.Cases() {
		first := index(t, c.Tar)
		if len(first)%512 != 0 {
			t.Errorf("%s: image of %d bytes", c.Name, len(first))
		}
		for range 3 {
			if !bytes.Equal(first, index(t, c.Tar)) {
				t.Fatalf("%s: images of one layer differ", c.Name)
			}
		}
	}
}

func TestUUID(t *testing.T) {
	a, b := erofs.UUID("sha256:a"), erofs.UUID("sha256:b")
	if a == b || a != erofs.UUID("sha256:a") || a[6]>>4 != 8 || a[8]>>6 != 2 {
		t.Errorf("%x %x", a, b)
	}
}

// Files of more than 4 and 8 GiB, in a tar that is itself a sparse file.
func TestLargeFiles(t *testing.T) {
	path := filepath.Join(t.TempDir(), "data")
	f, err := os.Create(path)
	check(t, err)
	defer f.Close()
	sizes := []int64{5<<30 + 7, 1 << 30, 1<<30 + 1, 9<<30 + 512}
	marks := map[string][]int64{}
	at := int64(0)
	for i, size := range sizes {
		name := fmt.Sprintf("large%d", i)
		head := new(treetest.Archive).Raw(treetest.Raw{
			Name: name, Mode: "0000644", Magic: treetest.MagicGNU, Type: '0', Size: treetest.Base256(size, 12),
		}, "").Bytes()[:512]
		_, err := f.WriteAt(head, at)
		check(t, err)
		at += 512
		for off := int64(0); off < size-8; off += 1<<30 - 4 {
			marks[name] = append(marks[name], off)
			_, err := f.WriteAt(fmt.Appendf(nil, "%8x", off/4), at+off)
			check(t, err)
		}
		at += (size + 511) &^ 511
	}
	check(t, f.Truncate(at+1024))
	root := mounted(t, path)
	for i, size := range sizes {
		name := fmt.Sprintf("large%d", i)
		f, err := os.Open(filepath.Join(root, name))
		check(t, err)
		defer f.Close()
		st, err := f.Stat()
		check(t, err)
		if st.Size() != size {
			t.Errorf("%s: %d bytes, want %d", name, st.Size(), size)
		}
		for _, off := range marks[name] {
			b := make([]byte, 8)
			_, err := f.ReadAt(b, off)
			check(t, err)
			if want := fmt.Sprintf("%8x", off/4); string(b) != want {
				t.Errorf("%s at %x: %q", name, off, b)
			}
		}
		if n, err := f.ReadAt(make([]byte, 100), size-1); n != 1 || err != io.EOF {
			t.Errorf("%s: read %d bytes at its end: %v", name, n, err)
		}
	}
}

// Holes of a large file cost references only, whatever their granularity.
func TestLargeSparse(t *testing.T) {
	s := treetest.Sparse{Name: "lastlog", Size: 400 << 30, Segs: []treetest.Segment{
		{Off: 4096 * 5, Data: treetest.Text(512)}, {Off: 300<<30 + 512, Data: treetest.Text(1024)},
	}}
	tar := new(treetest.Archive).PAXSparse("1.0", s).Bytes()
	img := index(t, tar)
	if len(img) > 16<<20 {
		t.Errorf("index of %d bytes", len(img))
	}
	f, err := os.Open(filepath.Join(mounted(t, writeTar(t, tar)), "lastlog"))
	check(t, err)
	defer f.Close()
	for _, g := range s.Segs {
		b := make([]byte, len(g.Data)+2000)
		_, err := f.ReadAt(b, g.Off-1000)
		check(t, err)
		if strings.Trim(string(b), "\x00") != g.Data || string(b[1000:1000+len(g.Data)]) != g.Data {
			t.Errorf("wrong bytes at %d", g.Off)
		}
	}
}

func TestHugeDirectory(t *testing.T) {
	const n = 100_000
	a := new(treetest.Archive).Dir("d")
	one := new(treetest.Archive).File("d/xxxxxxxx", "").Bytes()[:512]
	var tar bytes.Buffer
	tar.Write(a.Bytes()[:512])
	var names []string
	for i := range n {
		name := fmt.Sprintf("%08x", uint32(i)*2654435761)
		names = append(names, name)
		copy(one[2:], name)
		sum := 8 * int(' ')
		for i, c := range one {
			if i < 148 || i >= 156 {
				sum += int(c)
			}
		}
		copy(one[148:], fmt.Sprintf("%06o", sum))
		tar.Write(one)
	}
	tar.Write(make([]byte, 1024))
	root := filepath.Join(mounted(t, writeTar(t, tar.Bytes())), "d")
	d, err := os.Open(root)
	check(t, err)
	defer d.Close()
	got, err := d.Readdirnames(-1)
	check(t, err)
	slices.Sort(names)
	slices.Sort(got)
	if !slices.Equal(names, got) {
		t.Fatalf("%d names, want %d", len(got), len(names))
	}
	for i := 0; i < n; i += 97 {
		if err := unix.Access(filepath.Join(root, names[i]), unix.F_OK); err != nil {
			t.Errorf("%s: %v", names[i], err)
		}
		if err := unix.Access(filepath.Join(root, names[i]+"x"), unix.F_OK); err != unix.ENOENT {
			t.Errorf("%sx: %v", names[i], err)
		}
	}
}

// A tar may end with its last contents, unpadded.
func TestUnpaddedEnd(t *testing.T) {
	for _, size := range []int{1, 2, 511, 512, 513, 70_001, 1<<20 + 3} {
		want := treetest.Text(size)
		tar := new(treetest.Archive).File("a", "a").File("b", want).Bytes()
		tar = tar[:512*3+size]
		if img := index(t, tar); len(img) > 20<<10+512 {
			t.Errorf("%d bytes: index of %d bytes", size, len(img))
		}
		b, err := os.ReadFile(filepath.Join(mounted(t, writeTar(t, tar)), "b"))
		if err != nil || string(b) != want {
			t.Errorf("%d bytes: read %d, %v", size, len(b), err)
		}
	}
}

func TestSuperblock(t *testing.T) {
	testkit.Long(t)
	img := index(t, treetest.Cases()[0].Tar)
	list, err := toc.Read(bytes.NewReader(treetest.Cases()[0].Tar))
	check(t, err)
	var other bytes.Buffer
	check(t, erofs.Build(&other, list,
		erofs.Options{UUID: erofs.UUID("b"), DataSize: int64(len(treetest.Cases()[0].Tar))}))
	if !bytes.Equal(img[1536:], other.Bytes()[1536:]) {
		t.Error("the identity changes more than the superblock")
	}
	img[1024+100] ^= 1 // the checksum is checked by the kernel
	path := writeTar(t, treetest.Cases()[0].Tar)
	check(t, os.WriteFile(path+".index", img, 0o600))
	testkit.NeedRoot(t, "it mounts a file system")
	if err := unix.Mount(path+".index", t.TempDir(), "erofs", unix.MS_RDONLY, "device="+path); err == nil {
		t.Error("a damaged superblock was mounted")
	}
}

func TestRefused(t *testing.T) {
	entry := func(e toc.Entry) *toc.TOC { return &toc.TOC{Entries: []*toc.Entry{&e}} }
	many := make([]toc.Range, 0, 1000)
	for i := range int64(1000) {
		many = append(many, toc.Range{File: i << 33, Data: i*4096 + 1, Length: 4096})
	}
	acl := func(name, value string) *toc.TOC {
		return entry(toc.Entry{Name: "f", Xattrs: map[string]string{name: value}})
	}
	large := map[string]string{}
	for i := range 10 {
		large[fmt.Sprint("user.", i)] = strings.Repeat("v", 60_000)
	}
	for _, c := range []struct {
		what string
		toc  *toc.TOC
		size int64
		err  error
	}{
		{"data beyond the end", entry(toc.Entry{Name: "f", Size: 5, Ranges: []toc.Range{{Data: 512, Length: 5}}}),
			516, toc.ErrCorrupt},
		{"data too large", entry(toc.Entry{Name: "f"}), erofs.MaxDataSize + 1, erofs.ErrTooLarge},
		{"too many references", entry(toc.Entry{Name: "f", Size: 1 << 44, Ranges: many}), 1 << 40,
			erofs.ErrTooLarge},
		{"list cut", acl("system.posix_acl_access", "\x02\x00\x00\x00\x01"), 0, toc.ErrCorrupt},
		{"list out of order", acl("system.posix_acl_access", treetest.ACL([3]uint32{4, 4, 0}, [3]uint32{1, 4, 0})),
			0, toc.ErrCorrupt},
		{"default list of a file", acl("system.posix_acl_default", treetest.ACL([3]uint32{1, 4, 0})), 0,
			toc.ErrCorrupt},
		{"attributes too large", entry(toc.Entry{Name: "f", Xattrs: large}), 0, erofs.ErrTooLarge},
		{"unknown namespace", acl("foo.bar", "x"), 0, toc.ErrCorrupt},
	} {
		t.Run(c.what, func(t *testing.T) {
			var e *toc.Error
			err := erofs.Build(io.Discard, c.toc, erofs.Options{DataSize: c.size, Data: bytes.NewReader(nil)})
			if !errors.Is(err, c.err) {
				t.Fatalf("%v, want %v", err, c.err)
			}
			if c.size <= erofs.MaxDataSize && (!errors.As(err, &e) || e.Name != "f") {
				t.Errorf("%v does not name the entry", err)
			}
		})
	}
}

type brokenWriter struct{ n int }

var errDisk = errors.New("disk full")

func (w *brokenWriter) Write(b []byte) (int, error) {
	if w.n -= len(b); w.n < 0 {
		return 0, errDisk
	}
	return len(b), nil
}

func TestWriteError(t *testing.T) {
	for _, c := range treetest.Cases() {
		list, err := toc.Read(bytes.NewReader(c.Tar))
		check(t, err)
		o := erofs.Options{DataSize: int64(len(c.Tar)), Data: bytes.NewReader(c.Tar)}
		if err := erofs.Build(&brokenWriter{0}, list, o); !errors.Is(err, errDisk) {
			t.Errorf("%s: %v", c.Name, err)
		}
	}
}

// Sparse contents that must be copied need the data to be there.
func TestDataError(t *testing.T) {
	tar := new(treetest.Archive).GNU(treetest.SparseFiles()[6]).Bytes()
	list, err := toc.Read(bytes.NewReader(tar))
	check(t, err)
	for _, data := range []io.ReaderAt{nil, bytes.NewReader(tar[:600])} {
		if err := erofs.Build(io.Discard, list, erofs.Options{DataSize: int64(len(tar)), Data: data}); err == nil {
			t.Error("no error without data")
		}
	}
}

func TestFarTimes(t *testing.T) {
	tar := new(treetest.Archive).PAX('x', "mtime", fmt.Sprint(math.MaxInt64/int64(time.Second))+".5").File("f",
		"").Bytes()
	st, err := os.Stat(filepath.Join(mounted(t, writeTar(t, tar)), "f"))
	check(t, err)
	if want := time.Unix(math.MaxInt64/int64(time.Second), 5e8); !st.ModTime().Equal(want) {
		t.Errorf("%v, want %v", st.ModTime(), want)
	}
}

func FuzzBuild(f *testing.F) {
	for _, c := range treetest.Cases() {
		if len(c.Tar) < 12<<10 {
			f.Add(c.Tar)
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		data = fixSums(data)
		list, err := toc.Read(bytes.NewReader(data))
		if err != nil {
			return
		}
		w := &counter{}
		err = erofs.Build(w, list, erofs.Options{DataSize: int64(len(data)), Data: bytes.NewReader(data)})
		var refused *toc.Error
		if err != nil && !errors.As(err, &refused) {
			t.Fatal(err)
		}
		if err == nil && w.n%512 != 0 {
			t.Fatalf("image of %d bytes", w.n)
		}
	})
}

type counter struct{ n int64 }

func (c *counter) Write(b []byte) (int, error) { c.n += int64(len(b)); return len(b), nil }

// fixSums gives header blocks the right checksum, so that fuzzing gets past it.
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
