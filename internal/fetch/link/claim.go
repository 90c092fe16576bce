package link

import (
	"context"
	"io"
	"time"
)

// Claim is a transfer that takes no turn among the layers but holds higher
// classes while it moves: a pack, or a range that a reader waits for.
type Claim struct {
	Class Class

	link  *Link
	heard time.Time // guarded by the link, as what follows
	first time.Time // when the first byte had come; zero before
	got   int64     // bytes since then
}

// telling is how many bytes a claim carries at least before its rate says
// something about the link: more than what gathers in a connection.
const telling = 256 << 10

// carried notes what has come. It is called with the link's mu held.
func (k *Claim) carried(n int, now time.Time) {
	switch {
	case n == 0:
	case k.first.IsZero():
		k.first = now
	default:
		k.got += int64(n)
	}
	k.heard = now
	dt := now.Sub(k.first)
	if k.got < telling || dt < settle {
		return
	}
	if rate := float64(k.got) / dt.Seconds(); rate >= k.link.fastest || now.Sub(k.link.fastAt) > fastFor {
		k.link.fastest, k.link.fastAt = rate, now
	}
}

const (
	leastWindow = 64 << 10
	// windowTime is how long what was under way of the background holds up what
	// comes before it, once the background yields.
	windowTime = 100 * time.Millisecond
)

// Window is how many bytes a stream may have under way that yields to others:
// what the link carries in windowTime, and twice what it carries in a round trip, so
// that the stream can fill it.
func (l *Link) Window(rtt time.Duration) int {
	rate, _ := l.Expect()
	return max(leastWindow, int(rate*(windowTime+2*rtt).Seconds()))
}

// Claim tells the link of a transfer that takes no turn. Release must follow.
func (l *Link) Claim(c Class) *Claim {
	k := &Claim{link: l, Class: c, heard: l.clock()}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.claims[k] = true
	return k
}

// Release ends the claim.
func (k *Claim) Release() {
	k.link.mu.Lock()
	defer k.link.mu.Unlock()
	delete(k.link.claims, k)
	k.link.free()
}

// free wakes who yields. It is called with mu held.
func (l *Link) free() {
	if l.freed != nil {
		close(l.freed)
		l.freed = nil
	}
}

// Reader is r under the claim. What it gives must be read by one goroutine.
func (k *Claim) Reader(ctx context.Context, r io.ReadCloser) io.ReadCloser {
	return &claimed{k: k, ctx: ctx, body: r}
}

type claimed struct {
	k    *Claim
	ctx  context.Context
	body io.ReadCloser
}

func (r *claimed) Read(b []byte) (int, error) {
	if err := r.k.link.yield(r.ctx, func() Class { return r.k.Class }, nil); err != nil {
		return 0, err
	}
	n, err := r.k.link.read(r.ctx, r.k.Class, r.body, b)
	r.k.link.mu.Lock()
	r.k.carried(n, r.k.link.clock())
	r.k.link.mu.Unlock()
	return n, err
}

func (r *claimed) Close() error { return r.body.Close() }

// recheck is how often who yields looks whether those before it have fallen silent.
const recheck = 100 * time.Millisecond

// yield blocks while something of a lower class than that of the caller moves.
// class is called with mu held; yielding, unless nil, is told of a wait.
func (l *Link) yield(ctx context.Context, class func() Class, yielding func(bool)) error {
	for {
		l.mu.Lock()
		if !l.ahead(class(), l.clock()) {
			l.mu.Unlock()
			return nil
		}
		if l.freed == nil {
			l.freed = make(chan struct{})
		}
		freed := l.freed
		l.mu.Unlock()
		if yielding != nil {
			yielding(true)
			defer yielding(false)
			yielding = nil
		}
		select {
		case <-freed:
		case <-time.After(recheck):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// ahead reports whether something of a lower class than c moves. It is called
// with mu held.
func (l *Link) ahead(c Class, now time.Time) bool {
	for k := range l.claims {
		if k.Class < c && now.Sub(k.heard) < Silence {
			return true
		}
	}
	for _, t := range l.active {
		if t.class < c && t.held == nil && !t.idle(now) {
			return true
		}
	}
	return false
}

// yield is Link.yield for a turn. It returns the turn's class.
func (t *Turn) yield(ctx context.Context) (Class, error) {
	var c Class
	err := t.link.yield(ctx, func() Class { c = t.class; return c }, t.yielding.Store)
	return c, err
}

// read reads within the bounds of the link and of the class.
func (l *Link) read(ctx context.Context, c Class, r io.Reader, b []byte) (int, error) {
	buckets := []*bucket{l.bucket}
	if c == Background {
		buckets = append(buckets, l.slow)
	}
	var err error
	for i, k := range buckets {
		all := len(b)
		if b, err = k.admitBytes(ctx, b); err != nil {
			return 0, err
		}
		for _, before := range buckets[:i] {
			before.giveBack(all - len(b))
		}
	}
	n, err := r.Read(b)
	for _, k := range buckets {
		k.giveBack(len(b) - n)
	}
	return n, err
}
