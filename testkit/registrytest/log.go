package registrytest

import (
	"io"
	"log"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"
)

// quiet swallows what net/http says of the connections that faults break.
var quiet = log.New(io.Discard, "", 0)

// Request is one request that the registry answered, or began to.
type Request struct {
	Time   time.Time
	From   string // the client's address
	Method string
	Path   string // with the query
	Range  string // the Range header
	Auth   string // the Authorization header
	Header http.Header
	Digest digest.Digest // of the blob asked for, if it was one
	Status int
	Bytes  int64 // of the body, sent so far
}

// Requests gives the log, oldest first. A request enters it when it arrives;
// Status and Bytes follow.
func (s *Server) Requests() []Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]Request, len(s.log))
	for n, r := range s.log {
		out[n] = *r
	}
	return out
}

// Count is the number of requests in the log whose path contains part.
func (s *Server) Count(part string) int {
	n := 0
	for _, r := range s.Requests() {
		if strings.Contains(r.Path, part) {
			n++
		}
	}
	return n
}

// Kinds counts the requests in the log by what they are: "GET manifests",
// "HEAD blobs", "POST uploads", "PUT manifests", "GET referrers", "GET token"
// and so on.
func (s *Server) Kinds() map[string]int {
	out := map[string]int{}
	for _, r := range s.Requests() {
		out[r.Method+" "+kind(r.Path)]++
	}
	return out
}

func kind(path string) string {
	for _, k := range []string{"manifests", "referrers", "uploads", "blobs", "storage"} {
		if strings.Contains(path, "/"+k+"/") {
			return k
		}
	}
	return strings.Trim(strings.SplitN(path, "?", 2)[0], "/") // "token", "v2"
}

// Ranges gives the Range headers of the blob's GET requests, "" for none.
func (s *Server) Ranges(d digest.Digest) []string {
	var out []string
	for _, r := range s.Requests() {
		if r.Digest == d && r.Method == http.MethodGet {
			out = append(out, r.Range)
		}
	}
	return out
}

// Served is the number of bytes of the blob that were sent so far, by all
// requests, those under way included.
func (s *Server) Served(d digest.Digest) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.served[d]
}

// Total is the sum of Served over all blobs.
func (s *Server) Total() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	var n int64
	for _, b := range s.served {
		n += b
	}
	return n
}

// Peak is the largest number of blobs that were being sent at one time.
func (s *Server) Peak() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.peak
}

// Connections is the number of connections that clients opened.
func (s *Server) Connections() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.conns
}

func (s *Server) connState(_ net.Conn, state http.ConnState) {
	if state == http.StateNew {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.conns++
	}
}

// Forget empties the log and the counters.
func (s *Server) Forget() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.log, s.peak, s.conns = nil, 0, 0
	clear(s.served)
}

func (s *Server) enter(by int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.under += by
	s.idle.Broadcast()
}

func (s *Server) sending(by int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.busy += by
	s.peak = max(s.peak, s.busy)
}

func (a *answer) count(n int) {
	a.s.mu.Lock()
	defer a.s.mu.Unlock()
	a.entry.Bytes += int64(n)
	if a.serving {
		a.s.served[a.digest] += int64(n)
	}
}

func (s *Server) record(r Request) *Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.log = append(s.log, &r)
	return &r
}
