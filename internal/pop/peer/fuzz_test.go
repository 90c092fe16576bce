package peer

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
)

// strict is a Content of one layer that checks what it is asked for.
type strict struct{ t *testing.T }

const strictSize = 1000

func (s strict) check(id digest.Digest, from, to int64) {
	if id.Validate() != nil || id.Algorithm() != digest.SHA256 || from < 0 || to < from || to > MaxLayer {
		s.t.Errorf("asked for %q, %d to %d", id, from, to)
	}
}

func (s strict) Follow(_ context.Context, id digest.Digest, off int64) (io.ReadCloser, int64, error) {
	s.check(id, off, off)
	return io.NopCloser(strings.NewReader(strings.Repeat("x", int(max(0, strictSize-off))))), strictSize, nil
}

func (s strict) Range(_ context.Context, id digest.Digest, from, to int64) (io.ReadCloser, error) {
	s.check(id, from, to)
	if from == to {
		s.t.Error("asked for nothing")
	}
	return io.NopCloser(strings.NewReader(strings.Repeat("x", int(max(0, strictSize-from))))), nil
}

func (s strict) Table(_ context.Context, id digest.Digest) ([]byte, error) {
	s.check(id, 0, 0)
	return []byte("table"), nil
}

func (s strict) Progress(_ context.Context, id digest.Digest) ([]byte, error) {
	s.check(id, 0, 0)
	return []byte("progress"), nil
}

func (s strict) Pack(_ context.Context, id digest.Digest) (io.ReadCloser, error) {
	s.check(id, 0, 0)
	return io.NopCloser(strings.NewReader("pack")), nil
}

// FuzzRequest gives the handler any request that net/http lets through.
func FuzzRequest(f *testing.F) {
	id := string(digest.FromString("x"))
	for _, line := range []string{"/v1/layers/" + id, "/v1/layers/" + id + "?follow=1&from=5",
		"/v1/layers/" + id + "/table", "/v1/layers/" + id + "/progress", "/v1/packs/" + id} {
		f.Add("GET " + line + " HTTP/1.1\r\nHost: x\r\nRange: bytes=5-9\r\n\r\n")
		f.Add("GET " + line + " HTTP/1.1\r\nHost: x\r\n\r\n")
	}
	f.Add("POST /v1/packs/sha256:%2e%2e HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc")
	f.Fuzz(func(t *testing.T, text string) {
		req, err := http.ReadRequest(bufio.NewReader(strings.NewReader(text)))
		if err != nil {
			return
		}
		s, err := NewServer(Config{Auth: &Auth{server: baseTLS(), client: baseTLS()}, Content: strict{t}})
		check(t, err)
		defer s.Close()
		w := httptest.NewRecorder()
		cut := answered(s, w, req)
		if s.Stats().Active != 0 {
			t.Error("a request was not counted out")
		}
		if !cut && w.Code == http.StatusPartialContent && w.Header().Get("Content-Length") != "" &&
			w.Body.Len() == 0 {
			t.Error("a range without bytes")
		}
		if w.Code == http.StatusInternalServerError {
			t.Errorf("%q is the server's fault: %s", text, w.Body)
		}
	})
}

// answered reports whether the answer was cut off.
func answered(s *Server, w http.ResponseWriter, req *http.Request) (cut bool) {
	defer func() {
		if p := recover(); p != nil && p != http.ErrAbortHandler {
			panic(p)
		} else if p != nil {
			cut = true
		}
	}()
	s.http.Handler.ServeHTTP(w, req)
	return false
}

// FuzzAnswer gives the client any answer, and to all that it asks afterwards the same.
func FuzzAnswer(f *testing.F) {
	f.Add([]byte(head("206 x", "Content-Length: 10", "Content-Range: bytes 10-19/*") + "1234567890"))
	f.Add([]byte(followHead("10") + "5\r\n12345\r\n0\r\nDewpoint-End: 10\r\n\r\n"))
	f.Add([]byte(followHead("-1") + "5\r\n12345\r\n0\r\nDewpoint-More: 1\r\n\r\n"))
	f.Add([]byte(head("200 x", "Content-Length: 5") + "table"))
	f.Add([]byte(head("503 x", "Retry-After: 3")))
	f.Fuzz(func(t *testing.T, text []byte) {
		// A busy node has a follower wait for seconds: not here.
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		defer cancel()
		c, err := NewClient(Config{Auth: &Auth{server: baseTLS(), client: baseTLS()}, Patience: time.Millisecond})
		check(t, err)
		defer c.Close()
		c.maxPack = 100
		c.transport.DialTLSContext = func(context.Context, string, string) (net.Conn, error) {
			return pipe(text), nil
		}
		for _, what := range []string{"range", "table", "pack", "follow"} {
			got, err := drain(ctx, c, what, "127.0.0.1:1") // where nobody is
			switch {
			case err == nil && what == "range" && len(got) != 10:
				t.Errorf("a range of %d bytes", len(got))
			case what == "pack" && len(got) > 100:
				t.Errorf("a pack of %d bytes", len(got))
			case err != nil && !known(err):
				t.Errorf("%s: %v is none of the package's errors", what, err)
			case err == nil && what == "follow" && !bytes.Contains(bytes.ToLower(text), []byte("dewpoint-end")):
				t.Error("an end that nobody told of")
			}
		}
	})
}

func known(err error) bool {
	for _, e := range []error{ErrUnknown, ErrRefused, ErrAway, ErrBusy, ErrProtocol, ErrFailed,
		context.DeadlineExceeded} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// pipe is a connection to somebody who says text and hangs up.
func pipe(text []byte) net.Conn {
	a, b := net.Pipe()
	go func() {
		defer b.Close()
		if _, err := http.ReadRequest(bufio.NewReader(b)); err == nil {
			_, _ = b.Write(text)
		}
	}()
	return a
}
