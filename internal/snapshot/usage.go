package snapshot

import (
	"context"
	"os"
	"syscall"

	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/storage"
	"github.com/containerd/continuity/fs"
	"github.com/opencontainers/go-digest"
)

// Usage returns what a snapshot takes on disk, without its parents: of an
// active one, its directory as it is now; of a local layer, its directory when
// it was committed; of an image layer, the layer's files. When several
// snapshots stand for one layer, the oldest reports it and the others nothing,
// so that a sum over all snapshots is the space that they take.
func (s *Snapshotter) Usage(ctx context.Context, key string) (snapshots.Usage, error) {
	var id string
	var info snapshots.Info
	var usage snapshots.Usage
	err := s.view(ctx, func(ctx context.Context) (err error) {
		id, info, usage, err = storage.GetInfo(ctx, key)
		return err
	})
	if err != nil {
		return snapshots.Usage{}, err
	}
	if info.Kind == snapshots.KindActive {
		return diskUsage(ctx, s.roots.upper(id))
	}
	if l := s.roots.layerOf(id); l != nil && !s.roots.oldest(id, l) {
		return snapshots.Usage{}, nil
	}
	return usage, nil
}

// older compares ids, which are decimal numbers without leading zeros.
func older(a, b string) bool {
	if len(a) != len(b) {
		return len(a) < len(b)
	}
	return a < b
}

// layerUsage is what the files of a layer take.
func (s *Snapshotter) layerUsage(ctx context.Context, id digest.Digest) (snapshots.Usage, error) {
	files, err := s.layers.Files(id)
	if err != nil {
		return snapshots.Usage{}, err
	}
	var usage snapshots.Usage
	for _, path := range []string{files.Index, files.Data} {
		if fi, err := os.Stat(path); err == nil {
			usage.Add(snapshots.Usage{Inodes: 1, Size: fi.Sys().(*syscall.Stat_t).Blocks * 512})
		}
	}
	if files.Tree != "" {
		tree, err := diskUsage(ctx, files.Tree)
		if err != nil {
			return snapshots.Usage{}, err
		}
		usage.Add(tree)
	}
	return usage, nil
}

func diskUsage(ctx context.Context, dir string) (snapshots.Usage, error) {
	du, err := fs.DiskUsage(ctx, dir)
	return snapshots.Usage(du), err
}
