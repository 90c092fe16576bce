package evict

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
)

// contestants are the policies that a contest chooses from. The first leads until another has shown that it
// saves more; the second is what a contest shall never be worse than.
var contestants = []string{"lru-overdue", "lru", "overdue", "s3fifo"}

const (
	// What a contestant saved counts for about so many uses of each object in the cache, and for no fewer than
	// memory in all.
	contestWindow = 20
	contestMemory = 500
	// To lead, a contestant has to save so much more of the bytes asked for in that time than the one that
	// leads.
	contestLead = 0.002
)

// contest plays what is asked of the cache on one shadow for each contestant: a cache of names and sizes, as
// large as the real one. The contestant whose shadow had most bytes lately leads, and the cache becomes like
// its shadow: first goes what the shadow has let go of, the earliest first, then what the leader names. A new
// leader begins with what is there; nothing goes but for room.
//
// The shadows know of no leases. What may not go stays in the cache as a stray that is asked for again and
// again. What is deleted, not evicted, leaves the shadows too.
//
// It takes the memory of five policies: an object in the cache about 1 KiB, and in a snapshot 400 bytes and
// its key once. All calls are O(log n), amortised; Victim passes over what may refuses, and a change of
// leader sorts all.
type contest struct {
	objects
	kept    list // in the leader's shadow too; the last used in front
	strays  list // not in it; the earliest to go at the back
	shadows []*shadow
	leader  *shadow
	asked   float64 // bytes, each use less the longer it is ago
	full    int64   // bytes that the cache holds when it is full: the shadows' room
	seq     uint64  // uses of anything, ever
	named   *entry  // by the last Victim, unless it was used since
}

// shadow is a contestant with the cache that it would have.
type shadow struct {
	policy
	name  string
	used  int64
	n     int
	saved float64 // of asked
}

func newContest(capacity int64) *contest {
	c := &contest{objects: newObjects()}
	for _, name := range contestants {
		c.shadows = append(c.shadows, &shadow{name: name, policy: empty(name, capacity)})
	}
	c.leader = c.shadows[0]
	return c
}

func (c *contest) bytes() int64 { return c.kept.bytes + c.strays.bytes }

func (c *contest) Add(o Object) {
	e := c.all[o.Key]
	if e != nil {
		c.describe(e, o)
		return
	}
	e = &entry{}
	e.set(o)
	c.all[o.Key] = e
	c.strays.pushFront(e)
	c.full = max(c.full, c.bytes())
	c.request(e)
}

// describe replaces what is known of an object that is there.
func (c *contest) describe(e *entry, o Object) {
	update(e, o)
	c.full = max(c.full, c.bytes())
	for _, s := range c.shadows {
		if old := s.get(o.Key); old != nil {
			s.used += e.Size - old.Size
			s.Add(e.Object)
			c.fit(s, 0)
		}
	}
}

func (c *contest) Hit(key string) {
	e := c.all[key]
	if e == nil {
		return
	}
	if c.named == e {
		c.named = nil
	}
	c.request(e)
}

// request plays a use of e, which is in the cache by now, on all shadows.
func (c *contest) request(e *entry) {
	c.seq++
	e.seq = c.seq
	fade := 1 - 1/max(contestMemory, contestWindow*float64(len(c.all)))
	c.asked = c.asked*fade + float64(e.Size)
	for _, s := range c.shadows {
		s.saved *= fade
		if s.get(e.Key) != nil {
			s.saved += float64(e.Size)
			s.Hit(e.Key)
			continue
		}
		c.fit(s, e.Size)
		s.add(e.Object)
	}
	e.in.remove(e)
	c.kept.pushFront(e)
	best := slices.MaxFunc(c.shadows, func(a, b *shadow) int { return cmp.Compare(a.saved, b.saved) })
	if best.saved-c.leader.saved > contestLead*c.asked {
		c.lead(best)
	}
}

func (s *shadow) add(o Object) {
	s.Add(o)
	s.used += o.Size
	s.n++
}

func (s *shadow) remove(key string) {
	s.used -= s.get(key).Size
	s.n--
	s.Remove(key)
}

// fit makes room for size bytes in a shadow. It never has many more objects than the cache, however small
// they are.
func (c *contest) fit(s *shadow, size int64) {
	for s.used+size > c.full || s.n > 2*max(len(c.all), 16) {
		key, ok := s.Victim(nil)
		if !ok {
			return
		}
		s.remove(key)
		if e := c.all[key]; e != nil && s == c.leader {
			e.in.remove(e)
			c.strays.pushFront(e)
		}
	}
}

// lead sorts the cache's objects by whether the new leader's shadow has them, and by their last use.
func (c *contest) lead(s *shadow) {
	c.leader = s
	for _, e := range c.byUse() {
		e.in.remove(e)
		c.place(e)
	}
}

func (c *contest) place(e *entry) {
	if c.leader.get(e.Key) != nil {
		c.kept.pushFront(e)
	} else {
		c.strays.pushFront(e)
	}
}

// byUse is the objects, the one unused for longest first.
func (c *contest) byUse() []*entry {
	out := make([]*entry, 0, len(c.all))
	for _, e := range c.all {
		out = append(out, e)
	}
	slices.SortFunc(out, func(a, b *entry) int { return cmp.Compare(a.seq, b.seq) })
	return out
}

func (c *contest) Remove(key string) {
	e := c.all[key]
	if e == nil {
		return
	}
	evicted := c.named == e
	if evicted {
		c.named = nil
	}
	e.in.remove(e)
	delete(c.all, key)
	if evicted {
		// A cache that is emptied in rounds is full again before the next: its mean would be too little room.
		c.full -= (c.full - c.bytes()) / 32
	}
	for _, s := range c.shadows {
		if !evicted && s.get(key) != nil {
			s.remove(key)
		}
		c.fit(s, 0)
	}
}

func (c *contest) Victim(may func(string) bool) (string, bool) {
	c.named = nil
	for e := c.strays.back; e != nil; e = e.prev {
		if may == nil || may(e.Key) {
			c.named = e
			return e.Key, true
		}
	}
	key, ok := c.leader.Victim(func(key string) bool { return c.all[key] != nil && (may == nil || may(key)) })
	if ok {
		c.named = c.all[key]
	}
	return key, ok
}

func (c *contest) Snapshot() ([]byte, error) { return c.state().encode("contest") }

// state has each shadow's state with its keys as indices into Keys, so that a long key is there once.
func (c *contest) state() *state {
	out := &state{Leader: c.leader.name, Asked: c.asked, Full: c.full, Now: c.seq}
	index := make(map[string]string)
	short := func(key string) string {
		if _, ok := index[key]; !ok {
			index[key] = strconv.Itoa(len(out.Keys))
			out.Keys = append(out.Keys, key)
		}
		return index[key]
	}
	for e := c.strays.back; e != nil; e = e.prev {
		out.Objects = append(out.Objects, saveUse(e))
	}
	for e := c.kept.back; e != nil; e = e.prev {
		out.Objects = append(out.Objects, saveUse(e))
	}
	out.rename(func(key string) (string, error) { return short(key), nil })
	for _, s := range c.shadows {
		of := s.state()
		of.Version, of.Policy, of.Saved = version, s.name, s.saved
		of.rename(func(key string) (string, error) { return short(key), nil })
		out.Shadows = append(out.Shadows, of)
	}
	return out
}

func saveUse(e *entry) saved {
	o := save(e)
	o.Last = e.seq
	return o
}

func (c *contest) restore(s *state) error {
	long := func(key string) (string, error) {
		i, err := strconv.Atoi(key)
		if err != nil || i < 0 || i >= len(s.Keys) || strconv.Itoa(i) != key {
			return "", fmt.Errorf("%q is not the number of a key", key)
		}
		return s.Keys[i], nil
	}
	if len(s.Shadows) != len(c.shadows) {
		return fmt.Errorf("%d shadows", len(s.Shadows))
	}
	for i, of := range s.Shadows {
		if of == nil || of.Policy != c.shadows[i].name {
			return fmt.Errorf("no shadow of %s", c.shadows[i].name)
		}
		if err := errors.Join(of.rename(long), c.shadows[i].revive(of)); err != nil {
			return err
		}
	}
	i := slices.Index(contestants, s.Leader)
	if i < 0 {
		return fmt.Errorf("the leader is %q", s.Leader)
	}
	c.leader, c.asked, c.full, c.seq = c.shadows[i], s.Asked, s.Full, s.Now
	return errors.Join(s.rename(long), c.fill(s.Objects))
}

// revive fills a shadow that is empty.
func (s *shadow) revive(of *state) error {
	if err := errors.Join(of.check(), s.restore(of)); err != nil {
		return fmt.Errorf("shadow of %s: %w", s.name, err)
	}
	s.saved = of.Saved
	for _, o := range of.Objects {
		s.used += s.get(o.Key).Size
		s.n++
	}
	return nil
}

func (c *contest) fill(objects []saved) error {
	uses := make(map[uint64]bool, len(objects))
	for _, o := range objects {
		if c.all[o.Key] != nil || uses[o.Last] || o.Last > c.seq {
			return fmt.Errorf("%q is there twice, or was last used with another or after the end", o.Key)
		}
		uses[o.Last] = true
		e := o.entry()
		e.seq = o.Last
		c.all[e.Key] = e
		c.place(e)
	}
	c.full = min(max(c.full, c.bytes()), math.MaxInt64/2)
	return nil
}
