package snapshot

import (
	"context"
	"slices"
	"sync"

	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/storage"
	"github.com/opencontainers/go-digest"
)

// Fresh mounts a layer so that nothing of it is in the mount's page cache, and
// returns where. It stays mounted there until release is called, which is the
// caller's duty; what runs already keeps the mount that it has.
func (s *Snapshotter) Fresh(ctx context.Context, id digest.Digest) (path string, release func(), err error) {
	l := s.table.hold(id)
	if err := s.table.fresh(ctx, l); err != nil {
		s.drop(l)
		return "", nil, err
	}
	return s.table.path(l), sync.OnceFunc(func() { s.drop(l) }), nil
}

// fresh mounts a layer that the caller holds, anew if it is mounted.
func (t *table) fresh(ctx context.Context, l *layer) error {
	l.busy.Lock()
	old := l.mounted
	l.busy.Unlock()
	if !old {
		return t.ensure(ctx, l)
	}
	if err := t.ensure(ctx, l); err != nil {
		return err
	}
	return t.renew(ctx, l.id)
}

// prepared tells Config.Prepared of an active snapshot that a container is to
// have, if image layers alone lie below it.
func (s *Snapshotter) prepared(snap storage.Snapshot, key string, labels map[string]string) {
	if s.tell == nil || snap.Kind != snapshots.KindActive || len(snap.ParentIDs) == 0 || isExtraction(key, labels) {
		return
	}
	ids := make([]digest.Digest, 0, len(snap.ParentIDs))
	for _, id := range slices.Backward(snap.ParentIDs) {
		l := s.layerOf(id)
		if l == nil {
			return
		}
		ids = append(ids, l.id)
	}
	s.tell(ids)
}
