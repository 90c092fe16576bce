// Package registrytest runs an image registry inside the test process that
// behaves well until told otherwise.
//
//	reg := registrytest.New(t)
//	tar := registrytest.Tar(registrytest.File{Name: "a", Body: "b"})
//	img := reg.PushImage("app:1", []registrytest.Layer{{Tar: tar}}, registrytest.Options{})
//	reg.Fail(registrytest.Fault{Do: registrytest.Cut, At: 1000, Times: 1})
//	... pull img.Ref, over plain HTTP ...
//	reg.Served(img.Layers[0].Digest)
//
// It speaks what clients need to pull: manifests and blobs by GET and HEAD,
// ranges, the list of what refers to an image, and the three ways to
// authenticate. Blobs and manifests may also be pushed over HTTP, by POST and
// PUT; images are put in by PushImage and its like. Quirks are ways in which
// registries differ. Faults are the ways in which registries, and
// what lies between them and a node, are known to misbehave; they apply to the
// requests they match, in the order in which they were added. Every request is
// kept in a log. Everything is safe for concurrent use.
package registrytest

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"sync"
	"testing"
	"time"

	"dewpoint/testkit"

	"github.com/opencontainers/go-digest"
)

// Config says how a Server listens. The zero value is plain HTTP on a free
// port of 127.0.0.1.
type Config struct {
	Addr        string // host:port; "" is 127.0.0.1:0
	TLS         bool   // serve HTTPS with a certificate of its own making; see CA
	ClientCerts bool   // with TLS: insist on a client's certificate signed by CA
	Dir         string // where big blobs are kept; "" keeps all in memory
	Store       *Store // blobs and manifests to share with another Server; nil is a new one
}

// Server is one running registry.
type Server struct {
	Store *Store

	cfg   Config
	tb    testing.TB
	certs *certs // nil without TLS

	mu      sync.Mutex // guards what follows
	srv     *http.Server
	addr    string // where it listens or listened last
	done    chan struct{}
	stop    context.CancelFunc
	auth    Auth
	quirks  Quirks
	tokens  map[string]token
	uploads map[string]bool // begun, by REPOSITORY/ID
	faults  []*Fault
	log     []*Request
	served  map[digest.Digest]int64
	busy    int // blob bodies being sent now
	peak    int // the most that ever were at once
	conns   int // connections accepted
	under   int // handlers under way
	idle    *sync.Cond
}

// New starts a registry for the test and closes it with the test.
func New(tb testing.TB) *Server {
	tb.Helper()
	return NewConfig(tb, Config{})
}

// NewConfig is New with a Config. Without a Dir, big blobs are kept in the
// test's temporary directory.
func NewConfig(tb testing.TB, cfg Config) *Server {
	tb.Helper()
	if cfg.Dir == "" {
		cfg.Dir = tb.TempDir()
	}
	if cfg.Addr == "" {
		cfg.Addr = testkit.FreeAddress(tb)
	}
	s, err := Start(cfg)
	if err != nil {
		tb.Fatal(err)
	}
	s.tb = tb
	tb.Cleanup(s.Close)
	return s
}

// Start starts a registry outside a test. Errors of its Push methods panic.
func Start(cfg Config) (*Server, error) {
	s := &Server{cfg: cfg, Store: cfg.Store, addr: cfg.Addr, tokens: map[string]token{},
		uploads: map[string]bool{}, served: map[digest.Digest]int64{}}
	s.idle = sync.NewCond(&s.mu)
	if s.addr == "" {
		s.addr = "127.0.0.1:0"
	}
	if s.Store == nil {
		s.Store = newStore(cfg.Dir)
	}
	return s, s.Up()
}

// Up listens again, at the same address, after Close.
func (s *Server) Up() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	l, err := net.Listen("tcp", s.addr)
	if err != nil {
		return fmt.Errorf("test registry: %w", err)
	}
	s.addr = l.Addr().String()
	if s.cfg.TLS {
		if s.certs == nil {
			if s.certs, err = newCerts(s.addr); err != nil {
				l.Close()
				return fmt.Errorf("test registry: %w", err)
			}
		}
		l = tls.NewListener(l, s.certs.server(s.cfg.ClientCerts))
	}
	ctx, stop := context.WithCancel(context.Background())
	s.stop, s.done = stop, make(chan struct{})
	s.srv = &http.Server{
		Handler:           http.HandlerFunc(s.serve),
		BaseContext:       func(net.Listener) context.Context { return ctx },
		ReadHeaderTimeout: 10 * time.Second,
		ErrorLog:          quiet,
		ConnState:         s.connState,
	}
	go func(srv *http.Server, done chan struct{}) {
		defer close(done)
		srv.Serve(l)
	}(s.srv, s.done)
	return nil
}

// Close cuts all connections and stops listening, and waits until all requests have
// ended. The images stay.
func (s *Server) Close() {
	s.mu.Lock()
	srv, stop, done := s.srv, s.stop, s.done
	s.srv = nil
	s.mu.Unlock()
	if srv == nil {
		return
	}
	stop()
	srv.Close()
	<-done
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.under > 0 {
		s.idle.Wait()
	}
}

// Host is the registry's host and port, as image references name it.
func (s *Server) Host() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.addr
}

// URL is the registry's root, without a path.
func (s *Server) URL() string {
	if s.cfg.TLS {
		return "https://" + s.Host()
	}
	return "http://" + s.Host()
}

// Fail adds a fault.
func (s *Server) Fail(f Fault) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.faults = append(s.faults, &f)
}

// Heal takes all faults away.
func (s *Server) Heal() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.faults = nil
}

// must reports an error of test set-up.
func (s *Server) must(err error) {
	if err == nil {
		return
	}
	if s.tb == nil {
		panic(err)
	}
	s.tb.Helper()
	s.tb.Fatal(err)
}
