package admit

import (
	"cmp"
	"slices"
	"time"

	"dewpoint/internal/spec"
)

// schedule grants what can be granted. With mu held.
func (a *Admitter) schedule() {
	now := time.Now()
	a.look(now)
	for _, s := range []stage{running, fetching} {
		for a.waiting[s] > 0 && a.room(s) {
			t := a.next(s)
			if t == nil {
				break
			}
			a.grant(t)
		}
	}
	if a.waiting[fetching]+a.waiting[running] > 0 && !a.ticking && a.life.Err() == nil {
		a.ticking = true
		a.bg.Go(a.tick)
	}
}

// every is the time between two looks at the node while somebody waits.
const every = 200 * time.Millisecond

// tick looks again what fits as long as anybody waits.
func (a *Admitter) tick() {
	clock := time.NewTicker(every)
	defer clock.Stop()
	for {
		select {
		case <-clock.C:
		case <-a.life.Done():
			return
		}
		a.mu.Lock()
		a.schedule()
		if a.waiting[fetching]+a.waiting[running] == 0 {
			a.ticking = false
			a.mu.Unlock()
			return
		}
		a.mu.Unlock()
	}
}

// room reports whether a stage has any.
func (a *Admitter) room(s stage) bool {
	if s == fetching {
		return a.used[s] < hostsAtOnce*a.cfg.Fetch
	}
	return a.used[s] < a.limit()
}

// hostsAtOnce is how many registries that are silent leave room for another.
const hostsAtOnce = 4

// fair orders the callers that wait for s as they are served: who has the least
// under way, then who was served the longest ago.
func (a *Admitter) fair(s stage) []*caller {
	var all []*caller
	for _, c := range a.callers {
		if len(c.lines[s]) > 0 {
			all = append(all, c)
		}
	}
	slices.SortFunc(all, func(x, y *caller) int {
		return cmp.Or(cmp.Compare(x.used[s], y.used[s]), cmp.Compare(x.last[s], y.last[s]))
	})
	return all
}

// lookAhead is how many of one caller's tickets that lack something are passed at
// most to find one that does not.
const lookAhead = 64

// next is the ticket that is to be granted s now, or nil.
func (a *Admitter) next(s stage) *Ticket {
	for _, c := range a.fair(s) {
		lack := 0
		for _, t := range c.lines[s] {
			why := a.lacks(t)
			if why == "" {
				return t
			}
			if why == spec.WaitsMemory && a.kept.by == nil {
				a.keep(t)
			}
			if why != spec.WaitsTurn { // a group at its limit bounds nobody else
				lack++
			}
			if lack == lookAhead {
				break
			}
		}
	}
	return nil
}

// grant gives t what it waits for. With mu held.
func (a *Admitter) grant(t *Ticket) {
	s := t.at
	a.leave(t)
	a.serial++
	t.granted, t.who.last[s] = true, a.serial
	a.used[s]++
	t.who.used[s]++
	if s == fetching {
		a.images[t.claim.Image]++
		a.hosts[t.claim.Host]++
		t.disk = unpacked * t.claim.Absent
		a.disk += t.disk
	} else {
		t.slot = true
		if g := t.claim.Group; g != nil {
			g.used++
		}
		t.memory = t.need
		a.promised += t.memory
		if a.kept.by == t {
			a.kept = kept{}
		}
		a.stats.Admitted++
	}
	close(t.ready)
}

// lacks is what keeps t from being granted, but for its turn: "" is nothing. With mu held.
func (a *Admitter) lacks(t *Ticket) string {
	switch {
	case t.at == running && t.claim.Group.full():
		return spec.WaitsTurn
	case t.at == running && !a.fits(t):
		return spec.WaitsMemory
	case t.at == fetching && (a.hosts[t.claim.Host] >= a.cfg.Fetch || a.comes(t.claim.Image)):
		return spec.WaitsLink
	case t.at == fetching && !a.onDisk(t.claim.Absent):
		return spec.WaitsDisk
	}
	return ""
}

// comes reports whether an image is being fetched, and likely to come.
func (a *Admitter) comes(image string) bool {
	at, failed := a.failed[image]
	return a.images[image] > 0 && !(failed && time.Since(at) < failedFor)
}

func (g *Group) full() bool { return g != nil && g.Limit > 0 && g.used >= g.Limit }

// Place is where a ticket stands in the queue. The zero value does not wait.
type Place struct {
	// Position is the ticket's place among those that wait for the same, from 1 on: in
	// the order in which they go on if none lacks anything.
	Position int
	Waits    string // spec.WaitsTurn and so on; "" is nothing
}

// Places says where tickets stand, in one pass over all that wait.
func (a *Admitter) Places(tickets []*Ticket) []Place {
	a.mu.Lock()
	defer a.mu.Unlock()
	out := make([]Place, len(tickets))
	var ranked [over]bool
	for i, t := range tickets {
		if t.granted || t.at == over {
			continue
		}
		if !ranked[t.at] {
			a.rank(t.at)
			ranked[t.at] = true
		}
		out[i] = Place{t.rank, a.waits(t)}
	}
	return out
}

// rank numbers those that wait for s. Each grant puts its caller a level up, and the lowest
// level is next; on one level, those that began there are before those that came up to it.
// With mu held.
func (a *Admitter) rank(s stage) {
	type at struct {
		level int
		t     *Ticket
	}
	all := make([]at, 0, a.waiting[s])
	for _, c := range a.callers {
		for i, t := range c.lines[s] {
			all = append(all, at{c.used[s] + i, t})
		}
	}
	slices.SortFunc(all, func(x, y at) int {
		a, b := x.t.who, y.t.who
		return cmp.Or(cmp.Compare(x.level, y.level), cmp.Compare(b.used[s], a.used[s]),
			cmp.Compare(a.last[s], b.last[s]))
	})
	for i, x := range all {
		x.t.rank = i + 1
	}
}

// Place is where the ticket stands. Of many, Places says it for less.
func (t *Ticket) Place() Place { return t.a.Places([]*Ticket{t})[0] }

func (a *Admitter) waits(t *Ticket) string {
	if t.granted || t.at == over {
		return ""
	}
	why := a.lacks(t)
	switch {
	case why != "":
		return why
	case a.room(t.at):
		return spec.WaitsTurn
	case t.at == fetching:
		return spec.WaitsLink
	case a.limit() < a.cfg.Max:
		return spec.WaitsCPU
	}
	return spec.WaitsTurn
}
