package fetch

import "time"

// probe finds out whether one connection more fills a link better. Its fields
// are guarded by the link.
type probe struct {
	extra  *turn         // being tried, or held because it did not help
	since  time.Time     // when extra was let go
	before float64       // the link's rate until then
	failed time.Time     // when the last try did not help
	pause  time.Duration // before the next one, longer each time
	moved  time.Time     // when a turn last began, ended, or was held or let go
}

// tryNow reports whether a further connection is worth a try: the link is the
// limit, its rate has settled, nothing ends before a
// try would, and none has failed lately.
func (p *probe) tryNow(l *Link, now time.Time) bool {
	if p.extra != nil || len(l.active) >= maxConns || now.Sub(p.failed) < p.pause || now.Sub(p.moved) < 2*settle {
		return false
	}
	for _, t := range l.active {
		left := float64(t.size - t.last.Fetched)
		if now.Sub(t.began) < settle || t.rate == 0 || left < 2*t.rate*settle.Seconds() {
			return false
		}
	}
	p.extra, p.since, p.before = l.queue[0], now, l.rate()
	return true
}

// judge ends a try whose time is over: what did not help is held until the
// layers before it are here.
func (p *probe) judge(l *Link, now time.Time) {
	t := p.extra
	if t == nil {
		return
	}
	if t.held != nil {
		if len(l.active) > 0 && l.active[0] == t || l.ending() {
			p.forget(t, now)
		}
		return
	}
	if now.Sub(p.since) < settle {
		return
	}
	p.moved = now
	if l.rate() >= p.before*riseNeeded {
		p.extra, p.pause = nil, 0
		return
	}
	p.failed, p.pause = now, min(max(2*p.pause, firstPause), lastPause)
	t.held = make(chan struct{})
}

func (p *probe) holding() bool { return p.extra != nil && p.extra.held != nil }

// forget lets go of a turn.
func (p *probe) forget(t *turn, now time.Time) {
	p.moved = now
	if p.extra != t {
		return
	}
	if t.held != nil {
		close(t.held)
		t.held = nil
	}
	p.extra = nil
}
