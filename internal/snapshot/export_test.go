package snapshot

import (
	"context"

	"github.com/containerd/containerd/v2/core/snapshots/storage"
	"github.com/opencontainers/go-digest"
)

// Upper returns the writable directory of an active snapshot.
func (s *Snapshotter) Upper(ctx context.Context, key string) (dir string, err error) {
	err = s.view(ctx, func(ctx context.Context) error {
		id, _, _, err := storage.GetInfo(ctx, key)
		dir = s.roots.upper(id)
		return err
	})
	return dir, err
}

// Mark is what Diff.Apply does after an import, whatever the chain.
func (s *Snapshotter) Mark(ctx context.Context, key string, diffID digest.Digest) error {
	x := extracting{key: key}
	err := s.view(ctx, func(ctx context.Context) (err error) {
		x.id, _, _, err = storage.GetInfo(ctx, key)
		return err
	})
	if err != nil {
		return err
	}
	return s.mark(ctx, x, diffID)
}

// Mountable tells whether an overlay's options fit.
func Mountable(options, lowers []string) error { return mountable(options, lowers) }

// IDs returns the snapshots' names by id.
func (s *Snapshotter) IDs(ctx context.Context) (ids map[string]string, err error) {
	err = s.view(ctx, func(ctx context.Context) error {
		ids, err = idMap(ctx)
		return err
	})
	return ids, err
}
