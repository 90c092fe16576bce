package link

import (
	"testing"
	"time"

	"dewpoint/internal/layer"
)

// rig drives a Link by a clock of its own over a model of a link and a node.
type rig struct {
	link    *Link
	now     time.Time
	turns   []*Turn
	got     []float64 // bytes of each turn
	size    float64
	perConn float64 // bytes a second that one connection can carry
	total   float64 // bytes a second that the link can carry
	node    float64 // bytes a second that one inflater takes
	most    int     // connections seen at once
	waiting []time.Duration
	blocked []time.Duration

	stall []float64       // bytes after which a turn gets nothing more; -1 is never
	delay time.Duration   // from a turn's begin to its first byte
	since []time.Time     // when a turn was first seen to run
	quiet int             // ticks on end in which nothing moved
	ended []time.Duration // from the rig's begin
	begun time.Time
}

func newRig(cfg Config, layers int, size, perConn, total, node float64) *rig {
	return newRigOf(cfg, layers, size, perConn, total, node, func(int) string { return "a" })
}

// newRigOf is newRig for layers of several hosts.
func newRigOf(cfg Config, layers int, size, perConn, total, node float64,
	host func(layer int) string) *rig {
	r := &rig{link: New(cfg), now: time.Now(), size: size, perConn: perConn, total: total, node: node}
	r.begun = r.now
	r.link.ticking = true // the rig is the clock
	r.link.clock = func() time.Time { return r.now }
	for i := range layers {
		r.got = append(r.got, 0)
		r.waiting = append(r.waiting, 0)
		r.blocked = append(r.blocked, 0)
		r.stall = append(r.stall, -1)
		r.since = append(r.since, time.Time{})
		r.ended = append(r.ended, 0)
		r.turns = append(r.turns,
			r.link.Enter(Entry{Host: host(i), Size: int64(size), Class: Startup, Stats: func() layer.Progress {
				return layer.Progress{Received: int64(r.got[i]), Fetched: int64(r.got[i]), Written: int64(r.got[i]),
					Waiting: r.waiting[i], Blocked: r.blocked[i]}
			}}))
	}
	return r
}

func (r *rig) running(i int) bool {
	select {
	case <-r.turns[i].start:
		if r.since[i].IsZero() {
			r.since[i] = r.now
		}
		return r.got[i] < r.size && r.turns[i].held == nil && r.now.Sub(r.since[i]) >= r.delay &&
			(r.stall[i] < 0 || r.got[i] < r.stall[i])
	default:
		return false
	}
}

// run lets the model go on until all layers are here and returns the seconds.
func (r *rig) run(t *testing.T) float64 {
	const dt = 10 * time.Millisecond
	begin := r.now
	left := 0
	for i := range r.turns {
		if r.stall[i] < 0 {
			left++
		}
	}
	for left > 0 {
		n := 0
		for i := range r.turns {
			if r.running(i) {
				n++
			}
		}
		if r.quiet++; n > 0 {
			r.quiet = 0
		}
		if r.quiet > 150 {
			t.Fatalf("nothing moves, %d layers left", left)
		}
		r.most = max(r.most, n)
		arrive := min(r.perConn, r.total/float64(n))
		for i := range r.turns {
			if !r.running(i) {
				continue
			}
			rate := min(arrive, r.node)
			r.got[i] = min(r.size, r.got[i]+rate*dt.Seconds())
			busy := time.Duration(float64(dt) * (1 - rate/max(arrive, r.node)))
			if arrive > r.node {
				r.blocked[i] += busy
				r.waiting[i] += dt - busy
			} else {
				r.waiting[i] += dt
			}
			if r.got[i] == r.size {
				r.link.leave(r.turns[i])
				r.ended[i] = r.now.Sub(r.begun)
				left--
			}
		}
		r.now = r.now.Add(dt)
		r.link.step(r.now)
		if r.now.Sub(begin) > time.Hour {
			t.Fatal("no end")
		}
	}
	return r.now.Sub(begin).Seconds()
}

const mb = 1e6

func TestSlowLinkCarriesOneLayerAfterTheOther(t *testing.T) {
	r := newRig(Config{Inflaters: 2}, 4, 20*mb, 2.5*mb, 2.5*mb, 100*mb)
	secs := r.run(t)
	if ideal := 80 / 2.5; secs > ideal*1.02 {
		t.Errorf("%.1f s for what the link carries in %.1f", secs, ideal)
	}
	// A try of a second connection may overlap; it must not become the rule.
	if r.most > 2 {
		t.Errorf("%d connections on a link that one fills", r.most)
	}
}

func TestFirstLayerIsNotDelayedOnASlowLink(t *testing.T) {
	r := newRig(Config{Inflaters: 4}, 4, 20*mb, 2.5*mb, 2.5*mb, 100*mb)
	begin := r.now
	var first time.Duration
	for first == 0 {
		r.stepOnce()
		if r.got[0] >= r.size {
			first = r.now.Sub(begin)
		}
	}
	if ideal := 8.0; first.Seconds() > ideal*1.06 {
		t.Errorf("the first layer took %.2f s, alone it would take %.2f", first.Seconds(), ideal)
	}
}

// stepOnce is one tick of the model for links that the connections share fairly.
func (r *rig) stepOnce() {
	const dt = 10 * time.Millisecond
	n := 0
	for i := range r.turns {
		if r.running(i) {
			n++
		}
	}
	for i := range r.turns {
		if r.running(i) {
			r.got[i] = min(r.size, r.got[i]+min(r.perConn, r.total/float64(n))*dt.Seconds())
			r.waiting[i] += dt
		}
	}
	r.now = r.now.Add(dt)
	r.link.step(r.now)
}

func TestFastLinkKeepsAllProcessorsBusy(t *testing.T) {
	r := newRig(Config{Inflaters: 4}, 8, 50*mb, 1000*mb, 1000*mb, 100*mb)
	secs := r.run(t)
	if r.most != 4 {
		t.Errorf("%d layers at once, there are 4 inflaters", r.most)
	}
	if ideal := 400 / 400.0; secs > ideal*1.3 {
		t.Errorf("%.2f s, with all inflaters busy it would be %.2f", secs, ideal)
	}
}

func TestMoreConnectionsWhereOneDoesNotFillTheLink(t *testing.T) {
	r := newRig(Config{Inflaters: 2}, 8, 30*mb, 3*mb, 12*mb, 100*mb)
	secs := r.run(t)
	if r.most < 4 {
		t.Errorf("%d connections at most, 4 would fill the link", r.most)
	}
	if alone := 240 / 3.0; secs > alone/2 {
		t.Errorf("%.1f s; one connection would take %.1f, the link could do %.1f", secs, alone, 240/12.0)
	}
}

// A registry that never sends a byte, or stops in the middle, delays the
// layers behind it by little more than the silence that tells.
func TestStalledLayerHoldsNoOtherUp(t *testing.T) {
	for _, order := range []Order{Measured, Layers, Parallel} {
		for _, after := range []float64{0, 1 * mb} {
			r := newRig(Config{Order: order, Inflaters: 1}, 4, 20*mb, 2.5*mb, 2.5*mb, 100*mb)
			r.stall[0] = after
			secs := r.run(t)
			if ideal := 60/2.5 + after/2.5e6 + Silence.Seconds(); secs > ideal*1.05 {
				t.Errorf("%q, stalled after %.0f bytes: %.1f s, want %.1f", order, after, secs, ideal)
			}
		}
	}
}

// The second layer is tried and held; then the first one stalls.
func TestHeldLayerGoesOnWhenTheOthersStall(t *testing.T) {
	r := newRig(Config{Inflaters: 1}, 2, 20*mb, 2.5*mb, 2.5*mb, 100*mb)
	for r.turns[1].held == nil {
		if r.stepOnce(); r.now.Sub(r.begun) > 8*time.Second {
			t.Fatal("the second layer was never held")
		}
	}
	r.stall[0] = r.got[0]
	if secs := r.run(t); secs > 20/2.5+2 {
		t.Errorf("the second layer took %.1f s more", secs)
	}
}

// Layers of a host that hangs are not begun one after the other for ever, and
// not before those of one that does not.
func TestHangingHostDelaysItsOwnLayersOnly(t *testing.T) {
	r := newRigOf(Config{Inflaters: 2}, 40, 5*mb, 2.5*mb, 2.5*mb, 100*mb, func(i int) string {
		return string('a' + rune(i/30))
	})
	for i := range 30 {
		r.stall[i] = 0
	}
	secs := r.run(t)
	if ideal := 50 / 2.5; secs > ideal+3 {
		t.Errorf("%.1f s for what the link carries in %.1f", secs, ideal)
	}
	for range 3000 {
		r.stepOnce()
	}
	if n := len(r.link.active); n > maxConns {
		t.Errorf("%d connections to a host that hangs", n)
	}
}

// A node that does not take what came is no reason to start more.
func TestBusyNodeIsNotSilence(t *testing.T) {
	r := newRig(Config{Inflaters: 1}, 2, 5*mb, 2.5*mb, 2.5*mb, 100*mb)
	r.stall[0] = 1 * mb
	r.turns[0].working.Store(true)
	for range 1000 {
		r.stepOnce()
	}
	if len(r.link.active) != 1 {
		t.Error("a second layer was started though the node had work in hand")
	}
}

// Bytes that begin to flow late are neither a stall nor a try that failed.
func TestSlowToStart(t *testing.T) {
	r := newRig(Config{Inflaters: 2}, 8, 30*mb, 3*mb, 12*mb, 100*mb)
	r.delay = 600 * time.Millisecond
	if secs := r.run(t); r.most < 4 || secs > 240/3.0/2 {
		t.Errorf("%.1f s, %d connections at most; the link could do %.1f with 4", secs, r.most, 240/12.0)
	}
	r = newRig(Config{Inflaters: 2}, 4, 20*mb, 2.5*mb, 2.5*mb, 100*mb)
	r.delay = 600 * time.Millisecond
	if secs := r.run(t); r.most > 2 || secs > 80/2.5+4*0.6 {
		t.Errorf("%.1f s, %d connections at most, where one fills the link", secs, r.most)
	}
}

func TestForcedOrders(t *testing.T) {
	r := newRig(Config{Order: Layers, Inflaters: 4}, 4, 50*mb, 1000*mb, 1000*mb, 100*mb)
	if r.run(t); r.most != 1 {
		t.Errorf("layers in order, yet %d at once", r.most)
	}
	r = newRig(Config{Order: Parallel, Inflaters: 3}, 6, 5*mb, 2.5*mb, 2.5*mb, 100*mb)
	if r.run(t); r.most != 3 {
		t.Errorf("three in parallel, yet %d at once", r.most)
	}
}
