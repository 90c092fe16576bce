package lazypages

import (
	"context"
	"sync"
	"time"
)

type key struct {
	file  string
	chunk int
}

func keyOf(file string, offset int64) key { return key{file, int(offset / ChunkSize)} }

// job is one chunk that some process misses.
type job struct {
	key
	active bool      // somebody fetches it
	urgent bool      // somebody waits for it,
	asked  time.Time // since then,
	first  int64     // for the page at this offset
	bound  *time.Timer
}

// plan says which chunk is fetched next. Its own lock makes it safe for
// concurrent use; it calls nobody while it holds it.
type plan struct {
	mu     sync.Mutex
	change *sync.Cond
	jobs   map[key]*job
	urgent []*job
	order  []key // pushed first,
	rest   []key // then these
	live   bool  // all processes are restored: what nobody waits for may come
	closed bool
	hasty  bool      // quiet is not kept
	waited time.Time // when somebody last began to wait
	alarm  *time.Timer
}

// quiet is how long nobody must have begun to wait before what nobody waits for
// is fetched: processes that start need the processor themselves. It ends, as
// every wait brings a chunk.
const quiet = 50 * time.Millisecond

func (p *plan) init(order []Page) {
	p.change = sync.NewCond(&p.mu)
	p.jobs = map[key]*job{}
	p.alarm = time.AfterFunc(0, p.wake)
	seen := map[key]bool{}
	for _, page := range order {
		k := keyOf(page.File, page.Page*int64(pageSize))
		if !seen[k] {
			seen[k] = true
			p.order = append(p.order, k)
		}
	}
}

// want puts chunks of a file into the plan.
func (p *plan) want(file string, chunks []int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range chunks {
		if k := (key{file, c}); p.jobs[k] == nil {
			p.jobs[k] = &job{key: k}
			p.rest = append(p.rest, k)
		}
	}
	p.change.Broadcast()
}

// urge notes that a process waits for the page at offset. It returns whether it
// is the first to wait for this chunk.
func (p *plan) urge(file string, offset int64, now time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	k := keyOf(file, offset)
	j := p.jobs[k]
	if j == nil { // just pushed: asking once more does no harm
		j = &job{key: k}
		p.jobs[k] = j
	}
	if j.urgent {
		return false
	}
	j.urgent, j.asked, j.first = true, now, offset
	p.waited = now
	if !j.active {
		p.urgent = append(p.urgent, j)
		p.change.Broadcast()
	}
	return true
}

// firstOf is the offset of the page that is waited for.
func (p *plan) firstOf(j *job) int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return j.first
}

// atEnd stops the timer when the chunk is in.
func (p *plan) atEnd(k key, timer *time.Timer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if j := p.jobs[k]; j != nil && j.urgent && !p.closed {
		j.bound = timer
		return
	}
	timer.Stop()
}

// nextUrgent waits for a chunk that somebody waits for; nil when it is all over.
func (p *plan) nextUrgent() *job {
	p.mu.Lock()
	defer p.mu.Unlock()
	for !p.closed {
		for len(p.urgent) > 0 {
			j := p.urgent[0]
			p.urgent = p.urgent[1:]
			if p.jobs[j.key] == j && !j.active {
				j.active = true
				return j
			}
		}
		p.change.Wait()
	}
	return nil
}

// nextRest waits for a chunk that nobody waits for, while nobody waits for
// another, and tells whether it is one of the order; nil when it is all over.
func (p *plan) nextRest() (j *job, ordered bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for !p.closed {
		if p.live && len(p.urgent) == 0 {
			if j := p.take(&p.order); j != nil {
				return j, true
			}
			if until := time.Until(p.waited.Add(quiet)); until > 0 && !p.hasty {
				p.alarm.Reset(until)
			} else if j := p.take(&p.rest); j != nil {
				return j, false
			}
		}
		p.change.Wait()
	}
	return nil, false
}

// wake makes waiters look again. It takes the lock, so as not to come between a
// look and the wait that follows.
func (p *plan) wake() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.change.Broadcast()
}

func (p *plan) take(keys *[]key) *job {
	for len(*keys) > 0 {
		j := p.jobs[(*keys)[0]]
		*keys = (*keys)[1:]
		if j != nil && !j.active && !j.urgent {
			j.active = true
			return j
		}
	}
	return nil
}

// over ends a job; with again it stays in the plan. It returns how long somebody
// had waited for it.
func (p *plan) over(j *job, again bool) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	var waited time.Duration
	if j.urgent {
		waited = time.Since(j.asked)
	}
	if j.bound != nil {
		j.bound.Stop()
	}
	j.active, j.urgent, j.bound = false, false, nil
	if again {
		p.rest = append(p.rest, j.key)
	} else {
		delete(p.jobs, j.key)
	}
	p.change.Broadcast()
	return waited
}

// putBack returns a job whose chunk could not be had yet.
func (p *plan) putBack(j *job) {
	p.mu.Lock()
	defer p.mu.Unlock()
	j.active = false
	if j.urgent {
		p.urgent = append(p.urgent, j)
	} else {
		p.rest = append(p.rest, j.key)
	}
	p.change.Broadcast()
}

// hurry ends the keeping of quiet.
func (p *plan) hurry() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.hasty = true
	p.change.Broadcast()
}

// open lets come what nobody waits for.
func (p *plan) open() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.live = true
	p.change.Broadcast()
}

// close lets everybody go and stops all timers.
func (p *plan) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	p.alarm.Stop()
	for _, j := range p.jobs {
		if j.bound != nil {
			j.bound.Stop()
		}
	}
	p.change.Broadcast()
}

// pace bounds a rate, until free is closed.
type pace struct {
	rate int64 // bytes per second
	free chan struct{}
	once sync.Once

	mu   sync.Mutex
	next time.Time
}

func (p *pace) end() { p.once.Do(func() { close(p.free) }) }

// spend waits until n bytes fit into the rate, or ctx ends.
func (p *pace) spend(ctx context.Context, n int64) {
	p.mu.Lock()
	now := time.Now()
	if p.next.Before(now) {
		p.next = now
	}
	p.next = p.next.Add(time.Duration(float64(n) / float64(p.rate) * float64(time.Second)))
	timer := time.NewTimer(time.Until(p.next))
	p.mu.Unlock()
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-p.free:
	case <-ctx.Done():
	}
}
