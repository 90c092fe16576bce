package server

import (
	"context"
	"errors"
	"net"
	"net/http"
	"time"

	"dewpoint/internal/limit"
	"dewpoint/internal/server/metrics"
	"dewpoint/internal/server/web"
)

// serveHTTP serves Prometheus's text format at /metrics and, on a loopback address, the
// page for people: who reaches others has not said who he is.
func serveHTTP(ctx context.Context, addr string, set *metrics.Set, n web.Node) error {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", set.Handler())
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", addr)
	if err != nil {
		return err
	}
	if at, ok := l.Addr().(*net.TCPAddr); ok && at.IP.IsLoopback() {
		mux.Handle("/", web.Handler(n))
	}
	s := &http.Server{Handler: limit.Writes(mux, time.Minute), ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 64 << 10}
	context.AfterFunc(ctx, func() { s.Close() })
	if err := s.Serve(limit.Listener(l, 128, 0)); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}
