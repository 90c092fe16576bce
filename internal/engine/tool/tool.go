// Package tool finds the programs of the machine that the engine executes.
package tool

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
)

// ErrMissing says that a program the engine needs is not installed.
var ErrMissing = errors.New("program is missing")

// Find looks beside this program, then in PATH; "" if it is in neither.
func Find(configured, name string) string {
	if configured != "" {
		name = configured
	} else if self, err := os.Executable(); err == nil {
		if p := filepath.Join(filepath.Dir(self), name); Executable(p) {
			return p
		}
	}
	p, err := exec.LookPath(name)
	if err != nil {
		return ""
	}
	if p, err = filepath.Abs(p); err != nil {
		return ""
	}
	return p
}

// Executable says whether there is a file that may be executed.
func Executable(path string) bool {
	st, err := os.Stat(path)
	return err == nil && st.Mode().IsRegular() && st.Mode()&0o111 != 0
}
