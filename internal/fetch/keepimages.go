package fetch

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strings"

	"dewpoint/internal/image"
	"dewpoint/internal/layer"
)

// ImagesConfig is who knows which images containerd has. Without it what an image has stays until that is
// removed.
type ImagesConfig struct {
	// Idle has the references of containerd's images, and whether they may go: this node has registered them and
	// there is no container of them, as it seems. Those of other clients of containerd are theirs to remove.
	Idle func() (map[string]bool, error)
	// Remove has containerd forget images, but those that a container uses by now, and returns when it has let
	// go of what only they needed. No pull of them is under way.
	Remove func(context.Context, []image.Reference) error
}

// idleImages are those that may go so that so many bytes become free; none if all that is not claimed is to
// go.
func (p *Puller) idleImages(want int64) (map[string]bool, error) {
	if p.cfg.Images.Idle == nil || want == math.MaxInt64 {
		return nil, nil
	}
	idle, err := p.cfg.Images.Idle()
	if err != nil {
		return nil, fmt.Errorf("look for images that nothing uses: %w", err)
	}
	return idle, nil
}

// onlyIdle are the images that containerd has with a layer, if all of them are idle and nobody pulls one.
// What lies in the PoP's store takes no room here that would come back; what is on its way there stays, and,
// unless refused, what it would not take yet.
func (c *collection) onlyIdle(l *layer.Layer) (images []image.Reference) {
	p := c.p
	if len(c.idle) == 0 || l.At != "" || !l.Complete() || p.holds.Held(l.DiffID) || !p.isStale(l) {
		return nil
	}
	if p.pop.Pending(l.DiffID, c.refused) {
		c.spared = true
		return nil
	}
	for _, r := range p.cfg.Catalog.RefsWith(l.DiffID) {
		may, there := c.idle[r.String()]
		if there && (!may || p.isPulled(r)) {
			return nil
		}
		if may {
			images = append(images, r)
		}
	}
	return images
}

func (p *Puller) isPulled(ref image.Reference) bool {
	p.holdMu.Lock()
	defer p.holdMu.Unlock()
	return p.pulling[ref.String()] > 0
}

// retireImages has containerd forget images that are not being pulled. Their records stay as long as there is
// a layer of them: what is still here need not be fetched when they are deployed again.
func (p *Puller) retireImages(ctx context.Context, images []image.Reference) error {
	if len(images) == 0 {
		return nil
	}
	slices.SortFunc(images, func(a, b image.Reference) int { return strings.Compare(a.String(), b.String()) })
	images = slices.CompactFunc(images, func(a, b image.Reference) bool { return a.String() == b.String() })
	done := make(chan struct{})
	p.holdMu.Lock()
	images = slices.DeleteFunc(images, func(r image.Reference) bool { return p.pulling[r.String()] > 0 })
	for _, r := range images {
		p.retiring[r.String()] = done
	}
	p.holdMu.Unlock()
	defer func() {
		p.holdMu.Lock()
		defer p.holdMu.Unlock()
		for _, r := range images {
			delete(p.retiring, r.String())
		}
		close(done)
	}()
	return p.cfg.Images.Remove(ctx, images)
}

// enter has a pull of ref be one that is under way until ctx ends. It waits while the image is being removed.
func (p *Puller) enter(ctx context.Context, ref image.Reference) error {
	name := ref.String()
	for {
		p.holdMu.Lock()
		going := p.retiring[name]
		if going == nil {
			p.pulling[name]++
		}
		p.holdMu.Unlock()
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
		p.holdMu.Lock()
		defer p.holdMu.Unlock()
		if p.pulling[name]--; p.pulling[name] == 0 {
			delete(p.pulling, name)
		}
	})
	return nil
}
