package toc

import (
	"bytes"
	"strconv"
	"strings"
)

// segment is a run of a sparse file's bytes that the archive holds.
type segment struct{ off, len int64 }

// sparse reads the sparse map of the entry whose header is h, if it has one.
// It returns the file's real size and its segments, and moves s.data past what
// the map takes of the archive. ok is false if the map is not well formed.
func (s *Scanner) sparse(h *header, b block, p *pax) (size int64, segs []segment, found bool, err error) {
	if h.typeflag == 'S' {
		s.detach(h)
		size, segs, err = s.sparseGNU(h, b)
		return size, segs, true, err
	}
	if p == nil {
		return 0, nil, false, nil
	}
	v1 := false
	switch {
	case p.sparseMajor == "0" && (p.sparseMinor == "0" || p.sparseMinor == "1"):
	case p.sparseMajor == "1" && p.sparseMinor == "0":
		v1 = true
	case p.sparseMajor != "" || p.sparseMinor != "" || p.sparseMap == "":
		return 0, nil, false, nil
	}
	size = h.size
	if p.sparseName != "" {
		h.name = []byte(p.sparseName)
	}
	if n := firstOf(p.sparseSize, p.realSize); n != "" {
		if size, err = strconv.ParseInt(n, 10, 64); err != nil {
			return 0, nil, true, s.fail(ErrCorrupt, "bad sparse size")
		}
	}
	if s.detach(h); v1 {
		segs, err = s.sparse1x0(h)
	} else if segs, found = sparse0x1(p); !found {
		err = s.fail(ErrCorrupt, "bad sparse map")
	}
	return size, segs, true, err
}

// detach copies the names, which may lie in the window, before it moves.
func (s *Scanner) detach(h *header) {
	h.name, h.link = bytes.Clone(h.name), bytes.Clone(h.link)
	s.name = h.name
}

func firstOf(a, b string) string {
	if a != "" {
		return a
	}
	return b
}

// sparseGNU reads the old GNU map: four segments in the header and twenty-one
// in each block that follows.
func (s *Scanner) sparseGNU(h *header, b block) (int64, []segment, error) {
	bad := func() (int64, []segment, error) { return 0, nil, s.fail(ErrCorrupt, "bad sparse map") }
	size, ok := parseNumber(b[483:495])
	if h.format != formatGNU || !ok {
		return bad()
	}
	var segs []segment
	table, more := b[386:482], b[482]
	for total := 0; ; total += blockSize {
		for ; len(table) >= 24 && table[0] != 0; table = table[24:] {
			off, ok1 := parseNumber(table[:12])
			n, ok2 := parseNumber(table[12:24])
			if !ok1 || !ok2 {
				return bad()
			}
			segs = append(segs, segment{off, n})
		}
		if more == 0 {
			return size, segs, nil
		}
		if total >= MaxHeader {
			return 0, nil, s.fail(ErrLimit, "sparse map too long")
		}
		ext, err := s.nextBytes(blockSize)
		if err != nil {
			return 0, nil, err
		}
		table, more = ext[:504], ext[504]
	}
}

// sparse1x0 reads the map of PAX format 1.0: decimal numbers, one to a line,
// in whole blocks before the contents. h.size is reduced by what they take.
func (s *Scanner) sparse1x0(h *header) ([]segment, error) {
	r := lineReader{s: s, left: h.size}
	count, ok := r.number()
	if !ok || count < 0 || count > MaxHeader {
		return nil, r.failure()
	}
	var segs []segment
	for range count {
		off, ok1 := r.number()
		n, ok2 := r.number()
		if !ok1 || !ok2 {
			return nil, r.failure()
		}
		segs = append(segs, segment{off, n})
	}
	h.size = r.left
	return segs, nil
}

// lineReader reads lines from whole blocks at s.data, at most left bytes.
type lineReader struct {
	s    *Scanner
	left int64
	read int
	buf  []byte
	err  error
}

func (r *lineReader) number() (int64, bool) {
	i := bytes.IndexByte(r.buf, '\n')
	for i < 0 {
		if r.left < blockSize || r.read >= MaxHeader {
			return 0, false
		}
		b, err := r.s.nextBytes(blockSize)
		if err != nil {
			r.err = err
			return 0, false
		}
		r.buf = append(r.buf, b...)
		r.left -= blockSize
		r.read += blockSize
		i = bytes.IndexByte(r.buf, '\n')
	}
	line := r.buf[:i]
	r.buf = r.buf[i+1:]
	n, err := strconv.ParseInt(string(line), 10, 64)
	return n, err == nil
}

func (r *lineReader) failure() error {
	if r.err != nil {
		return r.err
	}
	return r.s.fail(ErrCorrupt, "bad sparse map")
}

// sparse0x1 reads the map of PAX formats 0.0 and 0.1 from the records.
func sparse0x1(p *pax) ([]segment, bool) {
	count, err := strconv.ParseInt(p.sparseBlocks, 10, 64)
	if err != nil || count < 0 || count > MaxHeader {
		return nil, false
	}
	var nums []string
	if p.sparseMap != "" {
		nums = strings.Split(p.sparseMap, ",")
	}
	if int64(len(nums)) != 2*count {
		return nil, false
	}
	segs := make([]segment, 0, count)
	for ; len(nums) > 0; nums = nums[2:] {
		off, err1 := strconv.ParseInt(nums[0], 10, 64)
		n, err2 := strconv.ParseInt(nums[1], 10, 64)
		if err1 != nil || err2 != nil {
			return nil, false
		}
		segs = append(segs, segment{off, n})
	}
	return segs, true
}

// ranges places the segments, whose bytes lie one after the other from data
// on. It reports false unless they ascend within size and their lengths add up
// to stored, what the archive holds.
func (s *Scanner) ranges(segs []segment, size, data, stored int64) ([]Range, bool) {
	var out []Range
	var end, used int64
	for _, g := range segs {
		if g.off < end || g.len < 0 || g.len > size || g.off > size-g.len {
			return nil, false
		}
		end = g.off + g.len
		if g.len == 0 {
			continue
		}
		if n := len(out); n > 0 && out[n-1].File+out[n-1].Length == g.off {
			out[n-1].Length += g.len
		} else {
			out = append(out, Range{File: g.off, Data: data + used, Length: g.len})
		}
		if used += g.len; used > stored {
			return nil, false
		}
	}
	return out, used == stored
}
