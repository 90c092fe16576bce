package snapshot

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/storage"
	"github.com/containerd/containerd/v2/plugins/snapshots/overlay/overlayutils"
	"golang.org/x/sync/errgroup"
)

// roots knows what each snapshot shows: the image layer that it stands for, or directories of its own, and
// what is to be mounted for its root file system. It asks containerd's records nothing. It is safe for
// concurrent use.
type roots struct {
	root    string // of the snapshotter
	log     *slog.Logger
	table   *table
	fixes   *corrections
	options []string // of every overlay mount
	remap   bool     // the kernel can mount overlays with mapped ids

	mu  sync.RWMutex
	ids map[string]*layer // by snapshot id, those that stand for an image layer; guarded by mu
}

func newRoots(root string, t *table, fixes *corrections, options []string, log *slog.Logger) *roots {
	r := &roots{root: root, log: log, table: t, fixes: fixes, ids: make(map[string]*layer)}
	r.options, r.remap = r.overlayOptions()
	r.options = append(r.options, options...)
	return r
}

// overlayOptions are those that containerd's overlay snapshotter chooses.
func (r *roots) overlayOptions() (options []string, remap bool) {
	if need, err := overlayutils.NeedsUserXAttr(r.root); err != nil {
		r.log.Warn("whether overlayfs needs userxattr is unknown", "err", err)
	} else if need {
		options = append(options, "userxattr")
	}
	if _, err := os.Stat("/sys/module/overlay/parameters/index"); err == nil {
		options = append(options, "index=off")
	}
	remap, err := overlayutils.SupportsIDMappedMounts()
	if err != nil {
		r.log.Debug("id-mapped mounts", "err", err)
	}
	return options, remap
}

// layerOf returns the image layer that the snapshot with this id stands for.
func (r *roots) layerOf(id string) *layer {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.ids[id]
}

// keep makes a held layer that of snapshot id; forget undoes it.
func (r *roots) keep(id string, l *layer) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ids[id] = l
}

func (r *roots) forget(id string) *layer {
	r.mu.Lock()
	defer r.mu.Unlock()
	l := r.ids[id]
	delete(r.ids, id)
	return l
}

func (r *roots) dir(id string) string   { return filepath.Join(r.root, "snapshots", id) }
func (r *roots) upper(id string) string { return filepath.Join(r.root, "snapshots", id, "fs") }
func (r *roots) work(id string) string  { return filepath.Join(r.root, "snapshots", id, "work") }

// top is the directory that shows the layer of a committed snapshot.
func (r *roots) top(id string) string {
	if l := r.layerOf(id); l != nil {
		return r.table.path(l)
	}
	return r.upper(id)
}

// count is how many snapshots stand for l.
func (r *roots) count(l *layer) (n int) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	for _, of := range r.ids {
		if of == l {
			n++
		}
	}
	return n
}

// oldest says whether no snapshot with a smaller id stands for l.
func (r *roots) oldest(id string, l *layer) bool {
	r.mu.RLock()
	defer r.mu.RUnlock()
	for other, ol := range r.ids {
		if ol == l && older(other, id) {
			return false
		}
	}
	return true
}

// correct makes the corrections of the image layers that a snapshot stands on,
// which are mounted. They are made from the bottom up, since each looks at those
// below it.
func (r *roots) correct(snap storage.Snapshot) error {
	for i := len(snap.ParentIDs) - 2; i >= 0; i-- { // the bottom layer has nothing below
		id := snap.ParentIDs[i]
		l := r.layerOf(id)
		if l == nil {
			continue
		}
		if implied := l.impliedDirs(); len(implied) > 0 {
			if err := r.fixes.ensure(id, r.table.path(l), implied, r.stack(snap.ParentIDs[i+1:])); err != nil {
				return err
			}
		}
	}
	return nil
}

// stack returns the directories that show these snapshots, which are given top
// first, as are the directories. A layer that occurs more than once in an image
// (the empty layer often does) shows once, at the top: overlayfs refuses one
// directory twice, and whatever the lower occurrence holds, the upper one holds
// above it.
func (r *roots) stack(ids []string) []string {
	dirs := make([]string, 0, len(ids))
	seen := make(map[*layer]bool, len(ids))
	for _, id := range ids {
		l := r.layerOf(id)
		switch {
		case l == nil:
			dirs = append(dirs, r.upper(id))
		case !seen[l]:
			seen[l] = true
			if r.fixes.needsCorrection(id) {
				dirs = append(dirs, r.fixes.path(id))
			}
			dirs = append(dirs, r.table.path(l))
		}
	}
	return dirs
}

// makeDirs makes the directories of a new snapshot, of which a view on a
// parent has none. What a crash left under its id, before the id was recorded,
// goes.
func (r *roots) makeDirs(snap storage.Snapshot) error {
	if !hasDirs(snap) {
		return nil
	}
	err := os.Mkdir(r.dir(snap.ID), 0o700)
	if os.IsExist(err) {
		if err = os.RemoveAll(r.dir(snap.ID)); err == nil {
			err = os.Mkdir(r.dir(snap.ID), 0o700)
		}
	}
	if err != nil {
		return err
	}
	if err := mkdir(r.upper(snap.ID), 0o755); err != nil {
		return err
	}
	if snap.Kind == snapshots.KindActive {
		return mkdir(r.work(snap.ID), 0o711)
	}
	return nil
}

func hasDirs(snap storage.Snapshot) bool {
	return snap.Kind == snapshots.KindActive || len(snap.ParentIDs) == 0
}

// mkdir is os.Mkdir whatever the umask.
func mkdir(path string, mode os.FileMode) error {
	if err := os.Mkdir(path, mode); err != nil {
		return err
	}
	return os.Chmod(path, mode)
}

// furnish mounts what a new snapshot stands on and gives its own directory the
// owner that the root directory has below.
func (r *roots) furnish(ctx context.Context, snap storage.Snapshot, labels map[string]string) error {
	if err := r.ensure(ctx, snap); err != nil || !hasDirs(snap) {
		return err
	}
	uid, gid, err := r.rootOwner(snap, labels)
	if err != nil || uid == 0 && gid == 0 {
		return err
	}
	return os.Lchown(r.upper(snap.ID), uid, gid)
}

// ensure mounts the image layers that a snapshot stands on and makes their
// corrections. The record of the snapshot keeps them held.
func (r *roots) ensure(ctx context.Context, snap storage.Snapshot) error {
	var group errgroup.Group // the files of a layer may lie on a file system that is far away
	group.SetLimit(8)
	for _, id := range append(slices.Clone(snap.ParentIDs), snap.ID) {
		if l := r.layerOf(id); l != nil {
			group.Go(func() error { return r.table.show(ctx, l) })
		}
	}
	if err := group.Wait(); err != nil {
		return err
	}
	return r.correct(snap)
}
