// Package tracetest has a collector of OpenTelemetry traces that tests ask
// what they were sent.
package tracetest

import (
	"cmp"
	"compress/gzip"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"
	"time"

	"dewpoint/testkit"

	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	common "go.opentelemetry.io/proto/otlp/common/v1"
	"google.golang.org/protobuf/proto"
)

// Span is one that was received.
type Span struct {
	Trace, ID, Parent string // hex; Parent is "" of a root
	Name              string
	From, To          time.Time
	Attributes        map[string]string
	Resource          map[string]string
	Error             string // the status's, if it is one
}

// Collector takes spans by OTLP over HTTP. It is safe for concurrent use.
type Collector struct {
	*httptest.Server

	mu    sync.Mutex
	spans []Span
	bad   []string // what was wrong with requests
}

// New starts a Collector, which ends with the test. What it is sent that is no
// OTLP fails the test.
func New(t testing.TB) *Collector {
	c := &Collector{}
	c.Server = httptest.NewServer(http.HandlerFunc(c.serve))
	t.Cleanup(func() {
		c.Close()
		for _, b := range c.bad {
			t.Errorf("the collector was sent %s", b)
		}
	})
	return c
}

func (c *Collector) serve(w http.ResponseWriter, r *http.Request) {
	req, err := read(r)
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil {
		c.bad = append(c.bad, err.Error())
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	for _, rs := range req.ResourceSpans {
		for _, ss := range rs.ScopeSpans {
			for _, s := range ss.Spans {
				c.spans = append(c.spans,
					Span{Trace: fmt.Sprintf("%x", s.TraceId), ID: fmt.Sprintf("%x", s.SpanId),
						Parent: fmt.Sprintf("%x", s.ParentSpanId),
						Name:   s.Name, From: time.Unix(0, int64(s.StartTimeUnixNano)),
						To:         time.Unix(0, int64(s.EndTimeUnixNano)),
						Attributes: attributes(s.Attributes), Resource: attributes(rs.Resource.GetAttributes()),
						Error: s.Status.GetMessage()})
			}
		}
	}
	w.Header().Set("Content-Type", "application/x-protobuf")
}

func read(r *http.Request) (*collector.ExportTraceServiceRequest, error) {
	if r.Method != http.MethodPost || r.URL.Path != "/v1/traces" ||
		r.Header.Get("Content-Type") != "application/x-protobuf" {
		return nil, fmt.Errorf("%s %s of %q", r.Method, r.URL.Path, r.Header.Get("Content-Type"))
	}
	body := io.Reader(r.Body)
	if r.Header.Get("Content-Encoding") == "gzip" {
		z, err := gzip.NewReader(r.Body)
		if err != nil {
			return nil, err
		}
		body = z
	}
	b, err := io.ReadAll(body)
	if err != nil {
		return nil, err
	}
	req := new(collector.ExportTraceServiceRequest)
	return req, proto.Unmarshal(b, req)
}

func attributes(all []*common.KeyValue) map[string]string {
	out := map[string]string{}
	for _, a := range all {
		switch v := a.Value.Value.(type) {
		case *common.AnyValue_StringValue:
			out[a.Key] = v.StringValue
		case *common.AnyValue_IntValue:
			out[a.Key] = fmt.Sprint(v.IntValue)
		case *common.AnyValue_DoubleValue:
			out[a.Key] = fmt.Sprint(v.DoubleValue)
		case *common.AnyValue_BoolValue:
			out[a.Key] = fmt.Sprint(v.BoolValue)
		}
	}
	return out
}

// Spans are those received so far, in the order in which they began.
func (c *Collector) Spans() []Span {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := slices.Clone(c.spans)
	slices.SortStableFunc(out, func(a, b Span) int { return cmp.Or(a.From.Compare(b.From), b.To.Compare(a.To)) })
	return out
}

// Await returns the spans of the trace whose root has an attribute of that
// value once enough says that they are all.
func (c *Collector) Await(t testing.TB, name, value string, enough func([]Span) bool) []Span {
	t.Helper()
	var of []Span
	for end := time.Now().Add(testkit.Limit); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		all := c.Spans()
		i := slices.IndexFunc(all, func(s Span) bool { return s.Attributes[name] == value })
		if i < 0 {
			continue
		}
		trace := all[i].Trace
		of = slices.DeleteFunc(all, func(s Span) bool { return s.Trace != trace })
		if enough(of) {
			return of
		}
	}
	t.Fatalf("the collector did not get all spans of %s %s: %+v", name, value, of)
	return nil
}
