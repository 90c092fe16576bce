// Package web is the page that a node shows a person: deployments as waterfalls of their stages while they go
// on, with the steps of the work when they have ended, the queue of those that wait for their turn, layers
// filling (those of pulls, and those that containers run with already, with what was waited for in them:
// reads of what is here reach no daemon), the containers, and the nodes of the PoP.
//
// # The model
//
// The page is three files without anything from elsewhere. It reads two things
// of the node: /state, what is so now, once a second while somebody looks, and
// /events, what happens, as server-sent events (WHATWG HTML, section 9.2) that a
// browser takes up again where it was cut by the number of the last one. All that
// is shown of deployments is made of the events alone, so it is what dew and the
// log say too.
//
// The page changes nothing on the node. It shows what runs there to whoever
// can connect, so the daemon serves it on loopback addresses only.
package web

import (
	"bytes"
	"context"
	"embed"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"dewpoint/api/openapi"
	"dewpoint/internal/spec"
)

// Node is what the page asks. Methods are called concurrently.
type Node interface {
	List(ctx context.Context, all bool) ([]spec.Container, error)
	PoPStatus(ctx context.Context) (spec.PoP, error)
	ListDeployments(ctx context.Context, q spec.DeploymentQuery) ([]spec.Deployment, error)
	Version(ctx context.Context) (spec.Version, error)
	// Arriving describes the layers that are not whole, each in so many parts.
	Arriving(parts int) []spec.LayerMap
	Events(ctx context.Context, after *spec.Mark, begun func() error, emit func(spec.Event) error) error
}

const (
	parts     = 120              // of a layer that is shown filling
	stateTime = 5 * time.Second  // that the node may take to say what is so
	beat      = 15 * time.Second // between signs that an idle stream is alive
	streams   = 32               // of events at once
	queued    = 50               // deployments of the queue that are shown
)

//go:embed page
var files embed.FS

// State is what /state answers.
type State struct {
	Version    spec.Version     `json:"version"`
	Containers []spec.Container `json:"containers"`
	Layers     []spec.LayerMap  `json:"layers"`
	PoP        *spec.PoP        `json:"pop,omitempty"` // nil: the node is in none, or cannot say
	Queue      Queue            `json:"queue"`
	Now        time.Time        `json:"now"`
}

// Queue is what waits for its turn.
type Queue struct {
	First []spec.Deployment `json:"first"` // by position, some of them
	Total int               `json:"total"`
}

// queueOf is the queue among deployments.
func queueOf(all []spec.Deployment) Queue {
	waiting := slices.DeleteFunc(all, func(d spec.Deployment) bool { return d.State != spec.StateQueued })
	slices.SortStableFunc(waiting, func(a, b spec.Deployment) int { return a.Position - b.Position })
	return Queue{First: waiting[:min(len(waiting), queued)], Total: len(waiting)}
}

// page is the handler.
type page struct {
	node Node
	busy chan struct{} // has an element for each stream
}

// Handler serves the page of n.
func Handler(n Node) http.Handler {
	p := &page{node: n, busy: make(chan struct{}, streams)}
	mux := http.NewServeMux()
	for path, f := range map[string]struct{ name, kind string }{
		"/{$}":      {"page.html", "text/html; charset=utf-8"},
		"/page.css": {"page.css", "text/css; charset=utf-8"},
		"/page.js":  {"page.js", "text/javascript; charset=utf-8"},
	} {
		mux.HandleFunc("GET "+path, func(w http.ResponseWriter, r *http.Request) { file(w, r, f.name, f.kind) })
	}
	mux.HandleFunc("GET /state", p.state)
	mux.HandleFunc("GET /events", p.events)
	mux.HandleFunc("GET "+openapi.Path, openapi.ServeHTTP)
	return local(mux)
}

// local serves who asks for this machine by a loopback name or address: a page from elsewhere
// whose host name was made to lead here (DNS rebinding) is not to read what runs.
func local(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		name := r.Host
		if host, _, err := net.SplitHostPort(name); err == nil {
			name = host
		}
		if ip := net.ParseIP(strings.Trim(name, "[]")); name != "localhost" && !ip.IsLoopback() {
			http.Error(w, "ask for localhost", http.StatusMisdirectedRequest)
			return
		}
		h.ServeHTTP(w, r)
	})
}

func file(w http.ResponseWriter, r *http.Request, name, kind string) {
	b, err := files.ReadFile("page/" + name)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	h := w.Header()
	h.Set("Content-Type", kind)
	h.Set("Cache-Control", "no-cache")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Content-Security-Policy",
		"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; frame-ancestors 'none'")
	http.ServeContent(w, r, name, time.Time{}, bytes.NewReader(b))
}

func (p *page) state(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), stateTime)
	defer cancel()
	s := State{Layers: p.node.Arriving(parts), Now: time.Now()}
	var err error
	if s.Containers, err = p.node.List(ctx, true); err == nil {
		s.Version, err = p.node.Version(ctx)
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	if all, err := p.node.ListDeployments(ctx, spec.DeploymentQuery{}); err == nil {
		s.Queue = queueOf(all)
	}
	if pop, err := p.node.PoPStatus(ctx); err == nil {
		pop.Layers = nil // many, and not shown
		s.PoP = &pop
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	_ = json.NewEncoder(w).Encode(s)
}

// events streams what happens, from what is still known or from where a browser was cut.
func (p *page) events(w http.ResponseWriter, r *http.Request) {
	select {
	case p.busy <- struct{}{}:
		defer func() { <-p.busy }()
	default:
		http.Error(w, "too many pages look at this node: close some", http.StatusServiceUnavailable)
		return
	}
	var after spec.Mark
	if epoch, seq, ok := strings.Cut(r.Header.Get("Last-Event-ID"), "."); ok {
		after.Epoch = epoch
		after.Seq, _ = strconv.ParseUint(seq, 10, 64)
	}
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Cache-Control", "no-store")
	s := &stream{w: w, c: http.NewResponseController(w)}
	if s.send(": dewpoint\n\n") != nil {
		return
	}
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	events, ended := make(chan spec.Event), make(chan struct{})
	go func() {
		defer close(ended)
		_ = p.node.Events(ctx, &after, nil, func(e spec.Event) error {
			select {
			case events <- e:
				return nil
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		})
	}()
	s.carry(events, ended)
	cancel()
	<-ended
}

// stream is one browser's.
type stream struct {
	w http.ResponseWriter
	c *http.ResponseController
}

// carry sends events until there are no more or nobody takes them.
func (s *stream) carry(events <-chan spec.Event, ended <-chan struct{}) {
	tick := time.NewTicker(beat)
	defer tick.Stop()
	for {
		var err error
		select {
		case e := <-events:
			b, jerr := json.Marshal(e)
			if jerr != nil {
				return
			}
			err = s.send(fmt.Sprintf("id: %s.%d\ndata: %s\n\n", e.Epoch, e.Seq, b))
		case <-tick.C:
			err = s.send(":\n\n")
		case <-ended:
			return
		}
		if err != nil {
			return
		}
	}
}

// send writes within a time: a reader that does not read is left.
func (s *stream) send(text string) error {
	if err := s.c.SetWriteDeadline(time.Now().Add(beat)); err != nil {
		return err
	}
	if _, err := s.w.Write([]byte(text)); err != nil {
		return err
	}
	return s.c.Flush()
}
