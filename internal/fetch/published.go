package fetch

import (
	"context"
	"errors"
	"fmt"
	"io"

	"dewpoint/internal/image"
	"dewpoint/internal/pack"

	"github.com/opencontainers/go-digest"
)

// Published is a pack that an image's repository has, whether it would be used
// here or not.
type Published struct {
	Digest digest.Digest // of the pack
	Size   int64

	p   *packs
	img *image.Image
	f   *packFile
}

// Published returns the pack that would be taken of an image's repository, and
// an error if there is none or the registry does not say.
func (p *packs) Published(ctx context.Context, img *image.Image) (*Published, error) {
	f, err := p.published(ctx, img)
	if err != nil {
		return nil, err
	}
	return &Published{Digest: digest.Digest(f.about[pack.AnnotationBlob]), Size: f.size, p: p, img: img, f: f},
		nil
}

// Open reads the pack from its beginning on.
func (r *Published) Open(ctx context.Context) (io.ReadCloser, error) {
	return r.f.open(ctx, pack.Span{Length: r.f.size})
}

// Trust says why a pack with this header is believed, as records do, or why it
// would not be used.
func (r *Published) Trust(header digest.Digest) (string, error) {
	if why := r.p.Quarantined(r.img.Desc.Digest); why != "" {
		return "", fmt.Errorf("it is quarantined: %s", why)
	}
	if r.p.policy(r.img) == TrustPoP {
		return "", errors.New("packs of registries are not used (pack.trust in the configuration)")
	}
	return r.p.trust(r.img, r.f, header)
}
