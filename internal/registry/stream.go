package registry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"

	"dewpoint/internal/image"

	"github.com/opencontainers/go-digest"
)

// Blob names a blob and its size.
type Blob struct {
	Digest digest.Digest
	Size   int64
}

// OpenOptions are what one stream may differ in.
type OpenOptions struct {
	// Window is how many bytes may be under way that nobody has read, and so how long the
	// stream goes on to take of the link when it is not read. 0 is as the system sees fit.
	Window int
	// Observe is called as Config.Observe is, for this stream alone.
	Observe func(n int)
}

// StreamStats counts what one stream did so far.
type StreamStats struct {
	Bytes     int64 // payload that crossed the wire
	Discarded int64 // of it, bytes before the position whose Range was ignored
	Retries   int64
}

var (
	errTooMuch = errors.New("the registry sends more bytes than the blob has")
	errClosed  = errors.New("stream is closed")
)

// Open opens the length bytes of a blob that begin at offset; a length below 0
// means to the end. Temporary failures are retried inside, here and in Read;
// what is returned is permanent, or has outlasted the retries.
//
// The stream ends with io.EOF after exactly the bytes asked for. That they are
// the blob's is for the caller to verify against its digest.
func (c *Client) Open(ctx context.Context, ref image.Reference, b Blob, offset, length int64,
	o OpenOptions) (*Stream, error) {
	op := opFetch + b.Digest.String()
	if length < 0 {
		length = b.Size - offset
	}
	if offset < 0 || length < 0 || length > b.Size-offset {
		return nil, fmt.Errorf("%s: %d bytes at %d are not within its %d", op, length, offset, b.Size)
	}
	if err := b.Digest.Validate(); err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	eps, err := c.endpoints(ref.Host)
	if err != nil {
		return nil, err
	}
	s := &Stream{
		c: c, eps: eps, size: b.Size, pos: offset, end: offset + length, start: offset, observe: o.Observe,
		ask: ask{op: op, path: "/" + ref.Path + "/blobs/" + b.Digest.String(), scope: pullScope(ref),
			accept: acceptAny, blob: b.Digest, window: o.Window},
		backoff: backoff{first: c.cfg.Backoff, most: c.cfg.MaxBackoff, retries: c.cfg.Retries},
	}
	s.ctx, s.cancel = context.WithCancelCause(ctx)
	if err := s.open(); err != nil {
		s.cancel(nil)
		return nil, err
	}
	return s, nil
}

func pullScope(ref image.Reference) string { return "repository:" + ref.Path + ":pull" }

var acceptAny = []string{"*/*"}

// Stream is a blob's bytes on their way. One goroutine reads it; Close and
// Stats may be called by others.
type Stream struct {
	c       *Client
	eps     []*endpoint
	ask     ask
	size    int64 // of the blob
	start   int64 // where the stream began
	end     int64 // where it ends
	observe func(int)
	ctx     context.Context
	cancel  context.CancelCauseFunc

	mu      sync.Mutex // held while reading; guards what follows
	pos     int64      // of the next byte that Read gives
	mark    int64      // bytes before it have earned their retries
	backoff backoff
	body    io.ReadCloser // nil between connections
	from    *endpoint     // that body comes from
	err     error         // final

	stats struct {
		sync.Mutex
		StreamStats
	}
}

// Stats gives the stream's counters.
func (s *Stream) Stats() StreamStats {
	s.stats.Lock()
	defer s.stats.Unlock()
	return s.stats.StreamStats
}

// Read implements io.Reader. Reads of 32 KiB and more go straight from the
// connection to p. After an error other than io.EOF the stream is done; Open
// gives another from any offset.
func (s *Stream) Read(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(p) == 0 {
		return 0, nil
	}
	for s.err == nil {
		if s.pos == s.end && s.body == nil {
			s.err = io.EOF
			break
		}
		if s.body == nil {
			s.err = s.open()
			continue
		}
		n, err := s.body.Read(p)
		s.advance(n)
		s.settle(err)
		if n > 0 {
			return n, nil
		}
	}
	return 0, s.err
}

// advance moves the position; enough of it gives the full number of retries again.
func (s *Stream) advance(n int) {
	s.pos += int64(n)
	if s.pos-s.mark >= progress {
		s.mark = s.pos
		s.backoff.reset()
	}
}

// settle deals with what a body's Read returned beside bytes.
func (s *Stream) settle(err error) {
	if err == nil {
		return
	}
	s.drop()
	if err == io.EOF {
		return // at the end, or of an answer shorter than asked for
	}
	if len(s.eps) > 1 {
		s.from.failed()
	}
	s.err = s.retry(err)
}

// retry waits before the next attempt, or returns why there is none.
func (s *Stream) retry(err error) error {
	if ended := s.backoff.again(s.ctx, err); ended != nil {
		return ended
	}
	s.c.retries.Add(1)
	s.stats.Lock()
	s.stats.Retries++
	s.stats.Unlock()
	s.c.cfg.Log.Info("retry", "op", s.ask.op, "position", s.pos, "failures", s.backoff.failures, "error", err)
	return nil
}

func (s *Stream) drop() {
	if s.body != nil {
		s.body.Close()
		s.body = nil
	}
}

// Close ends the stream and any Read under way.
func (s *Stream) Close() error {
	s.cancel(errClosed)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.drop()
	if s.err == nil || s.err == io.EOF {
		s.err = errClosed
	}
	return nil
}

// open connects at the position, with retries.
func (s *Stream) open() error {
	for s.pos < s.end {
		err := s.c.mirrors(s.ctx, s.eps, canPull, s.ask.op, s.connect)
		if err == nil {
			return nil
		}
		if err := s.retry(err); err != nil {
			return err
		}
	}
	return nil
}

// connect asks one endpoint for the bytes from the position on.
func (s *Stream) connect(ep *endpoint) error {
	q := s.ask
	if s.pos > 0 || s.end < s.size {
		q.rng = fmt.Sprintf("bytes=%d-%d", s.pos, s.end-1)
	}
	w := newWatch(s.ctx, s.c.cfg.StallTimeout)
	res, err := ep.do(w.Ctx, s.c.cfg.UserAgent, q)
	w.Rest()
	if err != nil {
		w.End()
		return err
	}
	body := &exact{wire: &wire{body: res.Body, w: w, c: s.c, observe: s.count, host: res.Request.URL.Host,
		op: q.op}}
	if err := s.begin(body, res); err != nil {
		body.Close()
		return err
	}
	s.body, s.from = body, ep
	return nil
}

// count is called for each read of the wire.
func (s *Stream) count(n int) {
	s.stats.Lock()
	s.stats.Bytes += int64(n)
	s.stats.Unlock()
	if s.observe != nil {
		s.observe(n)
	}
}

// begin checks that the answer is what was asked for, and brings the body to
// the position.
func (s *Stream) begin(body *exact, res *http.Response) error {
	lie := func(format string, args ...any) error {
		return &Error{Kind: Protocol, Host: body.host, Op: body.op, Err: fmt.Errorf(format, args...)}
	}
	whole := res.StatusCode != http.StatusPartialContent
	from, to := int64(0), s.size
	if !whole {
		var total int64
		var err error
		if from, to, total, err = parseContentRange(res.Header.Get("Content-Range")); err != nil {
			return lie("answer to a range: %w", err)
		}
		if total >= 0 && total != s.size {
			return lie("the registry says that the blob has %d bytes, the manifest says %d", total, s.size)
		}
		if from != s.pos || to > s.end {
			return lie("asked for bytes %d to %d, the registry answers with %d to %d", s.pos, s.end-1, from, to-1)
		}
	}
	if n := res.ContentLength; n >= 0 && n != to-from {
		return lie("the registry sends %d bytes where %d are due", n, to-from)
	}
	body.probe = res.ContentLength < 0 && to <= s.end
	if whole && s.pos > 0 {
		if err := s.discard(body); err != nil {
			return err
		}
	}
	body.left = min(to, s.end) - s.pos
	return nil
}

// discard reads what lies before the position of a blob that came whole.
func (s *Stream) discard(body *exact) error {
	s.c.cfg.Log.Info("registry ignores Range", "op", s.ask.op, "discard", s.pos)
	before := s.Stats().Bytes
	err := body.skip(s.pos)
	s.stats.Lock()
	s.stats.Discarded += s.stats.Bytes - before
	s.stats.Unlock()
	return err
}

// parseContentRange reads "bytes A-B/TOTAL"; to is B+1, total -1 if it is "*".
func parseContentRange(h string) (from, to, total int64, err error) {
	bad := fmt.Errorf("Content-Range %q makes no sense", h)
	spec, ok := strings.CutPrefix(h, "bytes ")
	span, size, ok2 := strings.Cut(spec, "/")
	a, b, ok3 := strings.Cut(span, "-")
	if !ok || !ok2 || !ok3 {
		return 0, 0, 0, bad
	}
	from, errA := strconv.ParseInt(a, 10, 63)
	last, errB := strconv.ParseInt(b, 10, 63)
	total = -1
	if size != "*" {
		var errT error
		if total, errT = strconv.ParseInt(size, 10, 63); errT != nil || total <= last {
			return 0, 0, 0, bad
		}
	}
	if errA != nil || errB != nil || from < 0 || last < from {
		return 0, 0, 0, bad
	}
	return from, last + 1, total, nil
}
