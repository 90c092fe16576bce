package server

import (
	"context"
	"crypto/rand"
	"strings"
	"sync"
	"time"

	"dewpoint/internal/engine"
	"dewpoint/internal/spec"
)

// keepEvents is how many events are known to who comes later.
const keepEvents = 1000

// events is what happened lately. It is safe for concurrent use.
type events struct {
	epoch string // of their numbers

	mu   sync.Mutex
	seq  uint64
	ring []spec.Event
	more chan struct{} // closed and replaced at every event
}

func newEvents() *events {
	return &events{epoch: strings.ToLower(rand.Text()[:13]), more: make(chan struct{})}
}

func (e *events) add(ev spec.Event) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.seq++
	ev.Seq, ev.Epoch = e.seq, e.epoch
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
func (e *events) after(seq uint64) ([]spec.Event, chan struct{}) {
	e.mu.Lock()
	defer e.mu.Unlock()
	var out []spec.Event
	for _, ev := range e.ring {
		if ev.Seq > seq {
			out = append(out, ev)
		}
	}
	return out, e.more
}

// from is the number after which a caller's events begin: where he says, or with what happens next. missed is
// whether some that came behind his mark are not known any more. A mark of another epoch, or a number that is
// not reached yet, is of a daemon before this one: all that is known is new to him.
func (e *events) from(after *spec.Mark) (seq uint64, missed bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	oldest := e.seq - uint64(len(e.ring)) // the one before the first that is known
	switch {
	case after == nil:
		return e.seq, false
	case *after == spec.Mark{}: // whatever there is
		return oldest, false
	case after.Epoch != "" && after.Epoch != e.epoch, after.Seq > e.seq, after.Seq < oldest:
		return oldest, true
	}
	return after.Seq, false
}

// resync tells a watcher that he has missed something.
func (e *events) resync(before uint64) spec.Event {
	return spec.Event{Seq: before, Epoch: e.epoch, Time: time.Now(), Kind: spec.EventResync,
		Error: "what happened before is not known any more: look at containers and deployments anew"}
}

// Events implements api.Observer. A watcher who is so slow that events are forgotten before he
// has them is told that, too.
func (e *events) Events(ctx context.Context, after *spec.Mark, begun func() error,
	emit func(spec.Event) error) error {
	seq, missed := e.from(after)
	if begun != nil {
		if err := begun(); err != nil {
			return err
		}
	}
	for {
		evs, more := e.after(seq)
		if len(evs) > 0 && evs[0].Seq > seq+1 {
			seq, missed = evs[0].Seq-1, true
		}
		if missed {
			if err := emit(e.resync(seq)); err != nil {
				return err
			}
			missed = false
		}
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
func (e *events) watchEngine(ctx context.Context, c *engine.Engine) error {
	err := c.Events(ctx, func(ev engine.Event) {
		switch ev.Kind {
		case engine.EventExited:
			e.add(spec.Event{Time: ev.Time, Kind: spec.EventExited, Name: ev.Name, ExitCode: &ev.Exit})
		case engine.EventRemoved:
			e.add(spec.Event{Time: ev.Time, Kind: spec.EventRemoved, Name: ev.Name})
		}
	})
	if ctx.Err() != nil {
		return nil
	}
	return err
}
