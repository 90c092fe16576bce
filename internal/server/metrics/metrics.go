// Package metrics is what a node measures for Prometheus.
//
// Metrics are of two kinds. What the parts count anyway is read from them when
// somebody scrapes: Counters, Gauges and Collect register functions that do so.
// What has to be observed when it happens, durations above all, is told to a
// Set: deployments that ended, calls of the API, waits for absent bytes. Both
// cost nothing while nobody looks but the memory of their series, which is
// bounded: every label has few values, known beforehand, and names of images,
// containers, callers and layers are never labels (they are in the records).
//
// docs/operate/metrics.md lists them all; a test compares.
package metrics

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"slices"
	"strings"
	"time"

	"dewpoint/internal/spec"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// prefix of all names.
const prefix = "dewpoint_"

// buckets, in seconds, reach from a stage that has nothing to do to a large
// image over a slow link.
var buckets = []float64{.001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10, 20, 30, 60, 120, 300}

// Set is a node's metrics. It is safe for concurrent use.
type Set struct {
	registry *prometheus.Registry

	stages      *prometheus.HistogramVec // stage, start, pull, outcome
	deployments *prometheus.HistogramVec // kind, start, pull, outcome
	bytes       *prometheus.CounterVec   // source
	failures    *prometheus.CounterVec   // code
	calls       *prometheus.HistogramVec // method, code
	waits       prometheus.Histogram
	evicted     prometheus.Counter
	freed       prometheus.Counter
}

// New returns a Set with the process's own metrics.
func New(version string) *Set {
	s := &Set{
		registry: prometheus.NewRegistry(),
		stages: histogram("deployment_stage_seconds", "Time from the stage before to this one.", "stage",
			"start", "pull", "outcome"),
		deployments: histogram("deployment_seconds",
			"Time from the instruction until the container is ready, the image is pulled, or it failed.", "kind",
			"start", "pull", "outcome"),
		bytes: counter("deployment_bytes_total",
			"Compressed bytes of the layers of deployments and pulls, by where they came from.", "source"),
		failures: counter("deployment_failures_total",
			"Deployments and pulls that failed, by the API's error code.", "code"),
		calls: histogram("api_call_seconds",
			"Time of the API's calls; streams last as long as the client listens.", "method", "code"),
		evicted: prometheus.NewCounter(prometheus.CounterOpts{Name: prefix + "cache_evicted_layers_total",
			Help: "Layers that nothing used and that were removed from the node to make room."}),
		freed: prometheus.NewCounter(prometheus.CounterOpts{Name: prefix + "cache_evicted_bytes_total",
			Help: "Bytes of disk that this freed, what cut pulls had left included."}),
	}
	s.waits = prometheus.NewHistogram(opts("lazy_wait_seconds",
		"Time that something waited for absent bytes of a layer."))
	info := prometheus.NewGauge(prometheus.GaugeOpts{Name: prefix + "build_info",
		Help: "1, with the version of dewd.", ConstLabels: prometheus.Labels{"version": version}})
	info.Set(1)
	s.registry.MustRegister(collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		s.stages, s.deployments, s.bytes, s.failures, s.calls, s.waits, s.evicted, s.freed, info)
	return s
}

// opts are a histogram's, in classic buckets for every scraper and in native
// ones, bounded, for those that ask for them.
func opts(name, help string) prometheus.HistogramOpts {
	return prometheus.HistogramOpts{Name: prefix + name, Help: help, Buckets: buckets,
		NativeHistogramBucketFactor: 1.2, NativeHistogramMaxBucketNumber: 64,
		NativeHistogramMinResetDuration: time.Hour}
}

func histogram(name, help string, labels ...string) *prometheus.HistogramVec {
	return prometheus.NewHistogramVec(opts(name, help), labels)
}

func counter(name, help string, labels ...string) *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{Name: prefix + name, Help: help}, labels)
}

// Registry is where all are registered.
func (s *Set) Registry() *prometheus.Registry { return s.registry }

// Handler answers scrapes.
func (s *Set) Handler() http.Handler {
	return promhttp.HandlerFor(s.registry,
		promhttp.HandlerOpts{MaxRequestsInFlight: 4, Timeout: 10 * time.Second})
}

// stages are the steps of a deployment, as their spans are called, and the
// stages that they lead to.
var stages = map[string]string{
	"admit": spec.Admitted, "resolve": spec.Resolved, "tables": spec.Tables, "mount": spec.Mounted,
	"create": spec.Created,
	"start":  spec.Started, "restore": spec.Restored, "ready": spec.Ready, "complete": spec.Complete,
}

// The outcomes of a deployment and of its stages.
const (
	outcomeOK       = "ok"
	outcomeFailed   = "failed"
	outcomeCanceled = "canceled"
)

func outcomeOf(err error) string {
	switch {
	case err == nil:
		return outcomeOK
	case errors.Is(err, context.Canceled):
		return outcomeCanceled
	}
	return outcomeFailed
}

// Ended observes a deployment or pull that was answered: by its record, and
// why it failed, which the API calls code.
func (s *Set) Ended(r spec.Record, err error, code string) {
	start, pull, kind := cmp.Or(r.Way.Start, "none"), cmp.Or(r.Way.Pull, "none"), "deploy"
	if r.Name == "" {
		kind = "pull"
	}
	for _, p := range r.Spans {
		if stage, ok := stages[p.Name]; ok {
			s.stages.WithLabelValues(stage, start, pull, spanOutcome(p, err)).Observe(p.To - p.From)
		}
	}
	if i := slices.IndexFunc(r.Spans, func(p spec.Span) bool { return p.Name == kind }); i >= 0 {
		s.deployments.WithLabelValues(kind, start, pull, outcomeOf(err)).Observe(r.Spans[i].To - r.Spans[i].From)
	}
	if err != nil {
		s.failures.WithLabelValues(code).Inc()
	}
}

// spanOutcome is that of a stage of a deployment that ended with err.
func spanOutcome(p spec.Span, err error) string {
	if p.Attributes["error"] == "" {
		return outcomeOK
	}
	return cmp.Or(map[bool]string{true: outcomeFailed}[err == nil], outcomeOf(err))
}

// Settled observes one whose layers are complete, or will not be.
func (s *Set) Settled(r spec.Record) {
	for source, n := range map[string]int64{"registry": r.Bytes.Registry, "pop": r.Bytes.PoP,
		"local": r.Bytes.Local} {
		s.bytes.WithLabelValues(source).Add(float64(max(0, n)))
	}
	if r.Name == "" || r.Stages[spec.Complete] == 0 {
		return
	}
	took := r.Stages[spec.Complete] - r.Stages[spec.Ready]
	s.stages.WithLabelValues(spec.Complete, cmp.Or(r.Way.Start, "none"), cmp.Or(r.Way.Pull, "none"),
		outcomeOK).Observe(max(0, took))
}

// Call observes one call of the API: its procedure, "/package.Service/Method",
// and the API's error code or "ok".
func (s *Set) Call(procedure, code string, took time.Duration) {
	s.calls.WithLabelValues(procedure[strings.LastIndexByte(procedure, '/')+1:], code).Observe(took.Seconds())
}

// Waited observes a wait for absent bytes.
func (s *Set) Waited(took time.Duration) { s.waits.Observe(took.Seconds()) }

// Evicted counts what was removed from the node to make room.
func (s *Set) Evicted(layers int, bytes int64) {
	s.evicted.Add(float64(layers))
	s.freed.Add(float64(max(0, bytes)))
}
