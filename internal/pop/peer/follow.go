package peer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"
)

// Follow gives a layer's tar from off on, as the node that fills it gets it, to its end. size is the whole
// layer's, -1 while unknown. The bytes are not verified. When the layer has stood still for Patience, the
// reader gives an ErrAway.
//
// One goroutine reads; Close may be called by another, and ends a Read that waits.
func (c *Client) Follow(ctx context.Context, addr string, id digest.Digest, off int64) (r io.ReadCloser,
	size int64, err error) {
	f := &following{c: c, addr: addr, id: id, pos: off, size: -1, last: time.Now()}
	if off < 0 || off > MaxLayer {
		return nil, 0, fmt.Errorf("%s: no such offset", f.op())
	}
	f.ctx, f.cancel = context.WithCancelCause(ctx)
	if err := f.open(); err != nil {
		f.cancel(nil)
		return nil, 0, err
	}
	return f, f.size, nil
}

// pause is how long lies between two requests of one stream at least.
const pause = 50 * time.Millisecond

// following is a layer on its way, over one request or many.
type following struct {
	c      *Client
	addr   string
	id     digest.Digest
	ctx    context.Context
	cancel context.CancelCauseFunc

	mu    sync.Mutex // held while reading; guards what follows
	from  *answer    // nil between requests
	pos   int64      // of the next byte
	size  int64      // -1 while unknown
	last  time.Time  // when there was a byte
	asked time.Time  // when the node was asked last
	err   error      // final
}

func (f *following) op() string {
	return fmt.Sprintf("follow %s at %d from %s", f.id, f.pos, f.addr)
}

func (f *following) Read(p []byte) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(p) == 0 {
		return 0, nil
	}
	for f.err == nil {
		if f.from == nil {
			f.err = f.again()
			continue
		}
		n, err := f.from.Read(p)
		f.pos += int64(n)
		if n > 0 {
			f.last = time.Now()
		}
		if err != nil {
			f.err = f.ended(err)
		}
		if n > 0 {
			return n, nil
		}
	}
	return 0, f.err
}

// ended deals with a body's end. It returns nil if there is more to ask for.
func (f *following) ended(err error) error {
	if err != io.EOF {
		f.drop()
		return err
	}
	more, end := f.from.res.Trailer.Get(trailerMore), f.from.res.Trailer.Get(trailerEnd)
	f.drop()
	if more == "1" && end == "" {
		return nil
	}
	size, err := parseNumber(end)
	if err != nil || size != f.pos || f.size >= 0 && size != f.size {
		return fmt.Errorf("%s: %w: an end at %q of %d: %w", f.op(), ErrProtocol, oneLine(end), f.size,
			io.ErrUnexpectedEOF)
	}
	return io.EOF
}

// again asks once more, as long as there is hope.
func (f *following) again() error {
	if time.Since(f.last) > f.c.cfg.Patience {
		return fmt.Errorf("%s: %w: %w: nothing came for %v", f.op(), ErrAway, io.ErrUnexpectedEOF, f.c.cfg.Patience)
	}
	// A node that ends each answer at once is not asked all the time.
	if err := f.wait(pause - time.Since(f.asked)); err != nil {
		return err
	}
	err := f.open()
	var busy *Busy
	if errors.As(err, &busy) {
		return f.wait(busy.After)
	}
	return err
}

func (f *following) wait(d time.Duration) error {
	if d <= 0 {
		return nil
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-f.ctx.Done():
		return context.Cause(f.ctx)
	}
}

// open asks from the position on.
func (f *following) open() error {
	f.asked = time.Now()
	a, err := f.c.ask(f.ctx,
		question{op: f.op(), addr: f.addr, path: "/v1/layers/", id: f.id,
			query: "follow=1&from=" + strconv.FormatInt(f.pos, 10)})
	if err != nil {
		return err
	}
	size, err := strconv.ParseInt(a.res.Header.Get(headerSize), 10, 64)
	switch {
	case a.res.StatusCode != http.StatusOK, a.res.Header.Get(headerFrom) != strconv.FormatInt(f.pos, 10),
		err != nil, size < -1, size >= 0 && size < f.pos, size > MaxLayer,
		size >= 0 && f.size >= 0 && size != f.size:
		a.Close()
		return fmt.Errorf("%s: %w: status %d, from %q, size %q", f.op(), ErrProtocol, a.res.StatusCode,
			oneLine(a.res.Header.Get(headerFrom)), oneLine(a.res.Header.Get(headerSize)))
	}
	f.size = max(f.size, size)
	a.left = MaxLayer - f.pos
	if f.size >= 0 {
		a.left = f.size - f.pos
	}
	f.from = a
	return nil
}

func (f *following) drop() {
	if f.from != nil {
		f.from.Close()
		f.from = nil
	}
}

// Close ends the stream and a Read under way.
func (f *following) Close() error {
	f.cancel(ErrClosed)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.drop()
	if f.err == nil || f.err == io.EOF {
		f.err = ErrClosed
	}
	return nil
}
