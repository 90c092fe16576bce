package fetch

import (
	"testing"
	"time"

	"dewpoint/internal/layer"
)

// rig drives a Link by a clock of its own over a model of a link and a node.
type rig struct {
	link    *Link
	now     time.Time
	turns   []*turn
	got     []float64 // bytes of each turn
	size    float64
	perConn float64 // bytes a second that one connection can carry
	total   float64 // bytes a second that the link can carry
	node    float64 // bytes a second that one inflater takes
	most    int     // connections seen at once
	waiting []time.Duration
	blocked []time.Duration
}

func newRig(cfg LinkConfig, layers int, size, perConn, total, node float64) *rig {
	r := &rig{link: NewLink(cfg), now: time.Now(), size: size, perConn: perConn, total: total, node: node}
	r.link.ticking = true // the rig is the clock
	r.link.clock = func() time.Time { return r.now }
	for i := range layers {
		r.got = append(r.got, 0)
		r.waiting = append(r.waiting, 0)
		r.blocked = append(r.blocked, 0)
		r.turns = append(r.turns, r.link.enter(int64(size), Measured, 0, func() layer.Progress {
			return layer.Progress{Received: int64(r.got[i]), Fetched: int64(r.got[i]), Written: int64(r.got[i]),
				Waiting: r.waiting[i], Blocked: r.blocked[i]}
		}))
	}
	return r
}

func (r *rig) running(i int) bool {
	select {
	case <-r.turns[i].start:
		return r.got[i] < r.size && r.turns[i].held == nil
	default:
		return false
	}
}

// run lets the model go on until all layers are here and returns the seconds.
func (r *rig) run(t *testing.T) float64 {
	const dt = 10 * time.Millisecond
	begin := r.now
	for left := len(r.turns); left > 0; {
		n := 0
		for i := range r.turns {
			if r.running(i) {
				n++
			}
		}
		if n == 0 {
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
	r := newRig(LinkConfig{Inflaters: 2}, 4, 20*mb, 2.5*mb, 2.5*mb, 100*mb)
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
	r := newRig(LinkConfig{Inflaters: 4}, 4, 20*mb, 2.5*mb, 2.5*mb, 100*mb)
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
	r := newRig(LinkConfig{Inflaters: 4}, 8, 50*mb, 1000*mb, 1000*mb, 100*mb)
	secs := r.run(t)
	if r.most != 4 {
		t.Errorf("%d layers at once, there are 4 inflaters", r.most)
	}
	if ideal := 400 / 400.0; secs > ideal*1.3 {
		t.Errorf("%.2f s, with all inflaters busy it would be %.2f", secs, ideal)
	}
}

func TestMoreConnectionsWhereOneDoesNotFillTheLink(t *testing.T) {
	r := newRig(LinkConfig{Inflaters: 2}, 8, 30*mb, 3*mb, 12*mb, 100*mb)
	secs := r.run(t)
	if r.most < 4 {
		t.Errorf("%d connections at most, 4 would fill the link", r.most)
	}
	if alone := 240 / 3.0; secs > alone/2 {
		t.Errorf("%.1f s; one connection would take %.1f, the link could do %.1f", secs, alone, 240/12.0)
	}
}

func TestForcedOrders(t *testing.T) {
	r := newRig(LinkConfig{Order: Layers, Inflaters: 4}, 4, 50*mb, 1000*mb, 1000*mb, 100*mb)
	if r.run(t); r.most != 1 {
		t.Errorf("layers in order, yet %d at once", r.most)
	}
	r = newRig(LinkConfig{Order: Parallel, Inflaters: 3}, 6, 5*mb, 2.5*mb, 2.5*mb, 100*mb)
	if r.run(t); r.most != 3 {
		t.Errorf("three in parallel, yet %d at once", r.most)
	}
}

func TestBucket(t *testing.T) {
	k := newBucket(1 << 20)
	begin := time.Now()
	buf, n := make([]byte, 64<<10), 0
	for n < 512<<10 {
		b, err := k.take(t.Context(), buf)
		if err != nil {
			t.Fatal(err)
		}
		n += len(b)
	}
	if d := time.Since(begin); d < 350*time.Millisecond {
		t.Errorf("half a second's worth passed in %s", d)
	}
}
