package pack_test

import (
	"bytes"
	"errors"
	"io"
	"slices"
	"testing"
	"testing/iotest"

	"dewpoint/internal/pack"
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
				if h.Layers[l].Points != nil || h.Layers[l].Windows != 0 {
					t.Error("it has points")
				}
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
		if err := broken(func(c *bed) { c.blobs[0][at] ^= 0x10 }); !errors.Is(err, pack.ErrInvalid) && !errors.Is(err, io.ErrUnexpectedEOF) {
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
	if err := p.Inflate(1, bytes.NewReader(b.blobs[0][lo:hi-5000]), window, dst); !errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, pack.ErrInvalid) {
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
