package link

import "time"

// probe finds out whether one connection more fills a link better. Its fields
// are guarded by the link.
type probe struct {
	extra  *Turn         // being tried, or held because it did not help
	before float64       // the link's rate until then
	failed time.Time     // when the last try did not help
	pause  time.Duration // before the next one, longer each time
	moved  time.Time     // when a turn last began, ended, or was held or let go
}

// tryNow reports whether a further connection is worth a try: the link is the
// limit, its rate has settled, nothing ends before a try would, and none has
// failed lately. If so, next is that try.
func (p *probe) tryNow(next *Turn, live []*Turn, now time.Time) bool {
	if p.extra != nil || len(live) >= maxConns || now.Sub(p.failed) < p.pause || now.Sub(p.moved) < 2*settle {
		return false
	}
	for _, t := range live {
		left := float64(t.size - t.last.Fetched)
		if now.Sub(t.began) < settle || t.rate == 0 || left < 2*t.rate*settle.Seconds() {
			return false
		}
	}
	p.extra, p.before = next, rate(live)
	return true
}

// judge ends a try whose time is over: what did not help is held until the
// live turns before it are here. A try's time begins with its first byte; one
// that stays silent says nothing of the link.
func (p *probe) judge(live []*Turn, now time.Time) {
	t := p.extra
	if t == nil {
		return
	}
	if t.held != nil {
		if live[0] == t || ending(live) {
			p.forget(t, now)
		}
		return
	}
	if t.idle(now) {
		p.defeat(now)
		p.extra = nil
		return
	}
	if t.first.IsZero() || now.Sub(t.first) < settle {
		return
	}
	p.moved = now
	if rate(live) >= p.before*riseNeeded {
		p.extra, p.pause = nil, 0
		return
	}
	p.defeat(now)
	t.held = make(chan struct{})
}

func (p *probe) defeat(now time.Time) {
	p.failed, p.pause = now, min(max(2*p.pause, firstPause), lastPause)
}

func (p *probe) holding() bool { return p.extra != nil && p.extra.held != nil }

// forget lets go of a turn.
func (p *probe) forget(t *Turn, now time.Time) {
	p.moved = now
	if p.extra != t {
		return
	}
	if t.held != nil {
		close(t.held)
		t.held, t.heard = nil, now
	}
	p.extra = nil
}
