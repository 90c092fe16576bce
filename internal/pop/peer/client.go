package peer

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"dewpoint/internal/limit"

	"github.com/opencontainers/go-digest"
)

// Client asks other nodes of the PoP for what they have. Addresses are "host:port". Nothing is retried
// inside, save that a followed layer that stands still is asked for again. It is safe for concurrent use.
//
// Its errors, and those of its streams, wrap one of the package's, or are the end of the caller's context. A
// stream that ends early gives an error that wraps io.ErrUnexpectedEOF. How fast a stream is, as long as it
// does not stand still, is the caller's to judge.
type Client struct {
	cfg       Config
	transport *http.Transport
	maxPack   int64
	stats     struct{ requests, bytes atomic.Int64 }

	mu      sync.Mutex
	refused map[string]bool // addresses that were refused, or refused, when they were asked last
}

// Try asks a node for nothing: nil if it answers and the two accept each other.
func (c *Client) Try(ctx context.Context, addr string) error {
	_, err := c.Table(ctx, addr, digest.FromString(""))
	if errors.Is(err, ErrUnknown) || errors.Is(err, ErrBusy) {
		return nil
	}
	if why := errors.Unwrap(err); why != nil {
		err = why // without what was asked for
	}
	return err
}

// accept notes whether addr and this node accept each other, and logs when they cease to.
func (c *Client) accept(addr string, why error) {
	c.mu.Lock()
	known := c.refused[addr]
	if why == nil {
		delete(c.refused, addr)
	} else if len(c.refused) < mostRefused {
		c.refused[addr] = true
	}
	c.mu.Unlock()
	if why != nil && !known {
		c.cfg.Log.Warn("another node of the PoP cannot be asked", "address", addr, "err", why)
	}
}

// mostRefused bounds what is remembered: a PoP has few nodes.
const mostRefused = 64

// ClientStats counts what a Client did so far.
type ClientStats struct {
	Requests int64 // that were answered, with whatever
	Bytes    int64 // received in answers
}

// NewClient returns a client. Close ends its connections.
func NewClient(cfg Config) (*Client, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	var only1 http.Protocols
	only1.SetHTTP1(true)
	c := &Client{cfg: cfg, maxPack: MaxPack, refused: map[string]bool{}}
	c.transport = &http.Transport{
		// No proxy: these are neighbours.
		DialTLSContext:         c.dialTLS,
		MaxIdleConnsPerHost:    8,
		IdleConnTimeout:        idleTime / 2, // before the server's
		DisableCompression:     true,
		Protocols:              &only1,
		ReadBufferSize:         32 << 10,
		MaxResponseHeaderBytes: maxHeader,
	}
	return c, nil
}

// Close ends the connections that are idle. Streams end by their own Close.
func (c *Client) Close() { c.transport.CloseIdleConnections() }

// Stats gives the client's counters.
func (c *Client) Stats() ClientStats {
	return ClientStats{Requests: c.stats.requests.Load(), Bytes: c.stats.bytes.Load()}
}

func (c *Client) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	return (&net.Dialer{Timeout: c.cfg.Connect, KeepAlive: 15 * time.Second}).DialContext(ctx, network, addr)
}

// dialTLS connects, and shakes hands.
func (c *Client) dialTLS(ctx context.Context, network, addr string) (net.Conn, error) {
	raw, err := c.dial(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	host, _, _ := net.SplitHostPort(addr)
	conn := c.cfg.Auth.over(raw, host)
	ctx, cancel := context.WithTimeout(ctx, c.cfg.Connect)
	defer cancel()
	if err := conn.HandshakeContext(ctx); err != nil {
		conn.Close()
		return nil, err
	}
	return conn, nil
}

// Refuses reports whether the machine of addr is there and says that nobody listens: its node is dead, or
// is about to start.
func (c *Client) Refuses(ctx context.Context, addr string) bool {
	conn, err := c.dial(ctx, "tcp", addr)
	if err == nil {
		conn.Close()
	}
	return errors.Is(err, syscall.ECONNREFUSED)
}

// Range gives bytes [from, to) of a layer: exactly so many, or an error in their place.
func (c *Client) Range(ctx context.Context, addr string, id digest.Digest, from, to int64) (io.ReadCloser,
	error) {
	op := fmt.Sprintf("range %d-%d of %s from %s", from, to, id, addr)
	if from < 0 || to < from || to > MaxLayer {
		return nil, fmt.Errorf("%s: no such range", op)
	}
	if from == to {
		return http.NoBody, checkDigest(id)
	}
	a, err := c.ask(ctx,
		question{op: op, addr: addr, path: "/v1/layers/", id: id, rng: fmt.Sprintf("bytes=%d-%d", from, to-1)})
	if err != nil {
		return nil, err
	}
	res := a.res
	if res.StatusCode != http.StatusPartialContent || res.ContentLength != to-from ||
		res.Header.Get("Content-Range") != fmt.Sprintf("bytes %d-%d/*", from, to-1) {
		a.Close()
		return nil, fmt.Errorf("%s: %w: status %d, %d bytes, range %q", op, ErrProtocol, res.StatusCode,
			res.ContentLength, oneLine(res.Header.Get("Content-Range")))
	}
	return a, nil
}

// Progress gives how far a layer has come that can be followed at addr, of MaxProgress bytes at most.
func (c *Client) Progress(ctx context.Context, addr string, id digest.Digest) ([]byte, error) {
	return c.all(ctx, MaxProgress,
		question{op: fmt.Sprintf("progress of %s from %s", id, addr), addr: addr, path: "/v1/layers/", id: id,
			rest: "/progress"})
}

// Table gives a layer's table, of MaxTable bytes at most. Whether it makes sense is for the caller to see.
func (c *Client) Table(ctx context.Context, addr string, id digest.Digest) ([]byte, error) {
	return c.all(ctx, MaxTable,
		question{op: fmt.Sprintf("table of %s from %s", id, addr), addr: addr, path: "/v1/layers/", id: id,
			rest: "/table"})
}

// Records gives the records of the checkpoints that the node has of an image, of MaxRecords bytes at most.
// Whether they make sense is for the caller to see.
func (c *Client) Records(ctx context.Context, addr string, manifest digest.Digest) ([]byte, error) {
	return c.all(ctx, MaxRecords,
		question{op: fmt.Sprintf("checkpoints of %s from %s", manifest, addr), addr: addr, path: "/v1/images/",
			id: manifest, rest: "/checkpoints"})
}

// all gives an answer of at most most bytes.
func (c *Client) all(ctx context.Context, most int64, q question) ([]byte, error) {
	a, err := c.ask(ctx, q)
	if err != nil {
		return nil, err
	}
	defer a.Close()
	if a.res.StatusCode != http.StatusOK || a.res.ContentLength < 0 || a.res.ContentLength > most {
		return nil, fmt.Errorf("%s: %w: status %d, %d bytes", q.op, ErrProtocol, a.res.StatusCode,
			a.res.ContentLength)
	}
	return io.ReadAll(a) // net/http ends it after its length
}

// Data gives the data file of a checkpoint, which must have size bytes. The caller compares its digest.
func (c *Client) Data(ctx context.Context, addr string, id digest.Digest, size int64) (io.ReadCloser, error) {
	op := fmt.Sprintf("checkpoint %s from %s", id, addr)
	a, err := c.ask(ctx, question{op: op, addr: addr, path: "/v1/checkpoints/", id: id})
	if err != nil {
		return nil, err
	}
	if a.res.StatusCode != http.StatusOK || a.res.ContentLength != size {
		a.Close()
		return nil, fmt.Errorf("%s: %w: status %d, %d bytes", op, ErrProtocol, a.res.StatusCode,
			a.res.ContentLength)
	}
	a.left = size
	return a, nil
}

// Pack gives the startup pack of an image, of MaxPack bytes at most. More are ErrProtocol at the reader.
func (c *Client) Pack(ctx context.Context, addr string, manifest digest.Digest) (io.ReadCloser, error) {
	op := fmt.Sprintf("pack of %s from %s", manifest, addr)
	a, err := c.ask(ctx, question{op: op, addr: addr, path: "/v1/packs/", id: manifest})
	if err != nil {
		return nil, err
	}
	// A body that ends with its connection could have been cut anywhere.
	delimited := a.res.ContentLength >= 0 || len(a.res.TransferEncoding) > 0
	if a.res.StatusCode != http.StatusOK || !delimited || a.res.ContentLength > c.maxPack {
		a.Close()
		return nil, fmt.Errorf("%s: %w: status %d, %d bytes", op, ErrProtocol, a.res.StatusCode,
			a.res.ContentLength)
	}
	a.left = c.maxPack
	return a, nil
}

// question is one request. The path is path, id and rest.
type question struct {
	op, addr   string
	path, rest string
	id         digest.Digest
	query, rng string
}

// ask sends a request and returns an answer with a status of success.
func (c *Client) ask(ctx context.Context, q question) (*answer, error) {
	if err := checkDigest(q.id); err != nil {
		return nil, fmt.Errorf("%s: %w", q.op, err)
	}
	u := url.URL{Scheme: "https", Host: q.addr, Path: q.path + string(q.id) + q.rest, RawQuery: q.query}
	w := limit.NewWatch(ctx, c.cfg.Stall, errStalled)
	req, err := http.NewRequestWithContext(w.Ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		w.End()
		return nil, fmt.Errorf("%s: %w: %w", q.op, ErrAway, err)
	}
	if q.rng != "" {
		req.Header.Set("Range", q.rng)
	}
	res, err := c.transport.RoundTrip(req) // no redirects
	w.Rest()
	if err != nil {
		err = c.unanswered(w.Ctx, q.addr, err)
		w.End()
		return nil, fmt.Errorf("%s: %w", q.op, err)
	}
	c.stats.requests.Add(1)
	c.accept(q.addr, nil)
	a := &answer{c: c, op: q.op, res: res, watch: w, left: MaxLayer}
	if res.StatusCode/100 != 2 {
		defer a.Close()
		return nil, fmt.Errorf("%s: %w", q.op, a.refusal())
	}
	return a, nil
}

// unanswered says why no answer came.
func (c *Client) unanswered(ctx context.Context, addr string, err error) error {
	if ctx.Err() != nil && context.Cause(ctx) != errStalled {
		return context.Cause(ctx)
	}
	if context.Cause(ctx) == errStalled {
		return fmt.Errorf("%w: %w", ErrAway, errStalled)
	}
	if broken(err) {
		// The other side may have said why, and we have written to what it had closed.
		if why := c.greet(ctx, addr); why != nil {
			err = why
		}
	}
	if reason := refusal(err); reason != nil {
		err := fmt.Errorf("%w: %w; %s", ErrRefused, reason, c.cfg.Auth.advice)
		c.accept(addr, err)
		return err
	}
	return fmt.Errorf("%w: %w", ErrAway, err)
}

// greet connects, says nothing, and returns what the other side has against that; nil
// if it waits for a request.
func (c *Client) greet(ctx context.Context, addr string) error {
	conn, err := c.dialTLS(ctx, "tcp", addr)
	if err != nil {
		return err
	}
	defer conn.Close()
	// One that has accepted us says nothing either, so the wait is short.
	if err := conn.SetReadDeadline(time.Now().Add(min(c.cfg.Connect, time.Second))); err != nil {
		return err
	}
	_, err = conn.Read(make([]byte, 1))
	var timeout net.Error
	if errors.As(err, &timeout) && timeout.Timeout() {
		return nil
	}
	return err
}

// broken reports that a connection ended without a reason.
func broken(err error) bool {
	return slices.ContainsFunc([]error{io.EOF, io.ErrUnexpectedEOF, net.ErrClosed, syscall.EPIPE,
		syscall.ECONNRESET},
		func(e error) bool { return errors.Is(err, e) })
}

// refusal gives the part of err that says that one side does not accept the other, or nil.
func refusal(err error) error {
	var record tls.RecordHeaderError
	var cert *tls.CertificateVerificationError
	var op *net.OpError
	switch {
	case errors.Is(err, errOtherKey):
		return errOtherKey
	case errors.Is(err, errRevoked):
		return err
	case errors.As(err, &record):
		return errNotTLS
	case errors.As(err, &cert):
		return cert
	case errors.As(err, &op) && op.Op == "remote error": // an alert
		return op.Err
	}
	return nil
}

// answer is a response. One goroutine reads it and closes it.
type answer struct {
	c     *Client
	op    string
	res   *http.Response
	watch *limit.Watch
	left  int64 // bytes that may still come
}

// Read gives the body. It ends with io.EOF only if net/http has seen it whole.
func (a *answer) Read(p []byte) (int, error) {
	a.watch.Arm()
	n, err := a.res.Body.Read(p)
	a.watch.Rest()
	a.c.stats.bytes.Add(int64(n))
	if a.left -= int64(n); a.left < 0 {
		return 0, fmt.Errorf("%s: %w: too many bytes", a.op, ErrProtocol)
	}
	if err != nil && err != io.EOF {
		err = fmt.Errorf("%s: %w", a.op, a.cut(err))
	}
	return n, err
}

// cut says why a body ended.
func (a *answer) cut(err error) error {
	cause := context.Cause(a.watch.Ctx)
	switch {
	case cause == errStalled:
		return fmt.Errorf("%w: %w: %w", ErrAway, io.ErrUnexpectedEOF, errStalled)
	case cause != nil:
		return cause
	case errors.Is(err, io.ErrUnexpectedEOF):
		return fmt.Errorf("%w: %w", ErrAway, err)
	}
	return fmt.Errorf("%w: %w: %w", ErrAway, io.ErrUnexpectedEOF, err)
}

// Close frees the connection: for another request if the body has been read to its end.
func (a *answer) Close() error {
	a.watch.End()
	return a.res.Body.Close()
}

// refusal makes an error of an answer that is none.
func (a *answer) refusal() error {
	switch a.res.StatusCode {
	case http.StatusNotFound:
		return ErrUnknown
	case http.StatusTooManyRequests, http.StatusServiceUnavailable:
		return &Busy{After: retryAfter(a.res.Header)}
	}
	text, err := io.ReadAll(io.LimitReader(a, 1024))
	if err != nil {
		return err
	}
	if a.res.StatusCode == http.StatusInternalServerError {
		return fmt.Errorf("%w: it says: %s", ErrFailed, oneLine(string(text)))
	}
	return fmt.Errorf("%w: %d %s", ErrProtocol, a.res.StatusCode, oneLine(string(text)))
}

// retryAfter is a time between one second and one minute.
func retryAfter(h http.Header) time.Duration {
	n, err := strconv.Atoi(h.Get("Retry-After"))
	if err != nil {
		n = 1
	}
	return time.Duration(min(max(n, 1), 60)) * time.Second
}
