package simulate

import (
	"container/list"
	"errors"
	"slices"

	"dewpoint/internal/evict"
)

// policyNames are the policies that can be replayed: the product's, and sieve, which is in no product.
func policyNames() []string { return append(evict.Names(), "sieve") }

func knownPolicy(name string) bool { return slices.Contains(policyNames(), name) }

func newPolicy(name string, capacity int64) (evict.Policy, error) {
	if name == "sieve" {
		return newSieve(), nil
	}
	return evict.New(name, nil, capacity)
}

// sieve keeps objects in the order in which they came. A hand moves from the oldest to the newest and round
// again: what was used since it last came by stays and counts as unused from then on, the first other is the
// victim. A layer of several images survives the hand twice for each time it was used. All calls are O(1),
// Victim amortised; it passes over what may refuses.
type sieve struct {
	all   map[string]*list.Element // of *sieved
	order *list.List               // the newest in front
	hand  *list.Element            // nil: at the oldest
}

type sieved struct {
	evict.Object
	uses int
}

func newSieve() *sieve { return &sieve{all: map[string]*list.Element{}, order: list.New()} }

func (p *sieve) Add(o evict.Object) {
	if e := p.all[o.Key]; e != nil {
		e.Value.(*sieved).Object = o
		return
	}
	p.all[o.Key] = p.order.PushFront(&sieved{Object: o})
}

func (p *sieve) Hit(key string) {
	e := p.all[key]
	if e == nil {
		return
	}
	if s := e.Value.(*sieved); s.Images > 1 {
		s.uses = 2
	} else {
		s.uses = 1
	}
}

func (p *sieve) Get(key string) (evict.Object, bool) {
	if e := p.all[key]; e != nil {
		return e.Value.(*sieved).Object, true
	}
	return evict.Object{}, false
}

func (p *sieve) Remove(key string) {
	e := p.all[key]
	if e == nil {
		return
	}
	if p.hand == e {
		p.hand = e.Prev()
	}
	p.order.Remove(e)
	delete(p.all, key)
}

// Victim ends: three rounds lower the uses of all that may accepts to none.
func (p *sieve) Victim(may func(string) bool) (string, bool) {
	e := p.hand
	for range 3 * p.order.Len() {
		if e == nil {
			e = p.order.Back()
		}
		switch s := e.Value.(*sieved); {
		case may != nil && !may(s.Key):
		case s.uses == 0:
			p.hand = e
			return s.Key, true
		default:
			s.uses--
		}
		e = e.Prev()
	}
	return "", false
}

// Snapshot is not there: a replay runs to its end.
func (p *sieve) Snapshot() ([]byte, error) { return nil, errors.New("sieve has no snapshots") }
