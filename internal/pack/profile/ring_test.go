package profile

import (
	"encoding/binary"
	"math/rand/v2"
	"slices"
	"testing"
)

const (
	testFormat = `name: mm_filemap_add_to_page_cache
ID: 600
format:
	field:unsigned short common_type;	offset:0;	size:2;	signed:0;
	field:int common_pid;	offset:4;	size:4;	signed:1;

	field:unsigned long pfn;	offset:8;	size:8;	signed:0;
	field:unsigned long i_ino;	offset:16;	size:8;	signed:0;
	field:unsigned long index;	offset:24;	size:8;	signed:0;
	field:dev_t s_dev;	offset:32;	size:4;	signed:0;
	field:unsigned char order;	offset:36;	size:1;	signed:0;
`
	testHeader = `	field: u64 timestamp;	offset:0;	size:8;	signed:0;
	field: local_t commit;	offset:8;	size:8;	signed:1;
	field: int overwrite;	offset:8;	size:1;	signed:1;
	field: char data;	offset:16;	size:4080;	signed:0;
`
)

func testLayout(t testing.TB) layout {
	t.Helper()
	l, err := parseLayout(testFormat, testHeader)
	check(t, err)
	if l.page != 4096 || l.data != 16 || l.id != 600 || l.dev != (field{32, 4}) || l.size != 37 {
		t.Fatalf("%+v", l)
	}
	return l
}

// body is an event as the kernel writes it.
func body(ino, index uint64, dev uint32, order byte) []byte {
	b := make([]byte, 40)
	binary.NativeEndian.PutUint16(b, 600)
	binary.NativeEndian.PutUint64(b[16:], ino)
	binary.NativeEndian.PutUint64(b[24:], index)
	binary.NativeEndian.PutUint32(b[32:], dev)
	b[36] = order
	return b
}

func words(w ...uint32) (b []byte) {
	for _, w := range w {
		b = binary.NativeEndian.AppendUint32(b, w)
	}
	return b
}

func page(at uint64, flags uint64, entries ...[]byte) []byte {
	all := slices.Concat(entries...)
	b := make([]byte, 16, 4096)
	binary.NativeEndian.PutUint64(b, at)
	binary.NativeEndian.PutUint64(b[8:], uint64(len(all))|flags)
	return append(b, all...)[:4096]
}

func TestPageOfTheRingBuffer(t *testing.T) {
	l := testLayout(t)
	const missed = 1 << 31
	p := page(1000, missed,
		words(10|5<<5), body(7, 3, 9, 0), // 5 ns later
		words(typeExtend|1<<5, 2),               // 1 + 2<<27 ns later
		words(0|1<<5, 44), body(8, 1<<33, 9, 2), // of explicit length
		words(typePadding|77<<5, 4), // discarded; takes no time
		words(typeStamp|5<<5, 1),
		words(10|1<<5), body(1, 2, 3, 0),
		words(typePadding), words(10|1<<5), body(1, 2, 3, 0), // behind the end
	)
	var got []event
	l.each(p, func(e event) { got = append(got, e) })
	want := []event{
		{at: 1005, ino: 7, page: 3, dev: 9},
		{at: 1005 + 1 + 2<<27 + 1, ino: 8, page: 1 << 33, dev: 9, order: 2},
		{at: 5 + 1<<27 + 1, ino: 1, page: 2, dev: 3},
	}
	if !slices.Equal(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

// Kernels before 6.2 have no order.
func TestEventWithoutOrder(t *testing.T) {
	l, err := parseLayout(testFormat[:len(testFormat)-len("	field:unsigned char order;	offset:36;	size:1;	signed:0;\n")], testHeader)
	check(t, err)
	l.each(page(1, 0, words(10), body(7, 3, 9, 5)), func(e event) {
		if e.order != 0 || e.ino != 7 {
			t.Errorf("%+v", e)
		}
	})
}

func TestUnknownLayoutIsRefused(t *testing.T) {
	for _, f := range []string{"", "ID: 5\n", "field:long i_ino; offset:9;"} {
		if _, err := parseLayout(f, testHeader); err == nil {
			t.Errorf("%q was understood", f)
		}
	}
	if _, err := parseLayout(testFormat, ""); err == nil {
		t.Error("no header was understood")
	}
}

func TestGarbageEnds(t *testing.T) {
	l := testLayout(t)
	r := rand.New(rand.NewPCG(1, 2))
	for range 20_000 {
		b := make([]byte, r.IntN(4097))
		for i := range b {
			b[i] = byte(r.Uint32())
		}
		l.each(b, func(e event) {
			if e.order > 20 {
				t.Fatalf("%+v", e)
			}
		})
	}
}

func TestFilter(t *testing.T) {
	for _, c := range []struct {
		devs []uint32
		want string
	}{
		{nil, "s_dev == 4294967295"},
		{[]uint32{5}, "s_dev == 5"},
		{[]uint32{5, 7, 8, 9, 11}, "s_dev == 5 || (s_dev >= 7 && s_dev <= 9) || s_dev == 11"},
	} {
		if got := filterOf(c.devs); got != c.want {
			t.Errorf("%v: %s", c.devs, got)
		}
	}
	var many []uint32
	for i := range uint32(maxLayers) {
		many = append(many, 1<<20*259+i*2)
	}
	if n := len(filterOf(many)); n > 4000 {
		t.Errorf("a filter of %d bytes, which the kernel does not take", n)
	}
}
