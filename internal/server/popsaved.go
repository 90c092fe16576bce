package server

import (
	"context"
	"errors"
	"fmt"
	"io"

	"dewpoint/internal/checkpoint/store"
	"dewpoint/internal/layer"
	"dewpoint/internal/pop/peer"

	"github.com/opencontainers/go-digest"
)

// given is what this node gives of its checkpoints to the others of its PoP. It implements peer.Checkpoints.
type given struct {
	saved  *store.Store
	layers *layer.Store
}

// Records implements peer.Checkpoints: of those whose writable layer is on this node.
func (g given) Records(_ context.Context, manifest digest.Digest) ([]byte, error) {
	return g.saved.OfferRecords(manifest, func(upper digest.Digest) bool {
		l, err := g.layers.Peek(upper)
		return err == nil && l.At == "" && l.Complete()
	})
}

// Data implements peer.Checkpoints.
func (g given) Data(_ context.Context, id digest.Digest) (io.ReadCloser, int64, error) {
	data, err := g.saved.GiveData(id)
	if errors.Is(err, store.ErrUnknown) {
		err = fmt.Errorf("%w: %w", peer.ErrUnknown, err)
	}
	if err != nil {
		return nil, 0, err
	}
	return struct {
		io.Reader
		io.Closer
	}{io.NewSectionReader(data, 0, data.Size), data}, data.Size, nil
}
