package durable_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"dewpoint/internal/durable"

	"golang.org/x/sys/unix"
)

// What an fsync fails of is not put in place: a startup pack, a record.
func TestFailedSyncLeavesWhatWas(t *testing.T) {
	defer durable.FailSync(nil)
	dir := t.TempDir()
	path := filepath.Join(dir, "file")
	if err := durable.WriteFile(path, []byte("old"), 0o600); err != nil {
		t.Fatal(err)
	}
	failed := false
	durable.FailSync(func(string) error {
		if failed {
			return nil
		}
		failed = true
		return unix.EIO
	})
	if err := durable.WriteFile(path, []byte("new"), 0o600); !errors.Is(err, unix.EIO) {
		t.Errorf("written with %v", err)
	}
	if b, err := os.ReadFile(path); err != nil || string(b) != "old" {
		t.Errorf("%q: %v", b, err)
	}
	if left, _ := os.ReadDir(dir); len(left) != 1 {
		t.Errorf("left: %v", left)
	}
	if err := durable.WriteFile(path, []byte("new"), 0o600); err != nil {
		t.Error(err)
	}
}
