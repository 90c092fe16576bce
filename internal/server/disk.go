package server

import (
	"cmp"
	"context"
	"fmt"
	"io/fs"
	"log/slog"
	"math"
	"path/filepath"
	"sync/atomic"
	"syscall"

	"dewpoint/internal/config"
	"dewpoint/internal/evict"
	"dewpoint/internal/fetch"
	"dewpoint/internal/server/metrics"

	"golang.org/x/sys/unix"
)

// keepFree is the share of the disk that unused layers are not to fill.
const keepFree = 0.10

// room is the disk of this node: how much of it is free, and what goes so that more is. It implements
// deploy.Disk, and is safe for concurrent use.
type room struct {
	root     string
	reserve  reserve
	maxBytes atomic.Int64 // that layers may take; 0 is what the disk has
	puller   *late[*fetch.Puller]
	usage    *usage
	metrics  *metrics.Set
	log      *slog.Logger
}

// cacheConfig says which unused layers go first.
func cacheConfig(root string, f config.Cache) (fetch.CacheConfig, error) {
	c := fetch.CacheConfig{Policy: cmp.Or(f.Policy, evict.Default),
		Capacity: int64(f.MaxBytes), Path: filepath.Join(root, "cache.policy")}
	if !evict.Known(c.Policy) {
		return c, fmt.Errorf("cache.policy = %q: it is one of %q", c.Policy, evict.Names())
	}
	var s unix.Statfs_t
	if c.Capacity == 0 && unix.Statfs(root, &s) == nil {
		c.Capacity = int64((1 - keepFree) * float64(s.Blocks) * float64(s.Bsize))
	}
	return c, nil
}

// Free is how many bytes are free where layers are.
func (r *room) Free() (int64, error) {
	var s unix.Statfs_t
	err := unix.Statfs(r.root, &s)
	return int64(s.Bavail) * s.Bsize, err
}

// excess is how many bytes the layers' store takes beyond the cache's bound,
// or lacks of the share of the disk that is to stay free; below 0 is what is left.
func (r *room) excess() int64 {
	want := int64(math.MinInt64)
	if most := r.maxBytes.Load(); most > 0 {
		want = diskUse(filepath.Join(r.root, "layers")) - most
	}
	var s unix.Statfs_t
	if unix.Statfs(r.root, &s) == nil {
		want = max(want, shortOf(&s))
	}
	return want
}

// shortOf is how many bytes the file system lacks to have keepFree of its
// size free; not above 0 if it has.
func shortOf(s *unix.Statfs_t) int64 {
	return int64(keepFree*float64(s.Blocks)-float64(s.Bavail)) * s.Bsize
}

// diskUse is the bytes that everything below dir takes, abandoned fills and
// those under way included.
func diskUse(dir string) int64 {
	var sum int64
	filepath.WalkDir(dir, func(_ string, e fs.DirEntry, err error) error {
		if err != nil {
			return nil // gone meanwhile
		}
		if fi, err := e.Info(); err == nil {
			if st, ok := fi.Sys().(*syscall.Stat_t); ok {
				sum += st.Blocks * 512
			}
		}
		return nil
	})
	return sum
}

// Fits reports whether a copy of a layer of the PoP's store fits into the cache.
func (r *room) Fits(bytes int64) bool { return r.excess()+bytes <= 0 }

// collect lets go of what exceeds the cache's bound, and of what cut pulls have left.
func (r *room) collect(ctx context.Context) {
	freed, err := r.evict(ctx, r.excess())
	if err != nil {
		r.log.Error("remove unused layers", "err", err)
	}
	if freed.Bytes > 0 || len(freed.Layers) > 0 {
		r.log.Info("unused layers and what cut pulls left removed", "layers", len(freed.Layers), "bytes",
			freed.Bytes)
	}
}

// MakeFree lets go of bytes of disk that nothing uses.
func (r *room) MakeFree(ctx context.Context, bytes int64) {
	if _, err := r.evict(ctx, bytes); err != nil {
		r.log.Warn("make room for an image", "err", err)
	}
}

// runningDisk is fetch's Disk.
type runningDisk struct{ *room }

// MakeFree frees disk for bytes that a running container needs.
func (r runningDisk) MakeFree(ctx context.Context, bytes int64) {
	freed, err := r.evict(ctx, bytes)
	if err != nil || freed.Bytes < bytes {
		r.log.Error("the disk is full: containers that run before their image is whole may get I/O errors; free some space",
			"freed", freed.Bytes, "wanted", bytes, "err", err)
	}
}

func (r *room) evict(ctx context.Context, bytes int64) (freed fetch.Freed, err error) {
	p, ok := r.puller.get()
	if !ok {
		return freed, nil
	}
	freed, err = p.Collect(ctx, bytes, r.usage.inUse)
	r.metrics.Evicted(len(freed.Layers), freed.Bytes)
	return freed, err
}
