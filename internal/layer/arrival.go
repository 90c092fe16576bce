package layer

import (
	"context"
	"sort"
	"sync"
)

// arrival knows which bytes of a layer's data a fill has written, and lets readers
// wait for those that are not. It is safe for concurrent use.
type arrival struct {
	mu    sync.Mutex
	spans []Span        // ascending, neither touching nor overlapping
	whole int64         // the data's size once known, else -1
	more  chan struct{} // closed and replaced at every change; nil if nobody waits
}

func newArrival() *arrival { return &arrival{whole: -1} }

// add records that [from, to) has been written.
func (p *arrival) add(from, to int64) {
	if from >= to {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	i := sort.Search(len(p.spans), func(i int) bool { return p.spans[i].To >= from })
	j := i
	for j < len(p.spans) && p.spans[j].From <= to {
		from, to = min(from, p.spans[j].From), max(to, p.spans[j].To)
		j++
	}
	p.spans = append(p.spans[:i], append([]Span{{from, to}}, p.spans[j:]...)...)
	p.wake()
}

// end records the data's size: nothing is missing behind it.
func (p *arrival) end(size int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.whole = size
	p.wake()
}

func (p *arrival) wake() {
	if p.more != nil {
		close(p.more)
		p.more = nil
	}
}

// wait blocks until the bytes [off, off+n) are there, as far as the data
// reaches, and returns how many of them that is, or until ctx ends.
func (p *arrival) wait(ctx context.Context, off, n int64) (int64, error) {
	for {
		p.mu.Lock()
		got, ok := p.have(off, n)
		if ok {
			p.mu.Unlock()
			return got, nil
		}
		if p.more == nil {
			p.more = make(chan struct{})
		}
		more := p.more
		p.mu.Unlock()
		select {
		case <-more:
		case <-ctx.Done():
			return 0, context.Cause(ctx)
		}
	}
}

// have is called with mu held.
func (p *arrival) have(off, n int64) (int64, bool) {
	to := off + n
	if p.whole >= 0 {
		to = min(to, p.whole)
	}
	if to <= off {
		return 0, true
	}
	i := sort.Search(len(p.spans), func(i int) bool { return p.spans[i].To > off })
	return to - off, i < len(p.spans) && p.spans[i].From <= off && p.spans[i].To >= to
}
