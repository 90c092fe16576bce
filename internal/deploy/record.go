package deploy

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"dewpoint/internal/fetch"
	"dewpoint/internal/layer"
	"dewpoint/internal/spec"
	"dewpoint/internal/trace"
)

// recorder keeps the clock, the record and the trace of a run, and tells who watches. It exists once the run
// has left the queue. The run's own goroutine sets what mu does not guard.
type recorder struct {
	begun  time.Time
	watch  spec.Watch
	trace  *trace.Trace
	pull   *fetch.Pull     // what brings the layers; nil before, and if containerd alone has the image
	filled map[string]bool // layers whose filling the trace has
	over   chan struct{}   // closed to end the watching of the layers
	shown  sync.WaitGroup  // that watching

	mu   sync.Mutex
	rec  spec.Record // guarded by mu, but for its Name
	last string      // stage that was reached; guarded by mu
}

// newRecorder begins the record. The trace continues that of ctx.
func newRecorder(ctx context.Context, e *trace.Exporter, begun time.Time, rec spec.Record,
	w spec.Watch) *recorder {
	k := &recorder{begun: begun, watch: w, filled: map[string]bool{}, over: make(chan struct{}), rec: rec}
	k.rec.Stages = map[string]float64{}
	name := "deploy"
	if rec.Name == "" {
		name = "pull"
	}
	_, k.trace = trace.Begin(ctx, e, name, begun)
	return k
}

// steps are what leads to each stage, as the spans between the stages are called.
var steps = map[string]string{
	spec.Admitted: "admit",
	spec.Resolved: "resolve",
	spec.Tables:   "tables",
	spec.Mounted:  "mount",
	spec.Created:  "create",
	spec.Started:  "start",
	spec.Restored: "restore",
	spec.Ready:    "ready",
	spec.Complete: "complete",
}

// next is what follows a stage, "" being none yet: of a deployment that fails, the
// step under way.
var next = map[string]string{
	"":            "admit",
	spec.Admitted: "resolve",
	spec.Resolved: "mount",
	spec.Tables:   "mount",
	spec.Mounted:  "create",
	spec.Created:  "start",
	spec.Started:  "ready",
	spec.Restored: "ready",
	spec.Ready:    "complete",
}

// note changes the record.
func (k *recorder) note(change func(*spec.Record)) {
	k.mu.Lock()
	defer k.mu.Unlock()
	change(&k.rec)
}

// reached records a stage and tells who watches.
func (k *recorder) reached(stage string) {
	now := time.Now()
	k.step(stage, now)
	k.tell(stage, now)
}

// step shows in the trace that a stage was reached.
func (k *recorder) step(stage string, at time.Time) {
	k.mu.Lock()
	k.last = stage
	k.mu.Unlock()
	k.trace.Reached(steps[stage], at)
}

// tell has the record and who watches know of a stage that was reached.
func (k *recorder) tell(stage string, t time.Time) {
	at := t.Sub(k.begun).Seconds()
	k.note(func(rec *spec.Record) { rec.Stages[stage] = at })
	if k.watch.Reached != nil {
		k.watch.Reached(k.rec.Name, stage, at)
	}
}

// unrestored records that the container could not be restored, and is to boot from here on.
func (k *recorder) unrestored(err error) {
	k.mu.Lock()
	k.rec.Way.Why = append(k.rec.Way.Why, "restore: "+err.Error())
	step := next[k.last]
	k.last = spec.Resolved
	k.mu.Unlock()
	k.trace.Broke(step, err, time.Now())
}

// follow takes the pull into the record and shows its layers.
func (k *recorder) follow(p *fetch.Pull) {
	k.pull = p
	tables := p.Lazy != nil && !p.Local
	k.note(func(rec *spec.Record) {
		rec.Digest = p.Image.Target.Digest.String()
		if tables {
			rec.Way.Pack = p.Lazy.Trust
		}
	})
	if tables {
		k.reached(spec.Tables)
	}
	if k.watch.Layer != nil {
		k.shown.Go(k.show)
	}
}

// watchEvery is the time between two looks at the layers for who watches.
const watchEvery = 150 * time.Millisecond

// show reports the layers' progress until over is closed.
func (k *recorder) show() {
	last := map[string]spec.LayerProgress{}
	at, ended := time.Now(), false
	for {
		dt := time.Since(at).Seconds()
		at = time.Now()
		for _, l := range k.pull.Progress() {
			p := spec.LayerProgress{Digest: l.Layer.Digest.String(), Size: l.Layer.Size, Fetched: here(l),
				State: l.State.String()}
			was, known := last[p.Digest]
			if known && dt > 0 && p.Fetched > was.Fetched {
				p.Rate = float64(p.Fetched-was.Fetched) / dt
			}
			if !known || p != was {
				k.watch.Layer(p)
			}
			last[p.Digest] = p
		}
		if ended {
			return
		}
		select {
		case <-k.over:
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

// hush ends the telling: the caller is answered. Stages that follow are of the record alone.
func (k *recorder) hush() {
	close(k.over)
	k.shown.Wait()
	k.watch.Reached = nil
}

// traced ends the root of the trace: the caller is answered.
func (k *recorder) traced(err error) {
	k.waits()
	root := k.trace.Root()
	k.mu.Lock()
	rec, last := k.rec, k.last
	at := time.Now()
	if s, ok := rec.Stages[last]; ok && err == nil {
		at = k.begun.Add(time.Duration(s * float64(time.Second)))
	}
	k.mu.Unlock()
	for name, v := range map[string]string{"container": rec.Name, "image": rec.Image, "digest": rec.Digest,
		"start": rec.Way.Start, "why": strings.Join(rec.Way.Why, "; ")} {
		if v != "" {
			root.Set(name, v)
		}
	}
	k.trace.End(cmp.Or(next[last], "complete"), err, at)
}

// mostWaits is how many of the waits for absent bytes a trace has, the longest.
const mostWaits = 32

// waits adds to the trace what readers have waited for until now, of an image that is not whole.
func (k *recorder) waits() {
	if k.pull == nil || k.pull.Lazy == nil {
		return
	}
	all := k.pull.Waits(k.begun)
	if len(all) == 0 {
		return
	}
	var sum time.Duration
	for _, w := range all {
		sum += w.Took
	}
	k.trace.Root().Set("waits", len(all))
	k.trace.Root().Set("waited", sum.Seconds())
	slices.SortFunc(all, func(a, b fetch.Wait) int { return cmp.Compare(b.Took, a.Took) })
	for _, w := range all[:min(len(all), mostWaits)] {
		k.trace.Add("wait", w.Begun, w.Begun.Add(w.Took), nil,
			map[string]any{"layer": w.Layer.String(), "at": w.From})
	}
}

// snapshot is the record as it stands.
func (k *recorder) snapshot(err error) spec.Record {
	k.fills()
	k.mu.Lock()
	defer k.mu.Unlock()
	rec := k.rec
	rec.Stages = maps.Clone(rec.Stages)
	if p := k.pull; p != nil {
		layers := p.Progress()
		for _, l := range layers {
			rec.Bytes.PoP += l.From.PoP
			rec.Bytes.Local += l.From.Local
			if l.Again {
				rec.Way.Why = append(slices.Clip(rec.Way.Why),
					fmt.Sprintf("layer %s was fetched twice: the disk had lost it", l.Layer.Digest))
			}
		}
		rec.Bytes.Registry += p.Fetched()
		rec.Bytes.PoP += p.Within()
		rec.Way.Pull = wayOf(p.Local, p.Lazy != nil, layers)
		if p.Why != "" && rec.Way.Pull != "pop" {
			rec.Way.Why = append(slices.Clip(rec.Way.Why), rec.Way.Pull+": "+p.Why)
		}
	}
	if err != nil {
		rec.Error = err.Error()
	}
	rec.Spans = k.trace.Spans()
	return rec
}

// fills adds to the trace the layers whose filling is over, each once.
func (k *recorder) fills() {
	if k.pull == nil {
		return
	}
	for _, l := range k.pull.Progress() {
		id := l.Layer.Digest.String()
		if k.filled[id] || l.Begun.IsZero() || l.Readable.IsZero() && l.State != layer.Failed {
			continue
		}
		k.filled[id] = true
		from, to := l.Begun, l.Readable
		attrs := map[string]any{"layer": id, "size": l.Layer.Size, "state": l.State.String(),
			"written": l.Written, "waiting": l.Waiting.Seconds(), "blocked": l.Blocked.Seconds()}
		for source, n := range map[string]int64{"registry": l.From.Registry, "pop": l.From.PoP,
			"local": l.From.Local} {
			if n > 0 {
				attrs["bytes_"+source] = n
			}
		}
		if from.Before(k.begun) {
			from, attrs["joined"] = k.begun, true
		}
		if to.IsZero() {
			to = time.Now()
		}
		if !to.Before(from) {
			k.trace.Add("fill", from, to, nil, attrs)
		}
	}
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
