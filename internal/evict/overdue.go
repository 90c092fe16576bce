package evict

import (
	"container/heap"
	"math"
)

// An object is overdue when overdueAfter times its mean gap has passed since its last use. Of an object in
// steady use one gap in e^20 is so long. It takes patience uses to have a mean. Nothing is overdue before
// twice as many uses have passed as the cache has objects: of what came in a burst, the mean gap says little.
const (
	overdueAfter = 20
	patience     = 3
)

// newOverdue is gdsf with two changes. Uses count by their logarithm, so that it is nearer to LRU; and what
// is overdue goes before all else, the longest overdue first. Time is counted in uses of anything, so that
// nights and weekends do not pass.
func newOverdue() *gdsf {
	p := newGDSF()
	p.name, p.retires = "overdue", true
	p.weigh = func(uses, cost float64) float64 { return (1 + math.Log2(uses)) * cost }
	return p
}

// newLRUOverdue is overdue in which neither uses nor costs count: what is not overdue goes as with LRU, but
// for what several images share.
func newLRUOverdue() *gdsf {
	p := newGDSF()
	p.name, p.retires = "lru-overdue", true
	p.weigh = func(_, _ float64) float64 { return 1 }
	return p
}

// expect notes the gap that the use which is being counted ends, and when the object will be overdue.
func (p *gdsf) expect(e *entry) {
	if e.uses > 0 {
		e.gap += (float64(p.seq-e.seq) - e.gap) / float64(e.uses)
	}
	if e.uses+1 < patience {
		return
	}
	e.due = float64(p.seq) + max(overdueAfter*e.gap, 2*float64(len(p.all)))
	if e.dueAt < 0 {
		heap.Push(&p.due, e)
	} else {
		heap.Fix(&p.due, e.dueAt)
	}
}

// overdue is the object that is overdue for longest of those that may accepts, or nil.
func (p *gdsf) overdue(may func(string) bool) (found *entry) {
	var refused []*entry
	for found == nil && p.due.Len() > 0 && p.due.all[0].due < float64(p.seq) {
		if e := p.due.all[0]; may == nil || may(e.Key) {
			found = e
		} else {
			refused = append(refused, heap.Pop(&p.due).(*entry))
		}
	}
	for _, e := range refused {
		heap.Push(&p.due, e)
	}
	return found
}
