package registrytest

import (
	"net/http"
	"strings"

	"github.com/opencontainers/go-digest"
)

// Do is a way to misbehave.
type Do int

const (
	Status      Do = iota // answer with Fault.Status and an error document
	Hang                  // accept the request, never answer
	Stall                 // send At bytes of the body, then nothing more, and keep the connection
	Cut                   // send At bytes of the body, then close the connection
	Extra                 // send At bytes more than were asked for, and say so in Content-Length
	Short                 // send At bytes fewer than were asked for, and say so in Content-Length
	Flip                  // flip a bit of the blob's byte At
	IgnoreRange           // answer 200 with the whole blob
	LieRange              // answer 206 with the range that begins At bytes further on, and say so
	WrongBytes            // answer 206 and the right headers with the bytes from the blob's beginning
	Slow                  // send At bytes a second
	Chunked               // leave out Content-Length
	Redirect              // send the client to Fault.To
	NoDigest              // leave out Docker-Content-Digest
	WrongDigest           // send a Docker-Content-Digest that is not the document's
	Garbage               // send At bytes of garbage in place of the body
)

// Fault is one misbehaviour and the requests it befalls.
type Fault struct {
	Do         Do
	At         int64
	Status     int     // of Status
	RetryAfter string  // header of Status
	Message    string  // of Status, in the error document
	To         *Server // of Redirect
	Method     string  // only requests by it; "" is any
	// only requests whose path contains it; "" is "/blobs/", but "/manifests/" for the two digest faults
	Path   string
	Digest digest.Digest // only requests for this blob or manifest digest; "" is any
	Skip   int           // so many matching requests go well first
	Times  int           // then so many go wrong; 0 is all
}

// Anywhere as a Fault's Path befalls every request.
const Anywhere = "/"

func (f *Fault) matches(r *http.Request) bool {
	part := f.Path
	if part == "" {
		part = "/blobs/"
		if f.Do == NoDigest || f.Do == WrongDigest {
			part = "/manifests/"
		}
	}
	return (f.Method == "" || f.Method == r.Method) && strings.Contains(r.URL.Path, part) &&
		strings.Contains(r.URL.Path, string(f.Digest))
}

// befall gives the faults for a request, and counts it against them.
func (s *Server) befall(r *http.Request) faults {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out faults
	for _, f := range s.faults {
		if !f.matches(r) || f.Times < 0 {
			continue
		}
		if f.Skip > 0 {
			f.Skip--
			continue
		}
		if f.Times == 1 {
			f.Times = -1 // used up
		} else if f.Times > 1 {
			f.Times--
		}
		out = append(out, *f)
		if f.Do == Status || f.Do == Hang {
			break // nothing else of this request happens
		}
	}
	return out
}

type faults []Fault

func (fs faults) find(d Do) (Fault, bool) {
	for _, f := range fs {
		if f.Do == d {
			return f, true
		}
	}
	return Fault{}, false
}

func (fs faults) hasFault(d Do) bool {
	_, ok := fs.find(d)
	return ok
}
