package fetch

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"

	"dewpoint/internal/image"
	"dewpoint/internal/layer"
)

// Images are those that containerd has.
type Images interface {
	// Idle has the references of containerd's images, and whether they may go: this node has registered them and
	// there is no container of them, as it seems. Those of other clients of containerd are theirs to remove.
	Idle() (map[string]bool, error)
	// Remove has containerd forget images, but those that a container uses by now, and returns when it has let
	// go of what only they needed. No pull of them is under way.
	Remove(context.Context, []image.Reference) error
}

// idleImages are those that may go so that so many bytes become free; none if all that is not claimed is to
// go.
func (c *cache) idleImages(want int64) (map[string]bool, error) {
	if c.cfg.Images == nil || want == math.MaxInt64 {
		return nil, nil
	}
	idle, err := c.cfg.Images.Idle()
	if err != nil {
		return nil, fmt.Errorf("look for images that nothing uses: %w", err)
	}
	return idle, nil
}

// onlyIdle are the images that containerd has with a layer, if all of them are idle and nobody pulls one.
// What lies in the PoP's store takes no room here that would come back; what is on its way there stays, and,
// unless refused, what it would not take yet.
func (c *collection) onlyIdle(l *layer.Layer) (images []image.Reference) {
	k := c.cache
	if len(c.idle) == 0 || l.At != "" || !l.Complete() || k.holds.Held(l.DiffID) || !k.isStale(l) {
		return nil
	}
	if k.pop.Pending(l.DiffID, c.refused) {
		c.spared = true
		return nil
	}
	for _, r := range k.cfg.Catalog.RefsWith(l.DiffID) {
		may, there := c.idle[r.String()]
		if there && (!may || k.isPulled(r)) {
			return nil
		}
		if may {
			images = append(images, r)
		}
	}
	return images
}

// retireImages has containerd forget images that are not being pulled. Their records stay as long as there is
// a layer of them: what is still here need not be fetched when they are deployed again.
func (c *cache) retireImages(ctx context.Context, images []image.Reference) error {
	if len(images) == 0 {
		return nil
	}
	slices.SortFunc(images, func(a, b image.Reference) int { return strings.Compare(a.String(), b.String()) })
	images = slices.CompactFunc(images, func(a, b image.Reference) bool { return a.String() == b.String() })
	images, done := c.retire(images)
	defer done()
	return c.cfg.Images.Remove(ctx, images)
}

// pulling is the images that are being pulled, and those that are being removed: none is both. It is safe for
// concurrent use.
type pulling struct {
	mu       sync.Mutex               // nothing is locked while it is held
	count    map[string]int           // by reference: how many are under way
	retiring map[string]chan struct{} // by reference: closed when containerd has forgotten the image
}

func newPulling() *pulling {
	return &pulling{count: map[string]int{}, retiring: map[string]chan struct{}{}}
}

func (p *pulling) isPulled(ref image.Reference) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.count[ref.String()] > 0
}

// retire returns those of images that are not being pulled. Until done is called no pull of them begins.
func (p *pulling) retire(images []image.Reference) (idle []image.Reference, done func()) {
	gone := make(chan struct{})
	p.mu.Lock()
	defer p.mu.Unlock()
	idle = slices.DeleteFunc(images, func(r image.Reference) bool { return p.count[r.String()] > 0 })
	for _, r := range idle {
		p.retiring[r.String()] = gone
	}
	return idle, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		for _, r := range idle {
			delete(p.retiring, r.String())
		}
		close(gone)
	}
}

// enter has a pull of ref be one that is under way until ctx ends. It waits while the image is being removed.
func (p *pulling) enter(ctx context.Context, ref image.Reference) error {
	name := ref.String()
	for {
		p.mu.Lock()
		going := p.retiring[name]
		if going == nil {
			p.count[name]++
		}
		p.mu.Unlock()
		if going == nil {
			break
		}
		select {
		case <-going:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	context.AfterFunc(ctx, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.count[name]--; p.count[name] == 0 {
			delete(p.count, name)
		}
	})
	return nil
}
