package pack_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"
	"slices"
	"testing"
	"testing/iotest"

	"dewpoint/internal/image"
	"dewpoint/internal/pack"
	"dewpoint/testkit/treetest"

	"github.com/opencontainers/go-digest"
)

// segment inflates segment i of layer l from exactly the bytes that Blob says.
func segment(b *bed, h *pack.Header, p *pack.Points, l, i int) ([]byte, error) {
	from, to := p.Data(i)
	dst := make([]byte, to-from)
	lo, hi := p.Blob(i)
	var window []byte
	if w := p.Window(i); w.Length > 0 {
		window = b.part(pack.Span{Offset: h.WindowsSpan(l).Offset + w.Offset, Length: w.Length})
	}
	return dst, p.Inflate(i, iotest.HalfReader(bytes.NewReader(b.blobs[l][lo:hi])), window, dst)
}

func TestEverySegment(t *testing.T) {
	b := packed()
	h := b.header(t)
	for l, c := range compressors {
		t.Run(c.name, func(t *testing.T) {
			if h.Layers[l].Compression != c.as {
				t.Errorf("compression %s", h.Layers[l].Compression)
			}
			if c.few {
				digestsAlone(t, b, h, l)
				return
			}
			p, err := h.DecodePoints(l, b.part(h.PointsSpan(l)))
			check(t, err)
			if p.Len() < 2 || p.Len() > len(b.tars[l])>>20 {
				t.Errorf("%d segments of %d bytes", p.Len(), len(b.tars[l]))
			}
			var order []int
			for i := range p.Len() {
				order = append(order, i)
			}
			end := int64(0)
			for _, i := range order {
				from, to := p.Data(i)
				if from != end || p.Segment(from) != i || p.Segment(to-1) != i {
					t.Errorf("segment %d from %d to %d", i, from, to)
				}
				end = to
			}
			if end != int64(len(b.tars[l])) || p.Segment(end) != -1 || p.Segment(-1) != -1 {
				t.Errorf("segments end at %d of %d", end, len(b.tars[l]))
			}
			backward := slices.Clone(order)
			slices.Reverse(backward)
			for _, i := range append(order, backward...) {
				got, err := segment(b, h, p, l, i)
				check(t, err)
				if from, to := p.Data(i); !bytes.Equal(got, b.tars[l][from:to]) {
					t.Errorf("segment %d differs", i)
				}
			}
		})
	}
	if last := len(b.tars) - 1; h.Layers[last].Points != nil {
		t.Error("an empty layer has points")
	}
}

// A blob or window that is not the one of the pack is found out.
func TestSegmentOfOther(t *testing.T) {
	b := packed()
	h := b.header(t)
	p, err := h.DecodePoints(0, b.part(h.PointsSpan(0)))
	check(t, err)
	broken := func(change func(c *bed)) error {
		c := *b
		c.blobs, c.pack = slices.Clone(b.blobs), bytes.Clone(b.pack)
		c.blobs[0] = bytes.Clone(b.blobs[0])
		change(&c)
		_, err := segment(&c, h, p, 0, 1)
		return err
	}
	lo, hi := p.Blob(1)
	for at := lo + 1; at < hi-1; at += (hi - lo) / 50 {
		if err := broken(func(c *bed) { c.blobs[0][at] ^= 0x10 }); !errors.Is(err, pack.ErrInvalid) &&
			!errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("changed at %d: %v", at, err)
		}
	}
	w := h.WindowsSpan(0).Offset + p.Window(1).Offset
	for at := w; at < w+p.Window(1).Length; at += p.Window(1).Length / 20 {
		if err := broken(func(c *bed) { c.pack[at] ^= 0x10 }); err != nil && !errors.Is(err, pack.ErrInvalid) {
			t.Errorf("window changed at %d: %v", at-w, err)
		}
	}
	from, to := p.Data(1)
	dst := make([]byte, to-from)
	window := b.part(pack.Span{Offset: w, Length: p.Window(1).Length})
	if err := p.Inflate(1, bytes.NewReader(b.blobs[0][lo:hi-5000]), window, dst); !errors.Is(err,
		io.ErrUnexpectedEOF) || errors.Is(err, pack.ErrInvalid) {
		t.Errorf("cut blob: %v", err)
	}
	gone := errors.New("gone")
	r := io.MultiReader(bytes.NewReader(b.blobs[0][lo:hi-5000]), iotest.ErrReader(gone))
	if err := p.Inflate(1, r, window, dst); !errors.Is(err, gone) || errors.Is(err, pack.ErrInvalid) {
		t.Errorf("lost blob: %v", err)
	}
	if err := p.Inflate(1, bytes.NewReader(b.blobs[0][lo:hi]), nil, dst); !errors.Is(err, pack.ErrInvalid) {
		t.Errorf("no window: %v", err)
	}
	if err := p.Inflate(1, bytes.NewReader(b.blobs[0][lo:hi]), window, dst[1:]); err == nil {
		t.Error("a short buffer was taken")
	}
	if _, err := pack.DecodeWindow(zst(make([]byte, 32<<10+1))); !errors.Is(err, pack.ErrInvalid) {
		t.Errorf("large window: %v", err)
	}
	if _, err := pack.DecodeWindow(zst(nil)); !errors.Is(err, pack.ErrInvalid) {
		t.Errorf("empty window: %v", err)
	}
}

// zeroMember is a gzip member of n zeros in one deflate block, n being 1 more
// than a multiple of 258.
func zeroMember(n int) []byte {
	b := []byte{0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255}
	var bits uint64
	var have int
	put := func(v uint64, n int) {
		bits |= v << have
		for have += n; have >= 8; have -= 8 {
			b = append(b, byte(bits))
			bits >>= 8
		}
	}
	put(3, 3)    // last block, fixed codes
	put(0x0c, 8) // the byte 0: code 00110000, first bit first
	for range n / 258 {
		put(0xa3, 8) // length 258: code 11000101
		put(0, 5)    // distance 1
	}
	put(0, 7+7) // end of block, padding
	b = binary.LittleEndian.AppendUint32(b, crc32.ChecksumIEEE(make([]byte, n)))
	return binary.LittleEndian.AppendUint32(b, uint32(n))
}

// A layer that cannot be entered often enough has points for the digests alone,
// and leaves no windows behind.
func TestLongSegment(t *testing.T) {
	n := 258*70_000 + 1
	head := new(treetest.Archive).File("text", content(1, 5<<20)).Bytes()
	head = head[:len(head)-1024]
	zeros := new(treetest.Archive).File("zeros", string(make([]byte, n))).Bytes()
	tar := append(bytes.Clone(head), zeros...)
	b := &bed{in: pack.Input{Image: digest.FromString("m")}}
	from := len(head) + 512
	b.add(tar, slices.Concat(gz(6, tar[:from]), zeroMember(n), gz(6, tar[from+n:])), image.Gzip)
	framed := append(bytes.Clone(tar), 1)
	b.add(framed, slices.Concat(zst(framed[:from]), zst(framed[from:from+n]), zst(framed[from+n:])), image.Zstd)
	last := layerTar(3, 5<<20)
	b.add(last, gz(6, last), image.Gzip)
	b.profile(1, 1<<20)
	b.build()
	h := b.header(t)
	for l := range 2 {
		digestsAlone(t, b, h, l)
	}
	p, err := h.DecodePoints(2, b.part(h.PointsSpan(2)))
	check(t, err)
	for i := range p.Len() {
		_, err := segment(b, h, p, 2, i)
		check(t, err)
	}
}

// digestsAlone checks a layer that cannot be entered in the middle: its segments
// have digests all the same, which are right.
func digestsAlone(t *testing.T, b *bed, h *pack.Header, l int) {
	t.Helper()
	if h.Layers[l].Points == nil || h.Layers[l].Windows != 0 {
		t.Fatalf("layer %d: points %v, windows of %d bytes", l, h.Layers[l].Points, h.Layers[l].Windows)
	}
	p, err := h.DecodePoints(l, b.part(h.PointsSpan(l)))
	check(t, err)
	if p.Len() > 1 && p.Enterable() {
		t.Errorf("layer %d can be entered", l)
	}
	for i := range p.Len() {
		from, to := p.Data(i)
		if p.Sum(i) != digest.FromBytes(b.tars[l][from:to]) {
			t.Errorf("layer %d: the digest of segment %d is wrong", l, i)
		}
		if i > 0 && p.Inflate(i, bytes.NewReader(nil), nil, make([]byte, to-from)) == nil {
			t.Errorf("layer %d: segment %d was inflated", l, i)
		}
	}
}
