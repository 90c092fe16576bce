package image

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/klauspost/compress/zstd"
)

// forge makes a file of a tar and an index that are wrong in themselves only: all sums are right.
func forge(meta []byte, change func(x *index), index func([]byte) []byte) []byte {
	enc, err := zstd.NewWriter(nil)
	if err != nil {
		panic(err)
	}
	defer enc.Close()
	b := enc.EncodeAll(meta, []byte(magic))
	x := indexOf(meta, int64(len(b)-len(magic)))
	if change != nil {
		change(x)
	}
	raw := x.encode()
	if index != nil {
		raw = index(raw)
	}
	at, stored := len(b), enc.EncodeAll(raw, nil)
	sum := sha256.Sum256(raw)
	b = append(append(b, stored...), sum[:]...)
	b = binary.LittleEndian.AppendUint64(b, uint64(at))
	b = binary.LittleEndian.AppendUint32(b, uint32(len(stored)))
	b = binary.LittleEndian.AppendUint32(b, uint32(len(raw)))
	return append(b, endMagic...)
}

func indexOf(meta []byte, length int64) *index {
	return &index{metaLength: length, metaRaw: int64(len(meta)), metaSum: sha256.Sum256(meta)}
}

func tarOf(hs ...*tar.Header) []byte {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range hs {
		if err := w.WriteHeader(h); err != nil {
			panic(err)
		}
		if _, err := w.Write(make([]byte, h.Size)); err != nil {
			panic(err)
		}
	}
	if err := w.Close(); err != nil {
		panic(err)
	}
	return b.Bytes()
}

func unpackAll(t testing.TB, b []byte, dir string) error {
	r, err := Open(bytes.NewReader(b), int64(len(b)))
	if err != nil {
		return err
	}
	return r.Unpack(t.Context(), dir, 1)
}

func TestForgedPaths(t *testing.T) {
	if err := unpackAll(t, forge(tarOf(&tar.Header{Name: "fine", Size: 5, Typeflag: tar.TypeReg}), nil, nil),
		t.TempDir()); err != nil {
		t.Fatal(err)
	}
	for _, h := range []*tar.Header{
		{Name: "../out", Typeflag: tar.TypeReg, Size: 3}, {Name: "/tmp/out", Typeflag: tar.TypeReg},
		{Name: "a/../../out", Typeflag: tar.TypeReg},
		{Name: "link", Typeflag: tar.TypeSymlink, Linkname: "/etc"},
		{Name: "hard", Typeflag: tar.TypeLink, Linkname: "fine"},
		{Name: "dev", Typeflag: tar.TypeChar}, {Name: "fifo", Typeflag: tar.TypeFifo},
		{Name: "..", Typeflag: tar.TypeDir},
		{Name: "pages-1.img", Typeflag: tar.TypeReg, Size: 3},
	} {
		above := t.TempDir()
		dir := filepath.Join(above, "in")
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := unpackAll(t, forge(tarOf(h), nil, nil), dir); !errors.Is(err, ErrDamaged) {
			t.Errorf("%s: %v", h.Name, err)
		}
		for _, d := range []string{above, dir} {
			if ents, err := os.ReadDir(d); err != nil || len(ents) > 1 || d == dir && len(ents) > 0 {
				t.Errorf("%s: left %v, %v", h.Name, ents, err)
			}
		}
	}
	twice := tarOf(&tar.Header{Name: "a", Typeflag: tar.TypeReg}, &tar.Header{Name: "a", Typeflag: tar.TypeReg})
	if err := unpackAll(t, forge(twice, nil, nil), t.TempDir()); err == nil {
		t.Error("one name twice")
	}
}

// A sparse entry of a few bytes that would fill the disk.
func TestForgedSparse(t *testing.T) {
	b := tarOf(&tar.Header{Name: "a", Typeflag: tar.TypeReg, Size: 0})
	copy(b[257:], "ustar  \x00")
	b[156] = tar.TypeGNUSparse
	copy(b[483:], "77777777777\x00") // real size, 8 GiB
	sum := 0
	copy(b[148:], "        ")
	for _, c := range b[:512] {
		sum += int(c)
	}
	copy(b[148:], []byte{byte('0' + sum>>15&7), byte('0' + sum>>12&7), byte('0' + sum>>9&7),
		byte('0' + sum>>6&7), byte('0' + sum>>3&7), byte('0' + sum&7), 0, ' '})
	if h, err := tar.NewReader(bytes.NewReader(b)).Next(); err != nil || h.Size < 8<<29 {
		t.Fatalf("the forgery is not one: %+v, %v", h, err)
	}
	if err := unpackAll(t, forge(b, nil, nil), t.TempDir()); !errors.Is(err, ErrDamaged) {
		t.Error(err)
	}
}

func TestForgedIndex(t *testing.T) {
	file := func(name string, size int64, chunks ...chunk) pages {
		return pages{PagesFile{name, size}, chunks}
	}
	for what, change := range map[string]func(x *index){
		"meta's length": func(x *index) { x.metaLength++ },
		"meta's sum":    func(x *index) { x.metaSum[0]++ },
		"meta's size":   func(x *index) { x.metaRaw-- },
		"meta is huge":  func(x *index) { x.metaRaw = maxMeta + 1 },
		"a path":        func(x *index) { x.files = []pages{file("../pages-1.img", 10)} },
		"a name":        func(x *index) { x.files = []pages{file("core-1.img", 10)} },
		"twice":         func(x *index) { x.files = []pages{file("pages-1.img", 10), file("pages-1.img", 10)} },
		"too large":     func(x *index) { x.files = []pages{file("pages-1.img", maxPages+1)} },
		"chunk outside": func(x *index) {
			x.files = []pages{file("pages-1.img", 10, chunk{number: 1, length: 1})}
		},
		"data outside":     func(x *index) { x.files = []pages{file("pages-1.img", 10, chunk{length: 1000})} },
		"chunk of no data": func(x *index) { x.files = []pages{file("pages-1.img", 10, chunk{length: 0})} },
	} {
		if err := unpackAll(t, forge(tarOf(), change, nil), t.TempDir()); !errors.Is(err, ErrDamaged) {
			t.Errorf("%s: %v", what, err)
		}
	}
	long := forge(tarOf(), nil, func(b []byte) []byte { return append(b, 0) })
	if err := unpackAll(t, long, t.TempDir()); !errors.Is(err, ErrDamaged) {
		t.Errorf("an index that is too long: %v", err)
	}
	other := forge(tarOf(), nil, func(b []byte) []byte { b[0]++; return b })
	if err := unpackAll(t, other, t.TempDir()); !errors.Is(err, ErrDamaged) {
		t.Errorf("another version: %v", err)
	}
}

// FuzzIndex reads what claims to be an index.
func FuzzIndex(f *testing.F) {
	x := indexOf(tarOf(), 90)
	x.files = []pages{{PagesFile{"pages-1.img", 3 * ChunkSize},
		[]chunk{{number: 0, length: 7, sum: 8}, {number: 2, length: 3}}}, {PagesFile: PagesFile{"pages-2.img", 1}}}
	f.Add(x.encode(), int64(108))
	f.Add([]byte{1, 0, 0}, int64(8))
	f.Fuzz(func(t *testing.T, b []byte, end int64) {
		x, err := decodeIndex(b, max(end, 0))
		if err == nil && !bytes.Equal(x.encode(), b) && len(x.encode()) > len(b) {
			t.Errorf("%x is read as %+v", b, x)
		}
	})
}

// FuzzFile reads what claims to be a file.
func FuzzFile(f *testing.F) {
	f.Add(forge(tarOf(&tar.Header{Name: "a", Typeflag: tar.TypeReg, Size: 9}), nil, nil))
	f.Add(forge(nil, func(x *index) { x.files = []pages{{PagesFile: PagesFile{"pages-1.img", 9}}} }, nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := Open(bytes.NewReader(b), int64(len(b)))
		if err != nil {
			return
		}
		if r.metaRaw < 1<<20 {
			_ = r.Meta(t.TempDir())
		}
		for i, p := range r.Pages() {
			for k := range min(3, chunksOf(p.Size)) {
				_, _ = r.ReadPages(t.Context(), i, int(k), make([]byte, ChunkSize))
			}
		}
	})
}
