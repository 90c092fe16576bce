package pop

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
)

// ErrTaken says that a node's name belongs to another machine.
var ErrTaken = errors.New("another machine of the PoP has this node's name")

func ownerOf(node string) string { return path.Join(nodesDir, node+".owner") }

// Claim makes this node's name the machine's that has this identity: the same whenever it
// is started, and no other machine's. A node keeps and clears its marks by its name, so
// two machines that share one would take from each other what protects their containers' layers. An
// error wraps ErrTaken if another machine has the name: nothing else of the Store is to be
// called then. The name is free again when the node is forgotten (Forget), or its owner's file is removed.
func (s *Store) Claim(ctx context.Context, machine string) error {
	has, err := s.cfg.FS.ReadFile(ctx, ownerOf(s.cfg.Node))
	if errors.Is(err, fs.ErrNotExist) {
		if err = s.own(ctx, machine); err == nil {
			has, err = s.cfg.FS.ReadFile(ctx, ownerOf(s.cfg.Node))
		}
	}
	if err != nil {
		return fmt.Errorf("claim the name %s: %w", s.cfg.Node, err)
	}
	if string(has) != machine {
		return fmt.Errorf("%s: %w", s.cfg.Node, ErrTaken)
	}
	return nil
}

// own writes the owner's file, unless there is one.
func (s *Store) own(ctx context.Context, machine string) error {
	tmp := path.Join(nodesDir, "."+s.cfg.Node+".owner."+s.boot)
	if err := s.cfg.FS.WriteFile(ctx, tmp, []byte(machine)); err != nil {
		return err
	}
	err := s.cfg.FS.Link(ctx, tmp, ownerOf(s.cfg.Node)) // of several machines, one
	if errors.Is(err, fs.ErrExist) {
		err = nil
	}
	return errors.Join(err, s.remove(ctx, tmp))
}

// Present returns an error that wraps ErrNotMounted if the directory does not have this store any
// more: its file system was unmounted, or another one was mounted over it.
func (s *Store) Present(ctx context.Context) error {
	fi, err := s.cfg.FS.Stat(ctx, storeFile)
	if err == nil && s.isFile(fi) {
		return nil
	}
	b, err := s.cfg.FS.ReadFile(ctx, storeFile)
	// perhaps a part of the file system is away that has this file: directories are on all
	if errors.Is(err, fs.ErrNotExist) {
		if _, err = s.cfg.FS.Stat(ctx, layersDir); errors.Is(err, fs.ErrNotExist) {
			err = fmt.Errorf("%w: %s was there, and nothing is", ErrNotMounted, s.id)
		}
		return err
	}
	var rec storeRecord
	if err == nil && json.Unmarshal(b, &rec) == nil && rec.ID != s.id {
		err = fmt.Errorf("%w: %s was there, and %s is", ErrNotMounted, s.id, rec.ID)
	}
	if err == nil && rec.ID == s.id {
		s.mu.Lock()
		s.file = fi
		s.mu.Unlock()
	}
	return err
}

// isFile reports whether fi is the file in which this store's name was read.
func (s *Store) isFile(fi fs.FileInfo) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.file != nil && os.SameFile(s.file, fi) && s.file.Size() == fi.Size() &&
		s.file.ModTime().Equal(fi.ModTime())
}

// twin reports whether a node that the coordinator hears of has this one's name.
func (s *Store) twin(ctx context.Context) (bool, error) {
	members, err := s.cfg.Coord.Members(ctx)
	for _, m := range members {
		if m.Node == s.cfg.Node && m.Twin != "" {
			return true, nil
		}
	}
	return false, err
}
