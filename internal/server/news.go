package server

import (
	"cmp"
	"context"
	"log/slog"
	"maps"
	"math"
	"slices"
	"sync/atomic"

	"dewpoint/internal/engine"
	"dewpoint/internal/server/metrics"
	"dewpoint/internal/spec"
)

// news is what becomes of deployments and pulls, as the log, the metrics and the event stream have it. It
// implements deploy.Audience, and is safe for concurrent use.
type news struct {
	events  *events
	metrics *metrics.Set
	log     *slog.Logger
	work    atomic.Int64 // counts what was done, to see when nothing is
}

// watched tells the event stream what w is told.
func (n *news) watched(img string, w spec.Watch) spec.Watch {
	tell := w.Reached
	w.Reached = func(name, stage string, at float64) {
		n.events.add(spec.Event{Kind: spec.EventStage, Name: name, Image: img, Stage: stage, At: at})
		if tell != nil {
			tell(name, stage, at)
		}
	}
	return w
}

// Reached tells of a stage of a deployment.
func (n *news) Reached(d spec.Deployment, stage string, at float64) {
	n.events.add(spec.Event{Kind: spec.EventStage, Name: d.Name, Image: d.Image, Stage: stage, At: at})
}

// Ended measures a deployment or pull that is being answered.
func (n *news) Ended(r spec.Record, err error) {
	var code string
	if err != nil {
		code = string(classify(err).Code)
	}
	n.metrics.Ended(r, err, code)
}

// Done logs a deployment or pull and tells the event stream its record.
func (n *news) Done(r spec.Record) {
	n.work.Add(1)
	n.metrics.Settled(r)
	kind, what := spec.EventRecord, "deployment"
	if r.Name == "" {
		kind, what = spec.EventPulled, "pull"
	}
	n.log.LogAttrs(context.Background(), slog.LevelInfo, what, summary(r)...)
	n.events.add(spec.Event{Kind: kind, Name: r.Name, Image: r.Image, Record: &r})
}

// restarted tells of a container that its policy started again, or could not.
func (n *news) restarted(i *engine.Info, restarts int, err error) {
	ev := spec.Event{Kind: spec.EventRestarted, Name: i.Name, Image: i.Image}
	if err != nil {
		ev.Error = err.Error()
		n.log.Error("a container cannot be started again", "container", i.Name, "restarts", restarts, "err", err)
	} else {
		n.log.Info("a container is started again", "container", i.Name, "restarts", restarts)
	}
	n.events.add(ev)
}

// healthy tells of a container whose health has another state, and why that is a bad one.
func (n *news) healthy(i *engine.Info, now, why string) {
	level := slog.LevelInfo
	if why != "" {
		level = slog.LevelWarn
	}
	n.log.Log(context.Background(), level, "a container's health has changed", "container", i.Name, "health", now,
		"why", why)
	n.events.add(spec.Event{Kind: spec.EventHealth, Name: i.Name, Image: i.Image, Health: now, Error: why})
}

// summary is what the log says of a record: its stages in seconds, in their order, and its
// compressed bytes. The steps of the work are left to traces and the event stream.
func summary(r spec.Record) []slog.Attr {
	var named []slog.Attr
	for _, f := range [][2]string{{"name", r.Name}, {"image", r.Image}, {"node", r.Node}, {"pull", r.Way.Pull},
		{"start", r.Way.Start}} {
		if f[1] != "" {
			named = append(named, slog.String(f[0], f[1]))
		}
	}
	var stages []slog.Attr
	for _, s := range slices.SortedFunc(maps.Keys(r.Stages), func(a, b string) int {
		return cmp.Compare(r.Stages[a], r.Stages[b])
	}) {
		stages = append(stages, slog.Float64(s, math.Round(r.Stages[s]*1000)/1000))
	}
	named = append(named, slog.GroupAttrs("stages", stages...),
		slog.Group("bytes", "registry", r.Bytes.Registry, "pop", r.Bytes.PoP, "local", r.Bytes.Local))
	if r.Error != "" {
		named = append(named, slog.String("error", r.Error))
	}
	return named
}
