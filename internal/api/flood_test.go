package api_test

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"dewpoint/internal/api"
	"dewpoint/internal/spec"
	"dewpoint/testkit"
	"dewpoint/testkit/apitest"
)

// flooded is a node that a socket and TCP serve.
type flooded struct {
	t     *testing.T
	local *api.Client
	addr  string // of TCP
	tls   *tls.Config
	ca    *authority
	open  []net.Conn
}

func newFlooded(t *testing.T) *flooded {
	f := &flooded{t: t, ca: newAuthority(t)}
	f.ca.sign("reader", nil, time.Hour)
	f.addr = strings.TrimPrefix(serveTCP(t, f.ca, &api.Access{Clients: map[string]api.Role{"reader": api.Read}}),
		"https://")
	f.tls = clientTLS(t, f.ca)
	n := &apitest.Node{}
	t.Cleanup(n.Close)
	path := filepath.Join(t.TempDir(), "s")
	l, err := api.Listen(path, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = api.Serve(ctx, l, api.NewHandler(n, api.Config{}))
	}()
	t.Cleanup(func() { cancel(); <-done })
	f.local = dialWith(t, "unix://"+path, api.Credentials{})
	t.Cleanup(f.stop)
	return f
}

// connect opens a connection of who is at ip, if the node lets it.
func (f *flooded) connect(ip string) net.Conn {
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(ip)}, Timeout: time.Minute}
	c, err := d.Dial("tcp", f.addr)
	if err != nil {
		return nil
	}
	f.open = append(f.open, c)
	return c
}

func (f *flooded) stop() {
	for _, c := range f.open {
		c.Close()
	}
	f.open = nil
}

// alive insists that the local socket answers, and that the flood takes a bounded memory.
func (f *flooded) alive(what string) {
	f.t.Helper()
	start := time.Now()
	if _, err := f.local.List(f.t.Context(), true); err != nil {
		f.t.Errorf("%s: the local socket: %v", what, err)
	}
	took := time.Since(start)
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	f.t.Logf("%s: an answer in %v, %d MiB in use, %d goroutines", what, took, (m.HeapInuse+m.StackInuse)>>20,
		runtime.NumGoroutine())
	if took > 5*time.Second { // 100 ms and the machine's other work
		f.t.Errorf("%s: an answer took %v", what, took)
	}
	if n := m.HeapInuse + m.StackInuse; n > 256<<20 {
		f.t.Errorf("%s: %d MiB are in use", what, n>>20)
	}
}

// Strangers who connect and say nothing, or never say all, take a bounded share of the node, and others have
// theirs.
func TestStrangersFlood(t *testing.T) {
	f := newFlooded(t)
	const flood = 600
	for what, say := range map[string]func(net.Conn){
		"connections that say nothing": func(net.Conn) {},
		"handshakes that never end":    func(c net.Conn) { fmt.Fprint(c, "\x16\x03\x01\x02\x00\x01") },
		"garbage":                      func(c net.Conn) { fmt.Fprint(c, strings.Repeat("x", 64<<10)) },
	} {
		for i := range flood {
			if c := f.connect(fmt.Sprintf("127.0.0.%d", 2+i%2)); c != nil {
				_ = c.SetWriteDeadline(time.Now().Add(time.Second))
				say(c)
			}
		}
		f.alive(what)
		f.stop()
	}
	for range flood {
		f.connect("127.0.0.2")
	}
	reader := dialWith(t, "https://"+f.addr, f.ca.credentials("reader"))
	testkit.Eventually(t, "who comes from elsewhere has his share", func() bool {
		_, err := reader.List(t.Context(), true)
		return err == nil
	})
}

// Heads and bodies without an end, of who has shaken hands.
func TestEndlessRequests(t *testing.T) {
	f := newFlooded(t)
	for what, say := range map[string]string{
		"heads that never end": "POST /dewpoint.v1.Node/List HTTP/1.1\r\nHost: x\r\n",
		"large heads": "POST /dewpoint.v1.Node/List HTTP/1.1\r\nHost: x\r\n" +
			strings.Repeat("X-A: "+strings.Repeat("a", 1000)+"\r\n", 200) + "\r\n",
		"bodies of strangers": "POST /dewpoint.v1.Node/Deploy HTTP/1.1\r\nHost: x\r\n" +
			"Content-Type: application/json\r\nContent-Length: 1000000000\r\n\r\n" + strings.Repeat("a", 256<<10),
	} {
		for range 100 {
			c := f.connect("127.0.0.2")
			if c == nil {
				continue
			}
			s := tls.Client(c, f.tls)
			_ = s.SetDeadline(time.Now().Add(5 * time.Second))
			_, _ = s.Write([]byte(say)) // a node that has heard enough hangs up
		}
		f.alive(what)
		f.stop()
	}
}

// Of one caller's streams there are so many, and he is told.
func TestStreamsOfOneCaller(t *testing.T) {
	f := newFlooded(t)
	const most, more = 1024, 200
	ctx, cancel := context.WithCancel(t.Context())
	var streams sync.WaitGroup
	var refused atomic.Int64
	for range 2 { // a connection has 1,000 at most
		c := dialWith(t, "https://"+f.addr, f.ca.credentials("reader"))
		for range (most + more) / 2 {
			streams.Go(func() {
				err := c.Events(ctx, nil, func() error { return nil }, func(spec.Event) error { return nil })
				var e *api.Error
				if errors.As(err, &e) && e.Code == api.Busy {
					refused.Add(1)
				} else if ctx.Err() == nil {
					t.Errorf("a stream ended with %v", err)
				}
			})
		}
	}
	testkit.Eventually(t, "all that are too many are refused", func() bool { return refused.Load() == more })
	f.alive("streams")
	cancel()
	streams.Wait()
}
