package pack

import (
	"crypto/sha256"
	"fmt"
	"io"
	"slices"
	"sort"
)

// A plan decides what lies in which chunk. The pages of the profile, in the
// order of first use, are cut into chunks; a page whose bytes an earlier page
// has becomes a copy of that. Within a chunk the order does not matter, since a
// chunk is used whole or not at all: its ranges are sorted and joined.
type plan struct {
	layers []InputLayer
	fresh  []Range     // what chunks must hold, in order
	same   []duplicate // what is found there too
	needed int64
}

// duplicate is a range that has the bytes of another.
type duplicate struct {
	Range
	from Range
}

// The first chunks are small, so that a start need not wait for much; later
// ones are a fraction of what came before.
const (
	firstChunk    = 256 << 10
	chunkFraction = 4
)

func chunkSize(before int64) int64 {
	return min(max(before/chunkFraction&^(Page-1), firstChunk), MaxChunk)
}

// makePlan reads the pages that the ranges lie in, whose Layer is an index of
// layers, to find those that are alike.
func makePlan(layers []InputLayer, reads []Range) (*plan, error) {
	p := &plan{layers: layers}
	d := deduper{plan: p, first: make(map[[sha256.Size]byte]Range), buf: make([]byte, firstChunk)}
	seen := pageSet{}
	var err error
	for _, r := range reads {
		size := layers[r.Layer].Size
		r.Length = min(r.Length, size-r.Offset)
		seen.fresh(r, func(n Range) {
			n.Length = min(n.Length, size-n.Offset)
			if p.needed += n.Length; err == nil {
				err = d.add(n)
			}
		})
	}
	return p, err
}

// deduper remembers where it saw the bytes of a page first.
type deduper struct {
	*plan
	first map[[sha256.Size]byte]Range
	buf   []byte
}

func (d *deduper) add(r Range) error {
	for r.Length > 0 {
		n := min(r.Length, int64(len(d.buf)))
		if err := readData(d.layers[r.Layer].Data, d.buf[:n], r.Offset); err != nil {
			return err
		}
		for b := d.buf[:n]; len(b) > 0; {
			page := Range{r.Layer, r.Offset, min(int64(len(b)), Page)}
			d.page(page, b[:page.Length])
			b = b[page.Length:]
			r.Offset += page.Length
			r.Length -= page.Length
		}
	}
	return nil
}

func readData(r io.ReaderAt, b []byte, off int64) error {
	if n, err := r.ReadAt(b, off); n < len(b) {
		if err == nil {
			err = io.EOF
		}
		return fmt.Errorf("read layer data at %d: %w", off, early(err))
	}
	return nil
}

// page adds one page. Pages of zeros are not worth a copy.
func (d *deduper) page(r Range, b []byte) {
	key := sum(b)
	from, known := d.first[key]
	if !known || zero(b) {
		d.first[key] = r
		d.fresh = appendRange(d.fresh, r)
		return
	}
	if n := len(d.same); n > 0 {
		last := &d.same[n-1]
		if last.Layer == r.Layer && last.end() == r.Offset && last.from.Layer == from.Layer &&
			last.from.end() == from.Offset {
			last.Length += r.Length
			last.from.Length += r.Length
			return
		}
	}
	d.same = append(d.same, duplicate{r, from})
}

func zero(b []byte) bool {
	for _, c := range b {
		if c != 0 {
			return false
		}
	}
	return true
}

// chunks lays the plan out. Of the chunks' parts only Raw is set.
func (p *plan) chunks() ([]Chunk, error) {
	chunks := p.fill()
	if len(p.same) > 0 {
		chunks = p.cut(chunks)
		p.place(chunks)
	}
	n := 0
	for k := range chunks {
		n += len(chunks[k].Ranges) + len(chunks[k].Copies)
	}
	if n > MaxRanges || len(chunks) > MaxChunks {
		return nil, fmt.Errorf("profile of %d ranges in %d chunks is too large for a pack: profile less of the image", n, len(chunks))
	}
	return chunks, nil
}

// fill cuts the fresh ranges into chunks.
func (p *plan) fill() []Chunk {
	var out []Chunk
	var before int64
	room := int64(0)
	for _, r := range p.fresh {
		for r.Length > 0 {
			if room == 0 {
				out = append(out, Chunk{})
				room = chunkSize(before)
			}
			c := &out[len(out)-1]
			part := r
			part.Length = min(r.Length, room)
			c.Ranges = append(c.Ranges, part)
			c.Raw += part.Length
			before += part.Length
			room -= (part.Length + Page - 1) &^ (Page - 1)
			r.Offset += part.Length
			r.Length -= part.Length
		}
	}
	for k := range out {
		out[k].Ranges = sortRanges(out[k].Ranges)
	}
	return out
}

// sortRanges sorts ranges that do not overlap and joins those that touch.
func sortRanges(list []Range) []Range {
	slices.SortFunc(list, compareRanges)
	out := list[:0]
	for _, r := range list {
		out = appendRange(out, r)
	}
	return out
}

// edge is an offset of a layer.
type edge struct {
	layer int
	at    int64
}

func compareEdges(a, b edge) int {
	return compareRanges(Range{Layer: a.layer, Offset: a.at}, Range{Layer: b.layer, Offset: b.at})
}

// cut splits ranges where something that is copied begins or ends, so that each
// copy is one of some whole ranges.
func (p *plan) cut(chunks []Chunk) []Chunk {
	edges := make([]edge, 0, 2*len(p.same))
	for _, d := range p.same {
		edges = append(edges, edge{d.from.Layer, d.from.Offset}, edge{d.from.Layer, d.from.end()})
	}
	slices.SortFunc(edges, compareEdges)
	edges = slices.Compact(edges)
	for k := range chunks {
		var out []Range
		for _, r := range chunks[k].Ranges {
			i, _ := slices.BinarySearchFunc(edges, edge{r.Layer, r.Offset + 1}, compareEdges)
			for ; i < len(edges) && edges[i].layer == r.Layer && edges[i].at < r.end(); i++ {
				n := edges[i].at - r.Offset
				out = append(out, Range{r.Layer, r.Offset, n})
				r.Offset += n
				r.Length -= n
			}
			out = append(out, r)
		}
		chunks[k].Ranges = out
	}
	return chunks
}

// home is where a range of the pack lies.
type home struct {
	Range
	chunk, of int
}

// place gives each duplicate to the chunks that have its bytes.
func (p *plan) place(chunks []Chunk) {
	var homes []home
	for k := range chunks {
		for i, r := range chunks[k].Ranges {
			homes = append(homes, home{r, k, i})
		}
	}
	slices.SortFunc(homes, func(a, b home) int { return compareRanges(a.Range, b.Range) })
	for _, d := range p.same {
		i := sort.Search(len(homes), func(i int) bool { return compareRanges(homes[i].Range, d.from) >= 0 })
		for left := d.Range; left.Length > 0; i++ {
			h := homes[i]
			c := &chunks[h.chunk]
			c.Copies = append(c.Copies, Copy{Range{left.Layer, left.Offset, h.Length}, h.of})
			left.Offset += h.Length
			left.Length -= h.Length
		}
	}
	for k := range chunks {
		slices.SortStableFunc(chunks[k].Copies, func(a, b Copy) int { return a.Of - b.Of })
	}
}
