package fetch

import (
	"context"
	"io"
	"sync"
	"sync/atomic"

	"dewpoint/internal/fetch/link"
	"dewpoint/internal/image"
	"dewpoint/internal/layer"
	"dewpoint/internal/registry"
)

// blob is a layer's blob in its registry, as a layer.Source that takes its
// turn on the link from the first Open until it has ended.
type blob struct {
	p   *Puller
	img *image.Image
	l   image.Layer
	o   Options
	got atomic.Int64 // bytes that came

	route layer.Preparer // from elsewhere; nil is none

	mu     sync.Mutex
	routed bool       // the route gives the layer's tar
	class  link.Class // that it moves in: the least of base and waits
	// of the pulls that want it, for as long as it lasts
	base  link.Class
	waits [link.Background]int // who waits for it for a while, by class
	// unless nil, nothing is fetched before it is closed
	gate <-chan struct{}
	// closed by raise, to pass the gate; nil until somebody waits there
	passed chan struct{}
	turn   *link.Turn // the newest
}

func (p *Puller) newBlob(img *image.Image, l image.Layer, o Options, c link.Class) *blob {
	return &blob{p: p, img: img, l: l, o: o, route: p.pop.Fill(img, l), class: c, base: c}
}

// Prepare implements layer.Preparer: it finds out who brings the layer.
func (b *blob) Prepare(ctx context.Context, f *layer.Fill) (layer.Way, error) {
	if b.route == nil {
		return layer.Way{}, nil
	}
	if err := b.pass(ctx); err != nil {
		return layer.Way{}, err
	}
	w, err := b.route.Prepare(ctx, f)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.routed = err == nil && w.Tar
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
	if err := b.p.roomFor(b.l.DiffID); err != nil {
		return nil, err
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
	t := b.p.cfg.Link.Enter(link.Entry{Host: b.img.Ref.Host, Size: b.l.Size, Class: b.class, Order: b.o.Order,
		Inflaters: b.o.Inflaters, Stats: stats})
	b.turn = t
	b.mu.Unlock()
	return t.Open(ctx, func() (io.ReadCloser, error) {
		o := registry.OpenOptions{Observe: func(n int) { b.got.Add(int64(n)) }}
		if b.classNow() == link.Background {
			o.Window = b.p.cfg.Link.Window(b.p.cfg.Registry.RoundTrip(b.img.Ref.Host))
		}
		return b.p.cfg.Registry.Open(ctx, b.img.Ref, registry.Blob{Digest: b.l.Digest, Size: b.l.Size}, offset, -1,
			o)
	})
}
