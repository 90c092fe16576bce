package erofs

import (
	"fmt"
	"math/bits"

	"dewpoint/internal/layer/toc"
)

// A file is cut into chunks of one size, a power of two. A chunk lies wholly in
// the tar, wholly in a hole, or its bytes are copied into the image. Chunks are
// as large as a file without holes needs, up to a GiB, which 32-bit kernels
// still count. A tar may end with its last contents, unpadded; the kernel reads
// whole blocks, so the chunk in which that happens is copied.
const maxChunkBits = 30

// chunks chooses the chunk size of a file that is not empty and takes data
// blocks for what must be copied. It returns the number of references.
func (p *plan) chunks(pl *place, n *toc.Node) (refs int64, err error) {
	if k := len(n.Ranges); k > 0 {
		if r := n.Ranges[k-1]; r.Data+r.Length > p.opts.DataSize {
			return 0, fmt.Errorf("%w: contents end at byte %d of %d", toc.ErrCorrupt, r.Data+r.Length, p.opts.DataSize)
		}
	}
	most := min(max(bits.Len64(uint64(n.Size-1)), blockBits), maxChunkBits)
	best, copied := most, int64(0)
	if !p.contiguous(n) {
		best, copied = p.bestChunks(n, most)
	}
	refs = chunkCount(n.Size, best)
	p.extra += refs*8 + copied
	if p.extra > MaxExtra || refs > MaxExtra/8 {
		return 0, fmt.Errorf("%w: its segments and those before take %d bytes of references and copies",
			ErrTooLarge, p.extra)
	}
	pl.bits = uint8(best)
	p.putData(pl, uint32(copied/blockSize))
	return refs, nil
}

func chunkCount(size int64, bits int) int64 { return (size-1)>>bits + 1 }

// contiguous reports whether a file needs no more than one kind of chunk.
func (p *plan) contiguous(n *toc.Node) bool {
	switch len(n.Ranges) {
	case 0:
		return true
	case 1:
		r := n.Ranges[0]
		return r.File == 0 && r.Length == n.Size && r.Data%blockSize == 0 && p.padded(&r)
	}
	return false
}

// padded reports whether the last block of a range is whole in the tar.
func (p *plan) padded(r *toc.Range) bool {
	return align(r.Data+r.Length, blockSize) <= p.opts.DataSize
}

// bestChunks finds the chunk size for which references and copies together take
// the least. copied counts whole blocks.
func (p *plan) bestChunks(n *toc.Node, most int) (best int, copied int64) {
	least := int64(-1)
	for b := most; b >= blockBits; b-- {
		c := p.copiedBytes(n, b)
		if cost := c + 8*chunkCount(n.Size, b); least < 0 || cost < least {
			best, copied, least = b, c, cost
		}
	}
	return best, copied
}

// copiedBytes is what must be copied of a file for a chunk size.
func (p *plan) copiedBytes(n *toc.Node, bits int) int64 {
	var total int64
	last := int64(-1)               // chunk that was counted last
	count := func(from, to int64) { // chunks from..to-1
		if from = max(from, last+1); from < to {
			total += (to - from) << bits
			if to<<bits > n.Size {
				total -= to<<bits - align(n.Size, blockSize)
			}
			last = to - 1
		}
	}
	for i := range n.Ranges {
		r := &n.Ranges[i]
		first, end := r.File>>bits, (r.File+r.Length-1)>>bits+1
		lo, hi := p.wholeChunks(r, n.Size, bits)
		if (r.Data-r.File)%blockSize != 0 || lo >= hi {
			count(first, end)
			continue
		}
		count(first, lo)
		count(hi, end)
	}
	return total
}

// wholeChunks gives the chunks lo..hi-1 that lie in a range altogether. The last
// chunk of a file does if the range reaches the file's end.
func (p *plan) wholeChunks(r *toc.Range, size int64, bits int) (lo, hi int64) {
	lo = (r.File + 1<<bits - 1) >> bits
	hi = (r.File + r.Length) >> bits
	if r.File+r.Length == size && p.padded(r) {
		hi = chunkCount(size, bits)
	}
	return lo, hi
}

// chunkRef is where a chunk lies: in the tar at Data, in a hole, or copied.
type chunkRef struct {
	kind chunkKind
	data int64
}

type chunkKind uint8

const (
	hole chunkKind = iota
	direct
	copied
)

// chunkWalk goes through the chunks of a file, in order.
type chunkWalk struct {
	p    *plan
	n    *toc.Node
	bits int
	pos  int64
	i    int // first range that ends after pos
}

func (w *chunkWalk) next() (ref chunkRef, from, to int64) {
	from = w.pos
	to = min(from+1<<w.bits, w.n.Size)
	w.pos = to
	for w.i < len(w.n.Ranges) && w.n.Ranges[w.i].File+w.n.Ranges[w.i].Length <= from {
		w.i++
	}
	if w.i == len(w.n.Ranges) || w.n.Ranges[w.i].File >= to {
		return chunkRef{kind: hole}, from, to
	}
	r := &w.n.Ranges[w.i]
	at := r.Data + from - r.File
	inside := r.File <= from && r.File+r.Length >= to
	if inside && at%blockSize == 0 && align(at+to-from, blockSize) <= w.p.opts.DataSize {
		return chunkRef{direct, at}, from, to
	}
	return chunkRef{kind: copied}, from, to
}
