package fetch

import (
	"io"
	"net"
	"sync"
	"testing"
	"time"
)

// relay is the way to a registry: connections to its address go there. All
// together carry rate bytes a second towards the client, each byte takes half a
// round trip, and a new connection's first ones a whole one more.
type relay struct {
	to   string
	rate float64
	rtt  time.Duration

	listener net.Listener
	group    sync.WaitGroup

	mu    sync.Mutex
	free  time.Time // when the link is free again
	conns []net.Conn
}

func newRelay(t testing.TB, to string, rate float64, rtt time.Duration) *relay {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r := &relay{to: to, rate: rate, rtt: rtt, listener: l}
	r.group.Go(r.serve)
	t.Cleanup(r.close)
	return r
}

func (r *relay) close() {
	r.listener.Close()
	r.mu.Lock()
	for _, c := range r.conns {
		c.Close()
	}
	r.mu.Unlock()
	r.group.Wait()
}

func (r *relay) serve() {
	for {
		near, err := r.listener.Accept()
		if err != nil {
			return
		}
		far, err := net.Dial("tcp", r.to)
		if err != nil {
			near.Close()
			continue
		}
		r.mu.Lock()
		r.conns = append(r.conns, near, far)
		r.mu.Unlock()
		r.group.Go(func() { r.carry(far, near, r.rtt, func(int) {}) })
		r.group.Go(func() { r.carry(near, far, 0, r.cross) })
	}
}

// cross waits until n bytes have crossed the link.
func (r *relay) cross(n int) {
	r.mu.Lock()
	if now := time.Now(); r.free.Before(now) {
		r.free = now
	}
	r.free = r.free.Add(time.Duration(float64(n) / r.rate * float64(time.Second)))
	until := r.free
	r.mu.Unlock()
	time.Sleep(time.Until(until))
}

type late struct {
	b  []byte
	at time.Time
}

func (r *relay) carry(to, from net.Conn, first time.Duration, cross func(int)) {
	way := make(chan late, 1<<14)
	r.group.Go(func() {
		defer to.Close()
		for c := range way {
			time.Sleep(time.Until(c.at))
			if _, err := to.Write(c.b); err != nil {
				from.Close()
			}
		}
	})
	defer close(way)
	for {
		b := make([]byte, 16<<10)
		n, err := from.Read(b)
		if n > 0 {
			cross(n)
			way <- late{b[:n], time.Now().Add(first + r.rtt/2)}
			first = 0
		}
		if err != nil {
			if err != io.EOF {
				to.Close()
			}
			return
		}
	}
}
