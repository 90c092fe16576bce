package lazypages

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
)

// entry is a message of a pagemap.
func entry(values ...uint64) []byte {
	var b []byte
	for i := 0; i < len(values); i += 2 {
		b = protowire.AppendTag(b, protowire.Number(values[i]), protowire.VarintType)
		b = protowire.AppendVarint(b, values[i+1])
	}
	return b
}

func pagemapImage(msgs ...[]byte) []byte {
	b := binary.LittleEndian.AppendUint32(nil, magicCommon)
	b = binary.LittleEndian.AppendUint32(b, magicPagemap)
	for _, m := range msgs {
		b = binary.LittleEndian.AppendUint32(b, uint32(len(m)))
		b = append(b, m...)
	}
	return b
}

func TestPagemap(t *testing.T) {
	m, err := parsePagemap(pagemapImage(entry(1, 7),
		entry(1, 0x10000, 2, 2, 4, flagPresent),
		entry(1, 0x20000, 2, 1, 4, flagPresent|flagLazy, 5, 3),
		entry(1, 0x30000, 2, 5, 4, flagLazy),
		entry(1, 0x40000, 2, 1)))
	if err != nil {
		t.Fatal(err)
	}
	p := int64(pageSize)
	want := []run{{0x10000, 0, 2 * p, false}, {0x20000, 2 * p, 3 * p, true}, {0x40000, 5 * p, p, false}}
	if m.file != "pages-7.img" || m.size != 6*p || len(m.runs) != len(want) {
		t.Fatalf("%+v", m)
	}
	for i := range want {
		if m.runs[i] != want[i] {
			t.Errorf("run %d is %+v, not %+v", i, m.runs[i], want[i])
		}
	}
	for name, b := range map[string][]byte{
		"nothing":       nil,
		"no head":       pagemapImage(),
		"another image": append([]byte{1, 2, 3, 4}, pagemapImage(entry(1, 7))[4:]...),
		"cut off":       pagemapImage(entry(1, 7), entry(1, 0x1000, 2, 1))[:20],
		"in a parent":   pagemapImage(entry(1, 7), entry(1, 0x1000, 2, 1, 4, flagParent)),
		"within a page": pagemapImage(entry(1, 7), entry(1, 0x1001, 2, 1)),
		"endless":       pagemapImage(entry(1, 7), entry(1, 0x1000, 5, 1<<60)),
		"far up":        pagemapImage(entry(1, 7), entry(1, 1<<63, 5, 1)),
		"endless in all": pagemapImage(entry(1, 7), entry(1, 0x1000, 5, 1<<43), entry(1, 0x1000, 5, 1<<43),
			entry(1, 0x1000, 5, 1<<43)),
	} {
		if m, err := parsePagemap(b); err == nil {
			t.Errorf("%s: no error but %+v", name, m)
		}
	}
}

func FuzzPagemap(f *testing.F) {
	f.Add(pagemapImage(entry(1, 7), entry(1, 0x10000, 2, 2, 4, flagPresent)))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := parsePagemap(b)
		if err != nil {
			return
		}
		var at int64
		for _, r := range m.runs {
			if r.offset != at || r.size <= 0 || r.addr+uint64(r.size) < r.addr {
				t.Fatalf("%+v", m)
			}
			at += r.size
		}
		if at != m.size {
			t.Fatalf("%d, %+v", at, m)
		}
	})
}

// FuzzOrder takes which pages come first, as a neighbour has learned it: what is not there is not pushed, and
// what is there is pushed once.
func FuzzOrder(f *testing.F) {
	f.Add([]byte(`[{"file":"pages-1.img","page":0},{"file":"pages-1.img","page":300},{"file":"pages-1.img","page":1}]`))
	f.Add([]byte(`[{"file":"../x","page":-1},{"page":9223372036854775807},{}]`))
	dir := f.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "pages-1.img"), make([]byte, 2*ChunkSize), 0o600); err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var order []Page
		if json.Unmarshal(b, &order) != nil {
			return
		}
		var p plan
		p.init(order)
		defer p.alarm.Stop()
		p.live, p.hasty = true, true
		if len(p.order) > len(order) {
			t.Fatalf("%d of %d", len(p.order), len(order))
		}
		for _, k := range p.order {
			data, err := Dir(dir).Chunk(t.Context(), k.file, k.chunk)
			if err == nil && (len(data) > ChunkSize || filepath.Base(k.file) != "pages-1.img" || k.chunk < 0 || k.chunk > 1) {
				t.Fatalf("%+v gives %d bytes", k, len(data))
			}
		}
		p.want("pages-1.img", []int{0, 1})
		for range 2 {
			if j, _ := p.nextRest(); j == nil || j.file != "pages-1.img" || j.chunk > 1 {
				t.Fatalf("%+v", j)
			}
		}
	})
}

// model is the obvious memory: where each missing page belongs.
type model map[uint64]int64

func (m model) cut(start, end uint64) model {
	out := model{}
	for a := start; a < end; a += pageSize {
		if o, there := m[a]; there {
			out[a] = o
			delete(m, a)
		}
	}
	return out
}

// FuzzMemory takes four bytes per step: what to do, where, how much, and whereto.
func FuzzMemory(f *testing.F) {
	f.Add([]byte{0, 10, 20, 0, 1, 15, 30, 100, 2, 0, 200, 0, 1, 90, 40, 3})
	f.Add([]byte{1, 0, 100, 50, 1, 20, 60, 200, 0, 210, 5, 0})
	f.Fuzz(func(t *testing.T, steps []byte) {
		const base = 0x7f0000000000
		runs := []run{{base, 0, 90 * int64(pageSize), true},
			{base + 90*pageSize, 90 * int64(pageSize), 10 * int64(pageSize), false},
			{base + 120*pageSize, 100 * int64(pageSize), 70 * int64(pageSize), true}}
		got, want := newMemory(runs), model{}
		for _, r := range runs {
			for o := int64(0); r.lazy && o < r.size; o += int64(pageSize) {
				want[r.addr+uint64(o)] = r.offset + o
			}
		}
		for ; len(steps) >= 4; steps = steps[4:] {
			at, size, to := base+uint64(steps[1])*pageSize, uint64(steps[2])*pageSize, base+uint64(steps[3])*pageSize
			switch steps[0] % 3 {
			case 0:
				got.cut(at, at+size)
				want.cut(at, at+size)
			case 1:
				if at < to+size && to < at+size {
					continue // mremap refuses that
				}
				got.move(at, to, size)
				moved := want.cut(at, at+size)
				want.cut(to, to+size)
				for a, o := range moved {
					want[a-at+to] = o
				}
			case 2:
				got = got.clone()
			}
			same(t, got, want)
		}
	})
}

func same(t *testing.T, got *memory, want model) {
	t.Helper()
	if got.left != uint64(len(want))*pageSize {
		t.Fatalf("%d bytes are left, not %d", got.left, uint64(len(want))*pageSize)
	}
	for a, o := range want {
		s := got.find(a)
		if s == nil || s.offset+int64(a-s.addr) != o {
			t.Fatalf("at %#x is %+v, not %d", a, s, o)
		}
	}
	indexed := uint64(0)
	for c, spans := range got.chunks {
		for _, s := range spans {
			indexed += s.size
			if s.chunk() != c || int((s.offset+int64(s.size)-1)/ChunkSize) != c || got.find(s.addr) != s {
				t.Fatalf("chunk %d has %+v", c, s)
			}
		}
	}
	if indexed != got.left {
		t.Fatalf("%d bytes are indexed of %d", indexed, got.left)
	}
}

type memSource map[string][]byte

func (m memSource) Chunk(_ context.Context, file string, chunk int) ([]byte, error) {
	b := m[file]
	return b[min(len(b), chunk*ChunkSize):min(len(b), (chunk+1)*ChunkSize)], nil
}

func TestEager(t *testing.T) {
	dir := t.TempDir()
	p := int(pageSize)
	pages := make([]byte, 200*p)
	for i := range pages {
		pages[i] = byte(i/p + 1)
	}
	lazy := uint64(flagPresent | flagLazy)
	images := map[string][]byte{
		"pagemap-1.img": pagemapImage(entry(1, 1), entry(1, 0, 2, 100, 4, lazy),
			entry(1, 1<<20, 2, 50, 4, flagPresent), entry(1, 1<<30, 2, 50, 4, lazy)),
		"pagemap-shmem-5.img": pagemapImage(entry(1, 2), entry(1, 0, 2, 70, 4, lazy)),
	}
	for name, b := range images {
		if err := os.WriteFile(filepath.Join(dir, name), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	src := memSource{"pages-1.img": pages, "pages-2.img": pages[:70*p]}
	e, l, err := Eager(t.Context(), dir, src)
	if err != nil || e != int64(120*p) || l != int64(150*p) {
		t.Fatalf("%d eager, %d lazy, %v", e, l, err)
	}
	want := append(append(make([]byte, 100*p), pages[100*p:150*p]...), make([]byte, 50*p)...)
	if got, err := os.ReadFile(filepath.Join(dir, "pages-1.img")); err != nil || !bytes.Equal(got, want) {
		t.Errorf("a process's pages differ: %v", err)
	}
	if got, err := os.ReadFile(filepath.Join(dir, "pages-2.img")); err != nil ||
		!bytes.Equal(got, pages[:70*p]) {
		t.Errorf("shared pages differ: %v", err)
	}
	src["pages-1.img"] = pages[:120*p]
	if _, _, err := Eager(t.Context(), dir, src); err == nil {
		t.Error("a source that is too short is no error")
	}
}
