package fetch

import (
	"context"
	"errors"
	"fmt"

	"dewpoint/internal/image"
	"dewpoint/internal/layer"
	"dewpoint/internal/pop"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Store is the PoP's store, nil if this node has none or it is away.
func (p *Puller) Store() *pop.Store {
	if p.site == nil {
		return nil
	}
	return p.site.usable()
}

// Saved is a layer that no registry has: what a container has written. Its
// blob is its tar.
func Saved(id digest.Digest, size int64) image.Layer {
	return image.Layer{Digest: id, DiffID: id, Size: size, MediaType: ocispec.MediaTypeImageLayer}
}

// Keep makes the tar that src gives a layer of this node, and returns when it
// would survive a power cut.
func (p *Puller) Keep(ctx context.Context, l image.Layer, src layer.Source) error {
	_, err := p.cfg.Layers.Fill(ctx, l, src).WaitComplete(ctx)
	return err
}

// Give puts a layer of this node into the PoP's store. It returns an error that
// wraps pop.ErrStoreAway if there is none.
func (p *Puller) Give(ctx context.Context, id digest.Digest) error {
	if p.Store() == nil {
		return pop.ErrStoreAway
	}
	have, err := p.cfg.Layers.Peek(id)
	if err != nil {
		return err
	}
	if have.At != "" {
		return nil
	}
	p.give(id, 1)
	defer p.give(id, -1)
	return p.site.republish(ctx, have)
}

// Take makes a layer known that is here or in the PoP's store.
func (p *Puller) Take(ctx context.Context, l image.Layer) error {
	st := p.Store()
	have, err := p.cfg.Layers.Get(l.DiffID)
	if err == nil && (have.At == "" || p.reachable(ctx, have)) {
		return nil
	}
	if st == nil {
		return fmt.Errorf("layer %s is not here: %w", l.DiffID, errors.Join(layer.ErrUnknown, pop.ErrStoreAway))
	}
	if err := p.site.attachLayer(ctx, st, l); err != nil {
		return fmt.Errorf("layer %s of the PoP's store: %w", l.DiffID, err)
	}
	return nil
}
