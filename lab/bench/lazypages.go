package bench

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"unsafe"

	"dewpoint/testkit/testbed"

	"golang.org/x/sys/unix"
)

// pages counts the page cache that a deployment takes, file by file:
//
//	files   of the engine's directories: layers' data and index, unpacked trees, databases
//	erofs   the image's files as EROFS shows them to the container
//	fuse    the layers as datafs shows them to EROFS
//
// by cachestat(2) (Linux 6.5), and for EROFS by mincore(2) through the container's
// root, since the mounts of a container that was started lazily may be out of
// sight. So it is what the deployment has cached and nothing else, the
// registry's copies not counted; memory of processes is in the tables of starts.
func (l *lazy) pages(ctx context.Context) error {
	engines, err := l.contenders(l.dewd("-partial", noBackground, false), l.dewd("", "", false),
		l.dewd("-whole", "", false, "--lazy", "never"), containerd{tools: l.tools, snapshotter: "overlayfs"},
		docker{})
	if err != nil {
		return err
	}
	err = l.turns(engines, func(e engine, image string, _ int) error {
		return l.container(ctx, e, image, func(s *session, process int) error {
			return l.pagesOf(ctx, s, e, image, process)
		})
	})
	tabulate(l.stdout, l.figures, "containerd-overlayfs")
	return err
}

// pagesOf counts after the start, and once more after a start of what is here
// on an empty page cache.
func (l *lazy) pagesOf(ctx context.Context, s *session, e engine, image string, process int) error {
	if err := l.countPages(s, e, image, "cold start", process); err != nil {
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
	process, err := pid(ctx, s, e)
	if err != nil {
		return err
	}
	return l.countPages(s, e, image, "later start", process)
}

func (l *lazy) countPages(s *session, e engine, image, when string, process int) error {
	n := map[string]int64{}
	if err := cachedBelow(s.dir, n); err != nil {
		return err
	}
	if _, ours := e.(dewd); ours {
		t, err := openTree(process)
		if err != nil {
			return err
		}
		defer t.close()
		if n["erofs"], err = t.cached(); err != nil {
			return err
		}
	}
	var sum int64
	for _, kind := range []string{"files", "erofs", "fuse"} {
		sum += n[kind]
		l.figures = merge(l.figures,
			[]figure{{image, e.name(), when + ": " + kind, "MB", []float64{float64(n[kind]) / 1e6}}})
	}
	l.figures = merge(l.figures,
		[]figure{{image, e.name(), when + ": all", "MB", []float64{float64(sum) / 1e6}}})
	return nil
}

// cachedBelow adds the cached bytes of the files below dir, and of the layers
// that datafs shows there. Overlayfs has no pages of its own.
func cachedBelow(dir string, n map[string]int64) error {
	if err := cachedOn(dir, n); err != nil {
		return err
	}
	mounts, err := mountsBelow(dir)
	if err != nil {
		return err
	}
	layers, _ := filepath.Glob(filepath.Join(dir, "root", "layers", "*"))
	for _, m := range mounts {
		for _, layer := range layers { // datafs has no list of them
			if m.kind != "fuse" {
				continue
			}
			b, err := cached(filepath.Join(m.path, filepath.Base(layer)))
			if err != nil {
				return err
			}
			n["fuse"] += b
		}
	}
	return nil
}

// cached is the bytes of the tree's files in the page cache. Overlayfs maps the
// file below it, so these are the pages of that.
func (t *tree) cached() (all int64, err error) {
	for _, name := range t.files {
		n, err := resident(int(t.dir.Fd()), name)
		if err != nil {
			return 0, fmt.Errorf("%s: %w", name, err)
		}
		all += n
	}
	return all, nil
}

func resident(dir int, name string) (int64, error) {
	fd, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Size == 0 {
		return 0, err
	}
	m, err := unix.Mmap(fd, 0, int(st.Size), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return 0, err
	}
	defer unix.Munmap(m)
	page := int64(os.Getpagesize())
	in := make([]byte, (st.Size+page-1)/page)
	if _, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&m[0])), uintptr(len(m)),
		uintptr(unsafe.Pointer(&in[0]))); errno != 0 {
		return 0, errno
	}
	var n int64
	for _, b := range in {
		n += int64(b&1) * page
	}
	return n, nil
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
func cachedOn(root string, n map[string]int64) error {
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
			n["files"] += b
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
