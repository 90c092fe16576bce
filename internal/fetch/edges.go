package fetch

import (
	"bytes"
	"sync"

	"dewpoint/internal/layer/presence"
)

// edges are the pages that two segments of a layer share: the ends of segments
// that were fetched, until the other side has come too. So no segment is fetched
// a second time for the page at its edge. Safe for concurrent use.
type edges struct {
	mu    sync.Mutex
	pages map[int]*edge // by the number of the segment that begins in the page
}

// edge is one such page, from its beginning on.
type edge struct{ left, right []byte }

func (e *edges) at(k int) *edge {
	if e.pages == nil {
		e.pages = map[int]*edge{}
	}
	if e.pages[k] == nil {
		e.pages[k] = &edge{}
	}
	return e.pages[k]
}

// right takes what segment k, which begins at off with b, has of its first page.
func (e *edges) right(o *origin, k int, off int64, b []byte) error {
	n := (presence.Page - off%presence.Page) % presence.Page
	if n == 0 || int64(len(b)) < min(n, o.part.Size-off) {
		return nil
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.at(k).right = bytes.Clone(b[:min(n, int64(len(b)))])
	return e.join(o, k, off-off%presence.Page)
}

// left takes the end of the segment before k: b, which begins a page at off.
func (e *edges) left(o *origin, k int, off int64, b []byte) error {
	if len(b) == 0 || len(b) >= presence.Page || off%presence.Page != 0 {
		return nil
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.at(k).left = bytes.Clone(b)
	return e.join(o, k, off)
}

// join puts the page at off if both its sides are here. It is called with mu held.
func (e *edges) join(o *origin, k int, off int64) error {
	page := e.pages[k]
	if page.left == nil || page.right == nil {
		return nil
	}
	delete(e.pages, k)
	return o.s.p.Put(o.part, off, append(page.left, page.right...))
}

// narrow leaves out of the segments i to j, which [from, to) touches, one whose
// side of a page they share is here.
func (e *edges) narrow(i, j int, from, to int64) (int, int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	page := e.pages[j]
	if j != i+1 || page == nil || from/presence.Page != (to-1)/presence.Page {
		return i, j
	}
	if page.left != nil {
		return j, j
	}
	return i, i
}
