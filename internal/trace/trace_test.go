package trace_test

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"dewpoint/internal/spec"
	"dewpoint/internal/trace"
	"dewpoint/testkit"
	"dewpoint/testkit/tracetest"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// deployment is a trace as deployments make them.
func deployment(ctx context.Context, e *trace.Exporter) *trace.Trace {
	begun := time.Now()
	ctx, t := trace.Begin(ctx, e, "deploy", begun)
	t.Root().Set("container", "web")
	beside, reg := trace.Start(trace.Beside(ctx), "register")
	_, l := trace.Start(beside, "layer")
	t.Reached("resolve", time.Now())
	l.End()
	t.Reached("mount", time.Now())
	reg.End()
	in, task := trace.Start(ctx, "task")
	_, shim := trace.Start(in, "shim")
	shim.Set("bytes", 7)
	shim.End()
	task.End()
	at := time.Now()
	t.Reached("create", at)
	t.Add("fill", begun, at, nil, map[string]any{"layer": "sha256:1"})
	t.End("start", nil, at)
	return t
}

// Stages follow each other without a gap, steps lie within their stages, and
// what runs beside belongs to the root.
func TestSpans(t *testing.T) {
	spans := deployment(t.Context(), nil).Spans()
	by := map[string]spec.Span{}
	for _, s := range spans {
		by[s.Name] = s
	}
	want := []string{"create", "create/task", "create/task/shim", "deploy", "fill", "mount", "register",
		"register/layer", "resolve"}
	if len(spans) != len(want) {
		t.Errorf("%d spans: %+v", len(spans), spans)
	}
	for _, name := range want {
		s, ok := by[name]
		if above, _, nested := cutLast(name); nested && (s.From < by[above].From || s.To > by[above].To) {
			t.Errorf("%s is not within %s", name, above)
		}
		if !ok || s.To < s.From || s.From < 0 || s.To > by["deploy"].To {
			t.Errorf("%s: %+v, there: %t", name, s, ok)
		}
	}
	if by["resolve"].From != 0 || by["resolve"].To != by["mount"].From || by["mount"].To != by["create"].From ||
		by["create"].To != by["deploy"].To {
		t.Errorf("there are gaps: %+v", spans)
	}
	if by["create/task/shim"].Attributes["bytes"] != "7" || by["deploy"].Attributes["container"] != "web" {
		t.Errorf("attributes: %+v", spans)
	}
}

func cutLast(s string) (above, name string, ok bool) {
	i := strings.LastIndexByte(s, '/')
	if i < 0 {
		return "", s, false
	}
	return s[:i], s[i+1:], true
}

// The collector gets the same spans, below the caller's.
func TestExport(t *testing.T) {
	c := tracetest.New(t)
	e, err := trace.NewExporter(t.Context(), trace.Config{Endpoint: c.URL, Node: "n1", Version: "7"})
	if err != nil {
		t.Fatal(err)
	}
	h := http.Header{}
	h.Set(trace.Header, "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
	mine := deployment(trace.FromHeader(t.Context(), h), e)
	e.Close()
	got := c.Spans()
	if want := mine.Spans(); len(got) != len(want) {
		t.Fatalf("got %d of %d spans: %+v", len(got), len(want), got)
	}
	by := map[string]tracetest.Span{}
	for _, s := range got {
		by[s.Name] = s
		if s.Trace != "0af7651916cd43dd8448eb211c80319c" || s.Resource["service.name"] != "dewd" ||
			s.Resource["host.name"] != "n1" {
			t.Errorf("%+v", s)
		}
	}
	for name, above := range map[string]string{"resolve": "deploy", "mount": "deploy", "create": "deploy",
		"task": "create", "shim": "task", "register": "deploy", "layer": "register", "fill": "deploy"} {
		if by[name].Parent != by[above].ID || by[above].ID == "" {
			t.Errorf("%s is not below %s", name, above)
		}
	}
	if by["deploy"].Parent != "b7ad6b7169203331" || mine.Spans()[0].Attributes["trace"] != by["deploy"].Trace {
		t.Errorf("the root: %+v, in the record %+v", by["deploy"], mine.Spans()[0])
	}
	if sent, lost := e.Sent(); sent != int64(len(got)) || lost != 0 {
		t.Errorf("%d sent, %d lost", sent, lost)
	}
}

// A failure is in the stage that was under way, and in the root.
func TestFailure(t *testing.T) {
	_, tr := trace.Begin(t.Context(), nil, "deploy", time.Now())
	tr.Reached("resolve", time.Now())
	tr.End("mount", errors.New("no disk"), time.Now())
	for _, s := range tr.Spans() {
		if failed := s.Attributes["error"] == "no disk"; failed == (s.Name == "resolve") {
			t.Errorf("%+v", s)
		}
	}
}

// A caller that wants no samples gets none sent; the record has them.
func TestUnsampled(t *testing.T) {
	c := tracetest.New(t)
	e, err := trace.NewExporter(t.Context(), trace.Config{Endpoint: c.URL})
	if err != nil {
		t.Fatal(err)
	}
	h := http.Header{}
	h.Set(trace.Header, "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00")
	mine := deployment(trace.FromHeader(t.Context(), h), e)
	e.Close()
	if n := len(c.Spans()); n != 0 || len(mine.Spans()) == 0 {
		t.Errorf("%d spans were sent, %d kept", n, len(mine.Spans()))
	}
}

// What nobody follows costs and does nothing; hostile headers are passed over.
func TestNobody(t *testing.T) {
	ctx, s := trace.Start(trace.Beside(t.Context()), "x")
	s.Set("a", 1)
	s.Fail(errors.New("x"))
	s.End()
	if s != nil || ctx != t.Context() {
		t.Error("a span without a trace")
	}
	for _, v := range []string{"", "00", "00-0-0-0", strings.Repeat("0", 1<<16),
		"00-00000000000000000000000000000000-0000000000000000-01"} {
		h := http.Header{}
		h.Set(trace.Header, v)
		if _, tr := trace.Begin(trace.FromHeader(t.Context(), h), nil, "deploy", time.Now()); tr.Root() == nil {
			t.Errorf("%q", v)
		}
	}
}

// Neither spans nor attributes grow without bound.
func TestBounds(t *testing.T) {
	ctx, tr := trace.Begin(t.Context(), nil, "deploy", time.Now())
	for i := range 2000 {
		_, s := trace.Start(ctx, "x")
		for k := range 30 {
			s.Set(strings.Repeat("k", k+1), strings.Repeat("v", 300*(i%2)))
		}
		s.End()
	}
	tr.End("ready", nil, time.Now())
	spans := tr.Spans()
	if len(spans) > 200 {
		t.Errorf("%d spans are kept", len(spans))
	}
	for _, s := range spans {
		if len(s.Attributes) > 12 ||
			slices.ContainsFunc([]string{s.Attributes["k"]}, func(v string) bool { return len(v) > 256 }) {
			t.Errorf("%+v", s)
		}
	}
	if !slices.ContainsFunc(spans, func(s spec.Span) bool {
		return s.Name == "deploy" && s.Attributes["spans_dropped"] != ""
	}) {
		t.Error("the root does not say that spans were dropped, or is not there")
	}
}

// A collector that is away costs a line of the log.
func TestAway(t *testing.T) {
	away := "http://" + testkit.FreeAddress(t)
	said := &lines{}
	e, err := trace.NewExporter(t.Context(),
		trace.Config{Endpoint: away, Log: slog.New(slog.NewTextHandler(said, nil))})
	if err != nil {
		t.Fatal(err)
	}
	for range 400 { // several times what waits for the collector
		deployment(t.Context(), e)
	}
	testkit.Eventually(t, "it says something", func() bool { return said.count() > 0 })
	e.Close()
	if _, lost := e.Sent(); lost == 0 || said.count() != 1 || !strings.Contains(said.String(), away) {
		t.Errorf("%d lost; the log:\n%s", lost, said)
	}
}

// Nowhere to send to is no Exporter.
func TestNowhere(t *testing.T) {
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "")
	if e, err := trace.NewExporter(t.Context(), trace.Config{}); e != nil || err != nil {
		t.Errorf("%v, %v", e, err)
	}
	c := tracetest.New(t)
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", c.URL)
	e, err := trace.NewExporter(t.Context(), trace.Config{})
	if err != nil {
		t.Fatal(err)
	}
	deployment(t.Context(), e)
	e.Close()
	if len(c.Spans()) == 0 {
		t.Error("the environment's collector got nothing")
	}
}

type lines struct {
	mu sync.Mutex
	b  strings.Builder
	n  int
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.n++
	return l.b.Write(b)
}

func (l *lines) count() int { l.mu.Lock(); defer l.mu.Unlock(); return l.n }

func (l *lines) String() string { l.mu.Lock(); defer l.mu.Unlock(); return l.b.String() }

// BenchmarkTrace is all the tracing of one deployment, kept for its record; sent
// as well; and a step of which nobody keeps account.
func BenchmarkTrace(b *testing.B) {
	one := func(ctx context.Context, e *trace.Exporter) {
		tr := deployment(ctx, e)
		steps := tr.Into(ctx)
		for range 20 {
			_, s := trace.Start(steps, "step")
			s.Set("layer", "sha256:0123")
			s.End()
		}
		if len(tr.Spans()) == 0 {
			b.Fatal("no spans")
		}
	}
	b.Run("kept", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			one(b.Context(), nil)
		}
	})
	b.Run("sent", func(b *testing.B) {
		c := tracetest.New(b)
		e, err := trace.NewExporter(b.Context(), trace.Config{Endpoint: c.URL})
		if err != nil {
			b.Fatal(err)
		}
		b.ReportAllocs()
		for b.Loop() {
			one(b.Context(), e)
		}
		e.Close()
	})
	b.Run("unfollowed", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			_, s := trace.Start(b.Context(), "step")
			s.End()
		}
	})
}
