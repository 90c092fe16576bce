package peer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"dewpoint/internal/limit"

	"github.com/opencontainers/go-digest"
)

var (
	errQuiet   = errors.New("no byte for a while")
	errStalled = errors.New("nothing moved for too long")
	errShort   = errors.New("less than was promised")
	errAsk     = errors.New("not a request of this protocol")
)

// bufferSize is what is read from Content at a time; one of them is held for each request under way.
const bufferSize = 128 << 10

var buffers = sync.Pool{New: func() any { return new([bufferSize]byte) }}

// handler answers the requests of the PoP's nodes.
//
// HTTP/1.1 only: with HTTP/2 a reader that stands still would hold up the others of its connection.
//
//	GET /v1/layers/<diffID>?follow=1&from=N   200, trailers below; headers
//	                                          Dewpoint-From: N, Dewpoint-Size: bytes or -1
//	GET /v1/layers/<diffID>                   with Range: bytes=A-B: 206, exactly these bytes
//	GET /v1/layers/<diffID>/progress          200, with its length
//	GET /v1/layers/<diffID>/table             200, with its length
//	GET /v1/packs/<manifest>                  200, chunked
//	GET /v1/images/<manifest>/checkpoints     200, with its length
//	GET /v1/checkpoints/<ID>                  200, with its length
//
// 404 is ErrUnknown; 429 (too many requests of this node) and 503 (of all) are ErrBusy and say when to come
// again.
//
// A followed layer may stand still for minutes, while the link to the registry does. A connection on which
// nothing moves may as well be dead, so a follow ends after Quiet without a byte, in order, with the trailer
// Dewpoint-More: 1, and the client asks again from where it is, on the same connection, until it has waited
// for Patience. The end of the layer is the trailer Dewpoint-End with its size. A body without either was cut
// off. So were a chunked body without its last chunk, and one shorter than its length. To the reader all of
// these are io.ErrUnexpectedEOF and never a clean end.
func (s *Server) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/layers/{id}", s.serve((*giving).layer))
	mux.HandleFunc("GET /v1/layers/{id}/progress", s.serve((*giving).progress))
	mux.HandleFunc("GET /v1/layers/{id}/table", s.serve((*giving).table))
	mux.HandleFunc("GET /v1/packs/{id}", s.serve((*giving).pack))
	if s.cfg.Checkpoints != nil {
		mux.HandleFunc("GET /v1/images/{id}/checkpoints", s.serve((*giving).records))
		mux.HandleFunc("GET /v1/checkpoints/{id}", s.serve((*giving).data))
	}
	return mux
}

// giving is one answer.
type giving struct {
	s     *Server
	w     http.ResponseWriter
	r     *http.Request
	id    digest.Digest
	ctx   context.Context // of Content's work
	watch *limit.Watch    // ends it when Content stands still
	begun bool            // the header is out
}

// serve answers a request by give. What give returns before it has begun becomes a status, later the
// connection is cut.
func (s *Server) serve(give func(*giving) error) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		peer, _, _ := net.SplitHostPort(r.RemoteAddr)
		if status := s.gate.enter(peer); status != 0 {
			s.stats.busy.Add(1)
			busy(w, status)
			return
		}
		defer s.gate.leave(peer)
		s.stats.requests.Add(1)
		g := &giving{s: s, w: w, r: r, watch: limit.NewWatch(r.Context(), s.cfg.Stall, errStalled)}
		g.ctx = g.watch.Ctx
		defer func() { g.watch.End() }()
		err := g.check()
		if err == nil {
			err = give(g)
		}
		if err != nil {
			g.fail(err)
		}
	}
}

func busy(w http.ResponseWriter, status int) {
	w.Header().Set("Retry-After", "1")
	http.Error(w, "too many requests", status)
}

// check looks at what all requests have.
func (g *giving) check() error {
	g.id = digest.Digest(g.r.PathValue("id"))
	if err := checkDigest(g.id); err != nil {
		return fmt.Errorf("%w: %w", errAsk, err)
	}
	if g.r.ContentLength != 0 {
		// Nobody waits for the rest of it.
		g.w.Header().Set("Connection", "close")
		return fmt.Errorf("%w: it has a body", errAsk)
	}
	if g.r.Method != http.MethodGet {
		return fmt.Errorf("%w: %s", errAsk, g.r.Method)
	}
	return nil
}

func (g *giving) fail(err error) {
	if g.begun {
		if g.r.Context().Err() == nil {
			g.s.cfg.Log.Warn("peer: answer cut off", "id", g.id, "to", g.r.RemoteAddr, "error", err)
		}
		panic(http.ErrAbortHandler)
	}
	g.extend()
	status := http.StatusInternalServerError
	switch {
	case errors.Is(err, errAsk):
		status = http.StatusBadRequest
	case errors.Is(err, ErrUnknown):
		status = http.StatusNotFound
	case errors.Is(err, ErrBusy), errors.Is(context.Cause(g.ctx), errStalled):
		g.s.stats.busy.Add(1)
		busy(g.w, http.StatusServiceUnavailable)
		return
	}
	http.Error(g.w, oneLine(err.Error()), status)
}

func (g *giving) layer() error {
	q := g.r.URL.Query()
	rng := g.r.Header.Get("Range")
	if !q.Has("follow") {
		from, to, err := parseRange(rng)
		if err != nil {
			return err
		}
		return g.rng(from, to)
	}
	from, err := parseNumber(q.Get("from"))
	if err != nil || rng != "" || q.Get("follow") != "1" || from > MaxLayer {
		return fmt.Errorf("%w: neither follow nor range", errAsk)
	}
	return g.follow(from)
}

func (g *giving) rng(from, to int64) error {
	r, err := g.s.cfg.Content.Range(g.ctx, g.id, from, to)
	if err != nil {
		return err
	}
	defer r.Close()
	h := g.w.Header()
	h.Set("Content-Range", fmt.Sprintf("bytes %d-%d/*", from, to-1))
	h.Set("Content-Length", strconv.FormatInt(to-from, 10))
	g.begin(http.StatusPartialContent)
	return g.copyAll(r, to-from)
}

func (g *giving) table() error {
	b, err := g.s.cfg.Content.Table(g.ctx, g.id)
	if err != nil {
		return err
	}
	return g.all("table", b, MaxTable)
}

func (g *giving) progress() error {
	b, err := g.s.cfg.Content.Progress(g.ctx, g.id)
	if err != nil {
		return err
	}
	return g.all("progress", b, MaxProgress)
}

func (g *giving) records() error {
	b, err := g.s.cfg.Checkpoints.Records(g.ctx, g.id)
	if err != nil {
		return err
	}
	return g.all("records", b, MaxRecords)
}

// all gives what is in memory, most bytes at most.
func (g *giving) all(what string, b []byte, most int) error {
	if len(b) > most {
		return fmt.Errorf("%s of %d bytes: longer than %d", what, len(b), most)
	}
	g.w.Header().Set("Content-Length", strconv.Itoa(len(b)))
	g.begin(http.StatusOK)
	for len(b) > 0 {
		n := min(len(b), bufferSize)
		if err := g.write(b[:n]); err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}

func (g *giving) data() error {
	r, size, err := g.s.cfg.Checkpoints.Data(g.ctx, g.id)
	if err != nil {
		return err
	}
	defer r.Close()
	g.w.Header().Set("Content-Length", strconv.FormatInt(size, 10))
	g.begin(http.StatusOK)
	return g.copyAll(r, size)
}

func (g *giving) pack() error {
	r, err := g.s.cfg.Content.Pack(g.ctx, g.id)
	if err != nil {
		return err
	}
	defer r.Close()
	g.begin(http.StatusOK)
	n, err := g.copy(r, MaxPack+1)
	if n > MaxPack {
		err = fmt.Errorf("pack of more than %d bytes", MaxPack)
	}
	return err
}

// follow gives a layer as it grows. When it stands still, the follower is told to ask again.
func (g *giving) follow(from int64) error {
	g.watch.End()
	g.watch = limit.NewWatch(g.r.Context(), g.s.cfg.Quiet, errQuiet)
	g.ctx = g.watch.Ctx
	r, size, err := g.s.cfg.Content.Follow(g.ctx, g.id, from)
	quiet := err != nil && context.Cause(g.ctx) == errQuiet
	if err != nil && !quiet {
		return err
	}
	if quiet {
		r, size = io.NopCloser(strings.NewReader("")), -1
	}
	defer r.Close()
	if size >= 0 && from > size || size > MaxLayer {
		return fmt.Errorf("%w: %d is outside a layer of %d bytes", errAsk, from, size)
	}
	h := g.w.Header()
	h.Set(headerFrom, strconv.FormatInt(from, 10))
	h.Set(headerSize, strconv.FormatInt(max(size, -1), 10))
	h.Set("Trailer", trailerMore+", "+trailerEnd)
	g.begin(http.StatusOK)
	if err := g.flush(); err != nil {
		return err
	}
	if quiet {
		h.Set(trailerMore, "1")
		return nil
	}
	return g.followed(r, from, size)
}

// followed gives the bytes, and says in the trailer what their end means.
func (g *giving) followed(r io.Reader, from, size int64) error {
	most := MaxLayer - from
	if size >= 0 {
		most = size - from
	}
	n, err := g.copy(r, most)
	switch {
	case err != nil && context.Cause(g.ctx) == errQuiet && !errors.Is(err, errWrite):
		g.w.Header().Set(trailerMore, "1")
		return nil
	case err != nil:
		return err
	case size < 0 && n == most:
		return fmt.Errorf("layer of %d bytes or more", MaxLayer)
	case size >= 0 && from+n < size:
		return fmt.Errorf("%w: %d bytes of %d", errShort, from+n, size)
	}
	g.w.Header().Set(trailerEnd, strconv.FormatInt(from+n, 10))
	return nil
}

func (g *giving) begin(status int) {
	g.extend()
	g.w.Header().Set("Content-Type", "application/octet-stream")
	g.w.WriteHeader(status)
	g.begun = true
}

// errWrite says that the peer does not take what it asked for.
var errWrite = errors.New("write")

// extend gives the peer time to take what is written next.
func (g *giving) extend() {
	// A writer without deadlines is a test's.
	_ = http.NewResponseController(g.w).SetWriteDeadline(time.Now().Add(g.s.cfg.Stall))
}

func (g *giving) write(b []byte) error {
	g.extend()
	n, err := g.w.Write(b)
	g.s.stats.bytes.Add(int64(n))
	if err != nil {
		return fmt.Errorf("%w: %w", errWrite, err)
	}
	return nil
}

func (g *giving) flush() error {
	if err := http.NewResponseController(g.w).Flush(); err != nil {
		return fmt.Errorf("%w: %w", errWrite, err)
	}
	return nil
}

// copyAll gives exactly size bytes of r.
func (g *giving) copyAll(r io.Reader, size int64) error {
	n, err := g.copy(r, size)
	if err == nil && n < size {
		err = fmt.Errorf("%w: %d bytes of %d", errShort, n, size)
	}
	return err
}

// copy gives r to its end, or its first most bytes. What came is sent on before the next is waited for.
func (g *giving) copy(r io.Reader, most int64) (int64, error) {
	buf := buffers.Get().(*[bufferSize]byte)
	defer buffers.Put(buf)
	var done int64
	for done < most {
		b := buf[:min(bufferSize, most-done)]
		g.watch.Arm()
		n, err := r.Read(b)
		g.watch.Rest()
		if n > 0 {
			if werr := g.write(b[:n]); werr != nil {
				return done, werr
			}
			done += int64(n)
		}
		if err == io.EOF {
			return done, nil
		}
		if err != nil {
			return done, err
		}
		if n < len(b) {
			if err := g.flush(); err != nil {
				return done, err
			}
		}
	}
	return done, nil
}

// parseRange reads "bytes=A-B", the only form that is asked for; to is behind the last byte.
func parseRange(s string) (from, to int64, err error) {
	a, b, ok := strings.Cut(strings.TrimPrefix(s, "bytes="), "-")
	if !ok || !strings.HasPrefix(s, "bytes=") {
		return 0, 0, fmt.Errorf("%w: range %q", errAsk, s)
	}
	from, errFrom := parseNumber(a)
	last, errLast := parseNumber(b)
	if errFrom != nil || errLast != nil || last < from || last >= MaxLayer {
		return 0, 0, fmt.Errorf("%w: range %q", errAsk, s)
	}
	return from, last + 1, nil
}

// parseNumber reads digits and nothing else.
func parseNumber(s string) (int64, error) {
	n, err := strconv.ParseUint(s, 10, 63)
	return int64(n), err
}

// oneLine keeps another's words from filling a log.
func oneLine(s string) string {
	s = strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r == utf8.RuneError {
			return ' '
		}
		return r
	}, strings.TrimSpace(s))
	if len(s) > 300 {
		s = strings.ToValidUTF8(s[:300], "") + "…"
	}
	return s
}
