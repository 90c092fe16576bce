package admit

import (
	"time"
)

// sample is what was seen of the node.
type sample struct {
	at      time.Time // of memory and free
	memory  Memory
	free    int64     // bytes on disk; below 0: not known
	pressed time.Time // when what follows was looked at
	unused  int64     // bytes that running containers may yet take
	short   bool      // memory is so short that reclaim takes time
	gauge   gauge
}

const (
	fresh  = 100 * time.Millisecond // how old a sample may be
	seldom = time.Second            // how old what is known of pressure, which is of ten seconds
	// settle is how long a promise stays after its container is ready: what it
	// has taken must show in the kernel's figure, and processes go on growing for a while.
	settle = time.Second

	pressed     = 50.0             // percent of processor pressure by others from which on there are fewer slots
	reclaiming  = 10.0             // percent of memory pressure
	unpacked    = 2                // bytes on disk for a compressed one, at least
	firstKept   = 30 * time.Second // how long memory is kept at first
	longestKept = time.Hour
)

// fade is a promise that ends.
type fade struct {
	until time.Time
	bytes int64
}

// look brings what is known of the node up to date. With mu held.
func (a *Admitter) look(now time.Time) {
	for len(a.fading) > 0 && !now.Before(a.fading[0].until) {
		a.promised -= a.fading[0].bytes
		a.fading = a.fading[1:]
	}
	a.gaugeNow(now)
	if a.seen.at.IsZero() || now.Sub(a.seen.at) >= fresh {
		a.sample(now)
	}
	a.kept.grow(a.free(), now)
}

func (a *Admitter) sample(now time.Time) {
	s := &a.seen
	s.at = now
	m, err := a.cfg.Memory()
	if err != nil {
		a.cfg.Log.Warn("how much memory is available is not known", "err", err)
		m = Memory{}
	}
	s.memory, s.free = m, -1
	if a.cfg.Disk != nil {
		if free, err := a.cfg.Disk.Free(); err == nil {
			s.free = free
		}
	}
	if now.Sub(s.pressed) < seldom {
		return
	}
	s.pressed = now
	if a.cfg.Limits != nil && !a.cfg.Overcommit {
		s.unused = a.cfg.Limits.Unused()
	}
	s.short = a.cfg.Pressure().Memory >= reclaiming
}

// limit is how many deployments may be under way now.
func (a *Admitter) limit() int {
	if a.seen.short || a.seen.gauge.others >= pressed {
		return min(a.cfg.Max, a.cfg.Processors)
	}
	return a.cfg.Max
}

// reserve is what stays free for the node.
func (a *Admitter) reserve() int64 {
	if a.cfg.Reserve > 0 {
		return a.cfg.Reserve
	}
	return min(256<<20, max(32<<20, a.seen.memory.Total/32))
}

// free is the memory that can be promised; without end where it is not known.
func (a *Admitter) free() int64 {
	if a.seen.memory.Total == 0 {
		return 1 << 62
	}
	return a.seen.memory.Available - a.reserve() - a.promised - a.seen.unused
}

// needOf is what a claim takes, or a *NeverError.
func (a *Admitter) needOf(c Claim) (int64, error) {
	most := a.seen.memory.Total - a.reserve()
	if a.seen.memory.Total == 0 {
		most = 1 << 62
	}
	guess := min(most, a.learnt.bytesOf(c.Image, a.cfg.Estimate))
	switch {
	case c.Memory == 0:
		return guess, nil
	case a.cfg.Overcommit:
		return min(c.Memory, guess), nil
	case c.Memory > most:
		return 0, &NeverError{Need: c.Memory, Have: most}
	}
	return c.Memory, nil
}

// fits reports whether t's memory can be promised now.
func (a *Admitter) fits(t *Ticket) bool {
	if a.kept.by == t {
		return t.need <= a.free()
	}
	return t.need <= a.free()-a.kept.bytes()
}

// kept is memory that is kept for a ticket that lacks it: what became free since
// it began to wait. The zero value keeps nothing.
type kept struct {
	by        *Ticket
	was, most int64 // free when it began, and the most since
	until     time.Time
	length    time.Duration
}

// keep begins for t. With mu held.
func (a *Admitter) keep(t *Ticket) {
	free := max(0, a.free())
	a.kept = kept{by: t, was: free, most: free, length: firstKept, until: time.Now().Add(firstKept)}
}

// grow takes into account what is free now.
func (k *kept) grow(free int64, now time.Time) {
	if k.by == nil {
		return
	}
	free = max(0, free)
	k.most = max(k.most, free)
	if !now.Before(k.until) {
		k.was, k.most = free, free
		k.length = min(2*k.length, longestKept)
		k.until = now.Add(k.length)
	}
}

func (k *kept) bytes() int64 {
	if k.by == nil {
		return 0
	}
	return min(k.by.need, k.most-k.was)
}

// onDisk reports whether absent compressed bytes fit beside what others fetch. If
// nobody fetches, waiting would change nothing.
func (a *Admitter) onDisk(absent int64) bool {
	return a.disk == 0 || a.seen.free < 0 || unpacked*absent <= a.seen.free-a.disk
}
