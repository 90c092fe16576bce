package toc_test

import (
	"archive/tar"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"

	"dewpoint/internal/layer/toc"
	"dewpoint/testkit"
	"dewpoint/testkit/treetest"
)

// archives are tars of all kinds that Read accepts.
func archives() map[string][]byte {
	all := map[string][]byte{}
	for _, c := range treetest.Cases() {
		all[c.Name] = c.Tar
	}
	for seed := range uint64(20) {
		all[fmt.Sprint("generated ", seed)] = generated(seed)
	}
	kinds := all["kinds"]
	all["no end"] = kinds[:len(kinds)-1024]
	all["half an end"] = kinds[:len(kinds)-512]
	all["blocked"] = append(bytes.Clone(kinds), make([]byte, 9999)...)
	all["trash behind the end"] = append(bytes.Clone(kinds), treetest.Text(3000)...)
	unpadded := new(treetest.Archive).File("a", "a").File("b", treetest.Text(1000)).Bytes()
	all["unpadded"] = unpadded[:512*3+1000]
	all["nothing"] = nil
	return all
}

// generated makes a tar of random entries: long names, attributes, sizes.
func generated(seed uint64) []byte {
	rnd := rand.New(rand.NewPCG(seed, 1))
	var a treetest.Archive
	for i := range 1 + rnd.IntN(60) {
		name := fmt.Sprintf("%d-%s", i, strings.Repeat("n", rnd.IntN(150)))
		switch rnd.IntN(6) {
		case 0:
			a.Dir(name)
		case 1:
			a.Symlink(name, strings.Repeat("t", 1+rnd.IntN(300)))
		case 2:
			a.Add(tar.Header{Name: name,
				PAXRecords: map[string]string{"SCHILY.xattr.user.x": treetest.Text(rnd.IntN(3000))}}, "x")
		case 3:
			a.GNU(treetest.SparseFiles()[rnd.IntN(11)])
		default:
			a.File(name, treetest.Text(rnd.IntN(30_000)))
		}
	}
	return a.Bytes()
}

func TestTableReadsLikeTar(t *testing.T) {
	testkit.Long(t)
	for name, b := range archives() {
		t.Run(name, func(t *testing.T) {
			want, err := toc.Read(bytes.NewReader(b))
			check(t, err)
			table, err := toc.MakeTable(bytes.NewReader(b), int64(len(b)), nil)
			check(t, err)
			same(t, want, table)
			enc, err := table.MarshalBinary()
			check(t, err)
			again, err := toc.ParseTable(enc)
			check(t, err)
			same(t, want, again)
			if b2, _ := again.MarshalBinary(); !bytes.Equal(enc, b2) {
				t.Error("it is encoded otherwise after it was read")
			}
			if again.Size() != int64(len(b)) {
				t.Errorf("size %d of %d", again.Size(), len(b))
			}
		})
	}
}

func same(t *testing.T, want *toc.TOC, table *toc.Table) {
	t.Helper()
	got, err := toc.Read(table)
	check(t, err)
	if !reflect.DeepEqual(want, got) {
		t.Error("the table of contents differs from the tar's")
	}
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Contents are zeros but for the extra bytes, and reads may begin anywhere.
func TestTableReadAt(t *testing.T) {
	b := new(treetest.Archive).File("a", treetest.Text(5000)).File("b", treetest.Text(3)).Bytes()
	extra := []toc.Span{{Offset: 5000, Length: 10}, {Offset: 700, Length: 100}, {Offset: 750, Length: 80},
		{Offset: int64(len(b)) - 2, Length: 99}, {Offset: 9, Length: 0}}
	table, err := toc.MakeTable(bytes.NewReader(b), int64(len(b)), extra)
	check(t, err)
	want := make([]byte, len(b))
	second := 512 + 5000 + (-5000 & 511)
	for _, s := range append(extra, toc.Span{Length: 512}, toc.Span{Offset: int64(second), Length: 512}) {
		to := min(s.Offset+s.Length, int64(len(b)))
		copy(want[s.Offset:to], b[s.Offset:to])
	}
	got := make([]byte, len(b))
	if n, err := table.ReadAt(got, 0); n != len(b) || err != nil || !bytes.Equal(got, want) {
		t.Fatalf("%d bytes, %v", n, err)
	}
	for range 3000 {
		from := rand.IntN(len(b))
		n := rand.IntN(len(b))
		p := bytes.Repeat([]byte{0xee}, n)
		k, err := table.ReadAt(p, int64(from))
		if k != min(n, len(b)-from) || (err == io.EOF) != (k < n) || !bytes.Equal(p[:k], want[from:from+k]) {
			t.Fatalf("%d at %d: %d, %v", n, from, k, err)
		}
	}
	if n, err := table.ReadAt(got, int64(len(b))); n != 0 || err != io.EOF {
		t.Error(n, err)
	}
	if _, err := table.ReadAt(got, -1); err == nil {
		t.Error("a negative offset was read")
	}
	var runs int
	table.Runs(func(off int64, p []byte) {
		runs++
		if !bytes.Equal(p, b[off:off+int64(len(p))]) {
			t.Errorf("run at %d is not the tar's", off)
		}
	})
	if runs != 5 {
		t.Errorf("%d runs", runs)
	}
}

// What Read refuses has no table, with the same error.
func TestTableOfCorrupt(t *testing.T) {
	b := treetest.Cases()[0].Tar
	for _, n := range []int{100, 511, 513, 1024*3 + 100, len(b) - 1000} {
		_, want := toc.Read(bytes.NewReader(b[:n]))
		_, err := toc.MakeTable(bytes.NewReader(b), int64(n), nil)
		if (want == nil) != (err == nil) || want != nil && err.Error() != want.Error() {
			t.Errorf("%d bytes: %v, not %v", n, err, want)
		}
	}
	if _, err := toc.MakeTable(bytes.NewReader(b), toc.MaxTableSize+1, nil); !errors.Is(err, toc.ErrLimit) {
		t.Error(err)
	}
	if _, err := toc.MakeTable(bytes.NewReader(b), 4096, []toc.Span{{Offset: -1, Length: 2}}); err == nil {
		t.Error("an impossible span was taken")
	}
	huge := []toc.Span{{Offset: 0, Length: toc.MaxTable + 1}}
	if _, err := toc.MakeTable(zeros{}, toc.MaxTable+1, huge); !errors.Is(err, toc.ErrLimit) {
		t.Error(err)
	}
}

type zeros struct{}

func (zeros) ReadAt(b []byte, _ int64) (int, error) { clear(b); return len(b), nil }

func TestParseTableRefuses(t *testing.T) {
	enc := func(body string, n ...uint64) []byte {
		var b []byte
		for _, v := range n {
			b = binary.AppendUvarint(b, v)
		}
		return append(b, body...)
	}
	for what, b := range map[string][]byte{
		"nothing":           nil,
		"no count":          enc("", 10),
		"size":              enc("", toc.MaxTableSize+1, 0),
		"huge number":       bytes.Repeat([]byte{0xff}, 30),
		"count":             enc("", 10, toc.MaxTableRuns+1),
		"count of nothing":  enc("", 1<<30, 1000),
		"behind the end":    enc("xxxx", 10, 1, 7, 4),
		"skipped too far":   enc("x", 10, 1, 11, 1),
		"empty run":         enc("x", 10, 1, 3, 0),
		"touching runs":     enc("xx", 10, 2, 0, 1, 0, 1),
		"bytes missing":     enc("xx", 10, 1, 0, 3),
		"bytes left":        enc("xxxx", 10, 1, 0, 3),
		"bytes of no run":   enc("x", 10, 0),
		"cut in its runs":   enc("", 10, 2, 0, 1, 1),
		"second run beyond": enc("xx", 10, 2, 0, 5, 5, 1),
	} {
		if _, err := toc.ParseTable(b); !errors.Is(err, toc.ErrCorrupt) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := toc.ParseTable(make([]byte, toc.MaxTable+1)); !errors.Is(err, toc.ErrLimit) {
		t.Error(err)
	}
	if table, err := toc.ParseTable(enc("", 7, 0)); err != nil || table.Size() != 7 {
		t.Error(err)
	}
}

func FuzzParseTable(f *testing.F) {
	for _, c := range treetest.Cases() {
		table, err := toc.MakeTable(bytes.NewReader(c.Tar), int64(len(c.Tar)), nil)
		check(f, err)
		b, _ := table.MarshalBinary()
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		table, err := toc.ParseTable(b)
		if err != nil {
			if !errors.Is(err, toc.ErrCorrupt) {
				t.Fatal(err)
			}
			return
		}
		n := min(table.Size(), 1<<20)
		p := make([]byte, n)
		if k, err := table.ReadAt(p, table.Size()-n); int64(k) != n || err != nil && n > 0 {
			t.Fatal(k, err)
		}
		again, err := table.MarshalBinary()
		check(t, err)
		other, err := toc.ParseTable(again)
		if err != nil || !reflect.DeepEqual(table, other) {
			t.Fatal("it does not survive encoding", err)
		}
	})
}
