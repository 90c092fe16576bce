package registry

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
)

// Kind sorts what can go wrong by what can be done about it.
type Kind int

const (
	Unreachable  Kind = iota // no connection, or it broke
	Stalled                  // connected, but nothing arrived for StallTimeout
	Unauthorized             // a login is missing or wrong
	Forbidden                // logged in, but not allowed
	NotFound                 // no such image or blob
	RateLimited              // too many requests
	ServerFault              // the registry's own failure (5xx)
	Protocol                 // an answer that contradicts itself or the request
	Mismatch                 // a document that does not hash to its digest
	PlainHTTP                // the registry speaks plain HTTP, which is not configured; or the reverse
	Certificate              // its TLS certificate is not trusted
	BadConfig                // hosts.toml, config.json or a credential helper cannot be used
	BadImage                 // the image was fetched but cannot be used; Err says why
)

// Error is what every method of Client returns, save when the caller's own
// context ended. Its text is one line that says what happened and, where
// there is a remedy, what to do.
type Error struct {
	Kind   Kind
	Host   string // that was asked
	Op     string // "resolve docker.io/library/nginx:1", "fetch sha256:…"
	Status int    // HTTP status, 0 if there was none
	Err    error

	after time.Duration       // Retry-After
	code  transport.ErrorCode // the registry's own, "" if it gave none
}

func (e *Error) Error() string {
	s := e.Op
	if e.Host != "" {
		s += e.preposition() + e.Host
	}
	s += ": " + oneLine(e.cause())
	if a := e.Remedy(); a != "" {
		s += "; " + a
	}
	return s
}

func (e *Error) preposition() string {
	switch e.Op {
	case opLogin:
		return " to "
	case opPing, opHosts:
		return " "
	}
	if e.pushing() {
		return " to "
	}
	return " from "
}

// pushing reports whether the operation was one of PushArtifact's.
func (e *Error) pushing() bool { return strings.HasPrefix(e.Op, opPush) }

// What is done besides "resolve IMAGE".
const (
	opPush  = "push "
	opList  = "list what refers to "
	opFetch = "fetch "
	opLogin = "log in"
	opPing  = "ping"
	opHosts = "read hosts directory for"
)

func (e *Error) cause() string {
	switch {
	case e.Status != 0 && e.Err != nil:
		return fmt.Sprintf("%d %s (%s)", e.Status, http.StatusText(e.Status), e.Err)
	case e.Status != 0:
		return fmt.Sprintf("%d %s", e.Status, http.StatusText(e.Status))
	case e.Err != nil:
		return e.Err.Error()
	}
	return "unknown error"
}

// Remedy is what the reader can do, "" if nothing is known: the end of the error's text.
func (e *Error) Remedy() string {
	if errors.Is(e.Err, errInClear) {
		return e.plainHTTP()
	}
	if a := e.pushAdvice(); a != "" {
		return a
	}
	if errors.Is(e.Err, errWrongLogin) {
		return "what was known before stays"
	}
	switch e.Kind {
	case Unreachable:
		return "check the network and the registry's address"
	case Stalled:
		return "check the link; what has arrived is kept, pull again to go on"
	case Unauthorized:
		return fmt.Sprintf("the image does not exist, or the login is missing or wrong: `dew login%s` as the user who runs dewd", loginName(e.Host))
	case Forbidden:
		return "the login has no right to pull this image"
	case NotFound:
		if strings.HasPrefix(e.Op, opFetch) {
			return "the registry lacks a part of the image, push the image again"
		}
		return "check the image's name and tag"
	case RateLimited:
		if e.after > 0 {
			return fmt.Sprintf("wait for %s, or log in for a higher limit", e.after)
		}
		return "wait, or log in for a higher limit"
	case Protocol, Mismatch:
		if e.Op != opLogin {
			return "the registry, or a proxy before it, answers wrongly: pull again, or push the image again"
		}
	case ServerFault:
		return "the registry is in trouble, try again later"
	case PlainHTTP:
		if errors.Is(e.Err, errWantsTLS) {
			return fmt.Sprintf("leave out plain_http under [registry.%q]", e.Host)
		}
		return e.plainHTTP()
	case Certificate:
		if alerted(e.Err) {
			return fmt.Sprintf("if it wants a client's certificate, name one as `client` in the hosts.toml of %s",
				e.Host)
		}
		return fmt.Sprintf("name its authority as `ca` in the hosts.toml of %s", e.Host)
	case BadConfig:
		return "mend that file, of the user who runs dewd, and try again"
	}
	return ""
}

func (e *Error) plainHTTP() string {
	return fmt.Sprintf("if that is meant to be so, [registry.%q] plain_http = true in dewd's configuration",
		e.Host)
}

// pushAdvice is what differs where something was pushed.
func (e *Error) pushAdvice() string {
	if !e.pushing() {
		return ""
	}
	switch e.Kind {
	case Unauthorized, Forbidden:
		return fmt.Sprintf("a push needs a login that may write to the repository: `dew login%s` as the user who runs dewd", loginName(e.Host))
	case Stalled:
		return "check the link, and push again"
	case NotFound, Protocol:
		return "the registry takes no push to this repository, or a proxy before it answers wrongly"
	case Mismatch:
		return "push again"
	}
	return ""
}

// loginName is what follows "dew login".
func loginName(host string) string {
	if host == dockerHubEndpoint {
		return ""
	}
	return " " + host
}

func (e *Error) Unwrap() error { return e.Err }

// Temporary reports whether the same request may succeed later. The Client has
// retried by itself before it returned such an error.
func (e *Error) Temporary() bool {
	switch e.Kind {
	case Unreachable:
		var dns *net.DNSError
		return !errors.As(e.Err, &dns) || !dns.IsNotFound
	case Stalled, RateLimited, ServerFault:
		return e.after <= maxAfter
	}
	return false
}

var (
	errStalled  = errors.New("nothing arrived in time")
	errNoTLS    = errors.New("the registry was asked over HTTPS, and answered without encryption")
	errInClear  = errors.New("it wants a login and speaks plain HTTP, over which none is sent unless the configuration says so")
	errWantsTLS = errors.New("the registry speaks HTTPS, and was asked over plain HTTP")
)

// broken makes an Error of what a transport or a body returned. An error that
// is one already, or the end of the caller's context, stays itself.
func broken(ctx context.Context, err error, host, op string) error {
	if ctx.Err() != nil && context.Cause(ctx) != errStalled {
		return context.Cause(ctx)
	}
	var e *Error
	if errors.As(err, &e) {
		return err
	}
	if context.Cause(ctx) == errStalled {
		return &Error{Kind: Stalled, Host: host, Op: op, Err: errStalled}
	}
	if errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) {
		err = errors.New("the connection ended early")
	}
	k := kindOf(err)
	if k == PlainHTTP {
		err = errNoTLS
	}
	return &Error{Kind: k, Host: host, Op: op, Err: err}
}

func kindOf(err error) Kind {
	var record tls.RecordHeaderError
	var cert *tls.CertificateVerificationError
	switch {
	case errors.As(err, &record):
		return PlainHTTP
	case errors.As(err, &cert), alerted(err):
		return Certificate
	}
	return Unreachable
}

// alerted reports that the server ended the TLS handshake.
func alerted(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == "remote error"
}

// refused makes an Error of an answer that is neither a success nor a redirect.
// It reads the body and closes it.
func refused(res *http.Response, host, op string) error {
	defer res.Body.Close()
	e := &Error{Kind: kindOfStatus(res.StatusCode), Host: host, Op: op, Status: res.StatusCode,
		after: retryAfter(res.Header)}
	body, err := io.ReadAll(io.LimitReader(res.Body, maxErrorBody))
	if err != nil {
		return e // the status has been heard, the rest is an extra
	}
	e.code, e.Err = diagnosis(res.Header, body)
	if res.StatusCode == http.StatusBadRequest && res.Request.URL.Scheme == "http" &&
		bytes.Contains(body, []byte("HTTPS")) {
		e.Kind, e.Status, e.Err = PlainHTTP, 0, errWantsTLS
	}
	return e
}

func kindOfStatus(status int) Kind {
	switch {
	case status == http.StatusUnauthorized:
		return Unauthorized
	case status == http.StatusForbidden:
		return Forbidden
	case status == http.StatusNotFound, status == http.StatusGone:
		return NotFound
	case status == http.StatusTooManyRequests:
		return RateLimited
	case status >= 500, status == http.StatusRequestTimeout:
		return ServerFault
	}
	return Protocol
}

// oneLine keeps a server's words from filling a terminal.
func oneLine(s string) string {
	s = strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, s)
	if len(s) > 400 {
		s = strings.ToValidUTF8(s[:400], "") + "…"
	}
	return s
}
