package evict

// What s3fifo counts: a tenth of the bytes for newcomers, and up to so many uses that each save an object in
// the main queue once.
const (
	smallShare = 10
	maxPasses  = 3
)

// s3fifo has two queues. Newcomers enter the small one, and those that were used again by the time they come
// to its end go on to the main one; the others leave and are remembered as ghosts, as many bytes of them as
// the cache has. A ghost that comes back enters the main queue. There, each use since it last came by saves
// an object once.
//
// The queues and the ghosts are measured in bytes, not in objects. A layer of several images counts as used
// once more whenever it is. All calls are O(1), Victim amortised; it passes over what may refuses.
type s3fifo struct {
	objects
	small, main list
	ghost       map[string]*entry
	ghosts      list
	capacity    int64
	named       *entry // by the last Victim, unless it was used since
}

func newS3FIFO(capacity int64) *s3fifo {
	return &s3fifo{objects: newObjects(), ghost: make(map[string]*entry), capacity: capacity}
}

func (p *s3fifo) Add(o Object) {
	if e := p.all[o.Key]; e != nil {
		update(e, o)
		return
	}
	e := &entry{}
	e.set(o)
	p.all[o.Key] = e
	if g := p.ghost[o.Key]; g != nil {
		p.forget(g)
		p.main.pushFront(e)
		return
	}
	p.small.pushFront(e)
}

func (p *s3fifo) Hit(key string) {
	e := p.all[key]
	if e == nil {
		return
	}
	e.uses = min(e.uses+passes(e), maxPasses)
	if p.named == e {
		p.named = nil
	}
}

// passes is what one use counts for.
func passes(e *entry) uint32 {
	if e.Images > 1 {
		return 2
	}
	return 1
}

func (p *s3fifo) Remove(key string) {
	e := p.all[key]
	if e == nil {
		return
	}
	if p.named == e && e.in == &p.small {
		p.remember(e)
	}
	if p.named == e {
		p.named = nil
	}
	e.in.remove(e)
	delete(p.all, key)
}

// remember makes a ghost of e. There are never more of them than objects were in the cache, nor more bytes.
func (p *s3fifo) remember(e *entry) {
	g := &entry{Object: Object{Key: e.Key, Size: e.Size, Images: 1}}
	p.ghost[g.Key] = g
	p.ghosts.pushFront(g)
	for p.ghosts.bytes > p.room() || p.ghosts.n > max(len(p.all), 16) {
		p.forget(p.ghosts.back)
	}
}

func (p *s3fifo) forget(g *entry) {
	p.ghosts.remove(g)
	delete(p.ghost, g.Key)
}

func (p *s3fifo) room() int64 { return max(p.capacity, p.small.bytes+p.main.bytes) }

func (p *s3fifo) Victim(may func(string) bool) (string, bool) {
	if p.named != nil && (may == nil || may(p.named.Key)) {
		return p.named.Key, true
	}
	p.named = nil
	if p.small.bytes > p.room()/smallShare {
		p.named = p.fromSmall(may)
	}
	if p.named == nil {
		p.named = p.fromMain(may)
	}
	if p.named == nil {
		p.named = p.fromSmall(may)
	}
	if p.named == nil { // what was in the small queue may just have gone to the main one
		p.named = p.fromMain(may)
	}
	if p.named == nil {
		return "", false
	}
	return p.named.Key, true
}

func (p *s3fifo) fromSmall(may func(string) bool) *entry {
	for e := p.small.back; e != nil; {
		prev := e.prev
		switch {
		case may != nil && !may(e.Key):
		case e.uses == 0:
			return e
		default:
			e.uses = 0
			p.small.remove(e)
			p.main.pushFront(e)
		}
		e = prev
	}
	return nil
}

// fromMain ends: a walk that finds nobody has lowered the uses of all that may accepts.
func (p *s3fifo) fromMain(may func(string) bool) *entry {
	for range maxPasses + 1 {
		e := p.main.back
		for range p.main.n {
			prev := e.prev
			switch {
			case may != nil && !may(e.Key):
			case e.uses == 0:
				return e
			default:
				e.uses--
				p.main.toFront(e)
			}
			e = prev
		}
	}
	return nil
}

func (p *s3fifo) Snapshot() ([]byte, error) { return p.state().encode("s3fifo") }

func (p *s3fifo) state() *state {
	s := &state{Objects: p.small.save(), Ghosts: p.ghosts.save()}
	for _, o := range p.main.save() {
		o.Main = true
		s.Objects = append(s.Objects, o)
	}
	return s
}

func (p *s3fifo) restore(s *state) error {
	for _, o := range s.Objects {
		e := o.entry()
		e.uses = min(e.uses, maxPasses)
		p.all[e.Key] = e
		if o.Main {
			p.main.pushFront(e)
		} else {
			p.small.pushFront(e)
		}
	}
	for _, o := range s.Ghosts {
		g := o.entry()
		p.ghost[g.Key] = g
		p.ghosts.pushFront(g)
	}
	return nil
}
