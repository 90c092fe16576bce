package registry

import (
	"context"
	"net/http/httptrace"
	"slices"
	"sync"
	"time"
)

// latency is how long an endpoint took lately from a request to the first byte
// of its answer, on connections that were there. The zero value is ready; it is
// safe for concurrent use.
type latency struct {
	mu   sync.Mutex
	took [8]time.Duration // a ring; 0 is none yet
	next int
	at   time.Time // of the newest
}

// latencyHolds is how long what was measured says something.
const latencyHolds = 10 * time.Minute

func (l *latency) add(d time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if time.Since(l.at) > latencyHolds {
		l.took = [8]time.Duration{}
	}
	l.took[l.next] = max(d, 1)
	l.next = (l.next + 1) % len(l.took)
	l.at = time.Now()
}

// least is the shortest of the last ones, in which the server thought least; 0
// if none is known.
func (l *latency) least() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	if time.Since(l.at) > latencyHolds {
		return 0
	}
	known := slices.DeleteFunc(slices.Clone(l.took[:]), func(d time.Duration) bool { return d == 0 })
	if len(known) == 0 {
		return 0
	}
	return slices.Min(known)
}

// traced is ctx for a request whose latency is measured.
func (l *latency) traced(ctx context.Context) context.Context {
	var mu sync.Mutex // the transport calls from goroutines of its own
	var sent time.Time
	return httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		WroteRequest: func(httptrace.WroteRequestInfo) {
			mu.Lock()
			defer mu.Unlock()
			sent = time.Now()
		},
		GotFirstResponseByte: func() {
			mu.Lock()
			defer mu.Unlock()
			if !sent.IsZero() {
				l.add(time.Since(sent))
			}
		},
	})
}

// RoundTrip is the shortest time that lately passed between a request to a host
// (or its mirrors: the first that was asked counts) and the first byte of the
// answer; 0 if it is not known.
func (c *Client) RoundTrip(host string) time.Duration {
	eps, err := c.endpoints(host)
	if err != nil {
		return 0
	}
	for _, e := range eps {
		if d := e.latency.least(); d > 0 {
			return d
		}
	}
	return 0
}
