// Package shimtest builds the programs of package shimgroup for tests.
package shimtest

import (
	"fmt"
	"os/exec"
	"path/filepath"

	"dewpoint/internal/engine/shimgroup"
)

// Build builds the program in dir and returns its path. module is where the
// module's own directory is, seen from the test's.
func Build(dir, module string) (string, error) {
	program := filepath.Join(dir, shimgroup.Program)
	out, err := exec.Command(filepath.Join(module, "cmd", shimgroup.Program, "build"), program).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("build %s: %w\n%s", shimgroup.Program, err, out)
	}
	return program, nil
}
