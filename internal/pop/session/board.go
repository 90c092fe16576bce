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
	b := &box{ready: make(chan struct{}, 1)}
	out := make(chan pop.Event)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, fmt.Errorf("subscribe: %w: closed", pop.ErrAway)
	}
	s.boxes[b] = struct{}{}
	if s.connected {
		b.resync()
	}
	s.wg.Go(func() {
		defer close(out)
		defer s.unsubscribe(b)
		b.pour(ctx, s.ctx, out)
	})
	return out, nil
}

func (s *Session) unsubscribe(b *box) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.boxes, b)
}

// listen keeps the session connected to the board.
func (s *Session) listen() {
	for s.ctx.Err() == nil {
		err := s.server.Listen(s.ctx, func() { s.setConnected(true) }, s.deliver)
		s.setConnected(false)
		if s.ctx.Err() == nil {
			s.cfg.Log.Debug("no events from the PoP's coordinator", "error", err)
		}
		select {
		case <-s.ctx.Done():
		case <-time.After(s.cfg.TTL / 20):
		}
	}
}

func (s *Session) setConnected(connected bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.connected = connected
	if connected {
		s.resyncLocked()
	}
}

// resyncLocked tells all subscribers that they may have missed events. Those
// that the board is not connected for hear of it when it is.
func (s *Session) resyncLocked() {
	if !s.connected {
		return
	}
	for b := range s.boxes {
		b.resync()
	}
}

func (s *Session) deliver(e pop.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for b := range s.boxes {
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
