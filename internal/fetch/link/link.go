// Package link shares the node's one way to the registries among all that crosses it.
//
// A layer takes a Turn: it waits until the link lets it begin. A pack, and a range that a reader waits for,
// take no turn but a Claim.
//
// Layers begin in the order in which they were asked for. Another one begins
// while some are being fetched only for one of these reasons, each of them
// measured on the fills themselves:
//
//   - the node is the limit: for a quarter of the time or more, what arrived
//     had to wait for the inflater. A further layer uses the other processors.
//   - the link is the limit but one connection does not fill it: a further
//     connection was tried for a moment and the total rate rose by a fifth.
//     If it did not rise, the further one is held until its turn comes.
//   - what is being fetched is almost here: the request for the next layer
//     crosses the link meanwhile, so that the link is never idle for a round trip.
//
// So a slow link carries one layer after the other, as Docker-pi does, and a
// fast one keeps all processors busy.
//
// A layer whose registry has been silent for a second (Silence) holds no other one up:
// until it is heard of again it does not count. What waits for another host
// goes first then, so that a registry that hangs delays only its own images.
//
// All this is among layers of one class. What is of a lower class (see Class)
// holds those of higher ones between two of their reads, as long as it moves.
package link

import (
	"context"
	"io"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"dewpoint/internal/layer"
)

// Order is how the layers that wait share the link.
type Order string

const (
	// Measured lets the measurement decide, at every moment of a pull.
	Measured Order = ""
	// Layers fetches one layer after the other (Docker-pi, section IV-A).
	Layers Order = "layers"
	// Parallel fetches as many at once as there are inflaters.
	Parallel Order = "parallel"
)

// Class says who waits for what crosses the link. A lower one goes first: while
// it moves, the higher ones are held.
type Class int32

const (
	Demand     Class = iota // a process in a container waits for these bytes
	Startup                 // a deployment does: packs, and layers that are pulled whole
	Background              // nobody does: the rest of layers that are mounted already
)

// Config bounds what the link is used for. The zero value measures.
type Config struct {
	Order     Order
	Inflaters int   // layers filled at once at most; 0 is the number of processors
	Limit     int64 // bytes a second; 0 is none
	// Background is what Class Background may take of it, in bytes a second; 0
	// is all.
	Background int64
}

// Link is the node's one way to the registries. It is safe for concurrent use.
type Link struct {
	cfg    Config
	bucket *bucket
	slow   *bucket          // of Class Background
	clock  func() time.Time // time.Now, but for tests

	mu      sync.Mutex
	queue   []*Turn // not started, in order
	active  []*Turn // started, in order
	ticking bool
	claims  map[*Claim]bool // transfers that take no turn
	freed   chan struct{}   // closed when a claim or an active turn goes; nil if nobody waits
	fastest float64         // bytes a second, the most that layers had together lately
	fastAt  time.Time       // when

	probe probe
}

const (
	tick        = 10 * time.Millisecond
	fastFor     = 10 * time.Minute // a rate is known for so long
	steadyBytes = 1 << 20          // after which a turn's rate says something
	drained     = 2 * time.Second  // after a pause, so that it says something again
	slowTick    = 60 * time.Millisecond
	fastLink    = 2.5e6                  // bytes a second of a layer from which on tick holds
	window      = 30 * time.Millisecond  // over which the node's limit is judged
	settle      = 400 * time.Millisecond // over which a link's rate is judged
	firstPause  = 3 * time.Second        // after a try that did not help, before the next
	lastPause   = time.Minute
	nodeLimit   = 0.25 // share of time blocked from which on the node is the limit
	riseNeeded  = 1.2
	endgame     = 150 * time.Millisecond // of fetching left, when the next request goes out
	// connections tried at most to fill the link, or to a host that is silent
	maxConns = 6
)

// Silence is how long a registry may give nothing before what waits for it holds nobody up.
const Silence = time.Second

// New returns a link that nothing crosses yet.
func New(cfg Config) *Link {
	if cfg.Inflaters <= 0 {
		cfg.Inflaters = runtime.NumCPU()
	}
	return &Link{cfg: cfg, bucket: newBucket(cfg.Limit), slow: newBucket(cfg.Background), clock: time.Now,
		claims: map[*Claim]bool{}}
}

// SetRates changes what Config has as Limit and Background, also for what is under way.
func (l *Link) SetRates(limit, background int64) {
	l.bucket.set(limit)
	l.slow.set(background)
}

// Turn is one layer's place on the link. Its fields are guarded by the link.
type Turn struct {
	start  chan struct{} // closed when it may begin
	held   chan struct{} // not nil while it must pause; closed to let it go on
	stats  func() layer.Progress
	host   string // of the registry
	size   int64
	link   *Link
	order  Order
	limit  int
	began  time.Time
	heard  time.Time      // when bytes last came, or could first have
	first  time.Time      // when the first bytes came; zero until then
	paused time.Time      // when it was last seen to be held, or to yield
	last   layer.Progress // at the last look
	lastT  time.Time
	rate   float64 // bytes a second lately
	stuck  float64 // share of the time that the node made the link wait lately

	working  atomic.Bool // the node has bytes in hand and does not wait for more
	yielding atomic.Bool // it waits for a lower class

	class Class
}

// Entry is what the link is told of a layer.
type Entry struct {
	Host      string // of the registry
	Size      int64  // compressed bytes
	Class     Class
	Order     Order                 // of this layer; Measured is the link's own
	Inflaters int                   // for this layer; 0 is the link's own number
	Stats     func() layer.Progress // how far the layer has come; must not block
}

// Enter queues a layer. The turn ends with the stream that Open gives.
func (l *Link) Enter(e Entry) *Turn {
	t := &Turn{start: make(chan struct{}), host: e.Host, size: e.Size, link: l, stats: e.Stats, order: e.Order,
		limit: e.Inflaters, class: e.Class}
	if t.order == Measured {
		t.order = l.cfg.Order
	}
	if t.limit <= 0 {
		t.limit = l.cfg.Inflaters
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.enqueue(t)
	l.admit(l.clock())
	if !l.ticking {
		l.ticking = true
		go l.run()
	}
	return t
}

// enqueue puts a turn behind those of its class. It is called with mu held.
func (l *Link) enqueue(t *Turn) {
	at := len(l.queue)
	for at > 0 && l.queue[at-1].class > t.class {
		at--
	}
	l.queue = slices.Insert(l.queue, at, t)
}

// Raise gives a turn a lower class.
func (t *Turn) Raise(c Class) {
	l := t.link
	l.mu.Lock()
	defer l.mu.Unlock()
	if c >= t.class {
		return
	}
	t.class = c
	if slices.Contains(l.queue, t) {
		l.queue = without(l.queue, t)
		l.enqueue(t)
	}
	l.free()
	l.admit(l.clock())
}

// Lower gives a turn that has begun a higher class.
func (t *Turn) Lower(c Class) {
	l := t.link
	l.mu.Lock()
	defer l.mu.Unlock()
	t.class = max(t.class, c)
	l.free()
}

// leave ends a turn, begun or not.
func (l *Link) leave(t *Turn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.queue = without(l.queue, t)
	l.active = without(l.active, t)
	l.free()
	now := l.clock()
	l.probe.forget(t, now)
	l.admit(now)
}

func without(ts []*Turn, t *Turn) []*Turn {
	for i, x := range ts {
		if x == t {
			return append(ts[:i:i], ts[i+1:]...)
		}
	}
	return ts
}

// run looks at the fills as long as there are any.
func (l *Link) run() {
	for {
		time.Sleep(l.pause())
		if !l.step(l.clock()) {
			return
		}
	}
}

// pause is the time until the next look: short at the beginning of a layer and
// where much happens at once, long on a slow link in the middle of one, where
// looking would be most of the node's work.
func (l *Link) pause() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := l.clock()
	for _, t := range l.active {
		left := float64(t.size - t.last.Fetched)
		if now.Sub(t.began) < settle || t.rate > fastLink || left < t.rate*2*endgame.Seconds() {
			return tick
		}
	}
	return slowTick
}

// step is one look. It reports whether another one is needed.
func (l *Link) step(now time.Time) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.queue)+len(l.active) == 0 {
		l.ticking = false
		return false
	}
	var sum float64
	for _, t := range l.active {
		t.look(now)
		if t.steady(now) && (t.class < Background || l.slow.limit() == 0) { // else it is the throttle's rate
			sum += t.rate
		}
	}
	if sum >= l.fastest || now.Sub(l.fastAt) > fastFor {
		l.fastest, l.fastAt = sum, now
	}
	l.admit(now)
	return true
}

// Fastest is the most that the link has carried lately, in bytes a second, as
// far as it is known; else 0.
func (l *Link) Fastest() float64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.clock().Sub(l.fastAt) > fastFor {
		return 0
	}
	return l.fastest
}

// guessedRate is the link's where nothing was measured: it is the slow links that matter.
const guessedRate = 12.5e6

// Expect is the rate that the link will carry; guessed says that it is not known.
func (l *Link) Expect() (rate float64, guessed bool) {
	rate = l.Fastest()
	if rate <= 0 {
		rate, guessed = guessedRate, true
	}
	if limit := l.bucket.limit(); limit > 0 && rate >= limit {
		return limit, false
	}
	return rate, guessed
}

// steady reports whether the turn's rate is the link's: it has been looked at for
// long enough, and what comes has not gathered in the connection while it paused.
func (t *Turn) steady(now time.Time) bool {
	known := !t.first.IsZero() && now.Sub(t.first) >= settle || t.last.Received >= steadyBytes
	return known && now.Sub(t.paused) >= drained
}

// Idle reports whether no layer crosses the link or waits for it.
func (l *Link) Idle() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.queue)+len(l.active) == 0
}

// look updates what is known of a turn, once a window.
func (t *Turn) look(now time.Time) {
	dt := now.Sub(t.lastT)
	if dt < window {
		return
	}
	p := t.stats()
	if p.Received > t.last.Received || t.working.Load() || t.yielding.Load() {
		t.heard = now
	}
	if p.Received > t.last.Received && t.first.IsZero() {
		t.first = now
	}
	if t.held != nil || t.yielding.Load() {
		t.paused = now
	}
	waited, blocked := p.Waiting-t.last.Waiting, p.Blocked-t.last.Blocked
	if sum := waited + blocked; sum > 0 {
		t.stuck = float64(blocked) / float64(sum)
	} else if p.Received == t.last.Received && p.Received > 0 {
		// Neither counter moves while one long wait lasts: bytes that do not
		// come are the link's doing, unless the node has not taken the last ones.
		t.stuck = 0
		if t.working.Load() || p.Written > t.last.Written {
			t.stuck = 1
		}
	}
	r := float64(p.Received-t.last.Received) / dt.Seconds()
	if t.rate == 0 {
		t.rate = r
	} else {
		t.rate += (r - t.rate) * min(1, dt.Seconds()/0.3)
	}
	t.last, t.lastT = p, now
}

// Idle reports whether the turn waits for a registry that is silent.
func (t *Turn) idle(now time.Time) bool { return t.held == nil && now.Sub(t.heard) > Silence }

// live are the turns that count, held ones included, in order.
func (l *Link) live(now time.Time) []*Turn {
	ts := make([]*Turn, 0, len(l.active))
	for _, t := range l.active {
		if !t.idle(now) {
			ts = append(ts, t)
		}
	}
	return ts
}

// admit starts what may start. It is called with mu held.
func (l *Link) admit(now time.Time) {
	for {
		live := l.live(now)
		next := l.next(len(live), now)
		if next == nil || !l.mayStart(next, upTo(next.class, live), now) {
			l.probe.judge(live, now)
			return
		}
		l.begin(next, now)
	}
}

// upTo are the turns of class c and lower ones: the others will be held.
func upTo(c Class, ts []*Turn) []*Turn {
	return slices.DeleteFunc(slices.Clone(ts), func(t *Turn) bool { return t.class > c })
}

// next is the layer that is to start next, or nil. Layers of a host that is
// silent are last, and not many of them are tried.
func (l *Link) next(live int, now time.Time) *Turn {
	if len(l.queue) == 0 {
		return nil
	}
	if live == len(l.active) {
		return l.queue[0]
	}
	silent := map[string]int{}
	for _, t := range l.active {
		if t.idle(now) {
			silent[t.host]++
		}
	}
	var best *Turn
	for _, t := range l.queue {
		if n := silent[t.host]; n < maxConns && (best == nil || n < silent[best.host]) {
			best = t
		}
	}
	return best
}

func (l *Link) begin(t *Turn, now time.Time) {
	l.queue = without(l.queue, t)
	t.began, t.heard, t.lastT, t.last = now, now, now, t.stats()
	l.active = append(l.active, t)
	l.probe.moved = now
	close(t.start)
}

// mayStart reports whether next may start beside the live turns.
func (l *Link) mayStart(next *Turn, live []*Turn, now time.Time) bool {
	n := len(live)
	switch {
	case n == 0:
		return true
	case next.order == Layers:
		return false
	case next.order == Parallel:
		return n < next.limit
	case l.probe.holding():
		return false // that one is next
	case ending(live):
		return n < next.limit || n < maxConns && !nodeIsLimit(live)
	case nodeIsLimit(live):
		return n < next.limit
	}
	return l.probe.tryNow(next, live, now)
}

// ending reports whether all that is being fetched is about to be here.
func ending(live []*Turn) bool {
	for _, t := range live {
		left := float64(t.size - t.last.Fetched)
		if t.held == nil && left > 0 && left > t.rate*endgame.Seconds() {
			return false
		}
	}
	return true
}

// nodeIsLimit reports whether every fill under way makes the link wait.
func nodeIsLimit(live []*Turn) bool {
	for _, t := range live {
		if t.held == nil && t.stuck < nodeLimit {
			return false
		}
	}
	return true
}

func rate(live []*Turn) float64 {
	var r float64
	for _, t := range live {
		r += t.rate
	}
	return r
}

// Open waits for the turn and then opens the stream that takes it. The turn
// ends when the stream is closed, or at once if it cannot be opened.
func (t *Turn) Open(ctx context.Context, open func() (io.ReadCloser, error)) (io.ReadCloser, error) {
	select {
	case <-t.start:
	case <-ctx.Done():
		t.link.leave(t)
		return nil, context.Cause(ctx)
	}
	r, err := open()
	if err != nil {
		t.link.leave(t)
		return nil, err
	}
	return &reader{body: r, ctx: ctx, turn: t}, nil
}

// reader is a stream under the link's control.
type reader struct {
	body io.ReadCloser
	ctx  context.Context
	turn *Turn
	once sync.Once
}

func (r *reader) Read(b []byte) (int, error) {
	r.turn.working.Store(false)
	defer r.turn.working.Store(true)
	if err := r.turn.wait(r.ctx); err != nil {
		return 0, err
	}
	class, err := r.turn.yield(r.ctx)
	if err != nil {
		return 0, err
	}
	return r.turn.link.read(r.ctx, class, r.body, b)
}

func (r *reader) Close() error {
	r.once.Do(func() { r.turn.link.leave(r.turn) })
	return r.body.Close()
}

// wait blocks while the turn is held.
func (t *Turn) wait(ctx context.Context) error {
	t.link.mu.Lock()
	held := t.held
	t.link.mu.Unlock()
	if held == nil {
		return nil
	}
	select {
	case <-held:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
