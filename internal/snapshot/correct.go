package snapshot

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"dewpoint/internal/durable"
	"dewpoint/internal/layer/tree"
)

// corrections are the directories ROOT/f/ID. A layer may have entries in
// directories that it does not describe (mount.Files.Implied); overlayfs would
// show its made-up attributes for them, where containerd's applier copies those
// of the layers below. So between such an image layer and what is above it in a
// stack stands a directory tree that has nothing but those directories, with the
// attributes that they have below. It depends on the chain, so it belongs to a
// committed snapshot; it is made when the snapshot is first stood on, and most
// snapshots have none.
//
// A correction appears whole, by rename, and a chain never changes, so what is
// there is right; but none is synced to disk. ROOT/f/boot names the boot in
// which they were made, and those of another boot are made again.
type corrections struct {
	dir string // ROOT/f

	busy sync.Mutex // held while making and removing

	mu     sync.Mutex
	needed map[string]bool // by snapshot id, as far as known; guarded by mu
}

const (
	bootFile = "boot"
	halfMade = ".tmp"
)

// openCorrections makes dir, empty unless it is of this boot.
func openCorrections(dir string) (*corrections, error) {
	boot := durable.BootID()
	c := &corrections{dir: dir, needed: make(map[string]bool)}
	marker := filepath.Join(dir, bootFile)
	if b, err := os.ReadFile(marker); err == nil && boot != "" && strings.TrimSpace(string(b)) == boot {
		return c, nil
	}
	if err := os.RemoveAll(dir); err != nil {
		return nil, err
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, err
	}
	return c, os.WriteFile(marker, []byte(boot), 0o600)
}

func (c *corrections) path(id string) string { return filepath.Join(c.dir, id) }

// needsCorrection says whether ensure found that a snapshot needs a correction.
func (c *corrections) needsCorrection(id string) bool {
	needed, _ := c.state(id)
	return needed
}

func (c *corrections) state(id string) (needed, known bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	needed, known = c.needed[id]
	return needed, known
}

func (c *corrections) note(id string, needed bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.needed[id] = needed
}

func (c *corrections) forget(id string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.needed, id)
}

// ensure makes the correction of snapshot id, if it needs one and it is not
// there. Its layer is mounted at layer; below are the directories under it, the
// uppermost first, corrections included.
func (c *corrections) ensure(id, layer string, implied, below []string) error {
	if needed, known := c.state(id); known && !needed {
		return nil
	}
	c.busy.Lock()
	defer c.busy.Unlock()
	needed := true
	_, err := os.Lstat(c.path(id))
	if os.IsNotExist(err) {
		needed, err = c.build(id, layer, implied, below)
	}
	if err != nil {
		return fmt.Errorf("correct directories of snapshot %s: %w", id, err)
	}
	c.note(id, needed)
	return nil
}

func (c *corrections) build(id, layer string, implied, below []string) (needed bool, err error) {
	tmp := c.path(id) + halfMade
	if err := os.RemoveAll(tmp); err != nil {
		return false, err
	}
	if err := os.Mkdir(tmp, 0o700); err != nil {
		return false, err
	}
	n, err := tree.Parents(tmp, layer, implied, below)
	if err != nil || n == 0 {
		return false, errors.Join(err, os.RemoveAll(tmp))
	}
	return true, os.Rename(tmp, c.path(id))
}

// remove takes the correction of a snapshot that is gone away.
func (c *corrections) remove(id string) error {
	if needed, known := c.state(id); known && !needed {
		c.forget(id)
		return nil
	}
	c.busy.Lock()
	defer c.busy.Unlock()
	c.forget(id)
	return os.RemoveAll(c.path(id))
}

// sweep removes those whose snapshot is not among keys, and what a crash left
// half made. The caller keeps snapshots from coming into being meanwhile.
func (c *corrections) sweep(keys map[string]string) error {
	c.busy.Lock()
	defer c.busy.Unlock()
	entries, err := os.ReadDir(c.dir)
	for _, e := range entries {
		if _, known := keys[e.Name()]; known || e.Name() == bootFile {
			continue
		}
		c.forget(e.Name())
		err = errors.Join(err, os.RemoveAll(c.path(e.Name())))
	}
	return err
}
