package trace

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/sdk/resource"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	otel "go.opentelemetry.io/otel/trace"
)

// Config says where spans go. The zero value is what the environment says
// (OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_TRACES_ENDPOINT), else
// nowhere. OpenTelemetry's other variables hold too: headers, certificates,
// the sampler, attributes of the resource.
type Config struct {
	// of a collector, by OTLP over HTTP: http://HOST:PORT, the path is /v1/traces if none is given
	Endpoint string
	Node     string // this node's name
	Version  string // of dewd
	Log      *slog.Logger
}

const (
	queued     = 1024             // spans that wait for the collector; more are dropped
	batch      = 256              // spans of one request
	every      = 2 * time.Second  // the longest that a span waits for others
	patience   = 10 * time.Second // for one request with its repetitions
	quietFor   = time.Minute      // between two lines of the log about a collector that is away
	lastWords  = time.Second      // for what is queued when dewd stops
	scopeName  = "dewpoint"
	tracesPath = "/v1/traces"
)

// Exporter sends spans to an OpenTelemetry collector, behind the back of who
// makes them. While the collector is away at most some thousand spans wait for
// it; others are dropped. It is safe for concurrent use; nil sends nothing.
type Exporter struct {
	tp *sdk.TracerProvider
	t  otel.Tracer
	to *counted
}

// NewExporter returns an Exporter, or nil if there is nowhere to send spans to.
// Close must follow. Nothing is connected before there are spans.
func NewExporter(ctx context.Context, cfg Config) (*Exporter, error) {
	to := cmp.Or(cfg.Endpoint, os.Getenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"),
		os.Getenv("OTEL_EXPORTER_OTLP_ENDPOINT"))
	if to == "" {
		return nil, nil
	}
	opts := []otlptracehttp.Option{otlptracehttp.WithTimeout(patience),
		otlptracehttp.WithRetry(otlptracehttp.RetryConfig{Enabled: true, InitialInterval: time.Second,
			MaxInterval: patience / 2, MaxElapsedTime: patience})}
	if cfg.Endpoint != "" {
		opts = append(opts, otlptracehttp.WithEndpointURL(withPath(cfg.Endpoint)))
	}
	client, err := otlptracehttp.New(ctx, opts...)
	if err != nil {
		return nil, fmt.Errorf("spans for %s: %w", to, err)
	}
	res, err := resource.New(ctx, resource.WithFromEnv(),
		resource.WithAttributes(attribute.String("service.name", "dewd"),
			attribute.String("service.version", cfg.Version), attribute.String("host.name", cfg.Node)))
	if err != nil {
		return nil, fmt.Errorf("spans for %s: %w", to, err)
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	c := &counted{SpanExporter: client, to: to, log: cfg.Log}
	tp := sdk.NewTracerProvider(sdk.WithResource(res), sdk.WithBatcher(c, sdk.WithMaxQueueSize(queued),
		sdk.WithMaxExportBatchSize(batch), sdk.WithBatchTimeout(every), sdk.WithExportTimeout(patience)))
	return &Exporter{tp, tp.Tracer(scopeName, otel.WithInstrumentationVersion(cfg.Version)), c}, nil
}

func withPath(endpoint string) string {
	if u, err := url.Parse(endpoint); err == nil && strings.Trim(u.Path, "/") == "" {
		return u.JoinPath(tracesPath).String()
	}
	return endpoint
}

func (e *Exporter) tracer() otel.Tracer {
	if e == nil {
		return nil
	}
	return e.t
}

// Sent is how many spans the collector has taken, and how many it has not though they were tried.
func (e *Exporter) Sent() (sent, lost int64) {
	if e == nil {
		return 0, 0
	}
	return e.to.sent.Load(), e.to.lost.Load()
}

// Close sends what is queued, for a second at most.
func (e *Exporter) Close() {
	if e == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), lastWords)
	defer cancel()
	e.to.stopping.Store(true)
	if err := e.tp.Shutdown(ctx); err != nil {
		e.to.log.Debug("the last spans were not sent", "to", e.to.to, "err", err)
	}
}

// counted counts what was sent, and says in the log, not too often, that the
// collector is away.
type counted struct {
	sdk.SpanExporter
	to         string
	log        *slog.Logger
	sent, lost atomic.Int64
	stopping   atomic.Bool
	said       time.Time // of the queue's one goroutine
}

// ExportSpans implements the SDK's exporter.
func (c *counted) ExportSpans(ctx context.Context, spans []sdk.ReadOnlySpan) error {
	err := c.SpanExporter.ExportSpans(ctx, spans)
	if err == nil {
		c.sent.Add(int64(len(spans)))
		return nil
	}
	c.lost.Add(int64(len(spans)))
	if time.Since(c.said) > quietFor && !c.stopping.Load() {
		c.said = time.Now()
		c.log.Warn("spans are dropped: the trace collector does not take them", "to", c.to, "err", err)
	}
	return nil // it is told already
}
