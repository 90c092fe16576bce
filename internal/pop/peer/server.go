package peer

import (
	"context"
	"errors"
	"log"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"dewpoint/internal/limit"
)

// Server gives a node's Content to the other nodes of its PoP.
type Server struct {
	cfg   Config
	http  http.Server
	gate  gate
	stats struct{ requests, busy, bytes atomic.Int64 }
	end   context.CancelFunc // ends all requests
}

// ServerStats counts what a Server did so far.
type ServerStats struct {
	Requests int64 // let in
	Busy     int64 // told to come again
	Bytes    int64 // given
	Active   int   // requests under way
}

const (
	headerTime = 10 * time.Second // to shake hands, and to send a request's header
	idleTime   = 2 * time.Minute
	maxHeader  = 16 << 10
)

// NewServer returns a server that waits for Serve.
func NewServer(cfg Config) (*Server, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	if cfg.Content == nil {
		return nil, errors.New("peer: a server without content")
	}
	s := &Server{cfg: cfg, gate: gate{perPeer: cfg.PerPeer, all: cfg.Requests, peers: map[string]int{}}}
	ctx, cancel := context.WithCancel(context.Background())
	s.end = cancel
	var only1 http.Protocols
	only1.SetHTTP1(true)
	s.http = http.Server{
		Handler:           s.handler(),
		TLSConfig:         cfg.Auth.serverTLS(),
		Protocols:         &only1,
		ReadHeaderTimeout: headerTime,
		WriteTimeout:      cfg.Stall, // from a request's header on; put off with each write
		IdleTimeout:       idleTime,
		MaxHeaderBytes:    maxHeader,
		BaseContext:       func(net.Listener) context.Context { return ctx },
		ErrorLog:          log.New(&sparse{log: cfg.Log}, "", 0),
	}
	return s, nil
}

// Serve takes connections from l until Close, which makes it return nil. It closes l.
func (s *Server) Serve(l net.Listener) error {
	l = s.cfg.Auth.listener(limit.Listener(l, s.cfg.Conns, (s.cfg.Conns+1)/2))
	err := s.http.ServeTLS(l, "", "")
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// Close cuts all streams and returns when no method of Content runs any more for this server.
func (s *Server) Close() error {
	s.gate.close()
	s.end()
	err := s.http.Close()
	s.gate.running.Wait()
	return err
}

// Stats gives the server's counters.
func (s *Server) Stats() ServerStats {
	return ServerStats{Requests: s.stats.requests.Load(), Busy: s.stats.busy.Load(), Bytes: s.stats.bytes.Load(),
		Active: s.gate.active()}
}

// gate lets so many requests in, of each peer and of all.
type gate struct {
	perPeer, all int
	running      sync.WaitGroup // Add under mu, not after closed

	mu     sync.Mutex
	peers  map[string]int // requests under way
	total  int
	closed bool
}

// enter returns 0, and leave must follow, or the status of a refusal.
func (g *gate) enter(peer string) int {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case g.closed, g.total >= g.all:
		return http.StatusServiceUnavailable
	case g.peers[peer] >= g.perPeer:
		return http.StatusTooManyRequests
	}
	g.peers[peer]++
	g.total++
	g.running.Add(1)
	return 0
}

func (g *gate) leave(peer string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.total--
	if g.peers[peer]--; g.peers[peer] == 0 {
		delete(g.peers, peer)
	}
	g.running.Done()
}

func (g *gate) close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed = true
}

func (g *gate) active() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.total
}

// sparse takes net/http's complaints, mostly of handshakes that came to nothing. Anybody can cause them: one
// in ten seconds is logged.
type sparse struct {
	log *slog.Logger

	mu     sync.Mutex
	last   time.Time
	missed int
}

func (s *sparse) Write(line []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if now := time.Now(); now.Sub(s.last) < 10*time.Second {
		s.missed++
	} else {
		s.log.Warn("peer", "problem", oneLine(string(line)), "more", s.missed)
		s.last, s.missed = now, 0
	}
	return len(line), nil
}
