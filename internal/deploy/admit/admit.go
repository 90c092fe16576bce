// Package admit says when each deployment may go on, so that many at once are as fast as few at once, one
// after the other. A deployment is a Ticket. It may have to wait twice:
//
//	Enter ─▶ Wait ─▶ (the image comes) ─▶ Run ─▶ (container) ─▶ Started ─▶ Done
//	           │                            │
//	           a place on the link          a slot, and memory
//
// A deployment whose image is here waits for the slot already in Wait; Run returns at once. So it passes
// those that must fetch, which hold no slot meanwhile. Of the deployments of one absent image one fetches.
//
//   - Slots: a few for each processor, down to one while others press the processors or memory is so short
//     that the kernel reclaims. Pressure by deployments does not count, so the kernel is asked once a second
//     while none is under way, and only then.
//   - Memory: the claim (a limit, or what containers of the image took) must fit into what the kernel has
//     available, less a reserve, what is promised to others, and what running containers may yet take of
//     their limits. A promise ends some time after the container runs.
//   - The link: images are fetched by few at once, of one registry fewer. The disk: absent bytes must fit.
//
// Order: next is the caller with the least under way, of several the one served longest ago; of a caller the
// oldest deployment that can go on. A deployment that lacks memory is passed by others, but for the first
// such one all that becomes free is kept, and the others share what was free when it began to wait. If it
// does not fit after a time, it begins anew, for twice that time.
//
// Back-pressure: the queue is bounded, and so is each caller's part of it. A BusyError says when to come
// again. A claim that can never fit is refused at once.
package admit

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"maps"
	"runtime"
	"sync"
	"time"
)

// Config says what the node can bear. The zero value is measured or asked of the kernel.
type Config struct {
	Max        int // deployments at once; 0 is SlotsPerProcessor of each processor
	Fetch      int // images fetched at once from one registry; 0 is 2 for each processor, at least 4
	Queue      int // deployments that wait; 0 is DefaultQueue
	PerCaller  int // of one caller; 0 is half of Queue
	Processors int // 0 is those of the machine

	Reserve    int64 // bytes of memory that stay free; 0 is a thirty-second of the machine's, 32 to 256 MiB
	Estimate   int64 // bytes that a container takes of which nothing is known; 0 is 24 MiB
	Overcommit bool  // limits of memory are not claims, nor kept: what containers were seen to take is

	Memory   func() (Memory, error) // nil asks the kernel
	Pressure func() Pressure        // nil asks the kernel
	Limits   Limits                 // nil: there are none
	Disk     Room                   // nil is without end

	Log *slog.Logger // nil discards
}

// Limits are those of memory of the containers that run.
type Limits interface {
	// Unused is how many bytes the containers may yet take.
	Unused() int64
}

// Room is the disk where images go.
type Room interface {
	// Free is how many bytes are free.
	Free() (int64, error)
}

// Defaults of Config.
const (
	// SlotsPerProcessor: with 6 slots a burst of 24 on two processors went no slower than with any other number
	// (BenchmarkSlots in test), and took a third less than with 2 (docs/design/creation.md, "How many at once").
	SlotsPerProcessor = 3
	DefaultQueue      = 1024
	defaultEstimate   = 24 << 20
)

// Memory is the machine's, in bytes.
type Memory struct{ Available, Total int64 }

// Pressure is the share of time, in percent, that some process waited for a
// resource in the last ten seconds (PSI's avg10); 0 where the kernel does not say.
type Pressure struct {
	CPU, Memory, IO float64
	Waited          time.Duration // for a processor, since the machine's start
}

// Claim is what a deployment asks for.
type Claim struct {
	Caller string // who asks
	Image  string // of which the claim learns and by which fetches are joined
	Memory int64  // the container's limit in bytes; 0 is none
	Fetch  bool   // the image is not here
	Host   string // its registry
	Absent int64  // compressed bytes that are not here; 0 is none, or not known
	Group  *Group // of which the claim is one; may be nil
	// Accepted was taken in before: the queue takes it though it be full.
	Accepted bool
}

// Group bounds how many of some claims are under way at once, whatever the node would
// admit. It must not change while claims have it.
type Group struct {
	Limit int // 0 is none
	used  int // guarded by the Admitter's mu
}

// stage is what a ticket waits for or has.
type stage int

const (
	fetching stage = iota
	running
	over
)

// Admitter admits deployments. It is safe for concurrent use.
type Admitter struct {
	cfg  Config
	life context.Context
	end  context.CancelFunc
	bg   sync.WaitGroup

	mu       sync.Mutex // guards what follows, and the tickets
	callers  map[string]*caller
	waiting  [over]int
	used     [over]int            // tickets that hold a place or a slot
	images   map[string]int       // that are being fetched, and by how many
	failed   map[string]time.Time // images that could not be fetched, and when
	hosts    map[string]int       // images that are being fetched, by registry
	promised int64                // bytes of memory, of tickets that have a slot and of fading
	disk     int64                // bytes, of those that fetch
	fading   []fade               // oldest first
	kept     kept
	seen     sample
	ticking  bool
	serial   uint64 // of grants, and of callers that came
	learnt   learnt
	ended    pace
	stats    Stats
}

// caller is who has tickets. Fields are guarded by the Admitter's mu.
type caller struct {
	name  string
	lines [over][]*Ticket // that wait, oldest first
	used  [over]int
	last  [over]uint64 // serial of the last grant or, before, of when he came
}

func (c *caller) waiting() int { return len(c.lines[fetching]) + len(c.lines[running]) }

// New returns an Admitter. Close must follow.
func New(cfg Config) *Admitter {
	cfg.Processors = cmp.Or(cfg.Processors, runtime.NumCPU())
	cfg.Max = cmp.Or(cfg.Max, SlotsPerProcessor*cfg.Processors)
	cfg.Fetch = cmp.Or(cfg.Fetch, max(4, 2*cfg.Processors))
	cfg.Queue = cmp.Or(cfg.Queue, DefaultQueue)
	cfg.PerCaller = cmp.Or(cfg.PerCaller, (cfg.Queue+1)/2)
	cfg.Estimate = cmp.Or(cfg.Estimate, defaultEstimate)
	if cfg.Memory == nil {
		cfg.Memory = kernelMemory
	}
	if cfg.Pressure == nil {
		cfg.Pressure = kernelPressure
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	a := &Admitter{cfg: cfg, callers: map[string]*caller{}, images: map[string]int{},
		failed: map[string]time.Time{}, hosts: map[string]int{}, learnt: learnt{}}
	a.life, a.end = context.WithCancel(context.Background())
	a.bg.Go(a.watch)
	return a
}

// Close ends the waits, with an error, and what runs in the background.
func (a *Admitter) Close() {
	a.end()
	a.bg.Wait()
}

// Ticket is a deployment's place in the queue and, later, what it may use. Its
// methods are safe for concurrent use, but for Wait, Run and Done, which one
// goroutine calls in their order.
type Ticket struct {
	a     *Admitter
	claim Claim
	who   *caller

	// Guarded by a.mu.
	at      stage         // what it waits for or has
	granted bool          // it has it
	ready   chan struct{} // closed when granted
	need    int64         // bytes of memory that it claims
	memory  int64         // that are promised to it
	disk    int64
	rank    int         // of those that wait, when it was last asked for
	slot    bool        // it counts as running
	boot    *time.Timer // ends slot; nil before Started
}

// Enter takes a place in the queue, which Done gives back. It waits for
// nothing. Errors are a *BusyError and a *NeverError.
func (a *Admitter) Enter(c Claim) (*Ticket, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.look(time.Now())
	need, err := a.needOf(c)
	if err != nil {
		a.stats.Refused++
		return nil, err
	}
	t := &Ticket{a: a, claim: c, need: need, ready: make(chan struct{})}
	who := a.callers[c.Caller]
	if who == nil {
		a.serial++
		who = &caller{name: c.Caller, last: [over]uint64{a.serial, a.serial}}
	}
	if err := a.busy(who); err != nil && !c.Accepted {
		a.stats.Busy++
		return nil, err
	}
	a.callers[c.Caller], t.who = who, who
	t.at = running
	if c.Fetch {
		t.at = fetching
	}
	a.enqueue(t)
	a.schedule()
	return t, nil
}

// busy refuses a caller for whom the queue has no room: the last eighth of it is
// for those who have little in it.
func (a *Admitter) busy(who *caller) error {
	all := a.waiting[fetching] + a.waiting[running]
	part := a.cfg.PerCaller
	if all >= a.cfg.Queue-a.cfg.Queue/8 {
		part = min(part, max(1, a.cfg.Queue/64))
	}
	if all < a.cfg.Queue && who.waiting() < part {
		return nil
	}
	wait := a.ended.time(max(1, min(all, who.waiting())/8), time.Now())
	return &BusyError{Waiting: all, Mine: who.waiting(), After: wait}
}

// Most is how many tickets of one caller there may be, when nobody else has any.
func (a *Admitter) Most() int { return a.cfg.Max + min(a.cfg.Queue-a.cfg.Queue/8, a.cfg.PerCaller) }

// enqueue puts t behind the caller's others that entered before it. With mu held.
func (a *Admitter) enqueue(t *Ticket) {
	t.who.lines[t.at] = append(t.who.lines[t.at], t)
	a.waiting[t.at]++
}

// Wait blocks until the image may be brought or, where it is here, until the container may
// be made. If ctx ends before, it returns why, and the ticket is over.
func (t *Ticket) Wait(ctx context.Context) error {
	a := t.a
	a.mu.Lock()
	ready := t.ready
	a.mu.Unlock()
	var err error
	select {
	case <-ready:
	case <-ctx.Done():
		err = context.Cause(ctx)
	case <-a.life.Done():
		err = errClosed
	}
	if err != nil {
		t.Done(0)
	}
	return err
}

var errClosed = errors.New("the node does not deploy any more: dewd is stopping")

// ImageIsHere says that the image is here, of a ticket that has waited to bring it and needs
// no more than that. Done must follow.
func (t *Ticket) ImageIsHere() {
	a := t.a
	a.mu.Lock()
	defer a.mu.Unlock()
	if t.at == fetching && t.granted {
		a.land(t)
		a.arrived(t.claim.Image)
		t.at = running
		a.schedule()
	}
}

// Run says that the image is here, and blocks until the container may be made;
// at once if Wait was for that. Errors are as Wait's.
func (t *Ticket) Run(ctx context.Context) error {
	a := t.a
	a.mu.Lock()
	if t.at == fetching && t.granted {
		a.land(t)
		t.at, t.granted, t.ready = running, false, make(chan struct{})
		a.first(t)
		a.arrived(t.claim.Image)
		a.schedule()
	}
	a.mu.Unlock()
	return t.Wait(ctx)
}

// first enqueues a ticket that has waited for its image before those that
// entered after it, as far as that is known: it goes to the front. With mu held.
func (a *Admitter) first(t *Ticket) {
	line := t.who.lines[running]
	i := 0
	for i < len(line) && line[i].claim.Fetch { // these have waited, too
		i++
	}
	t.who.lines[running] = append(line[:i:i], append([]*Ticket{t}, line[i:]...)...)
	a.waiting[running]++
}

// land gives back the place on the link. With mu held.
func (a *Admitter) land(t *Ticket) {
	if a.images[t.claim.Image]--; a.images[t.claim.Image] <= 0 {
		delete(a.images, t.claim.Image)
	}
	if a.hosts[t.claim.Host]--; a.hosts[t.claim.Host] <= 0 {
		delete(a.hosts, t.claim.Host)
	}
	a.disk -= t.disk
	t.disk = 0
	a.used[fetching]--
	t.who.used[fetching]--
}

// arrived moves those that waited for an image which is here now. With mu held.
func (a *Admitter) arrived(image string) {
	delete(a.failed, image)
	for _, c := range a.callers {
		var stay []*Ticket
		for _, t := range c.lines[fetching] {
			if t.claim.Image != image {
				stay = append(stay, t)
				continue
			}
			a.waiting[fetching]--
			t.at = running
			a.first(t)
		}
		c.lines[fetching] = stay
	}
}

// failedFor is how long those that wait for an image do not do so for each other, after
// it could not be fetched: else each would wait out what the one before has.
const failedFor = time.Minute

func (a *Admitter) fail(image string, now time.Time) {
	maps.DeleteFunc(a.failed, func(_ string, at time.Time) bool { return now.Sub(at) >= failedFor })
	a.failed[image] = now
}

// Resolved says how many compressed bytes of the image are absent, once that is
// known. It returns a *DiskError if they cannot fit.
func (t *Ticket) Resolved(absent int64) error {
	a := t.a
	a.mu.Lock()
	defer a.mu.Unlock()
	if t.at != fetching || !t.granted {
		return nil
	}
	a.sample(time.Now())
	if a.seen.free >= 0 && absent > a.seen.free {
		return &DiskError{Need: absent, Have: a.seen.free}
	}
	a.disk += unpacked*absent - t.disk
	t.disk = unpacked * absent
	return nil
}

// bootTime is how long a slot is held by a container that runs and is not
// ready: the first moments of a start take a processor, a longer time is
// mostly waiting for something else.
const bootTime = time.Second

// Started says that the container's processes run: the slot is held until
// Done, or for a second more at most.
func (t *Ticket) Started() {
	t.a.mu.Lock()
	defer t.a.mu.Unlock()
	if t.slot && t.boot == nil {
		t.boot = time.AfterFunc(bootTime, t.unslot)
	}
}

func (t *Ticket) unslot() {
	t.a.mu.Lock()
	defer t.a.mu.Unlock()
	if t.giveSlot() {
		t.a.schedule()
	}
}

// giveSlot reports whether there was one to give back. With mu held.
func (t *Ticket) giveSlot() bool {
	if !t.slot {
		return false
	}
	t.slot = false
	t.a.used[running]--
	t.who.used[running]--
	if g := t.claim.Group; g != nil {
		g.used--
	}
	return true
}

// Done ends the ticket, wherever it is. used is how much memory the container was
// seen to take, in bytes, from which later claims of the image learn; 0 is not known,
// or the deployment failed: then what was promised is free at once. It may be
// called more than once; the first call counts.
func (t *Ticket) Done(used int64) {
	a := t.a
	a.mu.Lock()
	defer a.mu.Unlock()
	if t.at == over {
		return
	}
	now := time.Now()
	switch {
	case !t.granted:
		a.leave(t)
	case t.at == fetching:
		a.land(t)
		a.fail(t.claim.Image, now)
	}
	t.giveSlot()
	if t.boot != nil {
		t.boot.Stop()
	}
	if t.memory != 0 {
		a.ended.add(now)
	}
	if used > 0 {
		a.learnt.add(t.claim.Image, used)
		a.fading = append(a.fading, fade{now.Add(settle), t.memory})
	} else {
		a.promised -= t.memory
	}
	t.memory, t.at = 0, over
	if a.kept.by == t {
		a.kept = kept{}
	}
	a.schedule()
	a.forget(t.who)
}

// leave takes a ticket that waits out of its line. With mu held.
func (a *Admitter) leave(t *Ticket) {
	line := t.who.lines[t.at]
	for i, x := range line {
		if x == t {
			line[i] = nil
			if t.who.lines[t.at] = line[1:]; i > 0 { // seldom: what goes is first
				t.who.lines[t.at] = append(line[:i], line[i+1:]...)
			}
			a.waiting[t.at]--
			return
		}
	}
}

// forget drops a caller that has nothing here. With mu held.
func (a *Admitter) forget(c *caller) {
	if c.waiting() == 0 && c.used == [over]int{} {
		delete(a.callers, c.name)
	}
}
