package profile

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"dewpoint/internal/engine/process"
)

// Clean removes what recordings of dead processes have left behind: their
// instances, and, by the journals in dir (Config.Dir), the read-ahead that
// they had switched off. Recordings that run are not touched.
func Clean(dir string) error {
	return errors.Join(cleanJournals(dirOf(dir)), cleanInstances())
}

func cleanJournals(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range entries {
		if name, ok := strings.CutSuffix(e.Name(), journalSuffix); ok && dead(name) {
			errs = append(errs, replay(filepath.Join(dir, e.Name())))
		}
	}
	return errors.Join(errs...)
}

// cleanInstances is content where there is no tracing: nothing can be left.
func cleanInstances() error {
	t, err := openTracing()
	if errors.Is(err, ErrUnsupported) {
		return nil
	}
	if err != nil {
		return err
	}
	defer t.Close()
	entries, err := os.ReadDir(filepath.Join(t.path, "instances"))
	if gone(err) {
		return nil
	}
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range entries {
		if !dead(e.Name()) {
			continue
		}
		// The kernel refuses to remove what has readers, such as the
		// instance of a process that is not visible from here.
		err := unix.Rmdir(filepath.Join(t.path, "instances", e.Name()))
		if err != unix.EBUSY && !gone(err) && err != nil {
			errs = append(errs, &os.PathError{Op: "remove the instance of tracing", Path: e.Name(), Err: err})
		}
	}
	return errors.Join(errs...)
}

// gone reports whether err says that somebody has removed a thing: another process that
// cleans at the same time, or the kernel, which has no device any more for what a name still leads to.
func gone(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV)
}

// dead reports whether name is one of an instance whose process is gone.
func dead(name string) bool {
	var pid int
	var start, n uint64
	rest, ok := strings.CutPrefix(name, prefix)
	if !ok {
		return false
	}
	if _, err := fmt.Sscanf(rest, "%d-%d-%d", &pid, &start, &n); err != nil {
		return false
	}
	now, err := identity(pid)
	if err != nil {
		return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH)
	}
	return now != fmt.Sprintf("%d-%d", pid, start)
}

// identity names a process: its number, and when it started in clock ticks
// since boot.
func identity(pid int) (string, error) {
	at, err := process.Started(pid)
	return fmt.Sprintf("%d-%d", pid, at), err
}
