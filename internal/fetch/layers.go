package fetch

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"dewpoint/internal/fetch/link"
	"dewpoint/internal/image"
	"dewpoint/internal/layer"
	"dewpoint/internal/layer/mount"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Chain returns the diffIDs, bottom first, of a chain whose layers can all be
// mounted, else an error that wraps layer.ErrUnknown.
func (p *pulls) Chain(_ context.Context, chain digest.Digest) ([]digest.Digest, error) {
	ids := p.cfg.Catalog.Chain(chain)
	if ids == nil {
		return nil, fmt.Errorf("chain %s: %w", chain, layer.ErrUnknown)
	}
	strict := p.strictest(chain, ids)
	for _, id := range ids {
		if strict == nil || !p.partials.Mountable(strict, id) {
			return nil, fmt.Errorf("%s: %w", id, layer.ErrUnknown)
		}
	}
	return ids, nil
}

// strictest is the image with the strictest policy of those that have the chain,
// for who asks for it may mean any of them. nil is none.
func (p *pulls) strictest(chain digest.Digest, ids []digest.Digest) *image.Image {
	var found *image.Image
	rank := map[string]int{TrustRepository: 1, TrustSigned: 2, TrustPoP: 3}
	for _, img := range p.cfg.Catalog.WithLayer(ids[len(ids)-1]) {
		if slices.Contains(img.ChainIDs(), chain) &&
			(found == nil || rank[p.packs.policy(img)] > rank[p.packs.policy(found)]) {
			found = img
		}
	}
	return found
}

// HasLayer reports whether a layer is readable.
func (p *pulls) HasLayer(id digest.Digest) bool {
	_, err := p.cfg.Layers.Peek(id)
	return err == nil
}

// Files says where a layer lies. A layer that was readable but not complete
// when the node stopped is filled again first. Files waits for that as long as
// ctx lives; the fill goes on until Close.
func (p *pulls) Files(ctx context.Context, id digest.Digest) (mount.Files, error) {
	l, err := p.cfg.Layers.Get(id)
	if part := p.cfg.Layers.Partial(id); part != nil && err != nil {
		return part.Files(), nil
	}
	if err == nil && l.At != "" && !p.pop.Mountable(ctx, l) {
		err = errors.Join(fmt.Errorf("layer %s lies in the PoP's store, which is away: %w", id, layer.ErrUnknown),
			p.pop.Detach(id))
	}
	if errors.Is(err, layer.ErrUnknown) {
		for _, img := range p.cfg.Catalog.WithLayer(id) {
			missing := layerOf(img, id)
			l, err = p.cfg.Layers.Fill(p.life, missing, p.newBlob(img, missing, Options{}, link.Startup)).Wait(ctx)
			if err == nil || ctx.Err() != nil {
				break
			}
		}
	}
	if err != nil {
		return mount.Files{}, err
	}
	return l.Files(), nil
}

// Saved is a layer that no registry has: what a container has written. Its
// blob is its tar.
func Saved(id digest.Digest, size int64) image.Layer {
	return image.Layer{Digest: id, DiffID: id, Size: size, MediaType: ocispec.MediaTypeImageLayer}
}

// Keep makes the tar that src gives a layer of this node, and returns when it would survive a power cut.
func (p *pulls) Keep(ctx context.Context, l image.Layer, src layer.Source) error {
	_, err := p.cfg.Layers.Fill(ctx, l, src).WaitComplete(ctx)
	return err
}

// Refill fetches a layer of an image as a pull would, behind what somebody waits for, and returns when it is
// on disk.
func (p *pulls) Refill(ctx context.Context, img *image.Image, id digest.Digest) (*layer.Layer, error) {
	l := layerOf(img, id)
	return p.cfg.Layers.Fill(ctx, l, p.newBlob(img, l, Options{}, link.Background)).WaitComplete(ctx)
}

// layerOf is the layer of img with that diffID, which it has.
func layerOf(img *image.Image, id digest.Digest) image.Layer {
	return img.Layers[slices.IndexFunc(img.Layers, func(l image.Layer) bool { return l.DiffID == id })]
}

// Import turns the blob that open gives into a layer and returns it when it is readable.
func (p *pulls) Import(ctx context.Context, l image.Layer, src layer.Source) (*layer.Layer, error) {
	return p.cfg.Layers.Import(ctx, l, src).Wait(ctx)
}
