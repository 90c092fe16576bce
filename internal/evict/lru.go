package evict

// lru names what was used longest ago. All calls are O(1) but Victim, which passes over what may refuses.
type lru struct {
	objects
	order list
}

func newLRU() *lru { return &lru{objects: newObjects()} }

func (p *lru) Add(o Object) {
	if e := p.all[o.Key]; e != nil {
		update(e, o)
		return
	}
	e := &entry{}
	e.set(o)
	p.all[o.Key] = e
	p.order.pushFront(e)
}

func (p *lru) Hit(key string) {
	if e := p.all[key]; e != nil {
		p.order.toFront(e)
	}
}

func (p *lru) Remove(key string) {
	if e := p.all[key]; e != nil {
		p.order.remove(e)
		delete(p.all, key)
	}
}

func (p *lru) Victim(may func(string) bool) (string, bool) {
	for e := p.order.back; e != nil; e = e.prev {
		if may == nil || may(e.Key) {
			return e.Key, true
		}
	}
	return "", false
}

func (p *lru) Snapshot() ([]byte, error) { return p.state().encode("lru") }

func (p *lru) state() *state { return &state{Objects: p.order.save()} }

func (p *lru) restore(s *state) error {
	for _, o := range s.Objects {
		e := o.entry()
		p.all[e.Key] = e
		p.order.pushFront(e)
	}
	return nil
}
