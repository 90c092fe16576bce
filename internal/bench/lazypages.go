package bench

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"dewpoint/internal/bench/testbed"

	"golang.org/x/sys/unix"
)

// pages counts the page cache that a deployment takes, by cachestat(2) of every
// file that could have any: the layers' own files (data, index), the files as
// EROFS shows them, the files that datafs serves by FUSE, and the directories
// of the other engines. So it is what the deployment has cached and nothing
// else, the registry's copies not counted; anonymous memory is in the tables of
// starts. It needs Linux 6.5.
func (l *lazy) pages(ctx context.Context) error {
	engines, err := l.contenders(l.dewd("-partial", noBackground, false), l.dewd("", "", false),
		l.dewd("-whole", "", false, "--lazy", "never"), containerd{tools: l.tools, snapshotter: "overlayfs"}, docker{})
	if err != nil {
		return err
	}
	err = l.turns(engines, func(e engine, image string, _ int) error {
		return l.container(ctx, e, image, func(s *session, _ int) error { return l.pagesOf(ctx, s, e, image) })
	})
	tabulate(l.stdout, l.figures, "containerd-overlayfs")
	return err
}

// pagesOf counts after the start, and once more after a start of what is here
// on an empty page cache.
func (l *lazy) pagesOf(ctx context.Context, s *session, e engine, image string) error {
	if err := l.countPages(s, e, image, "cold start"); err != nil {
		return err
	}
	if strings.HasSuffix(e.name(), "-partial") {
		return nil
	}
	if err := e.remove(ctx, s, containerName(e)); err != nil {
		return err
	}
	if err := dropCaches(); err != nil {
		return err
	}
	if err := answer(ctx, s, e, reference(e, testbed.Address, image), image); err != nil {
		return err
	}
	return l.countPages(s, e, image, "later start")
}

func (l *lazy) countPages(s *session, e engine, image, when string) error {
	n := map[string]int64{}
	if err := cachedBelow(s.dir, n); err != nil {
		return err
	}
	var sum int64
	for _, kind := range []string{"file", "erofs", "fuse"} {
		sum += n[kind]
		l.figures = merge(l.figures, []figure{{image, e.name(), when + ": " + kind, "MB", []float64{float64(n[kind]) / 1e6}}})
	}
	l.figures = merge(l.figures, []figure{{image, e.name(), when + ": all", "MB", []float64{float64(sum) / 1e6}}})
	return nil
}

// cachedBelow adds the cached bytes of the files below dir, by the kind of file
// system. Overlayfs has no pages of its own.
func cachedBelow(dir string, n map[string]int64) error {
	mounts, err := mountsBelow(dir)
	if err != nil {
		return err
	}
	for _, m := range append(mounts, mountpoint{dir, "file"}) {
		switch m.kind {
		case "file", "erofs", "fuse":
		default:
			continue
		}
		if err := cachedOn(m.path, n, m.kind); err != nil {
			return err
		}
	}
	return nil
}

type mountpoint struct{ path, kind string }

func mountsBelow(dir string) (all []mountpoint, err error) {
	raw, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(raw)) {
		head, tail, ok := strings.Cut(line, " - ")
		f, kind := strings.Fields(head), strings.Fields(tail)
		if ok && len(f) > 4 && len(kind) > 0 && strings.HasPrefix(f[4], dir+"/") {
			name, _, _ := strings.Cut(kind[0], ".") // fuse.NAME
			all = append(all, mountpoint{f[4], name})
		}
	}
	return all, nil
}

// cachedOn walks one file system.
func cachedOn(root string, n map[string]int64, kind string) error {
	var st unix.Stat_t
	if err := unix.Stat(root, &st); err != nil {
		return fmt.Errorf("stat %s: %w", root, err)
	}
	return filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		if d.IsDir() {
			var here unix.Stat_t
			if unix.Stat(path, &here) == nil && here.Dev != st.Dev {
				return fs.SkipDir
			}
			return nil
		}
		if d.Type().IsRegular() {
			b, err := cached(path)
			n[kind] += b
			return err
		}
		return nil
	})
}

// cached is the bytes of a file in the page cache; a file that went meanwhile has none.
func cached(path string) (int64, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err == unix.ENOENT {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("open %s: %w", path, err)
	}
	defer unix.Close(fd)
	var st unix.Cachestat_t
	if err := unix.Cachestat(uint(fd), &unix.CachestatRange{}, &st, 0); err != nil {
		return 0, fmt.Errorf("cachestat %s: %w", path, err)
	}
	return int64(st.Cache) * int64(os.Getpagesize()), nil
}
