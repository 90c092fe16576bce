package evict

import (
	"cmp"
	"container/heap"
	"fmt"
	"math"
	"slices"
)

// maxUses bounds what past fame is worth: an object that nobody uses any more goes after as many turnovers of
// the cache as it has uses, so that the layers of last month's release do not stay for a year.
const maxUses = 64

// gdsf names what saves least for its room: the lowest of clock + uses × cost × sharing / size, computed at
// the object's last use. The clock is the value of the last victim, so what is used now is worth more than
// what was used as often before. All calls are O(log n); Victim adds as much for each object that may
// refuses.
type gdsf struct {
	objects
	heap    ranking // by value
	clock   float64
	seq     uint64 // uses of anything, ever
	named   *entry // by the last Victim, unless it was used since
	retired bool   // named is overdue: it says nothing of what the others are worth

	name    string
	weigh   func(uses, cost float64) float64 // what these uses of a byte that costs so much are worth
	retires bool                             // what is overdue goes first
	due     ranking                          // by the time when they are overdue
}

func newGDSF() *gdsf {
	return &gdsf{objects: newObjects(), name: "gdsf",
		heap: ranking{of: func(e *entry) float64 { return e.value }, at: func(e *entry) *int { return &e.at }},
		due:  ranking{of: func(e *entry) float64 { return e.due }, at: func(e *entry) *int { return &e.dueAt }},
		weigh: func(uses, cost float64) float64 {
			return uses * cost
		}}
}

func (p *gdsf) Add(o Object) {
	if e := p.all[o.Key]; e != nil {
		old := p.worth(e)
		e.set(o)
		e.value = max(0, e.value-old+p.worth(e))
		heap.Fix(&p.heap, e.at)
		return
	}
	e := &entry{dueAt: -1}
	e.set(o)
	p.all[o.Key] = e
	p.use(e)
	heap.Push(&p.heap, e)
}

func (p *gdsf) Hit(key string) {
	e := p.all[key]
	if e == nil {
		return
	}
	p.use(e)
	heap.Fix(&p.heap, e.at)
	if p.named == e {
		p.named = nil
	}
}

func (p *gdsf) use(e *entry) {
	p.seq++
	if p.retires {
		p.expect(e)
	}
	e.uses, e.seq = min(e.uses+1, maxUses), p.seq
	e.value = p.clock + p.worth(e)
}

// worth is what the object saves for each byte that it takes.
func (p *gdsf) worth(e *entry) float64 {
	return p.weigh(float64(e.uses), e.Cost/float64(max(e.Size, 1))) * sharing(e.Images)
}

// sharing is the weight of being part of n images: each doubling counts once more. That it will be wanted by
// one that has not asked yet is what the uses do not show.
func sharing(n int) float64 { return 1 + math.Log2(float64(n))/4 }

func (p *gdsf) Remove(key string) {
	e := p.all[key]
	if e == nil {
		return
	}
	if p.named == e {
		if p.named = nil; !p.retired {
			p.clock = max(p.clock, e.value)
		}
	}
	if e.dueAt >= 0 {
		heap.Remove(&p.due, e.dueAt)
	}
	heap.Remove(&p.heap, e.at)
	delete(p.all, key)
}

func (p *gdsf) Victim(may func(string) bool) (string, bool) {
	if p.named = p.overdue(may); p.named != nil {
		p.retired = true
		return p.named.Key, true
	}
	p.retired = false
	var refused []*entry
	for p.heap.Len() > 0 {
		e := p.heap.all[0]
		if may == nil || may(e.Key) {
			p.named = e
			break
		}
		refused = append(refused, heap.Pop(&p.heap).(*entry))
	}
	for _, e := range refused {
		heap.Push(&p.heap, e)
	}
	if p.named == nil {
		return "", false
	}
	return p.named.Key, true
}

func (p *gdsf) Snapshot() ([]byte, error) { return p.state().encode(p.name) }

func (p *gdsf) state() *state {
	order := slices.SortedFunc(slices.Values(p.heap.all),
		func(a, b *entry) int { return cmp.Compare(a.seq, b.seq) })
	s := &state{Clock: p.clock, Now: p.seq, Objects: make([]saved, len(order))}
	for i, e := range order {
		o := save(e)
		o.Last, o.Gap, o.Due = e.seq, e.gap, e.due
		s.Objects[i] = o
	}
	return s
}

func (p *gdsf) restore(s *state) error {
	p.clock, p.seq = s.Clock, s.Now
	last := uint64(0)
	for _, o := range s.Objects {
		if o.Last <= last || o.Last > s.Now {
			return fmt.Errorf("%q was last used at %d, between %d and %d", o.Key, o.Last, last, s.Now)
		}
		e := o.entry()
		e.seq, e.gap, e.due, e.dueAt = o.Last, o.Gap, o.Due, -1
		e.uses = min(max(e.uses, 1), maxUses)
		last = e.seq
		p.all[e.Key] = e
		heap.Push(&p.heap, e)
		if p.retires && e.uses >= patience {
			heap.Push(&p.due, e)
		}
	}
	return nil
}

// ranking is a heap of objects with the lowest in front; among equals, the one unused for longest.
type ranking struct {
	all []*entry
	of  func(*entry) float64 // what they are ranked by
	at  func(*entry) *int    // where an object keeps its index in all; -1 when it is not there
}

func (r *ranking) Len() int { return len(r.all) }

func (r *ranking) Less(i, j int) bool {
	if a, b := r.of(r.all[i]), r.of(r.all[j]); a != b {
		return a < b
	}
	return r.all[i].seq < r.all[j].seq
}

func (r *ranking) Swap(i, j int) {
	r.all[i], r.all[j] = r.all[j], r.all[i]
	*r.at(r.all[i]), *r.at(r.all[j]) = i, j
}

func (r *ranking) Push(x any) {
	e := x.(*entry)
	*r.at(e) = len(r.all)
	r.all = append(r.all, e)
}

func (r *ranking) Pop() any {
	last := len(r.all) - 1
	e := r.all[last]
	*r.at(e) = -1
	r.all[last] = nil
	r.all = r.all[:last]
	return e
}
