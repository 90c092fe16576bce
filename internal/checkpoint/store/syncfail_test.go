package store_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"dewpoint/internal/checkpoint/store"
	"dewpoint/internal/durable"
	"dewpoint/internal/pop"

	"golang.org/x/sys/unix"
)

// Whichever fsync fails while a checkpoint is put, once: it is not there, nothing of it is left, and it can
// be put again.
func TestFailedSyncFailsTheCheckpoint(t *testing.T) {
	defer durable.FailSync(nil)
	packer := open(t, store.Config{Dir: t.TempDir()})
	r, packed := sample(t, packer, "text")
	data, err := os.ReadFile(packed)
	if err != nil {
		t.Fatal(err)
	}
	for at := int32(1); ; at++ {
		root := filepath.Join(t.TempDir(), "store")
		// what this node makes is pending, durably, before it is there
		s := open(t, store.Config{Dir: root, PoP: func() *pop.Store { return nil }})
		put := func() error {
			file := filepath.Join(root, "pack-1.tmp")
			if err := os.WriteFile(file, data, 0o600); err != nil {
				t.Fatal(err)
			}
			_, err := s.Put(t.Context(), r, file)
			return err
		}
		var n atomic.Int32
		durable.FailSync(func(string) error {
			if n.Add(1) == at {
				return unix.EIO
			}
			return nil
		})
		err := put()
		durable.FailSync(nil)
		if n.Load() < at {
			if err != nil || at < 7 {
				t.Errorf("%d fsyncs: %v", at-1, err)
			}
			return
		}
		if !errors.Is(err, unix.EIO) {
			t.Errorf("fsync %d failed: %v", at, err)
		}
		if all, err := s.List(t.Context(), ""); err != nil || len(all) > 0 {
			t.Errorf("fsync %d failed: %v are there: %v", at, ids(all), err)
		}
		for _, name := range files(t, root) {
			if !strings.HasPrefix(name, "cache") {
				t.Errorf("fsync %d failed: %s is left", at, name)
			}
		}
		if err := put(); err != nil {
			t.Errorf("after fsync %d failed: %v", at, err)
		}
		all, err := open(t, store.Config{Dir: root}).List(t.Context(), "")
		if err != nil || len(all) != 1 {
			t.Errorf("after fsync %d failed: %v: %v", at, ids(all), err)
		}
	}
}
