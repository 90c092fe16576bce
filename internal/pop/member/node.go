package member

import (
	"context"

	"dewpoint/internal/image"
	"dewpoint/internal/pop"

	"github.com/opencontainers/go-digest"
)

// Opener opens the shared store.
type Opener interface {
	OpenStore(context.Context) (*pop.Store, error)
}

// Checkpoints are those that this node gives the others.
type Checkpoints interface {
	// Manifests are those of the images that they were made of.
	Manifests() []digest.Digest
}

// Cache is where this node's own layers lie.
type Cache interface {
	// Fits reports whether it has room for a copy of so many bytes.
	Fits(bytes int64) bool
}

// Audience is told what happens in the PoP.
type Audience interface {
	// Damaged is told of layers in the store that are not what was published.
	Damaged(id digest.Digest, why error)
	// Lost is told of what has left the store since it was damaged, whichever node has found that: layers, and
	// what others keep there. It must not block for long.
	Lost(id digest.Digest)
	// Replaced is told of damaged layers that are in the store again.
	Replaced(id digest.Digest)
	// LetGo is told of a layer that this node used out of the store, and does not any more, and why: containers
	// that run with it go on with the files that they have. It must not block.
	LetGo(id digest.Digest, why string)
	// Heard is told of every event of the PoP, one after the other, while Run does, and of a Resync when the
	// store has been opened. It must not block.
	Heard(e pop.Event)
}

// deaf is an Audience that listens to nothing.
type deaf struct{}

func (deaf) Damaged(digest.Digest, error) {}

func (deaf) Lost(digest.Digest) {}

func (deaf) Replaced(digest.Digest) {}

func (deaf) LetGo(digest.Digest, string) {}

func (deaf) Heard(pop.Event) {}

// Engine has the images of this node, and mounts their layers.
type Engine interface {
	// Register makes an image known to the engine, whose layers are attached.
	Register(ctx context.Context, img *image.Image) error
	// Unmount unmounts layers that nothing needs mounted, and returns the others.
	Unmount(ctx context.Context, ids ...digest.Digest) (busy []digest.Digest, err error)
	// Forget has the engine, and the catalog, forget an image, unless a container uses it.
	Forget(ctx context.Context, ref image.Reference) error
}
