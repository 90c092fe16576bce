package store

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"dewpoint/internal/durable"

	"golang.org/x/sys/unix"
)

// cache is directories with checkpoints' files as their engines wrote them, which all restores share. It is
// bounded, holds for one boot of the machine, and costs only time when it is lost.
type cache struct {
	root string
	most int64         // bytes; what is in use is kept beyond that
	idle time.Duration // how long what nobody uses stays
	log  *slog.Logger

	mu   sync.Mutex
	dirs map[string]*unpacked // by name below root
}

func (uc *cache) path(name string) string { return filepath.Join(uc.root, name) }

// unpacked is a directory of the cache, or one that is on its way; cache.mu guards it.
type unpacked struct {
	id    string        // of the checkpoint
	name  string        // below the cache
	ready chan struct{} // closed when it is there, or not to be had
	err   error         // why not
	users int
	size  int64 // on disk
	used  time.Time
	gone  bool // the checkpoint is: it goes when nobody uses it
}

const (
	bootFile = "boot"
	metaEnd  = "-meta" // of a directory without memory
)

// load takes up what is unpacked already, if it is of this boot: it was never made durable.
func (uc *cache) load() error {
	dir := uc.root
	boot, err := os.ReadFile(filepath.Join(dir, bootFile))
	fresh := err == nil && string(boot) == durable.BootID() && len(boot) > 0
	ents, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	var errs error
	for _, e := range ents {
		id := strings.TrimSuffix(e.Name(), metaEnd)
		switch fi, err := e.Info(); {
		case e.Name() == bootFile:
		case err == nil && fresh && e.IsDir() && digestOf(id).Validate() == nil:
			u := &unpacked{id: id, name: e.Name(), ready: make(chan struct{}), used: fi.ModTime()}
			u.size, err = diskUse(filepath.Join(dir, e.Name()))
			errs = errors.Join(errs, err)
			close(u.ready)
			uc.dirs[u.name] = u
		default:
			errs = errors.Join(errs, os.RemoveAll(filepath.Join(dir, e.Name())))
		}
	}
	if errs != nil || fresh {
		return errs
	}
	return os.WriteFile(filepath.Join(dir, bootFile), []byte(durable.BootID()), 0o600)
}

// diskUse is how many bytes the files below dir take.
func diskUse(dir string) (sum int64, err error) {
	err = filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return &os.PathError{Op: "lstat", Path: path, Err: err}
		}
		sum += st.Blocks * 512
		return nil
	})
	return sum, err
}

// HasUnpacked reports whether Unpacked would find all of a checkpoint unpacked.
func (uc *cache) HasUnpacked(id string) bool {
	_, ok := uc.size(id)
	return ok
}

// size is how many bytes an unpacked checkpoint takes on the disk, and whether there is one.
func (uc *cache) size(id string) (int64, bool) {
	uc.mu.Lock()
	u := uc.dirs[id]
	uc.mu.Unlock()
	if u == nil {
		return 0, false
	}
	select {
	case <-u.ready:
		return u.size, u.err == nil
	default:
		return 0, false
	}
}

// ReadAhead has what is unpacked of a checkpoint read into the page cache, if most of it is not there.
func (uc *cache) ReadAhead(ctx context.Context, id string) {
	if !uc.HasUnpacked(id) || uc.Warm(id) {
		return
	}
	err := eachFile(uc.path(id), func(f *os.File) error { return readAhead(ctx, f) })
	if err != nil {
		uc.log.Debug("an unpacked checkpoint is not read ahead", "id", id, "err", err)
	}
}

// Warm reports whether a checkpoint is unpacked here and most of it in the page cache: reading it takes
// little time then. Kernels before 6.5 do not tell what is in the page cache; what is unpacked is warm there.
func (uc *cache) Warm(id string) bool {
	size, ok := uc.size(id)
	if !ok {
		return false
	}
	var cached int64
	err := eachFile(uc.path(id), func(f *os.File) error {
		var in unix.Cachestat_t
		err := unix.Cachestat(uint(f.Fd()), &unix.CachestatRange{}, &in, 0) // of length 0: to its end
		cached += int64(in.Cache) * int64(os.Getpagesize())
		return os.NewSyscallError("cachestat", err)
	})
	return errors.Is(err, unix.ENOSYS) || err == nil && cached >= size/2
}

// eachFile calls do with each file of a directory, until it returns an error.
func eachFile(dir string, do func(f *os.File) error) error {
	files, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range files {
		f, err := os.Open(filepath.Join(dir, e.Name()))
		if err != nil {
			return err
		}
		if err := errors.Join(do(f), f.Close()); err != nil {
			return err
		}
	}
	return nil
}

// How a file is read ahead: asked for in large steps, of each of which the kernel takes as much as the
// device's limit is (128 KiB at least, as a rule), then touched in small ones, which brings what it left out.
const (
	readStep  = 1 << 20
	touchStep = 128 << 10
)

// readAhead has the kernel read a file from the disk.
func readAhead(ctx context.Context, f *os.File) error {
	fi, err := f.Stat()
	if err != nil {
		return err
	}
	for off := int64(0); off < fi.Size() && ctx.Err() == nil; off += readStep {
		if err := unix.Fadvise(int(f.Fd()), off, readStep, unix.FADV_WILLNEED); err != nil {
			return os.NewSyscallError("fadvise", err)
		}
	}
	var b [1]byte
	for off := int64(0); off < fi.Size() && ctx.Err() == nil; off += touchStep {
		if _, err := f.ReadAt(b[:], off); err != nil {
			return err
		}
	}
	return nil
}

// addWhole puts a directory of that size into the cache as all of a checkpoint, unless there is one: it is
// removed then.
func (uc *cache) addWhole(id, dir string, size int64) error {
	u := &unpacked{id: id, name: id, ready: make(chan struct{}), size: size, used: time.Now()}
	close(u.ready)
	uc.mu.Lock()
	defer uc.mu.Unlock()
	if uc.dirs[u.name] != nil {
		return os.RemoveAll(dir)
	}
	err := os.Rename(dir, uc.path(u.name))
	if err == nil {
		uc.dirs[u.name] = u
	}
	return err
}

// restrict gives what is below dir the modes of this store, and returns its size.
func restrict(dir string) (int64, error) {
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case e.IsDir():
			return os.Chmod(path, 0o700)
		case e.Type().IsRegular():
			return os.Chmod(path, 0o600)
		}
		return fmt.Errorf("%s is neither a file nor a directory", path)
	})
	if err != nil {
		return 0, err
	}
	return diskUse(dir)
}

// directory is the one of that name in the cache, which fill fills if there is none.
func (uc *cache) directory(ctx context.Context, id, name string,
	fill func(ctx context.Context, dir string) error) (string, func(), error) {
	for {
		uc.mu.Lock()
		u := uc.dirs[name]
		mine := u == nil
		if mine {
			u = &unpacked{id: id, name: name, ready: make(chan struct{})}
			uc.dirs[name] = u
		}
		u.users++
		uc.mu.Unlock()
		if mine {
			uc.fill(ctx, u, fill)
		}
		select {
		case <-u.ready:
		case <-ctx.Done():
			uc.release(u)
			return "", nil, context.Cause(ctx)
		}
		if u.err == nil {
			return uc.path(name), sync.OnceFunc(func() { uc.release(u) }), nil
		}
		uc.release(u)
		if mine || !errors.Is(u.err, context.Canceled) && !errors.Is(u.err, context.DeadlineExceeded) {
			return "", nil, fmt.Errorf("unpack checkpoint %.12s: %w", id, u.err)
		} // else who came first has given up: it is the next one's turn
	}
}

// fill makes the directory under a temporary name.
func (uc *cache) fill(ctx context.Context, u *unpacked, fill func(ctx context.Context, dir string) error) {
	uc.trim()
	tmp := uc.path(u.name + "." + rand.Text()[:8] + tmpEnd)
	err := os.Mkdir(tmp, 0o700)
	if err == nil {
		err = fill(ctx, tmp)
	}
	var size int64
	if err == nil {
		size, err = diskUse(tmp)
	}
	if err == nil {
		err = os.Rename(tmp, uc.path(u.name))
	}
	if err != nil {
		err = errors.Join(err, os.RemoveAll(tmp))
	}
	uc.mu.Lock()
	u.size, u.err, u.used = size, err, time.Now()
	if err != nil {
		delete(uc.dirs, u.name)
	}
	uc.mu.Unlock()
	close(u.ready)
	uc.trim()
}

func (uc *cache) release(u *unpacked) {
	uc.mu.Lock()
	u.users--
	u.used = time.Now()
	gone := u.gone
	uc.mu.Unlock()
	if gone {
		uc.evictGone()
	}
}

// discard removes what was unpacked of a checkpoint that is gone, now or when nobody uses it any more.
func (uc *cache) discard(id string) {
	uc.mu.Lock()
	for _, u := range uc.dirs {
		u.gone = u.gone || u.id == id
	}
	uc.mu.Unlock()
	uc.evictGone()
}

func (uc *cache) evictGone() { uc.evict(func(u *unpacked) bool { return u.gone }) }

// trim removes what has been idle for long, and the least recently used beyond the bound.
func (uc *cache) trim() {
	uc.mu.Lock()
	all := make([]*unpacked, 0, len(uc.dirs))
	var sum int64
	for _, u := range uc.dirs {
		all = append(all, u)
		sum += u.size
	}
	slices.SortFunc(all, func(a, b *unpacked) int { return a.used.Compare(b.used) })
	idle := map[*unpacked]bool{}
	for _, u := range all {
		if u.users == 0 && (sum > uc.most || time.Since(u.used) > uc.idle) {
			idle[u] = true
			sum -= u.size
		}
	}
	uc.mu.Unlock()
	uc.evict(func(u *unpacked) bool { return idle[u] })
}

// evict removes those that which chooses and nobody uses.
func (uc *cache) evict(which func(u *unpacked) bool) {
	var names []string
	uc.mu.Lock()
	for name, u := range uc.dirs {
		if u.users > 0 || !which(u) {
			continue
		}
		old, gone := uc.path(name),
			uc.path(name+"."+rand.Text()[:8]+tmpEnd)
		if err := os.Rename(old, gone); err != nil {
			uc.log.Warn("an unpacked checkpoint stays", "dir", old, "err", err)
			continue
		}
		delete(uc.dirs, name)
		names = append(names, gone)
	}
	uc.mu.Unlock()
	for _, name := range names {
		if err := os.RemoveAll(name); err != nil {
			uc.log.Warn("an unpacked checkpoint stays until the next start", "dir", name, "err", err)
		}
	}
}
