package snapshot

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/storage"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	"golang.org/x/sync/errgroup"
)

// Remove forgets a snapshot that has no children. Its layer, if nothing else
// stands on it, is unmounted; its directory goes with the next Cleanup, which
// containerd calls after each garbage collection.
func (s *Snapshotter) Remove(ctx context.Context, key string) error {
	var id string
	err := s.update(ctx, func(ctx context.Context) (err error) {
		id, _, err = storage.Remove(ctx, key)
		return err
	})
	if err != nil {
		return fmt.Errorf("remove snapshot %s: %w", key, err)
	}
	s.removed(id)
	if l := s.roots.forget(id); l != nil {
		s.drop(l)
		if err := s.fixes.remove(id); err != nil {
			s.log.Warn("correction of a snapshot stays", "key", key, "err", err)
		}
	}
	return nil
}

// Cleanup removes the directories that no snapshot has, and mounts that no
// layer has.
func (s *Snapshotter) Cleanup(ctx context.Context) error {
	err := s.table.sweep()
	orphans, oerr := s.orphans(ctx)
	err = errors.Join(err, oerr)
	for _, dir := range orphans {
		err = errors.Join(err, os.RemoveAll(dir))
	}
	return err
}

// orphans lists directories under ROOT/snapshots that are not, or no longer,
// needed. The transaction keeps new ones from appearing meanwhile; ids are
// never used twice, so what is an orphan stays one.
func (s *Snapshotter) orphans(ctx context.Context) (dirs []string, err error) {
	err = s.update(ctx, func(ctx context.Context) error {
		keys, err := idMap(ctx)
		if err != nil {
			return err
		}
		entries, err := os.ReadDir(filepath.Join(s.root, "snapshots"))
		if err != nil {
			return err
		}
		for _, e := range entries {
			key, known := keys[e.Name()]
			if !known || s.needless(ctx, e.Name(), key) {
				dirs = append(dirs, s.roots.dir(e.Name()))
			}
		}
		return s.fixes.sweep(keys)
	})
	return dirs, err
}

func idMap(ctx context.Context) (map[string]string, error) {
	keys, err := storage.IDMap(ctx)
	if errdefs.IsNotFound(err) {
		return nil, nil
	}
	return keys, err
}

// needless says whether a snapshot has a directory from before it became an
// image layer.
func (s *Snapshotter) needless(ctx context.Context, id, key string) bool {
	if s.roots.layerOf(id) == nil {
		return false
	}
	_, info, _, err := storage.GetInfo(ctx, key)
	return err == nil && info.Kind == snapshots.KindCommitted
}

// reconcile loads the table from the records, clears what no record names, and
// mounts the layers that active snapshots and views stand on.
func (s *Snapshotter) reconcile(ctx context.Context) error {
	needed, err := s.load(ctx)
	if err != nil {
		return err
	}
	if err := s.Cleanup(ctx); err != nil {
		s.log.Warn("leftovers stay", "err", err)
	}
	var group errgroup.Group
	group.SetLimit(4)
	for l := range needed {
		group.Go(func() error {
			if err := s.table.ensure(ctx, l); err != nil {
				s.log.Error("layer of a container cannot be mounted", "layer", l.id, "err", err)
			}
			return nil
		})
	}
	return group.Wait()
}

// load fills ids and the table, and returns the layers below (and of) active
// snapshots and views.
func (s *Snapshotter) load(ctx context.Context) (map[*layer]bool, error) {
	needed := make(map[*layer]bool)
	err := s.view(ctx, func(ctx context.Context) error {
		keys, err := idMap(ctx)
		if err != nil {
			return err
		}
		var tops []string
		for id, key := range keys {
			_, info, _, err := storage.GetInfo(ctx, key)
			if err != nil {
				return err
			}
			if err := s.restore(id, info); err != nil {
				return fmt.Errorf("snapshot %s: %w", key, err)
			}
			if info.Kind != snapshots.KindCommitted {
				tops = append(tops, key)
			}
		}
		return s.collect(ctx, tops, needed)
	})
	return needed, err
}

// restore takes one record into the table.
func (s *Snapshotter) restore(id string, info snapshots.Info) error {
	if info.Labels[LabelLayer] == "" {
		return nil
	}
	diffID, err := digest.Parse(info.Labels[LabelLayer])
	if err != nil {
		return err
	}
	n, _ := strconv.Atoi(info.Labels[LabelMount])
	l := s.table.holdAs(diffID, n)
	s.roots.keep(id, l)
	return nil
}

func (s *Snapshotter) collect(ctx context.Context, tops []string, needed map[*layer]bool) error {
	for _, key := range tops {
		snap, err := storage.GetSnapshot(ctx, key)
		if err != nil {
			return err
		}
		for _, id := range append(snap.ParentIDs, snap.ID) {
			if l := s.roots.layerOf(id); l != nil {
				needed[l] = true
			}
		}
	}
	return nil
}
