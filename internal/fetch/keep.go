package fetch

import (
	"context"
	"errors"
	"math"
	"slices"
	"sync"
	"time"

	"dewpoint/internal/image"
	"dewpoint/internal/layer"

	"github.com/opencontainers/go-digest"
)

// partialAges are the ages from which on abandoned fills are removed: the
// first one anyway, the others one after the other while bytes are wanted. One
// that was cut a moment ago is likely to be taken up again.
var partialAges = []time.Duration{24 * time.Hour, 6 * time.Hour, time.Hour, 10 * time.Minute, time.Minute}

// cache is what may leave a full disk: this node's layers, images and packs.
type cache struct {
	*common
	packs *packs
	*pulling
	holds *Holds
	order *order // in which unused layers go
	// fresh is how long a layer that was just asked for is kept though nothing
	// refers to it yet: a client that was told of it is about to. It is constant.
	fresh time.Duration

	collecting sync.Mutex // held while layers are being collected; taken before all others
}

// Holds are the layers that must stay for now.
func (c *cache) Holds() *Holds { return c.holds }

// Freed says what a collection removed.
type Freed struct {
	Layers []string // their diffIDs
	Bytes  int64    // of disk, those of abandoned fills included
}

// Collect gives back at least want bytes of disk if that much is unused: what
// cut pulls left, oldest first, and then layers, by the policy of the cache
// (CacheConfig). What was left a day ago goes in any case, and so do records
// of images of which nothing is here. inUse is asked what must stay; it must
// not call the puller. Pulls under way are known here.
func (c *cache) Collect(ctx context.Context, want int64, inUse func(digest.Digest) bool) (Freed, error) {
	var freed Freed
	var errs error
	for i, age := range partialAges {
		if ctx.Err() != nil || i > 0 && freed.Bytes >= want {
			break
		}
		n, err := c.cfg.Layers.RemovePartial(c.holds.Claimed(inUse), age)
		freed.Bytes += n
		errs = errors.Join(errs, err)
	}
	c.retireUnused(inUse)
	errs = errors.Join(errs, c.collectLayers(ctx, want, inUse, &freed))
	if want < math.MaxInt64 { // packs make a start quick after everything else has been pruned
		n, err := c.packs.collectPacks(want - freed.Bytes)
		freed.Bytes += n
		errs = errors.Join(errs, err)
	}
	return freed, errors.Join(errs,
		c.cfg.Catalog.Sweep(func(img *image.Image) bool { return c.gone(img, inUse) }))
}

// collectLayers removes layers by the cache's policy: those that nobody claims, and those that only images
// claim of which there is no container, with these images. What the PoP's store would not take yet goes last.
func (c *cache) collectLayers(ctx context.Context, want int64, inUse func(digest.Digest) bool,
	freed *Freed) error {
	if freed.Bytes >= want {
		return nil
	}
	c.collecting.Lock() // else two could have the same image go, the second one when a pull of it has begun
	defer c.collecting.Unlock()
	idle, errs := c.idleImages(want)
	c.order.look(c.cfg.Layers.Layers(), c.cfg.Catalog.Sharing())
	run := &collection{cache: c, claimed: c.holds.Claimed(inUse), idle: idle, freed: freed}
	errs = errors.Join(errs, run.run(ctx, want))
	if run.spared {
		run.refused = true
		errs = errors.Join(errs, run.run(ctx, want))
	}
	if len(freed.Layers) > 0 {
		errs = errors.Join(errs, c.order.save())
	}
	return errs
}

// collection is one go through the cache.
type collection struct {
	cache   *cache
	claimed func(digest.Digest) bool
	idle    map[string]bool
	refused bool // what the PoP's store would not take may go, too
	spared  bool // something stays that is to go to the PoP's store
	freed   *Freed
}

func (c *collection) run(ctx context.Context, want int64) (errs error) {
	kept := map[digest.Digest]bool{}
	for c.freed.Bytes < want && ctx.Err() == nil {
		victims, images := c.victims(want-c.freed.Bytes, kept)
		if len(victims) == 0 {
			break
		}
		errs = errors.Join(errs, c.cache.retireImages(ctx, images))
		for _, id := range victims {
			errs = errors.Join(errs, c.cache.removeLayer(id, c.claimed, c.freed))
		}
	}
	return errs
}

// victims are the layers that go next, of want bytes in all if there are so many, and the images that have to
// go before. What was looked at is kept then.
func (c *collection) victims(want int64, kept map[digest.Digest]bool) (layers []digest.Digest,
	images []image.Reference) {
	for want > 0 {
		id, ok := c.cache.order.next(kept)
		if !ok {
			break
		}
		kept[id] = true
		l, err := c.cache.cfg.Layers.Peek(id)
		if err != nil { // it went meanwhile
			c.cache.order.dropLayer(id)
			continue
		}
		if c.claimed(id) {
			of := c.onlyIdle(l)
			if len(of) == 0 {
				continue
			}
			images = append(images, of...)
		}
		layers = append(layers, id)
		want -= l.DiskUse()
	}
	return layers, images
}

// removeLayer removes a layer unless somebody wants it.
func (c *cache) removeLayer(id digest.Digest, claimed func(digest.Digest) bool, freed *Freed) error {
	l, err := c.cfg.Layers.Peek(id)
	if err != nil {
		return nil
	}
	size := l.DiskUse()
	ok, err := c.cfg.Layers.Remove(id, func(l *layer.Layer) bool { return c.isStale(l) && !claimed(l.DiffID) })
	if ok {
		c.order.dropLayer(id)
		freed.Layers = append(freed.Layers, id.String())
		freed.Bytes += size
	}
	return err
}

func (c *cache) isStale(l *layer.Layer) bool { return time.Since(l.Used()) >= c.fresh }

// retireUnused lets go of partial layers that nothing mounts or is about to.
func (c *cache) retireUnused(inUse func(digest.Digest) bool) {
	claimed := c.holds.Claimed(inUse)
	for _, part := range c.cfg.Layers.Partials() {
		if id := part.Layer.DiffID; part.Age() >= c.fresh && !claimed(id) {
			c.cfg.Layers.Retire(id)
		}
	}
}

// releaseWait is how long it takes at most until the server has let go of
// layers that nothing uses.
const releaseWait = 2 * time.Second

// awaitReleased waits until no unused layer is partial any more.
func (c *cache) awaitReleased(ctx context.Context, inUse func(digest.Digest) bool) {
	claimed := c.holds.Claimed(inUse)
	for deadline := time.Now().Add(releaseWait); time.Now().Before(deadline) &&
		ctx.Err() == nil; time.Sleep(20 * time.Millisecond) {
		if !slices.ContainsFunc(c.cfg.Layers.Partials(), func(part *layer.Partial) bool {
			return !claimed(part.Layer.DiffID)
		}) {
			return
		}
	}
}

// gone reports whether no layer of img is here or wanted here. An image
// without layers is never gone.
func (c *cache) gone(img *image.Image, inUse func(digest.Digest) bool) bool {
	for _, l := range img.Layers {
		if _, err := c.cfg.Layers.Peek(l.DiffID); err == nil || c.holds.Held(l.DiffID) || inUse(l.DiffID) {
			return false
		}
	}
	return len(img.Layers) > 0
}

// Prune removes every layer that nothing uses, and what cut pulls left. What of the PoP's store nothing uses
// here is not referenced any more then.
func (c *cache) Prune(ctx context.Context, inUse func(digest.Digest) bool) (Freed, error) {
	select { // let the freshest become collectable
	case <-time.After(c.fresh):
	case <-ctx.Done():
		return Freed{}, ctx.Err()
	}
	c.retireUnused(inUse)
	c.awaitReleased(ctx, inUse)
	n, perr := c.cfg.Layers.RemovePartial(c.holds.Claimed(inUse), 0)
	freed, err := c.Collect(ctx, math.MaxInt64, inUse)
	freed.Bytes += n
	c.pop.Unuse(ctx, inUse)
	return freed, errors.Join(perr, err)
}
