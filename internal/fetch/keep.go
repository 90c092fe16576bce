package fetch

import (
	"context"
	"errors"
	"sort"
	"time"

	"dewpoint/internal/layer"

	"github.com/opencontainers/go-digest"
)

// fresh is how long a layer that was just asked for is kept though nothing
// refers to it yet: a client that was told of it is about to.
const fresh = 2 * time.Second

// Freed says what a collection removed.
type Freed struct {
	Layers []string // their diffIDs
	Bytes  int64    // of disk
}

// Collect removes layers that nothing uses, those not asked for the longest
// first, until all layers together take at most budget bytes; a negative
// budget collects nothing. inUse is asked what must stay; it must not call
// the puller. Pulls under way are known here.
func (p *Puller) Collect(ctx context.Context, budget int64, inUse func(digest.Digest) bool) (Freed, error) {
	if budget < 0 {
		return Freed{}, nil
	}
	var total int64
	all := p.cfg.Layers.Layers()
	size := map[digest.Digest]int64{}
	for _, l := range all {
		size[l.DiffID] = l.DiskUse()
		total += size[l.DiffID]
	}
	sort.Slice(all, func(i, j int) bool { return all[i].Used().Before(all[j].Used()) })
	held := p.held()
	var freed Freed
	var errs error
	for _, l := range all {
		if total <= budget || ctx.Err() != nil {
			break
		}
		ok, err := p.cfg.Layers.Remove(l.DiffID, func(l *layer.Layer) bool {
			return !held[l.DiffID] && !inUse(l.DiffID) && time.Since(l.Used()) >= fresh
		})
		errs = errors.Join(errs, err)
		if ok {
			total -= size[l.DiffID]
			freed.Layers = append(freed.Layers, l.DiffID.String())
			freed.Bytes += size[l.DiffID]
		}
	}
	return freed, errs
}

// Prune removes every layer that nothing uses, and what cut pulls left.
func (p *Puller) Prune(ctx context.Context, inUse func(digest.Digest) bool) (Freed, error) {
	select { // let the freshest become collectable
	case <-time.After(fresh):
	case <-ctx.Done():
		return Freed{}, ctx.Err()
	}
	freed, err := p.Collect(ctx, 0, inUse)
	n, perr := p.cfg.Layers.RemovePartial(inUse, 0)
	freed.Bytes += n
	return freed, errors.Join(err, perr)
}

// hold keeps the layers of a pull from being collected until its context ends.
func (p *Puller) hold(ctx context.Context, pull *Pull) {
	p.holdMu.Lock()
	p.holds[pull] = true
	p.holdMu.Unlock()
	context.AfterFunc(ctx, func() {
		p.holdMu.Lock()
		delete(p.holds, pull)
		p.holdMu.Unlock()
	})
}

func (p *Puller) held() map[digest.Digest]bool {
	p.holdMu.Lock()
	defer p.holdMu.Unlock()
	ids := map[digest.Digest]bool{}
	for pull := range p.holds {
		for _, f := range pull.fills {
			ids[f.Layer.DiffID] = true
		}
	}
	return ids
}
