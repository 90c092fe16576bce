package fetch

import (
	"context"
	"fmt"
	"io"
	"sync/atomic"
	"time"

	"dewpoint/internal/image"
	"dewpoint/internal/layer"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// CopyBlobs fetches the layers of an image as the registry serves them and
// hands each to put, which verifies and stores it, or does nothing if it has
// the blob already. The streams take their turns on the link as fills do.
// CopyBlobs returns the number of bytes that came, also beside an error.
func (p *pulls) CopyBlobs(ctx context.Context, img *image.Image, o Options,
	put func(context.Context, ocispec.Descriptor, func() (io.ReadCloser, error)) error) (int64, error) {
	var total int64
	for _, l := range img.Unique() {
		d := ocispec.Descriptor{MediaType: l.MediaType, Digest: l.Digest, Size: l.Size}
		src := &blob{c: p.common, img: img, l: l, o: o}
		m := new(meter)
		err := put(ctx, d, func() (io.ReadCloser, error) {
			body, err := src.open(ctx, m.progress, 0)
			if err != nil {
				return nil, err
			}
			return &metered{body, m, time.Time{}}, nil
		})
		total += m.got.Load()
		if err != nil {
			return total, fmt.Errorf("copy blob %s: %w", l.Digest, err)
		}
	}
	return total, nil
}

// meter counts for a stream what a fill counts.
type meter struct{ got, waiting, blocked atomic.Int64 }

func (m *meter) progress() layer.Progress {
	return layer.Progress{Received: m.got.Load(), Fetched: m.got.Load(),
		Waiting: time.Duration(m.waiting.Load()), Blocked: time.Duration(m.blocked.Load())}
}

// metered is a stream with a meter. One goroutine reads it.
type metered struct {
	io.ReadCloser
	*meter
	back time.Time // when the last Read returned
}

func (r *metered) Read(b []byte) (int, error) {
	begin := time.Now()
	if !r.back.IsZero() {
		r.blocked.Add(int64(begin.Sub(r.back)))
	}
	n, err := r.ReadCloser.Read(b)
	r.back = time.Now()
	r.waiting.Add(int64(r.back.Sub(begin)))
	r.got.Add(int64(n))
	return n, err
}
