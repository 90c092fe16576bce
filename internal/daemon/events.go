package daemon

import (
	"context"
	"sync"
	"time"

	"dewpoint/internal/engine"
	"dewpoint/internal/node"
)

// keepEvents is how many events are known to who comes later.
const keepEvents = 1000

// events is what happened lately. It is safe for concurrent use.
type events struct {
	mu   sync.Mutex
	seq  uint64
	ring []node.Event
	more chan struct{} // closed and replaced at every event
}

func newEvents() *events { return &events{more: make(chan struct{})} }

func (e *events) add(ev node.Event) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.seq++
	ev.Seq = e.seq
	if ev.Time.IsZero() {
		ev.Time = time.Now()
	}
	if len(e.ring) == keepEvents {
		e.ring = append(e.ring[:0], e.ring[1:]...)
	}
	e.ring = append(e.ring, ev)
	close(e.more)
	e.more = make(chan struct{})
}

// after returns the events known after number seq, and a channel that is
// closed when there are more.
func (e *events) after(seq uint64) ([]node.Event, chan struct{}) {
	e.mu.Lock()
	defer e.mu.Unlock()
	var out []node.Event
	for _, ev := range e.ring {
		if ev.Seq > seq {
			out = append(out, ev)
		}
	}
	return out, e.more
}

// from is the number after which a caller's events begin: where he says, or with what happens next.
// A number that is not reached yet is of a daemon before this one: all that is known is new to him.
func (e *events) from(after *uint64) uint64 {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case after == nil:
		return e.seq
	case *after > e.seq:
		return 0
	}
	return *after
}

// Events implements api.Observer.
func (d *Daemon) Events(ctx context.Context, after *uint64, emit func(node.Event) error) error {
	seq := d.events.from(after)
	for {
		evs, more := d.events.after(seq)
		for _, ev := range evs {
			if err := emit(ev); err != nil {
				return err
			}
			seq = ev.Seq
		}
		select {
		case <-more:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// watchEngine turns containerd's events into the node's.
func (d *Daemon) watchEngine(ctx context.Context) error {
	err := d.engine.Events(ctx, func(ev engine.Event) {
		switch ev.Kind {
		case engine.EventExited:
			d.events.add(node.Event{Time: ev.Time, Kind: node.EventExited, Name: ev.Name, ExitCode: &ev.Exit})
		case engine.EventRemoved:
			d.events.add(node.Event{Time: ev.Time, Kind: node.EventRemoved, Name: ev.Name})
		}
	})
	if ctx.Err() != nil {
		return nil
	}
	return err
}
