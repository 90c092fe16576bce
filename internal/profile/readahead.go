package profile

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
)

// off is the value of read_ahead_kb while a mount is recorded.
const off = "0"

func readAheadFile(bdi string) string { return "/sys/class/bdi/" + bdi + "/read_ahead_kb" }

// held are the mounts whose read-ahead is off, for all recordings of this
// process: the last one of them restores it.
var held = struct {
	sync.Mutex
	by map[string]*hold
}{by: map[string]*hold{}}

type hold struct {
	users int
	old   string
}

// lowered is what one recording has switched off. It is written to a journal
// first, from which Clean restores what a killed process could not.
type lowered struct {
	journal *os.File
	names   map[string]bool
}

const journalSuffix = ".readahead"

func newLowered(dir, name string) (*lowered, error) {
	f, err := os.OpenFile(filepath.Join(dir, name+journalSuffix), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	return &lowered{f, map[string]bool{}}, nil
}

// add switches the read-ahead of bdi off.
func (l *lowered) add(bdi string) error {
	if l.names[bdi] {
		return nil
	}
	held.Lock()
	defer held.Unlock()
	h := held.by[bdi]
	if h == nil {
		b, err := os.ReadFile(readAheadFile(bdi))
		if err != nil {
			return err
		}
		h = &hold{old: strings.TrimSpace(string(b))}
	}
	if _, err := fmt.Fprintln(l.journal, bdi, h.old); err != nil {
		return err
	}
	if h.users == 0 {
		if err := os.WriteFile(readAheadFile(bdi), []byte(off), 0); err != nil {
			return err
		}
		held.by[bdi] = h
	}
	h.users++
	l.names[bdi] = true
	return nil
}

// restore gives up the named ones.
func (l *lowered) restore(names []string) error {
	held.Lock()
	defer held.Unlock()
	var errs []error
	for _, bdi := range names {
		if !l.names[bdi] {
			continue
		}
		delete(l.names, bdi)
		h := held.by[bdi]
		if h.users--; h.users == 0 {
			delete(held.by, bdi)
			errs = append(errs, setBack(bdi, h.old))
		}
	}
	return errors.Join(errs...)
}

// setBack restores what is still as a recording has set it. A mount that is
// gone needs nothing.
func setBack(bdi, old string) error {
	b, err := os.ReadFile(readAheadFile(bdi))
	if err == nil && strings.TrimSpace(string(b)) == off {
		err = os.WriteFile(readAheadFile(bdi), []byte(old), 0)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// Close restores everything and removes the journal, unless something could
// not be restored.
func (l *lowered) Close() error {
	var names []string
	for n := range l.names {
		names = append(names, n)
	}
	err := l.restore(names)
	l.journal.Close()
	if err == nil {
		err = os.Remove(l.journal.Name())
	}
	return err
}

// replay restores what the journal of a dead process names, and removes it.
func replay(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	var errs []error
	for s := bufio.NewScanner(f); s.Scan(); {
		bdi, old, ok := strings.Cut(s.Text(), " ")
		if ok && bdi != "" && !strings.Contains(bdi, "/") && bdi != ".." {
			errs = append(errs, replayOne(bdi, old))
		}
	}
	return errors.Join(append(errs, os.Remove(path))...)
}

func replayOne(bdi, old string) error {
	held.Lock()
	defer held.Unlock()
	if h := held.by[bdi]; h != nil { // recorded again since: let that one restore it
		h.old = old
		return nil
	}
	return setBack(bdi, old)
}
