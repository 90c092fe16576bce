package journal

import (
	"errors"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"dewpoint/internal/durable"
	"dewpoint/testkit"

	"golang.org/x/sys/unix"
)

// failOnce fails the sync of path that follows number skip, as Linux tells of lost writes: once. It gives the
// file that had the journal's name then.
func failOnce(t *testing.T, path, file string, skip int) func() os.FileInfo {
	var mu sync.Mutex
	var lost os.FileInfo
	durable.FailSync(func(p string) error {
		mu.Lock()
		defer mu.Unlock()
		if p != path || lost != nil {
			return nil
		}
		if skip--; skip >= 0 {
			return nil
		}
		fi, err := os.Stat(file)
		if err != nil {
			return nil
		}
		lost = fi
		return unix.EIO
	})
	t.Cleanup(func() { durable.FailSync(nil) })
	return func() os.FileInfo {
		mu.Lock()
		defer mu.Unlock()
		return lost
	}
}

// renewed reports whether the journal is in another file than the one that was lost.
func renewed(path string, lost os.FileInfo) bool {
	fi, err := os.Stat(path)
	return err == nil && lost != nil && !os.SameFile(fi, lost)
}

// Close does not say that all is durable when a sync has failed before: it writes the file anew.
func TestCloseAfterFailedSync(t *testing.T) {
	cfg := inDir(t)
	j := open(t, cfg)
	lost := failOnce(t, cfg.Path, cfg.Path, 0)
	seq, err := j.Accept([]Entry{entry("a", "")})
	if err != nil {
		t.Fatal(err)
	}
	if err := j.Durable(t.Context(), seq); !errors.Is(err, unix.EIO) {
		t.Fatalf("durable with %v", err)
	}
	if err := j.Close(); err != nil {
		t.Error(err)
	}
	if !renewed(cfg.Path, lost()) {
		t.Error("what is said to be durable is in the file that the disk has lost")
	}
	if got := ids(open(t, cfg)); got != "a" {
		t.Errorf("open: %q", got)
	}
}

// A sync that fails as the journal is closed is no end either, and one that goes on failing is told.
func TestFailedSyncOfClose(t *testing.T) {
	cfg := inDir(t)
	j := open(t, cfg)
	if _, err := j.Accept([]Entry{entry("a", "")}); err != nil {
		t.Fatal(err)
	}
	lost := failOnce(t, cfg.Path, cfg.Path, 0)
	if err := j.Close(); err != nil || !renewed(cfg.Path, lost()) {
		t.Errorf("closed with %v, in the same file", err)
	}

	j = open(t, cfg)
	durable.FailSync(func(string) error { return unix.EIO })
	if _, err := j.Accept([]Entry{entry("b", "")}); err != nil {
		t.Fatal(err)
	}
	if err := j.Close(); !errors.Is(err, unix.EIO) {
		t.Errorf("closed with %v", err)
	}
}

// A sync that has failed is tried again, in another file, though nobody writes.
func TestFailedSyncIsTriedAgain(t *testing.T) {
	cfg := inDir(t)
	j := open(t, cfg)
	lost := failOnce(t, cfg.Path, cfg.Path, 0)
	seq, err := j.Accept([]Entry{entry("a", "")})
	if err != nil {
		t.Fatal(err)
	}
	if err := j.Durable(t.Context(), seq); !errors.Is(err, unix.EIO) {
		t.Fatalf("durable with %v", err)
	}
	testkit.Eventually(t, "another file", func() bool { return renewed(cfg.Path, lost()) })
	testkit.Eventually(t, "durable", func() bool { return j.Durable(t.Context(), seq) == nil })
}

// What is written after the file was replaced, and the sync of its directory has failed, is in the file that
// has the journal's name.
func TestFailedSyncOfDirectory(t *testing.T) {
	cfg := inDir(t)
	j := open(t, cfg)
	accept(t, j, entry("a", ""))
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(cfg.Path, os.O_WRONLY|os.O_APPEND, 0)
	if err == nil {
		_, err = f.WriteString("torn\ntorn\n") // it is written anew when it is opened
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		t.Fatal(err)
	}
	lost := failOnce(t, filepath.Dir(cfg.Path), cfg.Path, 1) // the first one is not that of the new file
	j = open(t, cfg)
	if lost() == nil {
		t.Fatal("no sync of the directory has failed")
	}
	accept(t, j, entry("b", ""))
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	if got := ids(open(t, cfg)); got != "a b" {
		t.Errorf("open: %q", got)
	}
}
