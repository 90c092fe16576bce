package fetch

import (
	"context"
	"fmt"
	"io"

	"dewpoint/internal/image"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// CopyBlobs fetches the layers of an image as the registry serves them and
// hands each to put, which verifies and stores it, or does nothing if it has
// the blob already. The streams take their turns on the link as fills do.
func (p *Puller) CopyBlobs(ctx context.Context, img *image.Image, o Options, put func(context.Context, ocispec.Descriptor, func() (io.ReadCloser, error)) error) error {
	for _, l := range img.Unique() {
		d := ocispec.Descriptor{MediaType: l.MediaType, Digest: l.Digest, Size: l.Size}
		src := &blob{p: p, img: img, l: l, o: o}
		err := put(ctx, d, func() (io.ReadCloser, error) { return src.open(ctx, nothing, 0) })
		if err != nil {
			return fmt.Errorf("copy blob %s: %w", l.Digest, err)
		}
	}
	return nil
}
