package server

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"dewpoint/internal/limit"
	"dewpoint/internal/server/metrics"
	"dewpoint/internal/server/web"
)

// serveHTTP serves Prometheus's text format at /metrics, /healthz, /readyz and, on a loopback address, the
// page for people: a caller of another address has not proved its role. ready says why no container could
// start; nil: one could.
func serveHTTP(ctx context.Context, addr string, set *metrics.Set, n web.Node,
	ready func(context.Context) error) error {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", set.Handler())
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), 3*time.Second)
		defer cancel()
		if err := ready(ctx); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
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
