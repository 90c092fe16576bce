package cgroup

import (
	"bytes"
	"os"
	"path/filepath"
)

// Freezer is the control over a cgroup's freezer.
type Freezer struct {
	control, state        string // files
	freeze, thaw, reached string // what to write, and what tells that all are frozen
}

// FreezerOf is that of a cgroup. An error of its methods is os.ErrNotExist if there is no such cgroup.
func FreezerOf(cgroup string) Freezer {
	if Unified() {
		return freezerIn(filepath.Join(mounts, cgroup))
	}
	f := filepath.Join(mounts, "freezer", cgroup, "freezer.state")
	return Freezer{f, f, "FROZEN", "THAWED", "FROZEN"}
}

// freezerIn is that of a directory of cgroup version 2.
func freezerIn(dir string) Freezer {
	return Freezer{dir + "/cgroup.freeze", dir + "/cgroup.events", "1", "0", "frozen 1"}
}

// Set asks for all processes to be frozen, or to run on; it takes them a moment.
func (f Freezer) Set(frozen bool) error {
	word := f.thaw
	if frozen {
		word = f.freeze
	}
	return os.WriteFile(f.control, []byte(word), 0)
}

// Frozen says whether all are.
func (f Freezer) Frozen() (bool, error) {
	b, err := os.ReadFile(f.state)
	return bytes.Contains(b, []byte(f.reached)), err
}
