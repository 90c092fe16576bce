package apitest

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"dewpoint/internal/api"
)

// Server is a daemon's API around a Node.
type Server struct {
	Host   string // for api.Dial
	Socket string
	Stop   func() // what a signal does to the daemon; waits until it has stopped
}

// Serve serves n on a socket of its own until the test ends.
func Serve(t testing.TB, n api.Node) *Server {
	t.Helper()
	dir, err := os.MkdirTemp("", "dew")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	s, err := Start(filepath.Join(dir, "s"), n)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Stop)
	return s
}

// Start serves n at the socket until Stop.
func Start(socket string, n api.Node) (*Server, error) {
	l, err := api.Listen(socket, 0o600)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = api.Serve(ctx, l, api.NewHandler(n, api.Config{Log: slog.New(slog.DiscardHandler)}))
	}()
	return &Server{Host: "unix://" + socket, Socket: socket, Stop: func() { cancel(); <-done }}, nil
}

// Dial is a client of the server, closed when the test ends.
func (s *Server) Dial(t testing.TB) *api.Client {
	t.Helper()
	c, err := api.Dial(s.Host)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}
