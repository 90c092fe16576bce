package evict

import "fmt"

// sieve keeps objects in the order in which they came. A hand moves from the oldest to the newest and round
// again: what was used since it last came by stays and counts as unused from then on, the first other is the
// victim. A layer of several images survives the hand twice for each time it was used. All calls are O(1),
// Victim amortised; it passes over what may refuses.
type sieve struct {
	objects
	order list
	hand  *entry // nil: at the oldest
}

func newSieve() *sieve { return &sieve{objects: newObjects()} }

func (p *sieve) Add(o Object) {
	if e := p.all[o.Key]; e != nil {
		update(e, o)
		return
	}
	e := &entry{}
	e.set(o)
	p.all[o.Key] = e
	p.order.pushFront(e)
}

func (p *sieve) Hit(key string) {
	if e := p.all[key]; e != nil {
		e.uses = passes(e)
	}
}

func (p *sieve) Remove(key string) {
	e := p.all[key]
	if e == nil {
		return
	}
	if p.hand == e {
		p.hand = e.prev
	}
	p.order.remove(e)
	delete(p.all, key)
}

// Victim ends: three rounds lower the uses of all that may accepts to none.
func (p *sieve) Victim(may func(string) bool) (string, bool) {
	e := p.hand
	for range 3 * p.order.n {
		if e == nil {
			e = p.order.back
		}
		switch {
		case may != nil && !may(e.Key):
		case e.uses == 0:
			p.hand = e
			return e.Key, true
		default:
			e.uses--
		}
		e = e.prev
	}
	return "", false
}

func (p *sieve) Snapshot() ([]byte, error) { return p.state().encode("sieve") }

func (p *sieve) state() *state {
	s := &state{Objects: p.order.save()}
	if p.hand != nil {
		s.Hand = &p.hand.Key
	}
	return s
}

func (p *sieve) restore(s *state) error {
	for _, o := range s.Objects {
		e := o.entry()
		e.uses = min(e.uses, 2)
		p.all[e.Key] = e
		p.order.pushFront(e)
	}
	if s.Hand == nil {
		return nil
	}
	if p.hand = p.all[*s.Hand]; p.hand == nil {
		return fmt.Errorf("the hand is at %q, which is not there", *s.Hand)
	}
	return nil
}
