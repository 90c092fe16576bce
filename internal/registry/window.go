package registry

import (
	"context"
	"net"
	"net/http"
	"syscall"

	"golang.org/x/sys/unix"
)

// widest is a window from which on the system's own bounds do.
const widest = 4 << 20

type windowKey struct{}

// bounded is a transport for requests whose connection is to have no more than a
// window of bytes under way, however long it is not read: the sender of a stream that
// is not read fills the receiver's buffer first, megabytes, at the expense of what
// has to come before it. A window that has grown does not shrink again, so each
// request has a connection of its own, whose buffer is set before it begins (tcp(7),
// socket(7) SO_RCVBUF).
func bounded(t *http.Transport) *http.Transport {
	b := t.Clone()
	b.DisableKeepAlives = true
	b.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		window, _ := ctx.Value(windowKey{}).(int)
		d := net.Dialer{Timeout: t.TLSHandshakeTimeout, Control: func(_, _ string, c syscall.RawConn) error {
			return c.Control(func(fd uintptr) { setBuffer(int(fd), window) })
		}}
		return d.DialContext(ctx, network, addr)
	}
	return b
}

// setBuffer bounds a socket's receive buffer, of which the kernel offers half to
// the sender and itself doubles the size. Without it a stream is only less polite.
func setBuffer(fd, window int) {
	if window <= 0 {
		return
	}
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, window) != nil {
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, window)
	}
}

// through is the transport for a request with that window, and its context.
func (e *endpoint) through(ctx context.Context, window int) (*http.Transport, context.Context) {
	if window <= 0 || window >= widest {
		return e.transport, ctx
	}
	return e.bounded, context.WithValue(ctx, windowKey{}, window)
}
