package snapshot

import (
	"context"
	"strings"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/storage"
)

// Mounts returns what to mount for an active snapshot or view, having mounted
// every image layer below it.
func (s *Snapshotter) Mounts(ctx context.Context, key string) ([]mount.Mount, error) {
	var snap storage.Snapshot
	var info snapshots.Info
	err := s.view(ctx, func(ctx context.Context) (err error) {
		if snap, err = storage.GetSnapshot(ctx, key); err != nil {
			return err
		}
		_, info, _, err = storage.GetInfo(ctx, key)
		return err
	})
	if err != nil {
		return nil, err
	}
	if err := s.ensure(ctx, snap); err != nil {
		return nil, err
	}
	return s.mounts(snap, info.Labels), nil
}

// mounts is one bind mount where overlayfs has nothing to stack, else one
// overlay.
func (s *Snapshotter) mounts(snap storage.Snapshot, labels map[string]string) []mount.Mount {
	options := s.idmapOptions(labels)
	lowers := s.lowers(snap)
	active := snap.Kind == snapshots.KindActive
	switch {
	case active && len(lowers) == 0:
		return bind(s.upper(snap.ID), append(options, "rw"))
	case !active && len(lowers) == 0:
		return bind(s.upper(snap.ID), append(options, "ro"))
	case !active && len(lowers) == 1:
		return bind(lowers[0], append(options, "ro"))
	case active:
		options = append(options, "workdir="+s.work(snap.ID), "upperdir="+s.upper(snap.ID))
	}
	options = append(options, "lowerdir="+strings.Join(lowers, ":"))
	return []mount.Mount{{Type: "overlay", Source: "overlay", Options: append(options, s.options...)}}
}

func bind(dir string, options []string) []mount.Mount {
	return []mount.Mount{{Type: "bind", Source: dir, Options: append(options, "rbind")}}
}

func (s *Snapshotter) idmapOptions(labels map[string]string) (options []string) {
	if !s.remap {
		return nil
	}
	if v, ok := labels[snapshots.LabelSnapshotUIDMapping]; ok {
		options = append(options, "uidmap="+v)
	}
	if v, ok := labels[snapshots.LabelSnapshotGIDMapping]; ok {
		options = append(options, "gidmap="+v)
	}
	return options
}

// lowers returns the directories below a snapshot, top first. A layer that
// occurs more than once in an image (the empty layer often does) shows once,
// at the top: overlayfs refuses one directory twice, and whatever the lower
// occurrence holds, the upper one holds above it.
func (s *Snapshotter) lowers(snap storage.Snapshot) []string {
	dirs := make([]string, 0, len(snap.ParentIDs)+1)
	seen := make(map[*layer]bool, len(snap.ParentIDs))
	add := func(l *layer) {
		if !seen[l] {
			seen[l] = true
			dirs = append(dirs, s.table.path(l))
		}
	}
	if l := s.layerOf(snap.ID); l != nil {
		add(l)
	}
	for _, id := range snap.ParentIDs {
		if l := s.layerOf(id); l != nil {
			add(l)
		} else {
			dirs = append(dirs, s.upper(id))
		}
	}
	return dirs
}
