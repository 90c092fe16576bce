package snapshot

import (
	"context"
	"errors"
	"fmt"

	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/storage"
	"github.com/opencontainers/go-digest"
)

// Deactivate unmounts those of the layers that only committed snapshots stand for, and returns those that
// are, or may be, mounted afterwards: a container or a view stands on them, or a call is under way. What is
// unmounted is mounted again, and Layers.Files asked for it, before anything can stand on it.
func (s *Snapshotter) Deactivate(ctx context.Context, ids ...digest.Digest) (busy []digest.Digest,
	err error) {
	for _, id := range ids {
		ok, rerr := s.deactivate(ctx, id)
		if rerr != nil {
			err = errors.Join(err, fmt.Errorf("unmount layer %s: %w", id, rerr))
		}
		if !ok {
			busy = append(busy, id)
		}
	}
	return busy, err
}

// deactivate unmounts one layer, and reports whether it is not mounted. While it looks, nobody mounts it:
// whoever has recorded a snapshot on it meanwhile, and was not seen, mounts it afterwards.
func (s *Snapshotter) deactivate(ctx context.Context, id digest.Digest) (bool, error) {
	t := s.table
	t.mu.Lock()
	l := t.layers[id]
	t.mu.Unlock()
	if l == nil {
		return true, nil
	}
	l.busy.Lock()
	defer l.busy.Unlock()
	stands, err := s.standsOn(ctx, l)
	if err != nil || stands {
		return false, err
	}
	if err := t.clear(t.path(l)); err != nil {
		return false, err
	}
	l.mounted, l.shown = false, false
	return true, nil
}

// standsOn reports whether anybody but a committed snapshot needs the mount of a layer.
func (s *Snapshotter) standsOn(ctx context.Context, l *layer) (stands bool, err error) {
	err = s.view(ctx, func(ctx context.Context) error {
		return storage.WalkInfo(ctx, func(ctx context.Context, info snapshots.Info) error {
			if stands || info.Kind == snapshots.KindCommitted {
				return nil
			}
			snap, err := storage.GetSnapshot(ctx, info.Name)
			for _, id := range append(snap.ParentIDs, snap.ID) {
				stands = stands || s.roots.layerOf(id) == l
			}
			return err
		})
	})
	shown := s.roots.count(l)
	s.table.mu.Lock()
	defer s.table.mu.Unlock()
	return stands || l.refs > shown, err
}
