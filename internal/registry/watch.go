package registry

import (
	"context"
	"io"
	"time"

	"dewpoint/internal/limit"
)

// newWatch ends a request whose server says nothing for a time, while somebody waits for it.
func newWatch(ctx context.Context, after time.Duration) *limit.Watch {
	return limit.NewWatch(ctx, after, errStalled)
}

// wire is a response's body as it comes off the connection: watched, and
// counted.
type wire struct {
	body     io.ReadCloser
	w        *limit.Watch
	c        *Client
	observe  func(int)
	host, op string // for errors
}

// Read reads as the body does. Its errors are io.EOF, an *Error, or the end of
// the caller's context.
func (r *wire) Read(p []byte) (int, error) {
	r.w.Arm()
	n, err := r.body.Read(p)
	r.w.Rest()
	if n > 0 {
		if werr := r.count(n); werr != nil {
			return n, werr
		}
	}
	if err != nil && err != io.EOF {
		err = broken(r.w.Ctx, err, r.host, r.op)
	}
	return n, err
}

func (r *wire) count(n int) error {
	r.c.bytes.Add(int64(n))
	if r.c.cfg.Observe != nil {
		r.c.cfg.Observe(n)
	}
	if r.observe != nil {
		r.observe(n)
	}
	if r.c.cfg.Wait != nil {
		return r.c.cfg.Wait(r.w.Ctx, n)
	}
	return nil
}

func (r *wire) Close() error {
	r.w.End()
	return r.body.Close()
}

// exact gives the next left bytes of a body: fewer are an error, and where
// the HTTP layer does not know the length, so are more.
type exact struct {
	*wire
	left  int64
	probe bool // see that nothing follows
}

func (r *exact) Read(p []byte) (int, error) {
	if r.left == 0 {
		return 0, r.atEnd()
	}
	if int64(len(p)) > r.left {
		p = p[:r.left]
	}
	n, err := r.wire.Read(p)
	r.left -= int64(n)
	switch {
	case err != io.EOF:
		return n, err
	case r.left > 0:
		return n, broken(r.w.Ctx, io.ErrUnexpectedEOF, r.host, r.op)
	}
	return n, io.EOF
}

func (r *exact) atEnd() error {
	if !r.probe {
		return io.EOF
	}
	var b [1]byte
	n, err := io.ReadFull(r.wire, b[:])
	if n > 0 {
		return &Error{Kind: Protocol, Host: r.host, Op: r.op, Err: errTooMuch}
	}
	return err
}

// skip reads n bytes away.
func (r *wire) skip(n int64) error {
	buf := make([]byte, min(n, 64<<10))
	for n > 0 {
		got, err := r.Read(buf[:min(n, int64(len(buf)))])
		n -= int64(got)
		r.c.discarded.Add(int64(got))
		if err == io.EOF && n > 0 {
			err = broken(r.w.Ctx, io.ErrUnexpectedEOF, r.host, r.op)
		}
		if err != nil && err != io.EOF {
			return err
		}
	}
	return nil
}
