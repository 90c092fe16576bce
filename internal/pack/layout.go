package pack

import (
	"fmt"

	"dewpoint/internal/layer/toc"
)

// Span is where a part lies in the pack, in bytes. A part that is not there has
// Length 0.
type Span struct{ Offset, Length int64 }

// Layout is where everything lies in a pack.
type Layout struct {
	Header  Span   // with the preamble
	Tables  []Span // by layer
	Chunks  []Span
	Points  []Span // by layer
	Windows []Span // by layer, all of a layer's together
	Files   []Span // by layer, of packs that have them
	Size    int64  // of the pack
}

// Layout returns where the parts lie. It is not to be changed.
func (h *Header) Layout() *Layout { return &h.layout }

func (h *Header) place(header int64) Layout {
	l := Layout{Header: Span{0, header}, Size: header}
	next := func(n int64) Span {
		s := Span{l.Size, n}
		l.Size += n
		return s
	}
	part := func(p *Part) Span {
		if p == nil {
			return next(0)
		}
		return next(p.Length)
	}
	for i := range h.Layers {
		l.Tables = append(l.Tables, part(h.Layers[i].Table))
	}
	for k := range h.Chunks {
		l.Chunks = append(l.Chunks, next(h.Chunks[k].Length))
	}
	for i := range h.Layers {
		l.Points = append(l.Points, part(h.Layers[i].Points))
	}
	for i := range h.Layers {
		l.Windows = append(l.Windows, next(h.Layers[i].Windows))
	}
	for i := range h.Layers {
		l.Files = append(l.Files, part(h.Layers[i].Files))
	}
	return l
}

// TableSpan, ChunkSpan, PointsSpan and WindowsSpan are where the
// parts of layer i, or chunk k, lie.
func (h *Header) TableSpan(i int) Span   { return h.layout.Tables[i] }
func (h *Header) ChunkSpan(k int) Span   { return h.layout.Chunks[k] }
func (h *Header) PointsSpan(i int) Span  { return h.layout.Points[i] }
func (h *Header) WindowsSpan(i int) Span { return h.layout.Windows[i] }

// DecodeTable reads the table of layer i as the pack stores it.
func (h *Header) DecodeTable(i int, stored []byte) (*toc.Table, error) {
	raw, err := h.decode("table", i, h.Layers[i].Table, stored)
	if err != nil {
		return nil, err
	}
	return h.ParseTable(i, raw)
}

// ParseTable reads the table of layer i as a Stream gives it. It keeps raw.
func (h *Header) ParseTable(i int, raw []byte) (*toc.Table, error) {
	t, err := toc.ParseTable(raw)
	if err != nil {
		return nil, invalid("layer %d: %w", i, err)
	}
	if t.Size() != h.Layers[i].Size {
		return nil, invalid("layer %d: table of a tar of %d bytes, not %d", i, t.Size(), h.Layers[i].Size)
	}
	return t, nil
}

func (h *Header) decode(what string, i int, p *Part, stored []byte) ([]byte, error) {
	if p == nil {
		return nil, invalid("layer %d has no %s", i, what)
	}
	raw, err := p.decode(stored, nil)
	if err != nil {
		return nil, fmt.Errorf("layer %d: %s: %w", i, what, err)
	}
	return raw, nil
}

// DecodeChunk returns the data of chunk k, whose stored bytes are given. It
// uses dst's memory if that is large enough.
func (h *Header) DecodeChunk(k int, stored, dst []byte) ([]byte, error) {
	raw, err := h.Chunks[k].Part.decode(stored, dst)
	if err != nil {
		return nil, fmt.Errorf("chunk %d: %w", k, err)
	}
	return raw, nil
}

// Each calls put for every place that the chunk's data belongs to, ranges and
// copies, until put returns an error. The bytes are parts of data.
func (c *Chunk) Each(data []byte, put func(layer int, offset int64, b []byte) error) error {
	if int64(len(data)) != c.Raw {
		return invalid("chunk of %d bytes, not %d", len(data), c.Raw)
	}
	copies := c.Copies
	for i, r := range c.Ranges {
		b := data[:r.Length:r.Length]
		data = data[r.Length:]
		if err := put(r.Layer, r.Offset, b); err != nil {
			return err
		}
		for ; len(copies) > 0 && copies[0].Of == i; copies = copies[1:] {
			if err := put(copies[0].Layer, copies[0].Offset, b); err != nil {
				return err
			}
		}
	}
	return nil
}
