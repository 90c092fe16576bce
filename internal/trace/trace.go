// Package trace follows a deployment in steps finer than its stages.
//
// A Trace is one deployment: a tree of spans under a root. Whoever works for
// the deployment has a context that Begin, or Start above it, has returned, and
// marks what takes time:
//
//	ctx, step := trace.Start(ctx, "snapshot")
//	defer step.End()
//
// Below a context without a Trace that does nothing, so packages need not know
// whether they work for a deployment.
//
// Between the root and such steps stand the stages. Exactly one stage's span is
// open at a time; Reached names it, ends it and opens the next at the same
// instant, so that they follow each other without a gap and sum to the stage
// times of the record. What Start begins belongs to the stage that is open.
// What may outlast a stage, since it goes on beside the deployment's own thread,
// is begun under Beside and belongs to the root.
//
// Every trace keeps its spans, at most maxSpans, for the record. With an
// Exporter they also go to an OpenTelemetry collector; its spans are made only
// then. A span costs well below a microsecond without, a few with (see the
// package's benchmark).
package trace

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"dewpoint/internal/spec"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	otel "go.opentelemetry.io/otel/trace"
)

const (
	maxSpans = 192 // that one trace keeps and exports
	maxAttrs = 12  // of one span
	maxValue = 256 // bytes of an attribute
)

// Trace is one deployment, or pull. It is safe for concurrent use.
type Trace struct {
	begun  time.Time
	tracer otel.Tracer // nil: nothing is exported
	root   *Span       // its children belong to the stage that is open
	beside *Span       // the root, its children its own

	mu      sync.Mutex
	stage   *Span // the open one
	spans   []ended
	dropped int
}

type ended struct {
	*Span
	to time.Time
}

// Span is a step under way. A nil Span is one of which nobody keeps account.
// Set and End are called by one goroutine.
type Span struct {
	t      *Trace
	parent *Span  // nil: the root
	name   string // guarded by t.mu
	from   time.Time
	attrs  map[string]string // guarded by t.mu
	otel   otel.Span         // nil: not exported
}

type key struct{}

// Begin begins a Trace whose root is called name. The root continues the remote
// span of ctx, if it has one (see FromHeader). e may be nil: then spans are kept
// for the record only.
func Begin(ctx context.Context, e *Exporter, name string, begun time.Time) (context.Context, *Trace) {
	t := &Trace{begun: begun, tracer: e.tracer()}
	t.root = &Span{t: t, name: name, from: begun}
	remote := otel.SpanContextFromContext(ctx)
	if t.tracer != nil {
		parent := otel.ContextWithRemoteSpanContext(context.Background(), remote)
		_, t.root.otel = t.tracer.Start(parent, name, otel.WithTimestamp(begun),
			otel.WithSpanKind(otel.SpanKindServer))
		remote = t.root.otel.SpanContext()
	}
	if remote.HasTraceID() {
		t.root.Set("trace", remote.TraceID().String())
	}
	t.beside = &Span{t: t, otel: t.root.otel}
	t.stage = t.begin(nil, "", begun)
	return t.Into(ctx), t
}

// Into is ctx for work of the deployment. t may be nil.
func (t *Trace) Into(ctx context.Context) context.Context {
	if t == nil {
		return ctx
	}
	return context.WithValue(ctx, key{}, t.root)
}

// Beside is ctx for work of the same deployment that may outlast the stage in
// which it begins.
func Beside(ctx context.Context) context.Context {
	if s, ok := ctx.Value(key{}).(*Span); ok {
		return context.WithValue(ctx, key{}, s.t.beside)
	}
	return ctx
}

// Start begins a step of what ctx works for. End must follow.
func Start(ctx context.Context, name string) (context.Context, *Span) {
	p, ok := ctx.Value(key{}).(*Span)
	if !ok {
		return ctx, nil
	}
	s := p.t.begin(p, name, time.Now())
	return context.WithValue(ctx, key{}, s), s
}

// begin begins a span below p; nil is the root.
func (t *Trace) begin(p *Span, name string, at time.Time) *Span {
	switch p {
	case t.root:
		t.mu.Lock()
		p = t.stage
		t.mu.Unlock()
	case t.beside:
		p = nil
	}
	s := &Span{t: t, parent: p, name: name, from: at}
	if t.tracer != nil {
		above := t.root
		if p != nil {
			above = p
		}
		_, s.otel = t.tracer.Start(otel.ContextWithSpan(context.Background(), above.otel), name,
			otel.WithTimestamp(at))
	}
	return s
}

// Set gives the span an attribute: a string, bool, int, int64 or float64.
// Beyond a dozen of them, and beyond 256 bytes, nothing is kept.
func (s *Span) Set(name string, value any) {
	if s == nil {
		return
	}
	text := fmt.Sprint(value)
	text = text[:min(len(text), maxValue)]
	s.t.mu.Lock()
	if s.attrs == nil {
		s.attrs = map[string]string{}
	}
	if _, again := s.attrs[name]; len(s.attrs) < maxAttrs || again {
		s.attrs[name] = text
	}
	s.t.mu.Unlock()
	if s.otel != nil {
		s.otel.SetAttributes(typed(name, value, text))
	}
}

func typed(name string, value any, text string) attribute.KeyValue {
	switch v := value.(type) {
	case int:
		return attribute.Int(name, v)
	case int64:
		return attribute.Int64(name, v)
	case float64:
		return attribute.Float64(name, v)
	case bool:
		return attribute.Bool(name, v)
	}
	return attribute.String(name, text)
}

// Fail says why the step did not succeed. nil changes nothing.
func (s *Span) Fail(err error) {
	if s == nil || err == nil {
		return
	}
	s.Set("error", err.Error())
	if s.otel != nil {
		s.otel.SetStatus(codes.Error, err.Error())
	}
}

// End ends the step now.
func (s *Span) End() {
	if s != nil {
		s.end(time.Now(), false)
	}
}

// EndAt ends it at a moment that is past.
func (s *Span) EndAt(at time.Time) {
	if s != nil {
		s.end(at, false)
	}
}

// end keeps and exports the span, if there is room or it must be.
func (s *Span) end(at time.Time, must bool) {
	t := s.t
	t.mu.Lock()
	kept := must || len(t.spans) < maxSpans
	if kept {
		t.spans = append(t.spans, ended{s, at})
	} else {
		t.dropped++
	}
	t.mu.Unlock()
	if s.otel != nil && kept {
		s.otel.End(otel.WithTimestamp(at))
	}
}

// Reached ends the span of the stage under way, which was called step, and
// opens that of the next. It is called by one goroutine at a time, with moments
// in order.
func (t *Trace) Reached(step string, at time.Time) {
	t.mu.Lock()
	s := t.stage
	t.mu.Unlock()
	next := t.begin(nil, "", at)
	t.mu.Lock()
	t.stage = next
	t.mu.Unlock()
	s.conclude(step, nil, at)
}

// Broke is Reached for a stage that failed, and after which the deployment goes
// on in another way.
func (t *Trace) Broke(step string, err error, at time.Time) {
	t.mu.Lock()
	s := t.stage
	t.mu.Unlock()
	s.Fail(err)
	t.Reached(step, at)
}

func (s *Span) conclude(step string, err error, at time.Time) {
	s.t.mu.Lock()
	s.name = step
	s.t.mu.Unlock()
	if s.otel != nil {
		s.otel.SetName(step)
	}
	s.Fail(err)
	s.end(at, true)
}

// Add adds a child of the root that is over.
func (t *Trace) Add(name string, from, to time.Time, err error, attrs map[string]any) {
	s := t.begin(nil, name, from)
	for k, v := range attrs {
		s.Set(k, v)
	}
	s.Fail(err)
	s.end(to, false)
}

// Root is the root's span, for its attributes; End is not called on it.
func (t *Trace) Root() *Span { return t.root }

// End ends the root at a moment. Unless err is nil the stage under way has
// failed, which is called step. What goes on behind a deployment that is ready
// may still be added.
func (t *Trace) End(step string, err error, at time.Time) {
	t.mu.Lock()
	open, dropped := t.stage, t.dropped
	t.mu.Unlock()
	if err != nil {
		open.conclude(step, err, at)
	}
	if dropped > 0 {
		t.root.Set("spans_dropped", dropped)
	}
	t.root.Fail(err)
	t.root.end(at, true)
}

// Spans are those that have ended: the root, if it has, and the others in the
// order in which they began. The name of one within others says so: "create/task".
func (t *Trace) Spans() []spec.Span {
	if t == nil {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	out := make([]spec.Span, 0, len(t.spans))
	all := slices.Clone(t.spans)
	slices.SortStableFunc(all, func(a, b ended) int {
		if root := a.Span == t.root; root != (b.Span == t.root) {
			return map[bool]int{true: -1, false: 1}[root]
		}
		return cmp.Or(a.from.Compare(b.from), b.to.Compare(a.to))
	})
	for _, s := range all {
		out = append(out, spec.Span{Name: s.path(), From: s.from.Sub(t.begun).Seconds(),
			To: s.to.Sub(t.begun).Seconds(), Attributes: maps.Clone(s.attrs)})
	}
	return out
}

// path is called with t.mu held.
func (s *Span) path() string {
	if s.parent == nil {
		return s.name
	}
	return s.parent.path() + "/" + s.name
}
