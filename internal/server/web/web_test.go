package web

import (
	"bufio"
	"context"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"dewpoint/internal/spec"
	"dewpoint/testkit"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fake is a node whose answers the tests set.
type fake struct {
	mu         sync.Mutex
	containers []spec.Container
	layers     []spec.LayerMap
	pop        *spec.PoP
	waiting    []spec.Deployment
	events     []spec.Event
	more       chan struct{}
	away       error
}

const epoch = "abc"

func newFake() *fake { return &fake{more: make(chan struct{})} }

func (f *fake) set(change func(f *fake)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change(f)
}

func (f *fake) add(evs ...spec.Event) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, e := range evs {
		e.Seq, e.Epoch, e.Time = uint64(len(f.events)+1), epoch, time.Now()
		f.events = append(f.events, e)
	}
	close(f.more)
	f.more = make(chan struct{})
}

func (f *fake) List(context.Context, bool) ([]spec.Container, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.containers, f.away
}

func (f *fake) PoPStatus(context.Context) (spec.PoP, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.pop == nil {
		return spec.PoP{}, errors.New("no PoP")
	}
	return *f.pop, nil
}

func (f *fake) ListDeployments(context.Context, spec.DeploymentQuery) ([]spec.Deployment, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.waiting), nil
}

func (f *fake) Version(context.Context) (spec.Version, error) {
	return spec.Version{Version: "v1", Node: "n1", Engine: "containerd v2.4.2", Kernel: "6.18", Mount: "erofs"},
		nil
}

func (f *fake) Arriving(int) []spec.LayerMap {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.layers
}

func (f *fake) Events(ctx context.Context, after *spec.Mark, _ func() error,
	emit func(spec.Event) error) error {
	seq := after.Seq
	if after.Epoch != "" && after.Epoch != epoch {
		seq = 0
		if err := emit(spec.Event{Epoch: epoch, Kind: spec.EventResync}); err != nil {
			return err
		}
	}
	for {
		f.mu.Lock()
		evs, more := f.events, f.more
		f.mu.Unlock()
		for _, e := range evs {
			if e.Seq > seq {
				if err := emit(e); err != nil {
					return err
				}
				seq = e.Seq
			}
		}
		select {
		case <-more:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func serve(t *testing.T, f *fake) *httptest.Server {
	t.Helper()
	s := httptest.NewServer(Handler(f))
	t.Cleanup(func() {
		s.CloseClientConnections()
		s.Close()
		http.DefaultClient.CloseIdleConnections()
	})
	return s
}

// read returns the ids and data of so many events.
func read(t *testing.T, url, last string, n int) (ids, data []string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), "GET", url+"/events", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Last-Event-ID", last)
	r, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	for in := bufio.NewScanner(r.Body); len(data) < n && in.Scan(); {
		if id, ok := strings.CutPrefix(in.Text(), "id: "); ok {
			ids = append(ids, id)
		}
		if d, ok := strings.CutPrefix(in.Text(), "data: "); ok {
			data = append(data, d)
		}
	}
	return ids, data
}

// A browser that was cut goes on behind the last event that it had; with the number
// of another daemon it begins anew.
func TestEventsResume(t *testing.T) {
	f := newFake()
	s := serve(t, f)
	f.add(spec.Event{Kind: "a"}, spec.Event{Kind: "b"}, spec.Event{Kind: "c"})
	ids, data := read(t, s.URL, "", 3)
	if len(data) != 3 || !strings.Contains(data[2], `"kind":"c"`) {
		t.Fatalf("%q", data)
	}
	if _, data := read(t, s.URL, ids[1], 1); !strings.Contains(data[0], `"kind":"c"`) {
		t.Errorf("after the second came %q", data)
	}
	if _, data := read(t, s.URL, "other.2", 2); !strings.Contains(data[0], `"kind":"resync"`) ||
		!strings.Contains(data[1], `"kind":"a"`) {
		t.Errorf("after another daemon's came %q", data)
	}
}

// Readers that do not read, and too many of them, cost the node a bounded number of streams.
func TestEventsAreBounded(t *testing.T) {
	s := serve(t, newFake())
	addr := strings.TrimPrefix(s.URL, "http://")
	var conns []net.Conn
	for range streams {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		conns = append(conns, c)
		c.Write([]byte("GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n"))
		if line, err := bufio.NewReader(c).ReadString('\n'); err != nil || !strings.Contains(line, "200") {
			t.Fatalf("%q %v", line, err)
		}
	}
	status := func() int {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		req, _ := http.NewRequestWithContext(ctx, "GET", s.URL+"/events", nil)
		r, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Body.Close()
		return r.StatusCode
	}
	if got := status(); got != http.StatusServiceUnavailable {
		t.Errorf("status %d", got)
	}
	conns[0].Close()
	testkit.Eventually(t, "a stream that was closed is given back", func() bool { return status() == http.StatusOK })
}

// A name of elsewhere that leads here opens nothing.
func TestOnlyLocalNames(t *testing.T) {
	s := serve(t, newFake())
	for host, want := range map[string]int{"evil.example": 421, "10.0.0.1:80": 421, "": 421, "localhost:1": 200,
		"127.0.0.1": 200, "[::1]:9": 200} {
		w := httptest.NewRecorder()
		r := httptest.NewRequestWithContext(t.Context(), "GET", s.URL+"/state", nil)
		r.Host = host
		s.Config.Handler.ServeHTTP(w, r)
		if w.Code != want {
			t.Errorf("host %q: status %d", host, w.Code)
		}
	}
}

func TestOnlyReads(t *testing.T) {
	s := serve(t, newFake())
	for _, path := range []string{"/", "/state", "/events", "/openapi.yaml"} {
		r, err := http.Post(s.URL+path, "text/plain", nil)
		if err != nil {
			t.Fatal(err)
		}
		r.Body.Close()
		if r.StatusCode != http.StatusMethodNotAllowed {
			t.Errorf("POST %s: %d", path, r.StatusCode)
		}
	}
	r, err := http.Get(s.URL + "/")
	if err != nil {
		t.Fatal(err)
	}
	r.Body.Close()
	if p := r.Header.Get("Content-Security-Policy"); !strings.Contains(p, "default-src 'none'") {
		t.Errorf("policy %q", p)
	}
}
