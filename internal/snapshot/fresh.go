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

// fresh mounts a layer that the caller holds, anew if someone may have read
// from its mount.
func (t *table) fresh(ctx context.Context, l *layer) error {
	if err := t.ensure(ctx, l); err != nil {
		return err
	}
	l.busy.Lock()
	shown := l.shown
	l.shown = true
	l.busy.Unlock()
	if !shown {
		return nil
	}
	return t.renew(ctx, l.id)
}

// show is ensure for who hands out the mount.
func (t *table) show(ctx context.Context, l *layer) error {
	err := t.ensure(ctx, l)
	l.busy.Lock()
	defer l.busy.Unlock()
	l.shown = true
	return err
}

// prepared tells Config.Prepared of an active snapshot that a container is to
// have, if image layers alone lie below it.
func (s *Snapshotter) prepared(snap storage.Snapshot, key string, labels map[string]string) {
	if s.tell == nil || snap.Kind != snapshots.KindActive || len(snap.ParentIDs) == 0 ||
		isExtraction(key, labels) {
		return
	}
	ids := make([]digest.Digest, 0, len(snap.ParentIDs))
	for _, id := range slices.Backward(snap.ParentIDs) {
		l := s.roots.layerOf(id)
		if l == nil {
			return
		}
		ids = append(ids, l.id)
	}
	gone := make(chan struct{})
	s.mu.Lock()
	s.gone[snap.ID] = gone
	s.mu.Unlock()
	s.tell(ids, gone)
}

// removed tells who was told of a snapshot that it is gone.
func (s *Snapshotter) removed(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if gone := s.gone[id]; gone != nil {
		close(gone)
		delete(s.gone, id)
	}
}
