package store

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"dewpoint/internal/checkpoint/image"
	"dewpoint/internal/durable"

	"golang.org/x/sys/unix"
)

// unpacked is a directory of the cache, or one that is on its way; Store.mu guards it.
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

// loadCache takes up what is unpacked already, if it is of this boot: it was never made durable.
func (s *Store) loadCache() error {
	dir := s.path(cacheDir)
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
			s.cache[u.name] = u
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

// Unpacked is a directory with the checkpoint's files as its engine wrote them, which
// must not be changed, and stays until release is called. All callers share it: the
// first unpacks it, from this node's data file or from the PoP's store, the others wait. It was
// verified as it was unpacked. An error wraps ErrUnknown, image.ErrDamaged, in which case the
// damaged data are gone, or what reading or writing returned; no directory is left then.
func (s *Store) Unpacked(ctx context.Context, r Record) (dir string, release func(), err error) {
	s.use(r.ID)
	return s.cached(ctx, r.ID, r.ID, func(ctx context.Context, dir string) error {
		img, d, err := s.reader(ctx, r)
		if err != nil {
			return err
		}
		err = errors.Join(img.Unpack(ctx, dir, s.cfg.Workers), d.Close())
		s.doubt(ctx, r, d.Local, err)
		return err
	})
}

// Meta is Unpacked without memory, which is to be read from the image: both stay until release, which is told
// what reading it returned: damaged data are taken out. prepare, unless nil, adds to the directory, once for
// all who share it, what else is needed there: it must be the same for all calls.
func (s *Store) Meta(ctx context.Context, r Record,
	prepare func(ctx context.Context, dir string, img *image.Reader) error) (dir string, img *image.Reader,
	release func(read error), err error) {
	img, d, err := s.reader(ctx, r)
	if err != nil {
		return "", nil, nil, err
	}
	dir, end, err := s.cached(ctx, r.ID, r.ID+metaEnd, func(ctx context.Context, dir string) error {
		err := img.Meta(dir)
		if err == nil && prepare != nil {
			err = prepare(ctx, dir, img)
		}
		return err
	})
	if err != nil {
		err = errors.Join(err, d.Close())
		s.doubt(ctx, r, d.Local, err)
		return "", nil, nil, err
	}
	return dir, img, func(read error) {
		end()
		if err := d.Close(); err != nil {
			s.cfg.Log.Debug("close a checkpoint's data", "id", r.ID, "err", err)
		}
		s.doubt(ctx, r, d.Local, read)
	}, nil
}

// HasUnpacked reports whether Unpacked would find all of a checkpoint unpacked.
func (s *Store) HasUnpacked(id string) bool {
	_, ok := s.unpackedSize(id)
	return ok
}

// unpackedSize is how many bytes an unpacked checkpoint takes on the disk, and whether there is one.
func (s *Store) unpackedSize(id string) (int64, bool) {
	s.mu.Lock()
	u := s.cache[id]
	s.mu.Unlock()
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
func (s *Store) ReadAhead(ctx context.Context, id string) {
	if !s.HasUnpacked(id) || s.Warm(id) {
		return
	}
	err := eachFile(filepath.Join(s.path(cacheDir), id), func(f *os.File) error { return readAhead(ctx, f) })
	if err != nil {
		s.cfg.Log.Debug("an unpacked checkpoint is not read ahead", "id", id, "err", err)
	}
}

// Warm reports whether a checkpoint is unpacked here and most of it in the page cache: reading it takes
// little time then. Kernels before 6.5 do not tell what is in the page cache; what is unpacked is warm there.
func (s *Store) Warm(id string) bool {
	size, ok := s.unpackedSize(id)
	if !ok {
		return false
	}
	var cached int64
	err := eachFile(filepath.Join(s.path(cacheDir), id), func(f *os.File) error {
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

// Adopt puts the directory that a checkpoint was packed from, which lies in one that
// Scratch has made, into the cache: the first restore here need not unpack it. The directory is gone then.
// One that is there already stays.
func (s *Store) Adopt(r Record, dir string) error {
	size, err := restrict(dir)
	if err != nil {
		return fmt.Errorf("adopt %s: %w", dir, err)
	}
	u := &unpacked{id: r.ID, name: r.ID, ready: make(chan struct{}), size: size, used: time.Now()}
	close(u.ready)
	s.mu.Lock()
	if s.cache[u.name] == nil {
		if err = os.Rename(dir, filepath.Join(s.path(cacheDir), u.name)); err == nil {
			s.cache[u.name] = u
		}
		gone := s.entries[r.ID] == nil // others that are newer have come meanwhile
		s.mu.Unlock()
		if gone {
			s.discard(r.ID)
		}
		s.trimCache()
		return err
	}
	s.mu.Unlock()
	return os.RemoveAll(dir)
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

// cached is the directory of that name in the cache, which fill fills if there is none.
func (s *Store) cached(ctx context.Context, id, name string,
	fill func(ctx context.Context, dir string) error) (string, func(), error) {
	for {
		s.mu.Lock()
		u := s.cache[name]
		mine := u == nil
		if mine {
			u = &unpacked{id: id, name: name, ready: make(chan struct{})}
			s.cache[name] = u
		}
		u.users++
		s.mu.Unlock()
		if mine {
			s.fill(ctx, u, fill)
		}
		select {
		case <-u.ready:
		case <-ctx.Done():
			s.release(u)
			return "", nil, context.Cause(ctx)
		}
		if u.err == nil {
			return filepath.Join(s.path(cacheDir), name), sync.OnceFunc(func() { s.release(u) }), nil
		}
		s.release(u)
		if mine || !errors.Is(u.err, context.Canceled) && !errors.Is(u.err, context.DeadlineExceeded) {
			return "", nil, fmt.Errorf("unpack checkpoint %.12s: %w", id, u.err)
		} // else who came first has given up: it is the next one's turn
	}
}

// fill makes the directory under a temporary name.
func (s *Store) fill(ctx context.Context, u *unpacked, fill func(ctx context.Context, dir string) error) {
	s.trimCache()
	tmp := filepath.Join(s.path(cacheDir), u.name+"."+rand.Text()[:8]+tmpEnd)
	err := os.Mkdir(tmp, 0o700)
	if err == nil {
		err = fill(ctx, tmp)
	}
	var size int64
	if err == nil {
		size, err = diskUse(tmp)
	}
	if err == nil {
		err = os.Rename(tmp, filepath.Join(s.path(cacheDir), u.name))
	}
	if err != nil {
		err = errors.Join(err, os.RemoveAll(tmp))
	}
	s.mu.Lock()
	u.size, u.err, u.used = size, err, time.Now()
	if err != nil {
		delete(s.cache, u.name)
	}
	s.mu.Unlock()
	close(u.ready)
	s.trimCache()
}

func (s *Store) release(u *unpacked) {
	s.mu.Lock()
	u.users--
	u.used = time.Now()
	gone := u.gone
	s.mu.Unlock()
	if gone {
		s.evictGone()
	}
}

// discard removes what was unpacked of a checkpoint that is gone, now or when nobody uses it any more.
func (s *Store) discard(id string) {
	s.mu.Lock()
	for _, u := range s.cache {
		u.gone = u.gone || u.id == id
	}
	s.mu.Unlock()
	s.evictGone()
}

func (s *Store) evictGone() { s.evictCache(func(u *unpacked) bool { return u.gone }) }

// trimCache removes what has been idle for long, and the least recently used beyond CacheBytes.
func (s *Store) trimCache() {
	s.mu.Lock()
	all := make([]*unpacked, 0, len(s.cache))
	var sum int64
	for _, u := range s.cache {
		all = append(all, u)
		sum += u.size
	}
	slices.SortFunc(all, func(a, b *unpacked) int { return a.used.Compare(b.used) })
	idle := map[*unpacked]bool{}
	for _, u := range all {
		if u.users == 0 && (sum > s.cfg.CacheBytes || time.Since(u.used) > s.cfg.CacheIdle) {
			idle[u] = true
			sum -= u.size
		}
	}
	s.mu.Unlock()
	s.evictCache(func(u *unpacked) bool { return idle[u] })
}

// evictCache removes those that which chooses and nobody uses.
func (s *Store) evictCache(which func(u *unpacked) bool) {
	var names []string
	s.mu.Lock()
	for name, u := range s.cache {
		if u.users > 0 || !which(u) {
			continue
		}
		old, gone := filepath.Join(s.path(cacheDir), name),
			filepath.Join(s.path(cacheDir), name+"."+rand.Text()[:8]+tmpEnd)
		if err := os.Rename(old, gone); err != nil {
			s.cfg.Log.Warn("an unpacked checkpoint stays", "dir", old, "err", err)
			continue
		}
		delete(s.cache, name)
		names = append(names, gone)
	}
	s.mu.Unlock()
	for _, name := range names {
		if err := os.RemoveAll(name); err != nil {
			s.cfg.Log.Warn("an unpacked checkpoint stays until the next start", "dir", name, "err", err)
		}
	}
}
