package fetch

import (
	"errors"
	"slices"
	"sync"
	"syscall"
	"time"

	"dewpoint/internal/fetch/link"
	"dewpoint/internal/image"
	"dewpoint/internal/layer"
	"dewpoint/internal/pack"

	"github.com/opencontainers/go-digest"
)

// partials are the layers that are mounted before they are whole: where each gets its bytes, and when it is
// completed.
type partials struct {
	*common
	packs      *packs
	slots      *slots        // of fetches for readers who wait
	hoursEvery time.Duration // how often it is looked whether the hours allow filling; constant

	mu      sync.Mutex
	origins map[digest.Digest]*origin // by layer: where partial ones get their bytes
}

// originOf is where a partial layer gets its bytes, or nil.
func (p *partials) originOf(id digest.Digest) *origin {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.origins[id]
}

// letFill lets the layers fill, after the configured delay.
func (s *Start) letFill() {
	if s.p.cfg.Lazy.Off {
		return
	}
	s.once.Do(func() {
		s.p.work.Go(func() {
			defer close(s.background)
			select {
			case <-s.done:
			case <-s.p.life.Done():
			}
			select {
			case <-time.After(s.p.cfg.Lazy.Delay):
			case <-s.p.life.Done():
			}
			s.p.awaitHours()
		})
	})
}

// adopt makes s the origin of a partial layer and sees to it that the layer
// becomes whole one day.
func (p *partials) adopt(s *Start, n int, part *layer.Partial) {
	p.mu.Lock()
	p.origins[part.Layer.DiffID] = newOrigin(s, n, part)
	p.mu.Unlock()
	p.work.Go(func() {
		if !p.cfg.Lazy.Off && p.cfg.Lazy.Hours == nil { // else it may never be filled, or not soon
			defer p.pop.Claim(p.life, part.Layer.DiffID)()
		}
		p.makeWhole(s, part)
	})
}

// gateOf is closed when a partial layer may fill: that of the start that began
// it, or of this one. nil holds nothing.
func (p *partials) gateOf(id digest.Digest, lazy *Start) <-chan struct{} {
	if o := p.originOf(id); o != nil {
		return o.s.background
	}
	if lazy != nil {
		return lazy.background
	}
	return nil
}

// makeWhole fills a partial layer, when that is allowed, and again after errors.
func (p *partials) makeWhole(s *Start, part *layer.Partial) {
	id := part.Layer.DiffID
	for pause := 5 * time.Second; ; pause = min(2*pause, 5*time.Minute) {
		if !p.mayFill(s.background) || p.cfg.Layers.Partial(id) != part {
			break
		}
		b := p.newBlob(s.img, part.Layer, s.o, link.Background)
		_, err := p.cfg.Layers.Fill(p.life, part.Layer, b).WaitComplete(p.life)
		if err == nil {
			p.showWhole(id)
			break
		}
		if p.life.Err() != nil {
			return
		}
		p.cfg.Log.Warn("a layer that runs already is not whole yet; trying again", "layer", part.Layer.Digest, "in",
			pause, "err", err)
		if errors.Is(err, syscall.ENOSPC) && p.cfg.Lazy.Disk != nil {
			p.cfg.Lazy.Disk.MakeFree(p.life, part.Size)
		}
		select {
		case <-time.After(pause):
		case <-p.life.Done():
			return
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if o := p.origins[id]; o != nil && o.part == part {
		delete(p.origins, id)
	}
}

// showWhole lets new mounts use a layer's own file. Those that are there go on.
func (p *partials) showWhole(id digest.Digest) {
	p.Remount(id)
	p.cfg.Layers.Retire(id)
}

// Remount has new mounts of a layer be made of what it is now. Those that are there go on.
func (p *partials) Remount(id digest.Digest) {
	p.cfg.Lazy.Audience.Whole(id)
}

// mayFill waits until the layers of a start may be completed. It is false if
// the node stops before.
func (p *partials) mayFill(gate <-chan struct{}) bool {
	select {
	case <-gate:
	case <-p.life.Done():
		return false
	}
	return p.awaitHours()
}

// awaitHours waits until the hours allow layers to be completed. It is false if
// the node stops before.
func (p *partials) awaitHours() bool {
	for p.cfg.Lazy.Hours != nil && !p.cfg.Lazy.Hours.Between(time.Now()) {
		select {
		case <-time.After(p.hoursEvery):
		case <-p.life.Done():
			return false
		}
	}
	return p.life.Err() == nil
}

// Revive takes up the partial layers that an earlier process has left, so that
// what reads them goes on. It returns at once.
func (p *partials) Revive() {
	byImage := map[digest.Digest]*image.Image{}
	for _, part := range p.cfg.Layers.Partials() {
		if _, err := p.cfg.Layers.Peek(part.Layer.DiffID); err == nil {
			p.showWhole(part.Layer.DiffID)
			continue
		}
		if img := p.imageOf(part); img != nil {
			byImage[img.Desc.Digest] = img
		}
	}
	for _, img := range byImage {
		p.work.Go(func() { p.reviveImage(img) })
	}
}

// imageOf is the image that a partial layer was begun for, by the reference that
// was used then; or another one that has the layer, or nil.
func (p *partials) imageOf(part *layer.Partial) *image.Image {
	all := p.cfg.Catalog.WithLayer(part.Layer.DiffID)
	ref, err := image.ParseReference(part.Origin.Ref)
	if err != nil || len(all) == 0 {
		return slices.Concat(all, []*image.Image{nil})[0]
	}
	for _, img := range all {
		if img.Ref.Host == ref.Host && img.Ref.Path == ref.Path {
			return as(img, ref)
		}
	}
	return all[0]
}

// reviveImage lets the partial layers of an image be filled, and looks for the
// pack again, for what is read meanwhile, until it is found or there is none.
func (p *partials) reviveImage(img *image.Image) {
	bare := p.bareStart(img, Options{})
	left := func() (parts []*layer.Partial) {
		for _, part := range p.cfg.Layers.Partials() {
			if !part.Whole() && img.HasLayer(part.Layer.DiffID) {
				parts = append(parts, part)
			}
		}
		return parts
	}
	err := p.reviveStart(img) // first: what is wanted meanwhile waits, and need not come by whole streams
	for _, part := range left() {
		if p.originOf(part.Layer.DiffID) == nil {
			p.adopt(bare, -1, part)
		}
	}
	bare.letFill()
	for pause := reviveFirst; len(left()) > 0; pause = min(2*pause, time.Minute) {
		if err == nil || errors.Is(err, errNoPack) || errors.Is(err, pack.ErrInvalid) {
			return
		}
		p.cfg.Log.Warn("the startup pack of a running image cannot be read again yet", "image", img.Ref, "err", err)
		select {
		case <-time.After(pause):
		case <-p.life.Done():
			return
		}
		err = p.reviveStart(img)
	}
}

// reviveFirst is the pause after the first search for a pack that failed.
const reviveFirst = 2 * time.Second

// reviveStart makes the pack of an image the origin of its partial layers again.
// Its chunks are fetched when they are read: most are here.
func (p *partials) reviveStart(img *image.Image) error {
	f, err := p.packs.findPack(p.life, img)
	if err != nil {
		return err
	}
	s := p.bareStart(img, Options{})
	s.pack = f
	_, end, err := s.readTables(p.life)
	if err != nil {
		return err
	}
	end()
	s.letFill()
	for i, part := range s.partials {
		if part == nil {
			continue
		}
		p.mu.Lock()
		known := p.origins[part.Layer.DiffID] != nil
		if known { // it is being made whole already
			p.origins[part.Layer.DiffID] = newOrigin(s, i, part)
		}
		p.mu.Unlock()
		if !known {
			p.adopt(s, i, part)
		}
	}
	return nil
}

// Put is Partial.Put that makes room once if the disk is full.
func (p *partials) Put(part *layer.Partial, off int64, b []byte) error {
	err := part.Put(off, b)
	if errors.Is(err, syscall.ENOSPC) && p.cfg.Lazy.Disk != nil {
		p.cfg.Log.Warn("disk full while an image runs that is not whole: unused layers go", "layer",
			part.Layer.DiffID)
		p.cfg.Lazy.Disk.MakeFree(p.life, int64(len(b)))
		err = part.Put(off, b)
	}
	return err
}
