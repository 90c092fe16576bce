package deploy

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"dewpoint/internal/deploy/admit"
	"dewpoint/internal/fetch"
	"dewpoint/internal/spec"
	"dewpoint/internal/trace"
)

// watchEvery is the time between two looks at the layers for who watches.
const watchEvery = 150 * time.Millisecond

// run is one deployment or pull that is under way: its clock and its record.
type run struct {
	d       *Deployer
	begun   time.Time
	watch   spec.Watch
	place   *admit.Ticket
	cgroup  string          // directory of the container's memory; "" before it is made
	life    context.Context // of the image's fills
	release context.CancelFunc
	pull    *fetch.Pull
	reg     *registration // of the image of pull; nil before it is known
	seen    chan struct{} // closed to end the watching of the layers
	gone    sync.WaitGroup
	trace   *trace.Trace
	filled  map[string]bool // layers that the trace has

	mu   sync.Mutex
	rec  spec.Record // guarded by mu once the image is resolved
	last string      // stage that was reached; guarded by mu
}

func (d *Deployer) begin(ctx context.Context, begun time.Time, ref, name string, w spec.Watch) *run {
	r := &run{d: d, begun: begun, watch: w, seen: make(chan struct{}), filled: map[string]bool{}}
	r.life, r.release = context.WithCancel(d.life)
	r.rec = spec.Record{Name: name, Image: ref, Node: d.cfg.Node, Stages: map[string]float64{}}
	r.begin(ctx)
	return r
}

// reached records a stage and tells who watches.
func (r *run) reached(stage string) { r.reachedAt(stage, time.Now()) }

func (r *run) reachedAt(stage string, t time.Time) {
	r.step(stage, t)
	r.tell(stage, t)
}

func (r *run) tell(stage string, t time.Time) {
	at := t.Sub(r.begun).Seconds()
	r.mu.Lock()
	r.rec.Stages[stage] = at
	r.mu.Unlock()
	if r.watch.Reached != nil {
		r.watch.Reached(r.rec.Name, stage, at)
	}
}

// mounted records the stage unless err says that it was not reached.
func (r *run) mounted(err error) error {
	if err == nil {
		r.reached(spec.Mounted)
	}
	return err
}

// follow takes the pull into the record and shows its layers.
func (r *run) follow(p *fetch.Pull) {
	r.pull = p
	r.reg.follow(p)
	r.rec.Digest = p.Image.Target.Digest.String()
	if p.Lazy != nil && !p.Local {
		r.rec.Way.Pack = p.Lazy.Trust
		r.reached(spec.Tables)
	}
	if r.watch.Layer != nil {
		r.gone.Go(r.show)
	}
}

// show reports the layers' progress until seen is closed.
func (r *run) show() {
	last := map[string]spec.LayerProgress{}
	at, ended := time.Now(), false
	for {
		dt := time.Since(at).Seconds()
		at = time.Now()
		for _, l := range r.pull.Progress() {
			p := spec.LayerProgress{Digest: l.Layer.Digest.String(), Size: l.Layer.Size, Fetched: here(l),
				State: l.State.String()}
			was, known := last[p.Digest]
			if known && dt > 0 && p.Fetched > was.Fetched {
				p.Rate = float64(p.Fetched-was.Fetched) / dt
			}
			if !known || p != was {
				r.watch.Layer(p)
			}
			last[p.Digest] = p
		}
		if ended {
			return
		}
		select {
		case <-r.seen:
			ended = true // one more look: who watches is to see the end
		case <-time.After(watchEvery):
		}
	}
}

// here is how many compressed bytes of a layer are here, or as good as here.
func here(l fetch.LayerProgress) int64 {
	if l.From.PoP == 0 {
		return l.Fetched
	}
	return min(l.Layer.Size, l.From.Local+l.From.PoP+l.From.Registry)
}

// started lets what the start did without come: now, if the container is known
// to be ready.
func (r *run) started(ready bool) {
	switch {
	case r.pull == nil:
	case ready:
		r.pull.Background()
	default:
		r.pull.BackgroundSoon()
	}
}

// fetched adds bytes that came from the registry beside the layers' fills.
func (r *run) fetched(n int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.rec.Bytes.Registry += n
}

// settle blocks until every layer is complete.
func (r *run) settle(ctx context.Context) error {
	if r.pull == nil {
		return nil
	}
	if err := r.pull.WaitComplete(ctx); err != nil {
		return err
	}
	r.reached(spec.Complete)
	return nil
}

// end closes the record of a run that ended with err. After a success the
// layers that are not complete yet go on, and Audience.Done gets the record with
// the moment when they are; after a failure they are given up.
func (r *run) end(err error) spec.Record {
	r.reg.close()
	close(r.seen)
	r.gone.Wait()
	if err != nil {
		r.started(true)
	}
	r.watch.Reached = nil
	r.traced(err)
	rec := r.snapshot(err)
	r.d.cfg.Audience.Ended(rec, err)
	if _, done := rec.Stages[spec.Complete]; done || err != nil || r.pull != nil && r.pull.Deferred() {
		r.finish(rec)
		return rec
	}
	r.d.bg.Go(func() {
		err := r.settle(r.life)
		if errors.Is(err, context.Canceled) {
			r.release()
			return
		}
		if err != nil {
			r.d.cfg.Log.Error("the image runs, and not all is well", "image", r.rec.Image, "err", err)
		}
		r.finish(r.snapshot(err))
	})
	return rec
}

func (r *run) finish(rec spec.Record) {
	r.release()
	r.d.cfg.Audience.Done(rec)
}

// snapshot is the record as it stands.
func (r *run) snapshot(err error) spec.Record {
	r.fills()
	r.mu.Lock()
	defer r.mu.Unlock()
	rec := r.rec
	rec.Stages = maps.Clone(rec.Stages)
	if r.pull != nil {
		layers := r.pull.Progress()
		for _, l := range layers {
			rec.Bytes.PoP += l.From.PoP
			rec.Bytes.Local += l.From.Local
			if l.Again {
				rec.Way.Why = append(slices.Clip(rec.Way.Why),
					fmt.Sprintf("layer %s was fetched twice: the disk had lost it", l.Layer.Digest))
			}
		}
		rec.Bytes.Registry += r.pull.Fetched()
		rec.Bytes.PoP += r.pull.Within()
		rec.Way.Pull = wayOf(r.pull.Local, r.pull.Lazy != nil, layers)
		if r.pull.Why != "" && rec.Way.Pull != "pop" {
			rec.Way.Why = append(slices.Clip(rec.Way.Why), rec.Way.Pull+": "+r.pull.Why)
		}
	}
	if err != nil {
		rec.Error = err.Error()
	}
	rec.Spans = r.trace.Spans()
	return rec
}

// wayOf says how the image came here. It is "pop" if no layer came from a
// registry, and some came out of the PoP: though nothing had to begin, since
// its store has them.
func wayOf(local, lazy bool, layers []fetch.LayerProgress) string {
	var pop int64
	registry := false
	for _, l := range layers {
		pop += l.From.PoP
		registry = registry || l.From.Registry > 0 || !l.State.Usable()
	}
	switch {
	case lazy && !local:
		return "lazy"
	case pop > 0 && !registry:
		return "pop"
	case local:
		return "local"
	}
	return "whole"
}
