package deploy

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"time"

	"dewpoint/internal/fetch"
	"dewpoint/internal/layer"
	"dewpoint/internal/spec"
	"dewpoint/internal/trace"
)

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

// begin makes the run's trace, which continues that of ctx.
func (r *run) begin(ctx context.Context) {
	name := "deploy"
	if r.rec.Name == "" {
		name = "pull"
	}
	_, r.trace = trace.Begin(ctx, r.d.cfg.Traces, name, r.begun)
	r.life = r.trace.Into(r.life)
}

// step shows in the trace that a stage was reached.
func (r *run) step(stage string, at time.Time) {
	r.mu.Lock()
	r.last = stage
	r.mu.Unlock()
	r.trace.Reached(steps[stage], at)
}

// broke shows that the container could not be restored, and is to boot from here on.
func (r *run) broke(err error) {
	r.mu.Lock()
	step := next[r.last]
	r.last = spec.Resolved
	r.mu.Unlock()
	r.trace.Broke(step, err, time.Now())
}

// mostWaits is how many of the waits for absent bytes a trace has, the longest.
const mostWaits = 32

// waits adds to the trace what readers have waited for until now, of an image that is not whole.
func (r *run) waits() {
	if r.pull == nil || r.pull.Lazy == nil {
		return
	}
	all := r.pull.Waits(r.begun)
	if len(all) == 0 {
		return
	}
	var sum time.Duration
	for _, w := range all {
		sum += w.Took
	}
	r.trace.Root().Set("waits", len(all))
	r.trace.Root().Set("waited", sum.Seconds())
	slices.SortFunc(all, func(a, b fetch.Wait) int { return cmp.Compare(b.Took, a.Took) })
	for _, w := range all[:min(len(all), mostWaits)] {
		r.trace.Add("wait", w.Begun, w.Begun.Add(w.Took), nil,
			map[string]any{"layer": w.Layer.String(), "at": w.From})
	}
}

// traced ends the root of the trace: the caller is answered.
func (r *run) traced(err error) {
	r.waits()
	root := r.trace.Root()
	r.mu.Lock()
	rec, last := r.rec, r.last
	at := time.Now()
	if s, ok := rec.Stages[last]; ok && err == nil {
		at = r.begun.Add(time.Duration(s * float64(time.Second)))
	}
	r.mu.Unlock()
	for k, v := range map[string]string{"container": rec.Name, "image": rec.Image, "digest": rec.Digest,
		"start": rec.Way.Start, "why": strings.Join(rec.Way.Why, "; ")} {
		if v != "" {
			root.Set(k, v)
		}
	}
	r.trace.End(cmp.Or(next[last], "complete"), err, at)
}

// fills adds to the trace the layers whose filling is over, each once.
func (r *run) fills() {
	if r.pull == nil {
		return
	}
	for _, l := range r.pull.Progress() {
		id := l.Layer.Digest.String()
		if r.filled[id] || l.Begun.IsZero() || l.Readable.IsZero() && l.State != layer.Failed {
			continue
		}
		r.filled[id] = true
		r.fillSpan(id, l)
	}
}

func (r *run) fillSpan(id string, l fetch.LayerProgress) {
	from, to := l.Begun, l.Readable
	attrs := map[string]any{"layer": id, "size": l.Layer.Size, "state": l.State.String(), "written": l.Written,
		"waiting": l.Waiting.Seconds(), "blocked": l.Blocked.Seconds()}
	for source, n := range map[string]int64{"registry": l.From.Registry, "pop": l.From.PoP,
		"local": l.From.Local} {
		if n > 0 {
			attrs["bytes_"+source] = n
		}
	}
	if from.Before(r.begun) {
		from, attrs["joined"] = r.begun, true
	}
	if to.IsZero() {
		to = time.Now()
	}
	if !to.Before(from) {
		r.trace.Add("fill", from, to, nil, attrs)
	}
}
