package snapshot

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/storage"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
)

// Prepare creates an active snapshot. When its labels name a chain whose top
// layer is here or can be fetched, Prepare commits that chain instead and
// returns ErrAlreadyExists, as the remote-snapshot protocol has it; this may
// block for as long as the fetch takes.
func (s *Snapshotter) Prepare(ctx context.Context, key, parent string, opts ...snapshots.Opt) ([]mount.Mount,
	error) {
	base, err := gather(opts)
	if err != nil {
		return nil, err
	}
	if base.Labels[snapshots.LabelSnapshotRef] != "" {
		done, err := s.prepareRemote(ctx, key, parent, base)
		if err != nil {
			return nil, err
		}
		if done {
			return nil, fmt.Errorf("snapshot %s: %w", base.Labels[snapshots.LabelSnapshotRef],
				errdefs.ErrAlreadyExists)
		}
	}
	return s.create(ctx, snapshots.KindActive, key, parent, base)
}

// View creates a read-only snapshot.
func (s *Snapshotter) View(ctx context.Context, key, parent string, opts ...snapshots.Opt) ([]mount.Mount,
	error) {
	base, err := gather(opts)
	if err != nil {
		return nil, err
	}
	return s.create(ctx, snapshots.KindView, key, parent, base)
}

// prepareRemote commits the chain that base names, if it can be had. Why it
// cannot is logged, and containerd then fetches the layer itself; the only
// error is the end of ctx.
func (s *Snapshotter) prepareRemote(ctx context.Context, key, parent string, base snapshots.Info) (bool,
	error) {
	var e extraction
	var ok bool
	err := s.view(ctx, func(ctx context.Context) error {
		e, ok = extractionOf(ctx, key, parent, base.Labels)
		return nil
	})
	if err != nil {
		return false, err
	}
	if !ok {
		s.log.Debug("chain below is unknown, layer is left to containerd", "key", key, "parent", parent)
		return false, nil
	}
	err = s.commitRemote(ctx, key, parent, base, e)
	switch {
	case err == nil:
		return true, nil
	case ctx.Err() != nil:
		return false, context.Cause(ctx)
	case errors.Is(err, ErrNotHere):
		s.log.Debug("layer is left to containerd", "chain", e.chain, "why", err)
	default:
		s.log.Warn("layer is left to containerd", "chain", e.chain, "why", err)
	}
	return false, nil
}

// commitRemote makes the chain a committed image layer: found or fetched, held
// (so that the store keeps it), mounted (so that it is known to be readable),
// recorded, in this order.
func (s *Snapshotter) commitRemote(ctx context.Context, key, parent string, base snapshots.Info,
	e extraction) error {
	id, err := s.find(ctx, e, true)
	if err != nil {
		return err
	}
	l := s.table.hold(id)
	err = s.table.ensure(ctx, l)
	if err == nil {
		err = s.recordRemote(ctx, key, parent, base, e.chain, l)
	}
	if err != nil {
		s.drop(l)
	}
	return err
}

// recordRemote writes the committed snapshot in one transaction and passes the
// hold on l to it. That the same chain on the same parent is there already is
// as good, and releases the hold.
func (s *Snapshotter) recordRemote(ctx context.Context, key, parent string, base snapshots.Info,
	chain digest.Digest, l *layer) error {
	usage, err := s.layerUsage(ctx, l.id)
	if err != nil {
		return err
	}
	var id string // of the new snapshot
	err = s.update(ctx, func(ctx context.Context) error {
		name, there, err := remoteName(ctx, chain.String(), parent)
		if err != nil || there {
			return err
		}
		if _, err := storage.CreateSnapshot(ctx, snapshots.KindActive, key, parent); err != nil {
			return err
		}
		id, err = storage.CommitActive(ctx, key, name, usage, snapshots.WithLabels(withLayer(base.Labels, l)))
		if err == nil {
			s.roots.keep(id, l)
		}
		return err
	})
	switch {
	case err != nil && id != "":
		s.roots.forget(id)
	case err == nil && id == "":
		s.drop(l)
	}
	return err
}

// remoteName chooses the name of a committed image layer and says whether the
// snapshot is there already. The name is the chain itself, which all
// namespaces of containerd share, unless a snapshot on another parent (a local
// one, whose name has a namespace) took it; then the parent's id, which is
// never used twice, makes it unique.
func remoteName(ctx context.Context, chain, parent string) (name string, there bool, err error) {
	name = chain
	if parent != "" {
		pid, _, _, err := storage.GetInfo(ctx, parent)
		if err != nil {
			return "", false, err
		}
		if _, plain := parseDigest(parent); !plain {
			name = chain + "@" + pid
		}
	}
	_, info, _, err := storage.GetInfo(ctx, name)
	switch {
	case errdefs.IsNotFound(err):
		return name, false, nil
	case err != nil:
		return "", false, err
	case info.Parent != parent || info.Kind != snapshots.KindCommitted ||
		info.Labels[snapshots.LabelSnapshotRef] != chain:
		return "", false, fmt.Errorf("snapshot %s is there with another parent or meaning", name)
	}
	return name, true, nil
}

// withLayer returns labels with those that make a snapshot an image layer.
func withLayer(labels map[string]string, l *layer) map[string]string {
	all := make(map[string]string, len(labels)+2)
	for k, v := range labels {
		all[k] = v
	}
	all[LabelLayer], all[LabelMount] = l.id.String(), strconv.Itoa(l.n)
	return all
}

// drop releases a hold; that unmounting fails is logged, and tried again by
// Cleanup.
func (s *Snapshotter) drop(l *layer) {
	if err := s.table.release(l); err != nil {
		s.log.Warn("layer stays mounted", "layer", l.id, "err", err)
	}
}

// create makes an active snapshot or a view and returns its mounts, with every
// layer below it mounted. On an error nothing is left behind.
func (s *Snapshotter) create(ctx context.Context, kind snapshots.Kind, key, parent string,
	base snapshots.Info) ([]mount.Mount, error) {
	var snap storage.Snapshot
	err := s.update(ctx, func(ctx context.Context) (err error) {
		snap, err = storage.CreateSnapshot(ctx, kind, key, parent, snapshots.WithLabels(base.Labels))
		if err != nil {
			return err
		}
		return s.roots.makeDirs(snap)
	})
	if err == nil {
		var m []mount.Mount
		if err = s.roots.furnish(ctx, snap, base.Labels); err == nil {
			m, err = s.roots.mounts(snap, base.Labels)
		}
		if err == nil {
			s.prepared(snap, key, base.Labels)
			return m, nil
		}
		s.undo(ctx, key)
	}
	if snap.ID != "" {
		os.RemoveAll(s.roots.dir(snap.ID))
	}
	return nil, fmt.Errorf("create snapshot %s: %w", key, err)
}

// undo takes back the record of a snapshot that could not be furnished.
func (s *Snapshotter) undo(ctx context.Context, key string) {
	err := s.update(context.WithoutCancel(ctx), func(ctx context.Context) error {
		_, _, err := storage.Remove(ctx, key)
		return err
	})
	if err != nil {
		s.log.Warn("useless snapshot stays", "key", key, "err", err)
	}
}
