package server

import (
	"context"
	"errors"
	"fmt"
	"io"

	"dewpoint/internal/checkpoint/store"
	"dewpoint/internal/pop"
	"dewpoint/internal/pop/peer"

	"github.com/opencontainers/go-digest"
)

// givenCheckpoints is what this node gives of its checkpoints to the others of its PoP; nil
// if it makes none.
func (d *Daemon) givenCheckpoints() peer.Checkpoints {
	if d.saved == nil {
		return nil
	}
	return given{d}
}

// savedImages are the manifests of images that this node gives checkpoints of.
func (d *Daemon) savedImages() []digest.Digest {
	if d.saved == nil {
		return nil
	}
	return d.saved.Manifests()
}

// popHeard is told of what happens in the PoP.
func (d *Daemon) popHeard(e pop.Event) {
	if d.saved != nil {
		d.saved.Heard(e)
	}
}

// given implements peer.Checkpoints.
type given struct{ d *Daemon }

// Records implements peer.Checkpoints: of those whose writable layer is on this node.
func (g given) Records(_ context.Context, manifest digest.Digest) ([]byte, error) {
	return g.d.saved.Give(manifest, func(upper digest.Digest) bool {
		l, err := g.d.layers.Peek(upper)
		return err == nil && l.At == "" && l.Complete()
	})
}

// Data implements peer.Checkpoints.
func (g given) Data(_ context.Context, id digest.Digest) (io.ReadCloser, int64, error) {
	data, err := g.d.saved.GiveData(id)
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
