// Package volumes keeps named volumes: directories of the node that containers have by name, and that outlast
// them.
//
// A volume is made when the first container names it, with what the image has at its place: owner, mode and
// files. It appears whole or not at all. What a container holds, or a record of one names, is not removed.
package volumes

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"dewpoint/internal/spec"
)

// Errors of volumes, which callers tell apart.
var (
	ErrNotFound = errors.New("there is no such volume")
	ErrInUse    = errors.New("the volume is in use")
)

// No volume's name begins so.
const (
	unfinished = ".new-"   // a volume that is being made, or removed
	untouched  = ".empty-" // a file for each volume that no container has had yet
)

// Store keeps the volumes below one directory. It is safe for concurrent use.
type Store struct {
	dir string

	mu   sync.Mutex
	held map[string]*volume // guarded by mu; by name
}

// volume is one that containers which are being made hold.
type volume struct {
	holders int // guarded by the store's mu
	making  sync.Mutex
}

// New returns the store of a directory, which is made when there is a volume.
func New(dir string) *Store { return &Store{dir: dir, held: map[string]*volume{}} }

// Path is the directory of a volume, whether it is there or not.
func (s *Store) Path(name string) string { return filepath.Join(s.dir, name) }

// Use keeps a volume until release is called, and makes it unless it is there: fill is to put into a new
// directory what the volume begins with.
func (s *Store) Use(name string, fill func(dir string) error) (release func(), err error) {
	if !spec.ValidVolume(name) {
		return nil, fmt.Errorf("%q is not the name of a volume", name)
	}
	s.mu.Lock()
	v := s.held[name]
	if v == nil {
		v = &volume{}
		s.held[name] = v
	}
	v.holders++
	s.mu.Unlock()
	release = func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if v.holders--; v.holders == 0 {
			delete(s.held, name)
		}
	}
	v.making.Lock()
	defer v.making.Unlock()
	if err := s.make(name, fill); err != nil {
		release()
		return nil, fmt.Errorf("volume %s: %w", name, err)
	}
	return release, nil
}

// Make makes an empty volume, unless it is there. The first container that has it fills it.
func (s *Store) Make(name string) error {
	if _, err := os.Lstat(s.Path(name)); err == nil && spec.ValidVolume(name) {
		return nil
	}
	release, err := s.Use(name, func(string) error { return os.WriteFile(s.mark(name), nil, 0o600) })
	if err == nil {
		release()
	}
	return err
}

// mark is there as long as no container has had the volume.
func (s *Store) mark(name string) string { return filepath.Join(s.dir, untouched+name) }

func (s *Store) make(name string, fill func(dir string) error) error {
	_, err := os.Lstat(s.Path(name))
	_, merr := os.Lstat(s.mark(name))
	there := !errors.Is(err, fs.ErrNotExist)
	if there && (err != nil || merr != nil) {
		return err
	}
	// Other users of the host do not reach what containers have made, which may be programs that run as root.
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return err
	}
	if !there { // of a volume that is gone
		if err := os.RemoveAll(s.mark(name)); err != nil {
			return err
		}
	}
	dir := filepath.Join(s.dir, unfinished+name)
	err = os.RemoveAll(dir) // of a dewd that was killed
	if err == nil {
		err = os.Mkdir(dir, 0o755)
	}
	if err == nil {
		err = fill(dir)
	}
	if err == nil {
		err = unix.Rename(dir, s.Path(name)) // also over an empty one, which os.Rename refuses
	}
	if errors.Is(err, unix.ENOTEMPTY) || errors.Is(err, unix.EEXIST) {
		err = os.RemoveAll(dir) // somebody has put files there
	}
	if err != nil {
		return errors.Join(err, os.RemoveAll(dir))
	}
	if there {
		return os.Remove(s.mark(name)) // last: a fill that failed is tried again
	}
	return nil
}

// List gives the volumes in the order of their names; used are the containers that have each, by its name.
func (s *Store) List(used map[string][]string) ([]spec.VolumeInfo, error) {
	entries, err := os.ReadDir(s.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var list []spec.VolumeInfo
	for _, e := range entries {
		if !e.IsDir() || strings.HasPrefix(e.Name(), ".") {
			continue
		}
		v := spec.VolumeInfo{Name: e.Name(), Path: s.Path(e.Name()), Containers: used[e.Name()]}
		if fi, err := e.Info(); err == nil {
			v.Changed = fi.ModTime()
		}
		list = append(list, v)
	}
	return list, err
}

// Remove removes a volume that no container has. used is asked while none can come to have it.
func (s *Store) Remove(name string, used func() (map[string][]string, error)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, err := os.Lstat(s.Path(name)); !spec.ValidVolume(name) || errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: %s", ErrNotFound, name)
	}
	if s.held[name] != nil {
		return fmt.Errorf("%w: %s, a container is being made", ErrInUse, name)
	}
	have, err := used()
	if err != nil {
		return err
	}
	if c := have[name]; len(c) > 0 {
		return fmt.Errorf("%w: %s, by %s", ErrInUse, name, strings.Join(c, " "))
	}
	gone := filepath.Join(s.dir, unfinished+name) // a volume that is removed by half is none
	if err := errors.Join(os.RemoveAll(gone), os.RemoveAll(s.mark(name))); err != nil {
		return err
	}
	if err := os.Rename(s.Path(name), gone); err != nil {
		return err
	}
	return os.RemoveAll(gone)
}
