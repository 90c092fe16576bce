package fetch

import (
	"context"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"syscall"

	"dewpoint/internal/fetch/link"
	"dewpoint/internal/image"
	"dewpoint/internal/layer"
	"dewpoint/internal/registry"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"
)

// blob is a layer's blob in its registry, as a layer.Source that takes its
// turn on the link from the first Open until it has ended.
type blob struct {
	c   *common
	img *image.Image
	l   image.Layer
	o   Options
	got atomic.Int64 // bytes that came from the registry
	// bytes that were read of the stored blob, and of them those that were of no use
	had, vain atomic.Int64

	route layer.Preparer // from elsewhere; nil is none

	mu     sync.Mutex
	routed bool // the route gives the layer's tar
	// the stored blob is read, and it was wrong
	fromStored, storedWrong bool
	hurry                   func() // unless nil, has the stored blob be read at once

	class link.Class // that it moves in: the least of base and waits
	// of the pulls that want it, for as long as it lasts
	base  link.Class
	waits [link.Background]int // who waits for it for a while, by class
	// unless nil, nothing is fetched before it is closed
	gate <-chan struct{}
	// closed by raise, to pass the gate; nil until somebody waits there
	passed chan struct{}
	turn   *link.Turn // the newest
}

func (c *common) newBlob(img *image.Image, l image.Layer, o Options,
	class link.Class) *blob {
	return &blob{c: c, img: img, l: l, o: o, route: c.pop.Fill(img, l), class: class, base: class}
}

// Prepare implements layer.Preparer: it finds out who brings the layer.
func (b *blob) Prepare(ctx context.Context, f *layer.Fill) (layer.Way, error) {
	if b.route == nil {
		return b.storedWay(), nil
	}
	if err := b.pass(ctx); err != nil {
		return layer.Way{}, err
	}
	w, err := b.route.Prepare(ctx, f)
	b.mu.Lock()
	b.routed = err == nil && w.Tar
	b.mu.Unlock()
	if err == nil && !w.Tar && w.Elsewhere == nil {
		w = b.storedWay()
	}
	return w, err
}

// Open implements layer.Source.
func (b *blob) Open(ctx context.Context, f *layer.Fill, offset int64) (io.ReadCloser, error) {
	if err := b.pass(ctx); err != nil {
		return nil, err
	}
	b.mu.Lock()
	routed := b.routed
	b.mu.Unlock()
	if routed {
		return b.route.Open(ctx, f, offset)
	}
	if err := b.c.roomFor(b.l.DiffID); err != nil {
		return nil, err
	}
	if r, err := b.openStored(ctx, offset); r != nil || err != nil {
		return r, err
	}
	return b.open(ctx, f.Progress, offset)
}

// pass waits at the gate.
func (b *blob) pass(ctx context.Context) error {
	b.mu.Lock()
	gate := b.gate
	if gate == nil {
		b.mu.Unlock()
		return nil
	}
	if b.passed == nil {
		b.passed = make(chan struct{})
	}
	open := b.passed
	b.mu.Unlock()
	select {
	case <-gate:
		return nil
	case <-open:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// raise says that the layer is of class c for somebody else too, who waits for
// it at no gate if ungated.
func (b *blob) raise(c link.Class, ungated bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if ungated {
		b.openGate()
	}
	b.base = min(b.base, c)
	b.reclass()
}

func (b *blob) classNow() link.Class {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.class
}

// openGate is called with mu held.
func (b *blob) openGate() {
	b.gate = nil
	if b.passed != nil {
		close(b.passed)
		b.passed = nil
	}
}

// wait has the layer be of class c for as long as somebody waits for it, at no
// gate. release must follow.
func (b *blob) wait(c link.Class) (release func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.openGate()
	b.waits[c]++
	b.reclass()
	return func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.waits[c]--
		b.reclass()
	}
}

// reclass gives the layer the class that follows from who wants it. It is called
// with mu held.
func (b *blob) reclass() {
	c := b.base
	for w := range link.Class(len(b.waits)) {
		if b.waits[w] > 0 {
			c = min(c, w)
		}
	}
	if c < link.Background && b.hurry != nil {
		b.hurry()
	}
	was := b.class
	if b.class = c; b.turn == nil || c == was {
		return
	}
	if c < was {
		b.turn.Raise(c)
	} else {
		b.turn.Lower(c)
	}
}

func (b *blob) open(ctx context.Context, stats func() layer.Progress, offset int64) (io.ReadCloser, error) {
	b.mu.Lock()
	t := b.c.cfg.Link.Enter(link.Entry{Host: b.img.Ref.Host, Size: b.l.Size, Class: b.class, Order: b.o.Order,
		Inflaters: b.o.Inflaters, Stats: stats})
	b.turn = t
	b.mu.Unlock()
	return t.Open(ctx, func() (io.ReadCloser, error) {
		o := registry.OpenOptions{Observe: func(n int) { b.got.Add(int64(n)) }}
		if b.classNow() == link.Background {
			o.Window = b.c.cfg.Link.Window(b.c.cfg.Registry.RoundTrip(b.img.Ref.Host))
		}
		return b.c.cfg.Registry.Open(ctx, b.img.Ref, registry.Blob{Digest: b.l.Digest, Size: b.l.Size}, offset, -1,
			o)
	})
}

// spareRoom is what the completion of a layer that runs already leaves free of
// the disk, in bytes: containers, and their removal, need some.
const spareRoom = 64 << 20

// roomFor is an error that wraps ENOSPC if the disk has not enough room to make
// a partial layer whole. Others are filled as far as they go.
func (c *common) roomFor(id digest.Digest) error {
	part := c.cfg.Layers.Partial(id)
	if part == nil {
		return nil
	}
	var st unix.Statfs_t
	if err := unix.Statfs(part.Files().Index, &st); err != nil {
		return err
	}
	if free, want := int64(st.Bavail)*st.Bsize, part.Size-part.Passed()-part.Early()+spareRoom; free < want {
		return fmt.Errorf("%d bytes of disk are free, the rest of the layer, which runs already, takes %d: %w",
			free, want, syscall.ENOSPC)
	}
	return nil
}
