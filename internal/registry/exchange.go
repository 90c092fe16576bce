package registry

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"
)

const maxRedirects = 8

// ask is one request below an endpoint's API root.
type ask struct {
	op     string   // for errors
	method string   // "" is GET
	path   string   // "/library/nginx/manifests/latest"
	query  string   // "artifactType=x", "" for none
	at     *url.URL // in place of path and query, where the registry said so
	scope  string   // of the token it needs
	accept []string
	rng    string        // Range header, "" for none
	blob   digest.Digest // set if the answer may lie elsewhere for a while
	body   *upload       // of a push, nil for none
	window int           // of the connection that answers; 0 is the system's
}

// do sends the request, answers one challenge and follows redirects. It
// returns a success (2xx), whose body the caller must close, or an error.
func (e *endpoint) do(ctx context.Context, ua string, q ask) (*http.Response, error) {
	if u := e.redirects.get(q.blob); u != nil {
		res, err := e.send(ctx, ua, q, u, "")
		if err == nil && res.StatusCode < 300 {
			return res, nil
		}
		e.redirects.drop(q.blob) // signed addresses expire; the registry has a new one
		if err == nil {
			res.Body.Close()
		}
	}
	res, err := e.authorized(ctx, ua, q)
	if err != nil {
		return nil, err
	}
	if res, err = e.follow(ctx, ua, q, res); err != nil {
		return nil, err
	}
	if res.StatusCode < 200 || res.StatusCode > 299 {
		return nil, refused(res, res.Request.URL.Host, q.op)
	}
	return res, nil
}

// authorized sends the request to the endpoint, and once more if challenged.
func (e *endpoint) authorized(ctx context.Context, ua string, q ask) (*http.Response, error) {
	header, err := e.authority.authorization(ctx, q.scope)
	if err != nil {
		return nil, err
	}
	u := e.address(q)
	res, err := e.send(ctx, ua, q, u, header)
	if err != nil || res.StatusCode != http.StatusUnauthorized {
		return res, err
	}
	if res.Request.URL.Scheme == "http" && e.loopback {
		drain(res)
		return nil, &Error{Kind: Unauthorized, Host: u.Host, Op: q.op, Err: errInClear}
	}
	if !e.same(u) {
		return res, nil
	}
	again, err := e.authority.challenged(ctx, res.Header, q.scope, header)
	if err != nil {
		res.Body.Close()
		return nil, err
	}
	if again == "" {
		return res, nil
	}
	drain(res)
	return e.send(ctx, ua, q, u, again)
}

// follow goes where redirects lead: with credentials and configured headers only
// to the endpoint itself.
func (e *endpoint) follow(ctx context.Context, ua string, q ask, res *http.Response) (*http.Response, error) {
	header := res.Request.Header.Get("Authorization")
	for n := 0; redirect(res); n++ {
		to, err := e.target(res)
		if err == nil && n == maxRedirects {
			err = errors.New("too many redirects")
		}
		drain(res)
		if err != nil {
			return nil, &Error{Kind: Protocol, Host: res.Request.URL.Host, Op: q.op, Err: err}
		}
		if res, err = e.send(ctx, ua, q, to, header); err != nil {
			return nil, err
		}
		if res.StatusCode < 300 && !e.same(to) {
			e.redirects.put(q.blob, to)
		}
	}
	return res, nil
}

// redirect reports whether the same request is to be made elsewhere.
func redirect(res *http.Response) bool {
	switch res.StatusCode {
	case http.StatusMovedPermanently, http.StatusFound, http.StatusSeeOther:
		return res.Request.Method == http.MethodGet || res.Request.Method == http.MethodHead
	case http.StatusTemporaryRedirect, http.StatusPermanentRedirect:
		return true
	}
	return false
}

func (e *endpoint) target(res *http.Response) (*url.URL, error) {
	to, err := res.Location()
	if err != nil {
		return nil, fmt.Errorf("redirect: %w", err)
	}
	if to.Scheme != "https" && !e.inClear(res.Request.URL, to) {
		return nil, fmt.Errorf("redirect from %s://%s to %s://%s is refused", res.Request.URL.Scheme,
			res.Request.URL.Host, to.Scheme, to.Host)
	}
	to.User = nil
	return to, nil
}

// inClear reports whether a redirect may lead over plain HTTP: from there to the same place, or to one
// that is configured so.
func (e *endpoint) inClear(from, to *url.URL) bool {
	return from.Scheme == "http" && to.Scheme == "http" &&
		(to.Host == from.Host || e.authority.c.cfg.Hosts[to.Host].PlainHTTP)
}

// send is one round trip. header is the Authorization, sent to the endpoint only.
func (e *endpoint) send(ctx context.Context, ua string, q ask, u *url.URL, header string) (*http.Response,
	error) {
	transport, through := e.through(ctx, q.window)
	method := cmp.Or(q.method, http.MethodGet)
	req, err := http.NewRequestWithContext(e.latency.traced(through), method, u.String(), nil)
	if err != nil {
		return nil, &Error{Kind: Protocol, Host: u.Host, Op: q.op, Err: err}
	}
	if q.accept != nil {
		req.Header["Accept"] = q.accept
	}
	req.Header.Set("User-Agent", ua)
	if q.rng != "" {
		req.Header.Set("Range", q.rng)
	}
	if e.same(u) {
		for k, v := range e.header {
			req.Header[k] = v
		}
		if header != "" {
			req.Header.Set("Authorization", header)
		}
	}
	if err := q.body.attach(req); err != nil {
		return nil, err
	}
	res, err := transport.RoundTrip(req)
	if err != nil && e.loopback && u.Scheme == "https" && u.Host == e.base.Host && spokeHTTP(err) {
		e.clear.Store(true)
		plain := *u
		plain.Scheme = "http"
		return e.send(ctx, ua, q, &plain, "")
	}
	if err != nil {
		return nil, broken(ctx, err, u.Host, q.op)
	}
	if e.loopback && res.StatusCode == http.StatusBadRequest {
		e.clear.Store(false) // it may be one that speaks TLS by now: the next request finds out
	}
	return res, nil
}

// spokeHTTP reports that a TLS handshake was answered by HTTP.
func spokeHTTP(err error) bool {
	var r tls.RecordHeaderError
	return errors.As(err, &r) && string(r.RecordHeader[:]) == "HTTP/"
}

// drain reads what little is left of a body, so that the connection is used again.
func drain(res *http.Response) {
	var b [4 << 10]byte
	for n := 0; n < 4; n++ {
		if _, err := res.Body.Read(b[:]); err != nil {
			break
		}
	}
	res.Body.Close()
}

// locations remembers for a short while where blobs were redirected to, so
// that reading a blob in pieces does not ask the registry for each. The zero
// value is ready; it is safe for concurrent use.
type locations struct {
	mu sync.Mutex
	m  map[digest.Digest]location
}

type location struct {
	u     *url.URL
	until time.Time
}

const (
	keepLocation = time.Minute
	maxLocations = 512
)

func (l *locations) get(d digest.Digest) *url.URL {
	if d == "" {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if at, ok := l.m[d]; ok && time.Now().Before(at.until) {
		return at.u
	}
	delete(l.m, d)
	return nil
}

func (l *locations) put(d digest.Digest, u *url.URL) {
	if d == "" {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.m == nil || len(l.m) >= maxLocations {
		l.m = map[digest.Digest]location{}
	}
	l.m[d] = location{u, time.Now().Add(keepLocation)}
}

func (l *locations) drop(d digest.Digest) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.m, d)
}
