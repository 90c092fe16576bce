package pack_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"testing"
	"testing/iotest"

	"dewpoint/internal/image"
	"dewpoint/internal/layer/erofs"
	"dewpoint/internal/layer/toc"
	"dewpoint/internal/pack"
	"dewpoint/testkit"
	"dewpoint/testkit/treetest"

	"github.com/opencontainers/go-digest"
)

// filled is what a pack has brought of some layers.
type filled struct {
	data [][]byte
	has  [][]bool // by page
}

func newFilled(b *bed) *filled {
	f := &filled{}
	for _, tar := range b.tars {
		f.data = append(f.data, make([]byte, len(tar)))
		f.has = append(f.has, make([]bool, (len(tar)+pack.Page-1)/pack.Page))
	}
	return f
}

func (f *filled) put(layer int, off int64, b []byte) error {
	copy(f.data[layer][off:], b)
	for p := off / pack.Page; p*pack.Page < off+int64(len(b)); p++ {
		if f.has[layer][p] {
			return errors.New("a page comes twice")
		}
		f.has[layer][p] = true
	}
	return nil
}

// TestStream reads a pack as it comes and finds in it what was asked for.
func TestStream(t *testing.T) {
	b := packed()
	s, err := pack.Open(iotest.OneByteReader(bytes.NewReader(b.pack[:2000])))
	if err != nil && !errors.Is(err, io.ErrUnexpectedEOF) || s != nil {
		t.Fatal(s, err)
	}
	if s, err = pack.Open(iotest.HalfReader(bytes.NewReader(b.pack))); err != nil {
		t.Fatal(err)
	}
	f, windows := newFilled(b), make([][]byte, len(b.tars))
	var kinds []pack.Kind
	for {
		it, err := s.Next()
		if err == io.EOF {
			break
		}
		check(t, err)
		if n := len(kinds); n == 0 || kinds[n-1] != it.Kind {
			kinds = append(kinds, it.Kind)
		}
		switch it.Kind {
		case pack.KindTable:
			table, err := s.Header.ParseTable(it.Layer, it.Data)
			check(t, err)
			sameIndex(t, b.tars[it.Layer], table)
		case pack.KindChunk:
			check(t, s.Header.Chunks[it.Chunk].Each(it.Data, f.put))
		case pack.KindPoints:
			_, err := s.Header.ParsePoints(it.Layer, it.Data)
			check(t, err)
		case pack.KindWindows:
			if it.Offset != int64(len(windows[it.Layer])) {
				t.Errorf("windows at %d, not %d", it.Offset, len(windows[it.Layer]))
			}
			windows[it.Layer] = append(windows[it.Layer], it.Data...)
		}
	}
	if !slices.Equal(kinds,
		[]pack.Kind{pack.KindTable, pack.KindChunk, pack.KindPoints, pack.KindWindows}) {
		t.Errorf("parts in the order %v", kinds)
	}
	for i := range windows {
		if !bytes.Equal(windows[i], b.part(s.Header.WindowsSpan(i))) {
			t.Errorf("windows of layer %d", i)
		}
	}
	checkFilled(t, b, f)
}

// checkFilled compares with the profile: its pages are there, right, and no others.
func checkFilled(t *testing.T, b *bed, f *filled) {
	t.Helper()
	want := newFilled(b)
	for _, r := range b.in.Profile.Reads {
		l := len(b.tars) - 1 - r.Layer
		for p := r.Offset / pack.Page; p*pack.Page < min(r.Offset+r.Length, int64(len(b.tars[l]))); p++ {
			want.has[l][p] = true
		}
	}
	var needed int64
	for l, tar := range b.tars {
		for p := range want.has[l] {
			if want.has[l][p] != f.has[l][p] {
				t.Fatalf("layer %d, page %d: %v", l, p, f.has[l][p])
			}
			if from, to := p*pack.Page, min((p+1)*pack.Page, len(tar)); want.has[l][p] {
				needed += int64(to - from)
				if !bytes.Equal(tar[from:to], f.data[l][from:to]) {
					t.Fatalf("layer %d, page %d is wrong", l, p)
				}
			}
		}
	}
	if needed != b.stats.Needed {
		t.Errorf("%d bytes needed, not %d", b.stats.Needed, needed)
	}
}

func sameIndex(t *testing.T, tar []byte, table *toc.Table) {
	t.Helper()
	a, b := index(t, bytes.NewReader(tar), len(tar)), index(t, table, len(tar))
	if !bytes.Equal(a, b) {
		t.Error("the index from the table differs from the tar's")
	}
}

func index(t *testing.T, r io.ReaderAt, size int) []byte {
	t.Helper()
	list, err := toc.Read(r)
	check(t, err)
	var b bytes.Buffer
	check(t, erofs.Build(&b, list, erofs.Options{UUID: erofs.UUID("x"), DataSize: int64(size), Data: r}))
	return b.Bytes()
}

// Sparse files that an index copies from, and all other kinds of layers.
func TestTableGivesIndex(t *testing.T) {
	cases := treetest.Cases()
	unpadded := new(treetest.Archive).File("a", "a").File("b", treetest.Text(70_001)).Bytes()
	cases = append(cases, treetest.Case{Name: "unpadded", Tar: unpadded[:512*3+70_001]})
	for _, c := range cases {
		t.Run(c.Name, func(t *testing.T) {
			table, err := pack.MakeTable(bytes.NewReader(c.Tar), int64(len(c.Tar)))
			check(t, err)
			b, err := table.MarshalBinary()
			check(t, err)
			table, err = toc.ParseTable(b)
			check(t, err)
			sameIndex(t, c.Tar, table)
		})
	}
}

// Any part can be had by itself.
func TestPartsAlone(t *testing.T) {
	b := packed()
	h := b.header(t)
	if h.Layout().Size != int64(len(b.pack)) || b.stats.Size != int64(len(b.pack)) ||
		b.stats.Digest != digest.FromBytes(b.pack) {
		t.Errorf("size %d and %d of %d", h.Layout().Size, b.stats.Size, len(b.pack))
	}
	f := newFilled(b)
	var dst []byte
	for _, k := range rand.Perm(len(h.Chunks)) {
		var err error
		dst, err = h.DecodeChunk(k, b.part(h.ChunkSpan(k)), dst)
		check(t, err)
		check(t, h.Chunks[k].Each(dst, f.put))
	}
	checkFilled(t, b, f)
	for i := range h.Layers {
		table, err := h.DecodeTable(i, b.part(h.TableSpan(i)))
		check(t, err)
		sameIndex(t, b.tars[i], table)
	}
}

// What is alike in two layers, or twice in one, is stored once.
func TestCopies(t *testing.T) {
	b := packed()
	h := b.header(t)
	var copies, raw int64
	for _, c := range h.Chunks {
		raw += c.Raw
		for _, d := range c.Copies {
			copies += d.Length
		}
	}
	if copies == 0 || raw != b.stats.Raw || raw+copies != b.stats.Needed {
		t.Errorf("%d copied, %d stored, %d needed", copies, raw, b.stats.Needed)
	}
	twice := &bed{in: pack.Input{Image: digest.FromString("m")}}
	tar := layerTar(1, 3<<20)
	twice.add(tar, gz(6, tar), "gzip")
	other := append(bytes.Clone(tar[:len(tar)-1024]), layerTar(9, 1<<20)...)
	twice.add(other, gz(6, other), "gzip")
	p := &pack.Profile{Version: 1, Image: twice.in.Image,
		Layers: []digest.Digest{digest.FromBytes(tar), digest.FromBytes(other)}}
	p.Reads = []pack.Range{{0, 50_000, 100_000}, {1, 0, 1 << 21}, {0, 0, 1 << 21}}
	twice.in.Profile = p
	twice.build()
	if s := twice.stats; s.Raw > s.Needed/2+1<<20 {
		t.Errorf("%d of %d bytes are stored", s.Raw, s.Needed)
	}
	f := newFilled(twice)
	h = twice.header(t)
	for k := range h.Chunks {
		b, err := h.DecodeChunk(k, twice.part(h.ChunkSpan(k)), nil)
		check(t, err)
		check(t, h.Chunks[k].Each(b, f.put))
	}
	if !bytes.Equal(f.data[0][:1<<21], tar[:1<<21]) || !bytes.Equal(f.data[1][:1<<21], other[:1<<21]) {
		t.Error("wrong bytes")
	}
}

// Whatever the profile and the layers' sizes are, the pack is valid and brings
// exactly what was asked for.
func TestPlans(t *testing.T) {
	testkit.Long(t)
	for seed := range uint64(12) {
		rnd := rand.New(rand.NewPCG(seed, 11))
		b := &bed{in: pack.Input{Image: digest.FromString("m")}}
		shared := layerTar(seed, 100_000+rnd.IntN(600_000))
		for i := range 1 + rnd.IntN(5) {
			a := new(treetest.Archive).File("own", content(seed+uint64(i), 20_000*i+rnd.IntN(2000)))
			tar := append(a.Bytes()[:len(a.Bytes())-1024], shared...)
			end := content(seed*77+uint64(i), 1+rnd.IntN(9000)) // behind the end marker, unpadded
			b.add(append(tar, end...), []byte(end), image.Plain)
			b.in.Layers[i].Open = nil
		}
		b.profile(seed, rnd.Int64N(4<<20))
		b.build()
		f, h := newFilled(b), b.header(t)
		for k := range h.Chunks {
			data, err := h.DecodeChunk(k, b.part(h.ChunkSpan(k)), nil)
			check(t, err)
			check(t, h.Chunks[k].Each(data, f.put))
		}
		checkFilled(t, b, f)
		check(t, drain(bytes.NewReader(b.pack)))
	}
}

// Bytes of first use come in early chunks, and the first chunks are small.
func TestOrder(t *testing.T) {
	b := packed()
	h := b.header(t)
	at := map[[2]int64]int{}
	for k := range h.Chunks {
		c := &h.Chunks[k]
		if k < 3 && c.Raw > 256<<10 || c.Raw > pack.MaxChunk {
			t.Errorf("chunk %d has %d bytes", k, c.Raw)
		}
		if !slices.IsSortedFunc(c.Ranges, func(a, b pack.Range) int {
			return (a.Layer-b.Layer)<<40 + int(a.Offset-b.Offset)
		}) {
			t.Errorf("chunk %d is not sorted", k)
		}
		c.Each(make([]byte, c.Raw), func(l int, off int64, b []byte) error {
			for p := off / pack.Page; p*pack.Page < off+int64(len(b)); p++ {
				at[[2]int64{int64(l), p}] = k
			}
			return nil
		})
	}
	last := 0
	for _, r := range b.in.Profile.Reads {
		l := int64(len(b.tars) - 1 - r.Layer)
		for p := r.Offset / pack.Page; p*pack.Page < min(r.Offset+r.Length, b.in.Layers[l].Size); p++ {
			if k := at[[2]int64{l, p}]; k > last+1 {
				t.Fatalf("page %d of layer %d is in chunk %d, those before it end in %d", p, l, k, last)
			} else {
				last = max(last, k)
			}
		}
	}
}

// A pack depends on its input alone, not on how the blob arrives.
func TestDeterministic(t *testing.T) {
	b := packed()
	other := *b
	other.in.Layers = slices.Clone(b.in.Layers)
	for i := range other.in.Layers {
		blob := b.blobs[i]
		other.in.Layers[i].Open = func() (io.ReadCloser, error) {
			return io.NopCloser(iotest.HalfReader(bytes.NewReader(blob))), nil
		}
	}
	other.in.Layers = append(other.in.Layers, b.in.Layers[0])
	other.in.Dir = t.TempDir()
	other.build()
	if !bytes.Equal(other.pack, b.pack) {
		t.Error("two packs of one input differ")
	}
	if left, err := os.ReadDir(other.in.Dir); err != nil || len(left) != 0 {
		t.Error(left, err)
	}
}

func TestBuildRefuses(t *testing.T) {
	tar := layerTar(1, 1<<20)
	blob := gz(6, tar)
	fresh := func() *bed {
		b := &bed{in: pack.Input{Image: digest.FromString("m"), Dir: t.TempDir()}}
		b.add(tar, blob, "gzip")
		b.profile(1, 1<<19)
		return b
	}
	open := func(blob []byte) func() (io.ReadCloser, error) {
		return func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(blob)), nil }
	}
	wrong := bytes.Clone(tar)
	wrong[len(wrong)/2] ^= 1
	disk := errors.New("disk")
	for _, c := range []struct {
		what   string
		change func(l *pack.InputLayer)
		err    error
	}{
		{"data is wrong", func(l *pack.InputLayer) { l.Data = bytes.NewReader(wrong) }, pack.ErrMismatch},
		{"data is wrong, no blob", func(l *pack.InputLayer) {
			l.Data, l.Open = bytes.NewReader(wrong), nil
		}, pack.ErrMismatch},
		{"blob of another layer", func(l *pack.InputLayer) { l.Open = open(gz(6, wrong)) }, pack.ErrMismatch},
		{"blob compressed otherwise", func(l *pack.InputLayer) { l.Open = open(gz(9, tar)) }, pack.ErrMismatch},
		{"blob is cut", func(l *pack.InputLayer) { l.Open = open(blob[:len(blob)-3]) }, io.ErrUnexpectedEOF},
		{"blob is longer", func(l *pack.InputLayer) { l.Open = open(gz(6, tar, tar)) }, pack.ErrMismatch},
		{"data is short", func(l *pack.InputLayer) {
			l.Data = bytes.NewReader(tar[:len(tar)-600])
		}, io.ErrUnexpectedEOF},
		{"diffID is wrong", func(l *pack.InputLayer) { l.DiffID = digest.FromString("x") }, pack.ErrMismatch},
		{"blob cannot be read", func(l *pack.InputLayer) {
			l.Open = func() (io.ReadCloser, error) { return io.NopCloser(iotest.ErrReader(disk)), nil }
		}, disk},
		{"no tar", func(l *pack.InputLayer) {
			l.Data = bytes.NewReader(bytes.Repeat([]byte("no"), len(tar)/2))
		}, toc.ErrCorrupt},
	} {
		b := fresh()
		c.change(&b.in.Layers[0])
		if _, err := pack.Build(context.Background(), io.Discard, b.in); !errors.Is(err, c.err) {
			t.Errorf("%s: %v", c.what, err)
		}
		if left, err := os.ReadDir(b.in.Dir); err != nil || len(left) != 0 {
			t.Errorf("%s: left %v, %v", c.what, left, err)
		}
	}
	b := fresh()
	b.in.Image = digest.FromString("other")
	if _, err := pack.Build(context.Background(), io.Discard, b.in); err == nil {
		t.Error("a profile of another image was used")
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(disk)
	if _, err := pack.Build(ctx, io.Discard, fresh().in); !errors.Is(err, disk) {
		t.Error(err)
	}
	if _, err := pack.Build(context.Background(), full{}, fresh().in); !errors.Is(err, errFull) {
		t.Error(err)
	}
}

var errFull = errors.New("full")

type full struct{}

func (full) Write([]byte) (int, error) { return 0, errFull }
