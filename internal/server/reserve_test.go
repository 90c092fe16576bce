package server

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"dewpoint/testkit"
)

// The reserve is given up on a full disk alone, and comes back when there is room.
func TestReserve(t *testing.T) {
	testkit.NeedRoot(t, "it mounts a small file system")
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=40m"); err != nil {
		t.Fatal(err)
	}
	defer unix.Unmount(dir, unix.MNT_DETACH)
	r := reserve{dir, slog.New(slog.DiscardHandler)}
	there := func() bool { _, err := os.Stat(r.path()); return err == nil }
	if r.keep(); !there() {
		t.Fatal("there is room, and nothing is kept")
	}
	if err := r.use(); err != nil || !there() {
		t.Errorf("with room: there is %v, %v", there(), err)
	}
	other := filepath.Join(dir, "other")
	err := os.WriteFile(other, make([]byte, 48<<20), 0o600)
	if !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("the disk is not full: %v", err)
	}
	if err := r.use(); err != nil || there() {
		t.Errorf("without room: there is %v, %v", there(), err)
	}
	if err := os.WriteFile(filepath.Join(dir, "needed"), make([]byte, reserveLeast), 0o600); err != nil {
		t.Error(err)
	}
	if err := r.use(); err != nil {
		t.Errorf("again: %v", err)
	}
	if r.keep(); there() {
		t.Error("it is there again without room")
	}
	if err := os.Remove(other); err != nil {
		t.Fatal(err)
	}
	if r.keep(); !there() {
		t.Error("with room again nothing is kept")
	}
	if err := r.fullAtStart(syscall.ENOSPC); !strings.Contains(err.Error(), dir) ||
		classify(err).Code != "disk_full" {
		t.Errorf("%v", err)
	}
}
