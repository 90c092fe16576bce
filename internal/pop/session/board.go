package session

import (
	"context"
	"fmt"
	"sync"
	"time"

	"dewpoint/internal/pop"
)

func (s *Session) Publish(ctx context.Context, e pop.Event) error {
	e.Node = s.cfg.Node
	return s.do(ctx, "publish", func(ctx context.Context, _ string) error {
		return s.server.Publish(ctx, e)
	})
}

func (s *Session) Subscribe(ctx context.Context) (<-chan pop.Event, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("subscribe: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, fmt.Errorf("subscribe: %w: closed", pop.ErrAway)
	}
	b, out := s.board.add(), make(chan pop.Event)
	s.wg.Go(func() {
		defer close(out)
		defer s.board.remove(b)
		b.pour(ctx, s.ctx, out)
	})
	return out, nil
}

// listen keeps the session connected to the coordinator's events.
func (s *Session) listen() {
	for s.ctx.Err() == nil {
		err := s.server.Listen(s.ctx, func() { s.board.connect(true) }, s.board.deliver)
		s.board.connect(false)
		if s.ctx.Err() == nil {
			s.cfg.Log.Debug("no events from the PoP's coordinator", "error", err)
		}
		select {
		case <-s.ctx.Done():
		case <-time.After(s.cfg.TTL / 20):
		}
	}
}

// A board passes the PoP's events on to the node's subscribers. Its lock is taken after the session's.
type board struct {
	mu        sync.Mutex
	connected bool // events come
	boxes     map[*box]struct{}
}

// add makes a subscriber's box. It holds a Resync if events come already.
func (o *board) add() *box {
	b := &box{ready: make(chan struct{}, 1)}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.boxes[b] = struct{}{}
	if o.connected {
		b.resync()
	}
	return b
}

func (o *board) remove(b *box) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.boxes, b)
}

// connect says whether events come now. Subscribers may have missed some until then.
func (o *board) connect(connected bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.connected = connected
	o.resyncLocked()
}

// resync tells all subscribers that they may have missed events. Those that no events come for hear of it
// when they come.
func (o *board) resync() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.resyncLocked()
}

func (o *board) resyncLocked() {
	if !o.connected {
		return
	}
	for b := range o.boxes {
		b.resync()
	}
}

func (o *board) deliver(e pop.Event) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for b := range o.boxes {
		b.put(e)
	}
}

// A box holds events for one subscriber, so that a slow one holds up nobody. A
// full box is emptied and holds a Resync instead.
type box struct {
	ready chan struct{}

	mu     sync.Mutex
	events []pop.Event
}

const boxSize = 256

func (b *box) put(e pop.Event) {
	b.mu.Lock()
	if len(b.events) < boxSize {
		b.events = append(b.events, e)
	} else {
		b.events = []pop.Event{{Kind: pop.Resync}}
	}
	b.mu.Unlock()
	b.wake()
}

// resync makes everything in the box superfluous.
func (b *box) resync() {
	b.mu.Lock()
	b.events = []pop.Event{{Kind: pop.Resync}}
	b.mu.Unlock()
	b.wake()
}

func (b *box) wake() {
	select {
	case b.ready <- struct{}{}:
	default:
	}
}

func (b *box) take() (e pop.Event, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.events) == 0 {
		return e, false
	}
	e, b.events = b.events[0], b.events[1:]
	return e, true
}

// pour gives the events to the subscriber until one of the contexts ends.
func (b *box) pour(ctx, session context.Context, out chan<- pop.Event) {
	for {
		e, ok := b.take()
		if !ok {
			select {
			case <-b.ready:
				continue
			case <-ctx.Done():
				return
			case <-session.Done():
				return
			}
		}
		select {
		case out <- e:
		case <-ctx.Done():
			return
		case <-session.Done():
			return
		}
	}
}
