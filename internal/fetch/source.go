package fetch

import (
	"context"
	"io"

	"dewpoint/internal/image"
	"dewpoint/internal/layer"
	"dewpoint/internal/pack"

	"github.com/opencontainers/go-digest"
)

// Source is where images and layers may come from beside their registry: the PoP of this node. It is
// safe for concurrent use.
type Source interface {
	// Resolve returns what ref means: what the others know of it, if local or if ref cannot change its meaning,
	// else what ask says, of which the others are told. What it has begun is handed to Attach; nil is nothing.
	Resolve(ctx context.Context, ref image.Reference, local bool,
		ask func() (*image.Image, error)) (img *image.Image, begun any, err error)
	// Attach makes those layers of img known that need not be fetched. It returns those that were known and
	// cannot be reached now: they are forgotten, and to be mounted anew when they have been fetched.
	Attach(ctx context.Context, img *image.Image, begun any) (lost []digest.Digest)
	// Fill gives the route of one layer, for one fill. What it finds no other way for, the registry has.
	Fill(img *image.Image, l image.Layer) layer.Preparer
	// Want brings absent bytes of a partial layer. It reports how many came, and whether they are all.
	Want(ctx context.Context, part *layer.Partial, from, to int64) (n int64, ok bool)
}

// Neighbours are the other nodes, as lazy starts know them. They are safe for concurrent use.
type Neighbours interface {
	// BringPack copies the pack of a manifest to where this node has its own, if others have it.
	BringPack(ctx context.Context, manifest digest.Digest) error
	// Brought is how many bytes BringPack has brought of a pack since this was asked last.
	Brought(manifest digest.Digest) int64
	// Pass is open, for a pack of a registry that is passed on to the others, or comes from one of them; then
	// what it gives is a *Near. It is false if the pack is not passed on.
	Pass(manifest digest.Digest, size int64, open OpenPack) (OpenPack, bool)
	// Claim has the others ask this node for a partial layer until release is called.
	Claim(ctx context.Context, id digest.Digest) (release func())
}

// OpenPack opens a part of a pack.
type OpenPack func(ctx context.Context, at pack.Span) (io.ReadCloser, error)

// Near is a stream that does not cross the link.
type Near struct{ io.ReadCloser }

// Attached are the layers of this node that lie elsewhere: their At is not "". It is safe for concurrent use.
type Attached interface {
	// Mountable reports whether a layer is there, and may be mounted now.
	Mountable(ctx context.Context, l *layer.Layer) bool
	// Detach forgets a layer.
	Detach(id digest.Digest) error
	// Pending reports whether a layer of this node's own is to be copied there, and, with refused, whether that
	// has not been refused yet.
	Pending(id digest.Digest, refused bool) bool
	// Unuse lets go of what nothing uses here.
	Unuse(ctx context.Context, inUse func(digest.Digest) bool)
}

// PoP is what a node has in common with others.
type PoP interface {
	Source
	Neighbours
	Attached
}

// alone is the PoP of a node by itself.
type alone struct{ layers *layer.Store }

func (alone) Resolve(_ context.Context, _ image.Reference, _ bool,
	ask func() (*image.Image, error)) (*image.Image, any, error) {
	img, err := ask()
	return img, nil, err
}

func (alone) Attach(context.Context, *image.Image, any) []digest.Digest { return nil }

func (alone) Fill(*image.Image, image.Layer) layer.Preparer { return nil }

func (alone) Want(context.Context, *layer.Partial, int64, int64) (int64, bool) { return 0, false }

func (alone) BringPack(context.Context, digest.Digest) error { return nil }

func (alone) Brought(digest.Digest) int64 { return 0 }

func (alone) Pass(_ digest.Digest, _ int64, open OpenPack) (OpenPack, bool) { return open, false }

func (alone) Claim(context.Context, digest.Digest) func() { return func() {} }

// Mountable is false: the layer lies in a store that was configured once.
func (alone) Mountable(context.Context, *layer.Layer) bool { return false }

func (a alone) Detach(id digest.Digest) error { return a.layers.Detach(id) }

func (alone) Pending(digest.Digest, bool) bool { return false }

func (alone) Unuse(context.Context, func(digest.Digest) bool) {}
