package fetch

import (
	"context"
	"errors"
	"fmt"
	"time"

	"dewpoint/internal/image"
	"dewpoint/internal/layer"

	"github.com/opencontainers/go-digest"
)

// session keeps the fills of an image going between the calls of a client
// that asks for one layer after the other, as containerd does.
type session struct {
	made  chan struct{} // closed when pull is there
	pull  *Pull
	end   context.CancelFunc
	users int         // calls under way; guarded by the puller
	idle  *time.Timer // runs while there are none; guarded by the puller
}

// clientStart is how long the start of a container may take of which dewd does
// not see when it is ready.
const clientStart = 10 * time.Second

// BackgroundSoon is Background for containers of which nobody knows when they
// have started.
func (p *Pull) BackgroundSoon() { time.AfterFunc(clientStart, p.Background) }

// Want names one layer of an image as containerd's snapshot labels do.
type Want struct {
	Ref      image.Reference
	Manifest digest.Digest
	Layer    digest.Digest // of the blob
}

// Fetch makes one layer of an image readable and returns its diffID. The
// image's other layers fill meanwhile.
func (p *Puller) Fetch(ctx context.Context, w Want) (digest.Digest, error) {
	s, err := p.join(ctx, w)
	if err != nil {
		return "", err
	}
	defer p.part(s.pull.Image.Desc.Digest, s)
	for i, l := range s.pull.Image.Layers {
		if l.Digest == w.Layer {
			return l.DiffID, s.pull.WaitLayer(ctx, i)
		}
	}
	return "", fmt.Errorf("image %s has no layer %s", w.Ref, w.Layer)
}

// join finds or begins the session of the image that w names. part must follow.
func (p *Puller) join(ctx context.Context, w Want) (*session, error) {
	o := Options{Lazy: !p.cfg.Lazy.Never}
	look := p.newLookup(ctx, w.Ref, o)
	img := p.cfg.Catalog.Manifest(w.Ref, w.Manifest)
	if img == nil {
		ref := w.Ref
		if w.Manifest != "" {
			ref.Dgst = w.Manifest
		}
		var err error
		if img, err = p.resolve(ctx, ref, o, look); err != nil {
			return nil, err
		}
		look.settle()
	}
	img = as(img, w.Ref)
	s, run, err := p.enlist(img.Desc.Digest)
	if err != nil {
		return nil, err
	}
	if run != nil { // nobody else makes it
		s.pull = p.fill(run, img, o, look)
		s.pull.BackgroundSoon()
		close(s.made)
	}
	select {
	case <-s.made:
		return s, nil
	case <-ctx.Done():
		p.part(img.Desc.Digest, s)
		return nil, context.Cause(ctx)
	}
}

// as is the image by another reference: the one that a client named, which
// may be a tag though the manifest was asked for by its digest.
func as(img *image.Image, ref image.Reference) *image.Image {
	named := *img
	named.Ref = ref
	return &named
}

// enlist counts the caller in the session of a manifest. If there was none it
// returns the context of a new one, whose pull the caller must make.
func (p *Puller) enlist(d digest.Digest) (s *session, run context.Context, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.life.Err() != nil {
		return nil, nil, errClosed
	}
	s = p.sessions[d]
	if s == nil || s.failed() {
		s = &session{made: make(chan struct{})}
		run, s.end = context.WithCancel(p.life)
		p.sessions[d] = s
	}
	s.users++
	if s.idle != nil {
		s.idle.Stop()
	}
	return s, run, nil
}

// errClosed is what clients get while the node stops.
var errClosed = errors.New("no more fetches: the node stops")

// part ends what join began.
func (p *Puller) part(d digest.Digest, s *session) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if s.users--; s.users == 0 && p.life.Err() == nil {
		s.idle = time.AfterFunc(p.sessionIdle, func() { p.endIdle(d, s) })
	}
}

func (p *Puller) endIdle(d digest.Digest, s *session) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if s.users > 0 {
		return
	}
	s.end()
	if p.sessions[d] == s {
		delete(p.sessions, d)
	}
}

// failed reports whether a fill of the session has erred.
func (s *session) failed() bool {
	select {
	case <-s.made:
		return s.pull.failed()
	default:
		return false
	}
}

// failed reports whether a fill of the pull has erred.
func (p *Pull) failed() bool {
	for _, f := range p.fills {
		if f.Progress().State == layer.Failed {
			return true
		}
	}
	return false
}
