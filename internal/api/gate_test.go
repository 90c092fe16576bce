package api

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// A gate has no more inside than it may, lets each caller's in in their order, and others past one who has
// all of his there.
func TestGate(t *testing.T) {
	g := new(gate)
	in := func(who string) <-chan error {
		before := g.standing()
		got := make(chan error, 1)
		go func() { got <- g.enter(t.Context(), who) }()
		for g.standing() == before {
			time.Sleep(time.Millisecond)
		}
		return got
	}
	for range gateCaller {
		if err := <-in("much"); err != nil {
			t.Fatal(err)
		}
	}
	first, second := in("much"), in("much")
	for _, who := range []string{"little", "other"} {
		if err := <-in(who); err != nil {
			t.Fatal(err)
		}
	}
	select {
	case <-first:
		t.Fatal("a caller has more inside than he may")
	default:
	}
	g.leave("little")
	g.leave("much")
	if err := <-first; err != nil {
		t.Fatal(err)
	}
	select {
	case <-second:
		t.Fatal("one left, and two came in")
	default:
	}
	gone, cancel := context.WithCancelCause(t.Context())
	cancel(errCrowded)
	if err := g.enter(gone, "much"); !errors.Is(err, errCrowded) {
		t.Errorf("one who does not wait: %v", err)
	}
	g.leave("much")
	if err := <-second; err != nil || g.waiting.Len() != 0 {
		t.Errorf("%v, %d wait", err, g.waiting.Len())
	}
	for range gateCaller {
		g.leave("much")
	}
	g.leave("other")
	if g.in != 0 || len(g.of) != 0 {
		t.Errorf("%d are inside, %v", g.in, g.of)
	}
}

// standing is how many are inside or wait.
func (g *gate) standing() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.in + g.waiting.Len()
}

// Large requests that do not come to an end take their places and no more; small ones, and another caller's,
// are read beside them.
func TestGated(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	l, err := Listen(socket, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	const size = 3 * gateFree
	read := make(chan string, 4*gateCaller) // whose requests have come to two thirds
	h := gated(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		two, err := io.ReadAll(io.LimitReader(r.Body, 2*gateFree))
		read <- r.Header.Get("Who")
		rest, rerr := io.ReadAll(r.Body)
		fmt.Fprint(w, len(two)+len(rest), err, rerr)
	}))
	who := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), callerKey{},
			caller{r.Header.Get("Who"), Admin})))
	})
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- serve(ctx, l, who) }()
	begin := func(name string, length, sent int) net.Conn {
		c, err := net.Dial("unix", socket)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		go fmt.Fprintf(c, "POST /dewpoint.v1.Node/List HTTP/1.1\r\nHost: x\r\nWho: %s\r\nContent-Length: %d\r\n\r\n%s", name, length, strings.Repeat("x", sent))
		return c
	}
	answered := func(c net.Conn, length int) {
		t.Helper()
		r, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Body.Close()
		if b, err := io.ReadAll(r.Body); err != nil || string(b) != fmt.Sprint(length, nil, nil) {
			t.Errorf("%s, %v", b, err)
		}
	}
	var slow []net.Conn
	for range 2 * gateCaller {
		slow = append(slow, begin("slow", size, 2*gateFree))
	}
	for range gateCaller {
		<-read
	}
	answered(begin("slow", 100, 100), 100)
	answered(begin("other", size, size), size)
	<-read
	<-read
	if len(read) > 0 {
		t.Error("more of a caller's requests are read than may be")
	}
	for _, c := range slow {
		go fmt.Fprint(c, strings.Repeat("x", size-2*gateFree))
	}
	for _, c := range slow {
		answered(c, size)
	}
	cancel()
	if err := <-served; err != nil {
		t.Error(err)
	}
}
