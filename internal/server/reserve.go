package server

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// The reserve is a share of the disk, within bounds.
const (
	reserveShare = 32 // one part of so many
	reserveLeast = 1 << 20
	reserveMost  = 16 << 20
)

// reserve is a file that takes disk for the day on which there is no more: it goes when dewd starts, or is to
// prune, on a disk that is full, since removing needs room, too. It comes back when there is room.
type reserve struct {
	root string
	log  *slog.Logger
}

func (r reserve) path() string { return filepath.Join(r.root, "reserve") }

// size is that of the reserve, and the bytes that are free without it.
func (r reserve) size() (size, free int64, err error) {
	var s unix.Statfs_t
	if err := unix.Statfs(r.root, &s); err != nil {
		return 0, 0, err
	}
	size = min(reserveMost, max(reserveLeast, int64(s.Blocks)*s.Bsize/reserveShare))
	return size, int64(s.Bavail) * s.Bsize, nil
}

// use gives the reserve up if the disk is full.
func (r reserve) use() error {
	size, free, err := r.size()
	if err != nil || free >= size {
		return err
	}
	err = os.Remove(r.path())
	if err == nil {
		r.log.Warn("the disk is full: what dewd keeps for that is given up, so that \"dew prune\" can make room",
			"root", r.root, "free", free, "reserve", size)
	}
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

// keep makes the reserve if there is none, and room for many of them.
func (r reserve) keep() {
	size, free, err := r.size()
	if _, serr := os.Stat(r.path()); err != nil || serr == nil || free < 4*size {
		return
	}
	f, err := os.OpenFile(r.path(), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err == nil {
		err = errors.Join(unix.Fallocate(int(f.Fd()), 0, 0, size), f.Close())
	}
	if err != nil {
		r.log.Debug("nothing is kept for a full disk", "err", err)
		_ = os.Remove(r.path())
	}
}

// fullAtStart says what to do where there is not even room to start.
func (r reserve) fullAtStart(err error) error {
	if !errors.Is(err, unix.ENOSPC) && !errors.Is(err, unix.EDQUOT) {
		return err
	}
	return fmt.Errorf("%w: the disk is full: dewd needs 1 MiB in %s to start; free that, and then \"dew prune\" frees more",
		err, r.root)
}
