package api

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"
)

// grace is how long calls have to end once the daemon stops.
const grace = 5 * time.Second

// Serve answers on l, over HTTP/1.1 and HTTP/2, in clear or as l's TLS agrees, until ctx ends. Then
// it takes no more calls and cancels those under way, which fail with
// Stopping; it returns nil once they have ended, or after five seconds. Who does not send the
// whole of a request within a minute is not waited for. It closes l.
func Serve(ctx context.Context, l net.Listener, h http.Handler) error {
	return serve(ctx, l, bounded(h, bodyTime))
}

func serve(ctx context.Context, l net.Listener, h http.Handler) error {
	base, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cancel(nil)
	s := &http.Server{
		Handler:           h,
		BaseContext:       func(net.Listener) context.Context { return base },
		Protocols:         new(http.Protocols),
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    64 << 10,
		ErrorLog:          log.New(io.Discard, "", 0), // what strangers send is not to fill ours
		HTTP2: &http.HTTP2Config{MaxConcurrentStreams: 1000, MaxReceiveBufferPerConnection: 128 << 10,
			MaxReceiveBufferPerStream: 64 << 10}, // what was sent and is not read yet
	}
	if l.Addr().Network() != "unix" { // a local client may stand still for as long as it likes
		s.HTTP2.WriteByteTimeout = writeTime
	}
	s.Protocols.SetHTTP1(true)
	s.Protocols.SetHTTP2(true)
	s.Protocols.SetUnencryptedHTTP2(true)

	over := make(chan error, 1)
	go func() { over <- s.Serve(l) }()
	select {
	case err := <-over:
		return err
	case <-ctx.Done():
	}
	cancel(errStopping)
	ctx, stop := context.WithTimeout(context.WithoutCancel(ctx), grace)
	defer stop()
	err := s.Shutdown(ctx)
	if err != nil {
		_ = s.Close()
	}
	<-over
	if errors.Is(err, context.DeadlineExceeded) {
		return nil
	}
	return err
}

// Listen makes a Unix socket at path with the given mode, before anybody can
// connect to it. A socket that a dead daemon left is replaced; one that
// answers is an error. Closing the listener removes the socket.
func Listen(path string, mode fs.FileMode) (net.Listener, error) {
	if c, err := net.DialTimeout("unix", path, time.Second); err == nil {
		c.Close()
		return nil, fmt.Errorf("listen on %s: another daemon answers there", path)
	}
	dir, err := os.MkdirTemp(filepath.Dir(path), ".dewd-")
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	defer os.RemoveAll(dir)
	tmp := filepath.Join(dir, "s")
	l, err := net.Listen("unix", tmp)
	if err != nil {
		return nil, err
	}
	u := l.(*net.UnixListener)
	u.SetUnlinkOnClose(false)
	if err := errors.Join(os.Chmod(tmp, mode), os.Rename(tmp, path)); err != nil {
		u.Close()
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	return &socket{UnixListener: u, path: path}, nil
}

// socket removes its file when it is closed.
type socket struct {
	*net.UnixListener
	path string
}

func (s *socket) Close() error {
	err := s.UnixListener.Close()
	if err == nil {
		_ = os.Remove(s.path)
	}
	return err
}
