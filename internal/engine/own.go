package engine

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// OwnDir is the directory of Spec.Own on the host.
func (e *core) OwnDir(name string) string { return e.cfg.ownDir(name) }

func (c *Config) ownDir(name string) string { return filepath.Join(c.dir(name), "own") }

// makeOwn makes it, anew if a creation that was cut short has left one.
func (e *core) makeOwn(s *Spec) error {
	if s.Own == nil {
		return nil
	}
	dir := e.OwnDir(s.Name)
	err := os.RemoveAll(dir)
	if err == nil {
		err = os.Mkdir(dir, 0o700)
	}
	if err == nil && s.Own.From != "" {
		err = linkTree(s.Own.From, dir)
	}
	if err != nil {
		return fmt.Errorf("the container's own directory: %w", err)
	}
	return nil
}

// linkTree makes to, which is empty, a tree like from, of links to its files.
func linkTree(from, to string) error {
	return filepath.WalkDir(from, func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == from {
			return err
		}
		rel, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		switch target := filepath.Join(to, rel); {
		case d.IsDir():
			return os.Mkdir(target, 0o700)
		case d.Type().IsRegular():
			return linkOrCopy(path, target)
		}
		return fmt.Errorf("%s is neither a file nor a directory", path)
	})
}
