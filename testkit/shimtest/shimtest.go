// Package shimtest builds the programs of package shimgroup for tests.
package shimtest

import (
	"fmt"
	"os"
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

// BuildOwn builds our own shim in dir, where the program is to find it beside itself.
func BuildOwn(dir, module string) error {
	cmd := exec.Command("go", "build", "-ldflags=-s -w", "-o", dir+"/", "./cmd/"+shimgroup.Own)
	cmd.Dir, cmd.Env = module, append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build %s: %w\n%s", shimgroup.Own, err, out)
	}
	return nil
}
