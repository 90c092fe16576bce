// Package limit bounds what strangers can take of a node: how many connections and calls there are at once,
// of all and of each, how long an answer is kept for who does not read it, and how long one is waited for.
//
// How long a handshake, a header and a body may take, and how large they may be, net/http's Server bounds.
package limit

import (
	"net"
	"net/http"
	"sync"
	"time"
)

// Shares counts what is under way, by whose it is. All and Each are the most, and do not change; 0 of Each
// is All. It is safe for concurrent use.
type Shares struct {
	All, Each int

	mu    sync.Mutex
	total int            // guarded by mu
	by    map[string]int // guarded by mu
}

// Enter takes a place for who, and reports whether there was one. Leave must follow then.
func (s *Shares) Enter(who string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.total >= s.All || s.Each > 0 && s.by[who] >= s.Each {
		return false
	}
	if s.by == nil {
		s.by = map[string]int{}
	}
	s.total++
	s.by[who]++
	return true
}

// Leave gives a place back.
func (s *Shares) Leave(who string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.total--
	if s.by[who]--; s.by[who] == 0 {
		delete(s.by, who)
	}
}

// Listener is l, which hangs up on whoever comes while there are all connections open, or each from his
// address: they need memory before they have proved who they are. A listener for TLS goes around it.
func Listener(l net.Listener, all, each int) net.Listener {
	return &listener{Listener: l, shares: &Shares{All: all, Each: each}}
}

type listener struct {
	net.Listener
	shares *Shares
}

func (l *listener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		from, _, _ := net.SplitHostPort(c.RemoteAddr().String())
		if l.shares.Enter(from) {
			return &conn{Conn: c, leave: sync.OnceFunc(func() { l.shares.Leave(from) })}, nil
		}
		if t, ok := c.(*net.TCPConn); ok {
			_ = t.SetLinger(0) // nothing is kept of it
		}
		c.Close()
	}
}

type conn struct {
	net.Conn
	leave func()
}

func (c *conn) Close() error {
	c.leave()
	return c.Conn.Close()
}

// Writes lets h answer who reads: a write that is not taken within d fails, and so does what is left when h
// has returned.
func Writes(h http.Handler, d time.Duration) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		t := &writer{w, http.NewResponseController(w), d}
		h.ServeHTTP(t, r)
		_ = t.c.SetWriteDeadline(time.Now().Add(d))
	})
}

type writer struct {
	http.ResponseWriter
	c *http.ResponseController
	d time.Duration
}

// Unwrap is for http.ResponseController.
func (w *writer) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w *writer) Write(p []byte) (n int, err error) {
	err = w.timed(func() error {
		n, err = w.ResponseWriter.Write(p)
		return err
	})
	return n, err
}

// Flush is http.Flusher's.
func (w *writer) Flush() { _ = w.FlushError() }

// FlushError is for http.ResponseController.
func (w *writer) FlushError() error { return w.timed(w.c.Flush) }

// timed writes. The deadline ends with the write: over HTTP/2 one that passes ends a stream, be it as quiet
// as it should be.
func (w *writer) timed(write func() error) error {
	_ = w.c.SetWriteDeadline(time.Now().Add(w.d)) // a writer without deadlines is a test's
	err := write()
	if err == nil {
		_ = w.c.SetWriteDeadline(time.Time{})
	}
	return err
}
