package fetch

import (
	"context"
	"fmt"
	"io"
	"os"
	"sync"

	"dewpoint/internal/fetch/link"
	"dewpoint/internal/image"
	"dewpoint/internal/layer"

	"github.com/opencontainers/go-digest"
)

// Stored are blobs that lie on this node for other reasons: containerd's content store, where other clients'
// pulls have put them. It is safe for concurrent use.
type Stored interface {
	// Open gives a whole blob, which has yet to be verified, or an error if it is not there.
	Open(d digest.Digest) (*os.File, error)
}

// stored opens the blob of a layer where it lies on this node, else it is nil.
func (c *common) stored(l image.Layer) *os.File {
	if c.cfg.Stored == nil {
		return nil
	}
	f, err := c.cfg.Stored.Open(l.Digest)
	if err != nil {
		return nil
	}
	if fi, err := f.Stat(); err != nil || fi.Size() != l.Size {
		f.Close()
		return nil
	}
	return f
}

// Stored reports whether a layer's blob lies on this node, so that nothing of it has to be fetched.
func (c *common) Stored(l image.Layer) bool {
	f := c.stored(l)
	if f == nil {
		return false
	}
	f.Close()
	return true
}

// storedWay lets the layer come from its stored blob, unless that was wrong before.
func (b *blob) storedWay() layer.Way {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.fromStored = !b.storedWrong && b.c.Stored(b.l); !b.fromStored {
		return layer.Way{}
	}
	return layer.Way{Wrong: func(error) {
		b.vain.Store(b.had.Load())
		b.avoidStored()
	}}
}

func (b *blob) avoidStored() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.storedWrong, b.fromStored = true, false
}

// openStored gives the stored blob from an offset on; nil, nil says that the layer does not come from there,
// or that the blob has gone since.
func (b *blob) openStored(ctx context.Context, offset int64) (io.ReadCloser, error) {
	waiting, hurry := context.WithCancel(ctx)
	defer hurry()
	b.mu.Lock()
	from := b.fromStored
	if b.hurry = hurry; b.class < link.Background {
		hurry()
	}
	b.mu.Unlock()
	if !from {
		return nil, nil
	}
	release := func() {}
	if b.c.storing.Acquire(waiting, 1) == nil {
		release = sync.OnceFunc(func() { b.c.storing.Release(1) })
	}
	if ctx.Err() != nil {
		release()
		return nil, context.Cause(ctx)
	}
	f := b.c.stored(b.l)
	if f == nil {
		release()
		b.avoidStored()
		return nil, nil
	}
	r := io.NewSectionReader(f, offset, b.l.Size-offset)
	return &storedBlob{File: f, Reader: r, b: b, release: release}, nil
}

// storedBlob is a stored blob that is read. What cannot be read is fetched.
type storedBlob struct {
	*os.File
	io.Reader
	b       *blob
	release func()
}

func (s *storedBlob) Read(p []byte) (int, error) {
	n, err := s.Reader.Read(p)
	s.b.had.Add(int64(n))
	if err != nil && err != io.EOF {
		s.b.avoidStored()
		err = fmt.Errorf("%w: %w", layer.ErrAgain, err)
	}
	return n, err
}

func (s *storedBlob) Close() error {
	s.release()
	return s.File.Close()
}

// Adopt records what an image is and begins its fills, last on the link. They go on, and stay in the store,
// as long as ctx lives.
func (p *pulls) Adopt(ctx context.Context, img *image.Image) (*Pull, error) {
	if err := p.cache.enter(ctx, img.Ref); err != nil {
		return nil, err
	}
	if err := p.cfg.Catalog.Put(img); err != nil {
		return nil, err
	}
	o := Options{Background: true}
	return p.fill(ctx, img, o, p.packs.newLookup(ctx, img.Ref, o)), nil
}
