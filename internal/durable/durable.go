// Package durable writes files that survive a power cut, or are not there.
//
// The order is always the same: content into a temporary file, fsync, rename,
// fsync of the directory. Every fsync of the daemon goes through this package,
// so that a test can kill the process at each of them in turn (see OnSync).
package durable

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

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

// syncing is called before every fsync, which is not done if it returns an error.
func syncing(path string) error {
	if fn := onSync.Load(); fn != nil {
		(*fn)(path)
	}
	if fn := failSync.Load(); fn != nil {
		return (*fn)(path)
	}
	return nil
}

// Sync makes the content and the length of f durable (fdatasync(2)).
func Sync(f *os.File) error {
	if err := syncing(f.Name()); err != nil {
		return &os.PathError{Op: "fdatasync", Path: f.Name(), Err: err}
	}
	for {
		err := unix.Fdatasync(int(f.Fd()))
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return &os.PathError{Op: "fdatasync", Path: f.Name(), Err: err}
		}
		return nil
	}
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
	if err := syncing(path); err != nil {
		return &os.PathError{Op: "sync", Path: path, Err: err}
	}
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// SyncFS makes everything on the file system that path is on durable
// (syncfs(2)): cheaper than an fsync for each of thousands of files.
func SyncFS(path string) error {
	if err := syncing(path); err != nil {
		return &os.PathError{Op: "sync", Path: path, Err: err}
	}
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	if err = unix.Syncfs(int(d.Fd())); err != nil {
		err = &os.PathError{Op: "syncfs", Path: path, Err: err}
	}
	return errors.Join(err, d.Close())
}
