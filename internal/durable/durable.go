// Package durable writes files that survive a power cut, or are not there.
package durable

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// WriteFile puts data at path so that, whenever the machine stops, path holds
// either its old content or all of data. Once WriteFile returns nil the new
// content survives a power cut. Its leftovers, after a crash, end in ".tmp".
// Concurrent writers of one path must exclude each other.
func WriteFile(path string, data []byte, mode os.FileMode) error {
	tmp := path + ".tmp"
	f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, mode)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	err = errors.Join(err, f.Close())
	if err != nil {
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
	return errors.Join(d.Sync(), d.Close())
}
