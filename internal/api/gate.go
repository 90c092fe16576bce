package api

import (
	"container/list"
	"context"
	"io"
	"net/http"
	"sync"
	"time"
)

// Of how many requests at once more is read than gateFree, each of which takes up to twice maxMessage, and of
// how many of one caller: who sends slowly, or never to the end, keeps nobody else out.
const (
	gateFree   = 64 << 10 // bytes
	gateAll    = 16
	gateCaller = 8
	gateWait   = 30 * time.Second // for a place; then the caller is told to come again
)

// gate lets a bounded number in, those of one caller in their order. It is safe for concurrent use.
type gate struct {
	mu      sync.Mutex
	in      int            // guarded by mu, as all that follows
	of      map[string]int // of them, by caller
	waiting list.List      // of *guest, who came first is first
}

type guest struct {
	caller string
	enter  chan struct{} // closed when he is in
}

// enter waits for a place; leave must follow if it returns nil.
func (g *gate) enter(ctx context.Context, caller string) error {
	g.mu.Lock()
	if g.of == nil {
		g.of = map[string]int{}
	}
	me := &guest{caller, make(chan struct{})}
	at := g.waiting.PushBack(me)
	g.next()
	g.mu.Unlock()
	select {
	case <-me.enter:
		return nil
	case <-ctx.Done():
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	select {
	case <-me.enter: // just now
		return nil
	default:
		g.waiting.Remove(at)
		return context.Cause(ctx)
	}
}

func (g *gate) leave(caller string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.in--
	if g.of[caller]--; g.of[caller] == 0 {
		delete(g.of, caller)
	}
	g.next()
}

// next lets in who may enter. It is called with mu held.
func (g *gate) next() {
	for e := g.waiting.Front(); e != nil && g.in < gateAll; {
		me, at := e.Value.(*guest), e
		e = e.Next()
		if g.of[me.caller] == gateCaller {
			continue
		}
		g.in++
		g.of[me.caller]++
		g.waiting.Remove(at)
		close(me.enter)
	}
}

var errCrowded = advised(Busy, "too many large requests are being sent to the node at once",
	"try again in a few seconds, and send fewer at the same time")

// gated has large requests read, from where they have shown to be that to their end, a bounded number at
// once. Calls that stream what the client sends are not bounded: there he sets the pace.
func gated(h http.Handler) http.Handler {
	_, both := streams()
	g := new(gate)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Body != nil && r.Body != http.NoBody && !both[r.URL.Path] {
			b := &large{ReadCloser: r.Body, g: g, ctx: r.Context(), who: callerOf(r.Context()).name}
			defer b.leave()
			r.Body = b
		}
		h.ServeHTTP(w, r)
	})
}

// large is a body that has a place in the gate from its gateFree-th byte on until it is read.
type large struct {
	io.ReadCloser
	g    *gate
	ctx  context.Context
	who  string
	read int
	in   bool
}

func (b *large) Read(p []byte) (int, error) {
	if !b.in && b.read >= gateFree {
		ctx, cancel := context.WithTimeoutCause(b.ctx, gateWait, errCrowded)
		err := b.g.enter(ctx, b.who)
		cancel()
		if err != nil {
			return 0, errCrowded.wire() // nobody hears it if it is the caller who has gone
		}
		b.in = true
	}
	if !b.in {
		p = p[:min(len(p), gateFree-b.read)]
	}
	n, err := b.ReadCloser.Read(p)
	b.read += n
	if err != nil {
		b.leave()
	}
	return n, err
}

// leave gives the place back. What is read after the end gives nothing.
func (b *large) leave() {
	if b.in {
		b.in, b.read = false, 0
		b.g.leave(b.who)
	}
}
