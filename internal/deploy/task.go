package deploy

import (
	"context"
	"slices"
	"sync"

	"dewpoint/internal/deploy/admit"
	"dewpoint/internal/deploy/journal"
	"dewpoint/internal/spec"
)

// task is the Queue's account of one run, from its acceptance to its end: who is told of it, and who keeps it
// going.
type task struct {
	k       *Queue
	run     *run // which has its place from the beginning, but for a container that is adopted; see enter
	entry   journal.Entry
	seq     uint64 // of the journal
	serial  uint64
	ctx     context.Context
	cancel  context.CancelCauseFunc
	release func() // what ctx has

	done chan struct{}
	// What it has come to, once done is closed.
	rec  spec.Record
	err  error
	last spec.Deployment

	mu       sync.Mutex
	stand    spec.Deployment // guarded by mu
	stages   []stageTold     // guarded by mu
	watchers []*watcher      // guarded by mu
	askers   int             // guarded by mu; of watchers
	told     admit.Place     // guarded by mu; what watchers were told last
}

type stageTold struct {
	name, stage string
	at          float64
}

// watcher is who is told of a task.
type watcher struct {
	spec.Watch
	asks bool // and keeps it going
}

// join adds a watcher and tells him what he has missed.
func (t *task) join(w spec.Watch, asks bool) *watcher {
	me := &watcher{w, asks}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.watchers = append(t.watchers, me)
	if asks {
		t.askers++
	}
	if w.Deployment != nil {
		if t.stand.State == spec.StateQueued && t.run.place != nil {
			t.told = t.run.place.Place()
		}
		w.Deployment(t.standing(t.told))
	}
	for _, s := range t.stages {
		if w.Reached != nil {
			w.Reached(s.name, s.stage, s.at)
		}
	}
	return me
}

// leave takes one away who was told. When he was the last who asked for it, the task is
// called off, and leave returns true, unless it is detached.
func (t *task) leave(a *asked) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	i := slices.Index(t.watchers, a.w)
	if i < 0 {
		return false
	}
	t.watchers = slices.Delete(t.watchers, i, i+1)
	if !a.w.asks {
		return false
	}
	t.askers--
	if t.askers > 0 || t.entry.Detached {
		return false
	}
	t.cancel(errGone)
	return true
}

// enter has the run take a place in the queue.
func (t *task) enter(g *admit.Group, accepted bool) error {
	t.mu.Lock() // others may ask for the place already
	defer t.mu.Unlock()
	return t.run.enter(g, accepted)
}

// placed reports whether the task has a place in the queue.
func (t *task) placed() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.run.place != nil
}

// watched reports whether somebody wants to be told of the task's place in the queue.
func (t *task) watched() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.run.place != nil && t.stand.State == spec.StateQueued && len(t.watchers) > 0
}

// standing is where the task stands, at place p if it is in the queue. It is called with mu held.
func (t *task) standing(p admit.Place) spec.Deployment {
	d := t.stand
	if d.State == spec.StateQueued {
		d.Position, d.Waits = p.Position, p.Waits
	}
	return d
}

// moved tells who watches that the task's place in the queue is another, if it is: of one far
// behind only when it has come on by a sixteenth, else a long queue would be told to all of it at every step.
func (t *task) moved(p admit.Place) {
	t.mu.Lock()
	defer t.mu.Unlock()
	far := max(p.Position, t.told.Position) / 16
	if t.stand.State != spec.StateQueued ||
		p.Waits == t.told.Waits && max(p.Position-t.told.Position, t.told.Position-p.Position) <= far {
		return
	}
	t.told = p
	t.tell()
}

// tell tells where the task stands. It is called with mu held.
func (t *task) tell() {
	d := t.standing(t.told)
	for _, w := range t.watchers {
		if w.Deployment != nil {
			w.Deployment(d)
		}
	}
}

func (t *task) reached(name, stage string, at float64) {
	t.mu.Lock()
	if stage == spec.Admitted {
		t.stand.State = spec.StateDeploying
		t.tell()
	}
	t.stages = append(t.stages, stageTold{name, stage, at})
	for _, w := range t.watchers {
		if w.Reached != nil {
			w.Reached(name, stage, at)
		}
	}
	t.mu.Unlock()
	t.k.d.cfg.Audience.Reached(t.entry.Deployment, stage, at)
}

func (t *task) layer(l spec.LayerProgress) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, w := range t.watchers {
		if w.Layer != nil {
			w.Layer(l)
		}
	}
}

// watch is what the Deployer tells. Layers are looked at for those who watch from the beginning.
func (t *task) watch() spec.Watch {
	w := spec.Watch{Reached: t.reached}
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, o := range t.watchers {
		if o.Hold != nil {
			w.Hold = o.Hold
		}
		if o.Layer != nil {
			w.Layer = t.layer
		}
	}
	return w
}

// written returns when the task's acceptance survives a power cut.
func (t *task) written(ctx context.Context) error { return t.k.j.Durable(ctx, t.seq) }

// finish tells what the task has come to. The Queue calls it once.
func (t *task) finish(d spec.Deployment, rec spec.Record, err error) {
	t.rec, t.err, t.last = rec, err, d
	t.mu.Lock()
	t.stand = d
	t.stand.Record = nil // it is told by itself
	t.tell()
	t.mu.Unlock()
	close(t.done)
}
