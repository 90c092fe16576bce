// Package durable writes files that survive a power cut, or are not there.
//
// The order is always the same: content into a temporary file, fsync, rename,
// fsync of the directory. Every fsync of the daemon but those in the PoP's shared
// store goes through this package, so that a test can kill the process at each of
// them in turn (see OnSync).
package durable

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// ErrLost is wrapped by the errors of syncs: what was written since the last one that succeeded may not be on
// the disk, though it can be read, and the kernel does not say so again (fsync(2)). It is to be written anew,
// into another file; to sync once more is of no use.
var ErrLost = errors.New("what was written may not have reached the disk")

var (
	onSync   atomic.Pointer[func(path string)]
	failSync atomic.Pointer[func(path string) error]
)

// OnSync has fn called before every fsync with the path concerned, nil takes
// it away. It exists for tests of crash consistency.
func OnSync(fn func(path string)) {
	if fn == nil {
		onSync.Store(nil)
		return
	}
	onSync.Store(&fn)
}

// FailSync has every fsync fail for which fn returns an error; nil takes it away. It exists for tests of
// disks that fail.
func FailSync(fn func(path string) error) {
	if fn == nil {
		failSync.Store(nil)
		return
	}
	failSync.Store(&fn)
}

// syncing does one sync of what is at path. EINTR is no answer.
func syncing(op, path string, sync func() error) error {
	if fn := onSync.Load(); fn != nil {
		(*fn)(path)
	}
	err := error(unix.EINTR)
	if fn := failSync.Load(); fn != nil {
		if ferr := (*fn)(path); ferr != nil {
			err = ferr
		}
	}
	for err == unix.EINTR {
		err = sync()
	}
	if err != nil {
		return fmt.Errorf("%w: %w", &os.PathError{Op: op, Path: path, Err: err}, ErrLost)
	}
	return nil
}

// Sync makes the content and the length of f durable (fdatasync(2)). It tells of each failed write to the
// file since f was opened, but for those that another Sync of f has told of.
func Sync(f *os.File) error {
	return syncing("fdatasync", f.Name(), func() error { return unix.Fdatasync(int(f.Fd())) })
}

// WriteFile puts data at path so that, whenever the machine stops, path holds
// either its old content or all of data. Once WriteFile returns nil the new
// content survives a power cut. Its leftovers, after a crash, end in ".tmp".
// Concurrent writers of one path must exclude each other.
func WriteFile(path string, data []byte, mode os.FileMode) error {
	return Commit(path, mode, func(f *os.File) error {
		_, err := f.Write(data)
		return err
	})
}

// Commit is WriteFile for content that write produces.
func Commit(path string, mode os.FileMode, write func(*os.File) error) error {
	tmp := path + ".tmp"
	f, err := os.OpenFile(tmp, os.O_RDWR|os.O_CREATE|os.O_TRUNC, mode)
	if err != nil {
		return err
	}
	if err = write(f); err == nil {
		err = Sync(f)
	}
	if err = errors.Join(err, f.Close()); err != nil {
		os.Remove(tmp)
		return fmt.Errorf("write %s: %w", path, err)
	}
	return Rename(tmp, path)
}

// Rename moves old to new and makes the move durable. The content of old must
// be durable already.
func Rename(old, new string) error {
	if err := os.Rename(old, new); err != nil {
		return err
	}
	return SyncDir(filepath.Dir(new))
}

// SyncDir makes the entries of a directory durable.
func SyncDir(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(syncing("fsync", path, func() error { return unix.Fsync(int(d.Fd())) }), d.Close())
}

// SyncFS makes everything on the file system that f is on durable (syncfs(2)): cheaper than an fsync for each
// of thousands of files. It tells of each failed write there since f was opened, but for those that another
// SyncFS of f has told of.
func SyncFS(f *os.File) error {
	return syncing("syncfs", f.Name(), func() error { return unix.Syncfs(int(f.Fd())) })
}
