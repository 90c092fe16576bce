package snapshot

import (
	"context"
	"fmt"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/storage"
	"github.com/containerd/errdefs"
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
	if err := s.roots.ensure(ctx, snap); err != nil {
		return nil, err
	}
	return s.roots.mounts(snap, info.Labels)
}

// mounts is one bind mount where overlayfs has nothing to stack, else one
// overlay.
func (r *roots) mounts(snap storage.Snapshot, labels map[string]string) ([]mount.Mount, error) {
	options := r.idmapOptions(snap, labels)
	lowers := r.lowers(snap)
	active := snap.Kind == snapshots.KindActive
	switch {
	case active && len(lowers) == 0:
		return bind(r.upper(snap.ID), append(options, "rw")), nil
	case !active && len(lowers) == 0:
		return bind(r.upper(snap.ID), append(options, "ro")), nil
	case !active && len(lowers) == 1:
		return bind(lowers[0], append(options, "ro")), nil
	case active:
		options = append(options, "workdir="+r.work(snap.ID), "upperdir="+r.upper(snap.ID))
	}
	options = append(options, "lowerdir="+strings.Join(lowers, ":"))
	options = append(options, r.options...)
	if err := mountable(options, lowers); err != nil {
		return nil, fmt.Errorf("snapshot %s: %w", snap.ID, err)
	}
	return []mount.Mount{{Type: "overlay", Source: "overlay", Options: options}}, nil
}

// What an overlay mount takes. containerd mounts by mount(2), whose options
// are cut after a page less one byte; it makes the lower directories relative
// to their common parent when the options come near to that.
const (
	maxLowers = 500 // the kernel's OVL_MAX_STACK
	nearly    = 512 // bytes less than a page that containerd calls near
)

// mountable returns an error that wraps errdefs.ErrResourceExhausted if
// containerd's mount could not mount an overlay with these options, lowerdir
// among them.
func mountable(options, lowers []string) error {
	if len(lowers) > maxLowers {
		return fmt.Errorf("%d layers to stack, overlayfs takes %d: %w", len(lowers), maxLowers,
			errdefs.ErrResourceExhausted)
	}
	size, data := 0, -1
	for _, o := range options {
		size += len(o)
		if !strings.HasPrefix(o, "uidmap=") && !strings.HasPrefix(o, "gidmap=") {
			data += len(o) + len(",")
		}
	}
	page := os.Getpagesize()
	if size < page-nearly {
		return nil
	}
	if parent := commonParent(lowers); parent != "/" {
		data -= len(lowers) * (len(parent) + len("/"))
	}
	if data >= page {
		return fmt.Errorf("%d layers to stack take %d bytes of mount options, the kernel takes %d: %w",
			len(lowers), data, page-1, errdefs.ErrResourceExhausted)
	}
	return nil
}

func commonParent(dirs []string) string {
	if len(dirs) < 2 {
		return "/" // containerd leaves a single one as it is
	}
	first, last := slices.Min(dirs), slices.Max(dirs)
	n := 0
	for n < len(first) && n < len(last) && first[n] == last[n] {
		n++
	}
	return path.Dir(first[:n])
}

func bind(dir string, options []string) []mount.Mount {
	return []mount.Mount{{Type: "bind", Source: dir, Options: append(options, "rbind")}}
}

// lowers returns the directories below a snapshot, top first; an active one
// that a layer was imported for shows that, too.
func (r *roots) lowers(snap storage.Snapshot) []string {
	if r.layerOf(snap.ID) == nil {
		return r.stack(snap.ParentIDs)
	}
	return r.stack(append([]string{snap.ID}, snap.ParentIDs...))
}
