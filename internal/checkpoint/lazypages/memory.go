package lazypages

import (
	"slices"
	"sort"
)

// span is pages that are not in yet, neighbours in memory and in one chunk.
type span struct {
	addr   uint64 // where they belong now
	size   uint64
	offset int64 // in the file of pages
}

func (s *span) end() uint64 { return s.addr + s.size }
func (s *span) chunk() int  { return int(s.offset / ChunkSize) }

// memory is what of one process is not in yet. It follows what the process does
// to its address space. Not safe for concurrent use.
type memory struct {
	spans  []*span         // by address, none overlap
	chunks map[int][]*span // the same, by chunk
	left   uint64          // bytes
}

// newMemory splits the lazy runs at the borders of chunks.
func newMemory(runs []run) *memory {
	m := &memory{chunks: map[int][]*span{}}
	for _, r := range runs {
		if !r.lazy {
			continue
		}
		for r.size > 0 {
			n := min(r.size, ChunkSize-r.offset%ChunkSize)
			m.insert(&span{addr: r.addr, size: uint64(n), offset: r.offset})
			r.addr, r.offset, r.size = r.addr+uint64(n), r.offset+n, r.size-n
		}
	}
	return m
}

func (m *memory) clone() *memory {
	out := &memory{chunks: make(map[int][]*span, len(m.chunks)), spans: make([]*span, 0, len(m.spans))}
	for _, s := range m.spans {
		c := *s
		out.insert(&c)
	}
	return out
}

// after is the index of the first span that ends after addr.
func (m *memory) after(addr uint64) int {
	return sort.Search(len(m.spans), func(i int) bool { return m.spans[i].end() > addr })
}

// find is the span that addr lies in, nil if it is in none.
func (m *memory) find(addr uint64) *span {
	if i := m.after(addr); i < len(m.spans) && m.spans[i].addr <= addr {
		return m.spans[i]
	}
	return nil
}

func (m *memory) insert(s *span) {
	if n := len(m.spans); n == 0 || m.spans[n-1].end() <= s.addr {
		m.spans = append(m.spans, s)
	} else {
		m.spans = slices.Insert(m.spans, m.after(s.addr), s)
	}
	m.chunks[s.chunk()] = append(m.chunks[s.chunk()], s)
	m.left += s.size
}

// cut takes [start, end) out and returns the pieces.
func (m *memory) cut(start, end uint64) []*span {
	if start >= end {
		return nil
	}
	i := m.after(start)
	j := i
	for j < len(m.spans) && m.spans[j].addr < end {
		j++
	}
	if i == j {
		return nil
	}
	touched := slices.Clone(m.spans[i:j])
	m.spans = slices.Delete(m.spans, i, j)
	var out []*span
	for _, s := range touched {
		m.forget(s)
		before, inside, behind := split(s, start, end)
		for _, rest := range []*span{before, behind} {
			if rest != nil {
				m.insert(rest)
			}
		}
		out = append(out, inside)
	}
	return out
}

// forget drops s, which is out of spans already, from the other index.
func (m *memory) forget(s *span) {
	m.left -= s.size
	c := s.chunk()
	m.chunks[c] = slices.DeleteFunc(m.chunks[c], func(o *span) bool { return o == s })
	if len(m.chunks[c]) == 0 {
		delete(m.chunks, c)
	}
}

// split divides s, which overlaps [start, end), at both.
func split(s *span, start, end uint64) (before, inside, behind *span) {
	part := func(from, to uint64) *span {
		if from >= to {
			return nil
		}
		return &span{addr: from, size: to - from, offset: s.offset + int64(from-s.addr)}
	}
	from, to := max(start, s.addr), min(end, s.end())
	return part(s.addr, from), part(from, to), part(to, s.end())
}

// move follows mremap: what lay at from lies at to; what lay there is gone.
func (m *memory) move(from, to, size uint64) {
	moved := m.cut(from, from+size)
	m.cut(to, to+size)
	for _, s := range moved {
		s.addr += to - from
		m.insert(s)
	}
}

func (m *memory) clear() {
	m.spans, m.chunks, m.left = nil, map[int][]*span{}, 0
}
