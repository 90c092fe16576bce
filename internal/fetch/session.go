package fetch

import (
	"context"
	"errors"
	"fmt"
	"sync"
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
	users int         // calls under way; guarded by clients
	idle  *time.Timer // runs while there are none; guarded by clients
}

// clients are programs that ask for one layer after the other: what they have begun goes on for a while.
type clients struct {
	*common
	pulls       *pulls
	sessionIdle time.Duration // how long fills go on after the last call that wanted them; constant

	mu       sync.Mutex
	sessions map[digest.Digest]*session // by manifest
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
func (c *clients) Fetch(ctx context.Context, w Want) (digest.Digest, error) {
	s, err := c.join(ctx, w)
	if err != nil {
		return "", err
	}
	defer c.part(s.pull.Image.Desc.Digest, s)
	for i, l := range s.pull.Image.Layers {
		if l.Digest == w.Layer {
			return l.DiffID, s.pull.WaitLayer(ctx, i)
		}
	}
	return "", fmt.Errorf("image %s has no layer %s", w.Ref, w.Layer)
}

// join finds or begins the session of the image that w names. part must follow.
func (c *clients) join(ctx context.Context, w Want) (*session, error) {
	o := Options{Lazy: !c.cfg.Lazy.Never}
	look := c.pulls.packs.newLookup(ctx, w.Ref, o)
	img := c.cfg.Catalog.Manifest(w.Ref, w.Manifest)
	if img == nil {
		ref := w.Ref
		if w.Manifest != "" {
			ref.Dgst = w.Manifest
		}
		var err error
		if img, err = c.pulls.resolve(ctx, ref, o, look); err != nil {
			return nil, err
		}
		look.settle()
	}
	img = as(img, w.Ref)
	s, run, err := c.enlist(img.Desc.Digest)
	if err != nil {
		return nil, err
	}
	if run != nil { // nobody else makes it
		s.pull = c.pulls.fill(run, img, o, look)
		s.pull.BackgroundSoon()
		close(s.made)
	}
	select {
	case <-s.made:
		return s, nil
	case <-ctx.Done():
		c.part(img.Desc.Digest, s)
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
func (c *clients) enlist(d digest.Digest) (s *session, run context.Context, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.life.Err() != nil {
		return nil, nil, errClosed
	}
	s = c.sessions[d]
	if s == nil || s.failed() {
		s = &session{made: make(chan struct{})}
		run, s.end = context.WithCancel(c.life)
		c.sessions[d] = s
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
func (c *clients) part(d digest.Digest, s *session) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if s.users--; s.users == 0 && c.life.Err() == nil {
		s.idle = time.AfterFunc(c.sessionIdle, func() { c.endIdle(d, s) })
	}
}

func (c *clients) endIdle(d digest.Digest, s *session) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if s.users > 0 {
		return
	}
	s.end()
	if c.sessions[d] == s {
		delete(c.sessions, d)
	}
}

func (c *clients) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, s := range c.sessions {
		if s.idle != nil {
			s.idle.Stop()
		}
	}
	clear(c.sessions)
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
