package toc

import "unsafe"

// arena allocates many small things in few pieces. What it hands out is never
// written again, and stays alive as long as any of its piece is referenced.
type arena struct {
	text    []byte
	entries []Entry
	ranges  []Range
	tmp     [MaxName + 1]byte
}

// string returns b as a string.
func (a *arena) string(b []byte) string {
	if len(b) == 0 {
		return ""
	}
	if cap(a.text)-len(a.text) < len(b) {
		a.text = make([]byte, 0, max(16<<10, len(b)))
	}
	n := len(a.text)
	a.text = append(a.text, b...)
	return unsafe.String(&a.text[n], len(b))
}

func (a *arena) entry() *Entry {
	if len(a.entries) == 0 {
		a.entries = make([]Entry, 64)
	}
	e := &a.entries[0]
	a.entries = a.entries[1:]
	return e
}

func (a *arena) oneRange(r Range) []Range {
	if len(a.ranges) == 0 {
		a.ranges = make([]Range, 256)
	}
	out := a.ranges[:1:1]
	a.ranges = a.ranges[1:]
	out[0] = r
	return out
}
