package snapshot

import (
	"context"
	"fmt"
	"io"
	"maps"
	"os"
	"strings"

	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/storage"
	"github.com/containerd/errdefs"
)

// Commit makes the active snapshot key a committed one. One whose layer is a
// file, by the diff plugin or because the layer of the chain has meanwhile
// arrived in the store, becomes an image layer; any other keeps its directory.
func (s *Snapshotter) Commit(ctx context.Context, name, key string, opts ...snapshots.Opt) error {
	base, err := gather(opts)
	if err != nil {
		return err
	}
	id, l, err := s.settle(ctx, key)
	if err != nil {
		return fmt.Errorf("commit snapshot %s: %w", key, err)
	}
	labels := base.Labels
	var usage snapshots.Usage
	if l == nil {
		usage, err = diskUsage(ctx, s.roots.upper(id))
	} else {
		defer s.drop(l)
		labels = withLayer(labels, l)
		usage, err = s.layerUsage(ctx, l.id)
	}
	if err != nil {
		return fmt.Errorf("commit snapshot %s: %w", key, err)
	}
	fresh := l != nil && s.roots.layerOf(id) == nil
	err = s.update(ctx, func(ctx context.Context) error {
		_, err := storage.CommitActive(ctx, key, name, usage, snapshots.WithLabels(labels),
			snapshots.WithParent(base.Parent))
		if err == nil && fresh {
			s.table.again(l)
			s.roots.keep(id, l)
		}
		return err
	})
	if err == nil {
		return nil
	}
	if fresh && s.roots.forget(id) != nil {
		s.drop(l)
	}
	return fmt.Errorf("commit snapshot %s: %w", key, err)
}

// settle decides what an active snapshot is committed as: its id, and its
// layer, held for the caller, if it is to be an image layer.
func (s *Snapshotter) settle(ctx context.Context, key string) (string, *layer, error) {
	var id string
	var e extraction
	var extracts bool
	err := s.view(ctx, func(ctx context.Context) error {
		var info snapshots.Info
		var err error
		if id, info, _, err = storage.GetInfo(ctx, key); err == nil {
			e, extracts = extractionOf(ctx, key, info.Parent, info.Labels)
		}
		return err
	})
	if err != nil {
		return "", nil, err
	}
	if l := s.roots.layerOf(id); l != nil {
		if !empty(s.roots.upper(id)) {
			return "", nil, fmt.Errorf("was written to after its layer had been imported: %w",
				errdefs.ErrFailedPrecondition)
		}
		s.table.again(l)
		return id, l, nil
	}
	if !extracts {
		return id, nil, nil
	}
	return id, s.arrived(ctx, e), nil
}

// arrived returns the mounted layer of an extraction, held, if it is in the
// store by now; else nil.
func (s *Snapshotter) arrived(ctx context.Context, e extraction) *layer {
	diffID, err := s.find(ctx, e, false)
	if err != nil {
		return nil
	}
	l := s.table.hold(diffID)
	if err := s.table.ensure(ctx, l); err != nil {
		s.log.Warn("layer stays a directory", "chain", e.chain, "why", err)
		s.drop(l)
		return nil
	}
	return l
}

// empty says whether a directory has no entries; one that is not there has none.
func empty(dir string) bool {
	d, err := os.Open(dir)
	if err != nil {
		return os.IsNotExist(err)
	}
	defer d.Close()
	_, err = d.Readdirnames(1)
	return err == io.EOF
}

// Stat returns what is recorded of a snapshot.
func (s *Snapshotter) Stat(ctx context.Context, key string) (info snapshots.Info, err error) {
	err = s.view(ctx, func(ctx context.Context) error {
		_, info, _, err = storage.GetInfo(ctx, key)
		return err
	})
	return info, err
}

// Update changes labels, other than those that make an image layer.
func (s *Snapshotter) Update(ctx context.Context, info snapshots.Info,
	fieldpaths ...string) (updated snapshots.Info, err error) {
	for _, path := range fieldpaths {
		if label, ok := strings.CutPrefix(path, "labels."); ok && (label == LabelLayer || label == LabelMount) {
			return updated, fmt.Errorf("label %s: %w", label, errdefs.ErrInvalidArgument)
		}
	}
	err = s.update(ctx, func(ctx context.Context) error {
		_, old, _, err := storage.GetInfo(ctx, info.Name)
		if err != nil {
			return err
		}
		info.Labels = retain(info.Labels, old.Labels)
		updated, err = storage.UpdateInfo(ctx, info, fieldpaths...)
		return err
	})
	return updated, err
}

// retain returns labels with those of old that are ours, and no others that are.
func retain(labels, old map[string]string) map[string]string {
	if labels == nil && old[LabelLayer] == "" {
		return nil
	}
	all := make(map[string]string, len(labels)+2)
	maps.Copy(all, labels)
	for _, k := range []string{LabelLayer, LabelMount} {
		delete(all, k)
		if v, ok := old[k]; ok {
			all[k] = v
		}
	}
	return all
}

// Walk calls fn for each snapshot that the filters match.
func (s *Snapshotter) Walk(ctx context.Context, fn snapshots.WalkFunc, filters ...string) error {
	return s.view(ctx, func(ctx context.Context) error {
		return storage.WalkInfo(ctx, fn, filters...)
	})
}
