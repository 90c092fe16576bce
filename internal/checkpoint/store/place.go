package store

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"dewpoint/internal/pop"
)

// place is where checkpoints lie: this node's directory, and the store that the PoP's nodes share. Every part
// of a Store has it.
type place struct {
	cfg Config
	// change is held while files appear in the directory or go, so that what one part writes of a checkpoint
	// does not outlive what another removes. The parts' own locks guard memory, and are taken within it.
	change sync.Mutex
}

// pop is the PoP's store, nil while there is none.
func (pl *place) pop() *pop.Store {
	if pl.cfg.PoP == nil {
		return nil
	}
	return pl.cfg.PoP()
}

func removed(err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

const (
	dataEnd   = ".data"
	recordEnd = ".json"
	notesEnd  = ".notes"
	orderEnd  = ".order"
	tmpEnd    = ".tmp"
	scratch   = "scratch-"
	cacheDir  = "cache"
)

func (pl *place) path(name string) string { return filepath.Join(pl.cfg.Dir, name) }

// readFile reads a small file of this store's.
func readFile(path string) ([]byte, error) {
	fi, err := os.Stat(path)
	if err == nil && fi.Size() > maxRecord {
		err = fmt.Errorf("%w: %d bytes", ErrDamaged, fi.Size())
	}
	if err != nil {
		return nil, err
	}
	return os.ReadFile(path)
}
