package profile

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"dewpoint/internal/layer/bdi"
)

// off is what is read ahead while a mount is recorded, in KiB.
const off = 0

// held are the mounts whose read-ahead is off, for all recordings of this
// process: the last one of them restores it.
var held = struct {
	sync.Mutex
	by map[string]*hold
}{by: map[string]*hold{}}

type hold struct {
	users int
	old   int
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

// add switches the read-ahead of a backing device off.
func (l *lowered) add(name string) error {
	if l.names[name] {
		return nil
	}
	held.Lock()
	defer held.Unlock()
	h := held.by[name]
	if h == nil {
		old, err := bdi.ReadAhead(name)
		if err != nil {
			return err
		}
		h = &hold{old: old}
	}
	if _, err := fmt.Fprintln(l.journal, name, h.old); err != nil {
		return err
	}
	if h.users == 0 {
		if err := bdi.SetReadAhead(name, off); err != nil {
			return err
		}
		held.by[name] = h
	}
	h.users++
	l.names[name] = true
	return nil
}

// restore gives up the named ones.
func (l *lowered) restore(names []string) error {
	held.Lock()
	defer held.Unlock()
	var errs []error
	for _, name := range names {
		if !l.names[name] {
			continue
		}
		delete(l.names, name)
		h := held.by[name]
		if h.users--; h.users == 0 {
			delete(held.by, name)
			errs = append(errs, setBack(name, h.old))
		}
	}
	return errors.Join(errs...)
}

// setBack restores what is still as a recording has set it. A mount that is
// gone needs nothing.
func setBack(name string, old int) error {
	now, err := bdi.ReadAhead(name)
	if err == nil && now == off {
		err = bdi.SetReadAhead(name, old)
	}
	if gone(err) {
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
	if gone(err) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	var errs []error
	for s := bufio.NewScanner(f); s.Scan(); {
		name, rest, _ := strings.Cut(s.Text(), " ")
		if old, err := strconv.Atoi(rest); err == nil { // else the line was cut
			errs = append(errs, replayOne(name, old))
		}
	}
	if err := os.Remove(path); !gone(err) {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func replayOne(name string, old int) error {
	held.Lock()
	defer held.Unlock()
	if h := held.by[name]; h != nil { // recorded again since: let that one restore it
		h.old = old
		return nil
	}
	return setBack(name, old)
}
