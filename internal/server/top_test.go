package server

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"dewpoint/internal/engine"
)

// A container chooses its processes and their commands; cgroups below its own come and go.
func TestProcesses(t *testing.T) {
	cmd := exec.Command("sh", "-c", "read line", "\xff", strings.Repeat("x", 100_000))
	in, err := cmd.StdinPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	defer func() { in.Close(); _ = cmd.Wait() }()
	dir := t.TempDir()
	below := filepath.Join(dir, "below")
	if err := errors.Join(os.Mkdir(below, 0o700), os.Symlink("gone", filepath.Join(below, "cgroup.procs")),
		os.WriteFile(filepath.Join(dir, "cgroup.procs"), fmt.Appendln(nil, cmd.Process.Pid), 0o600)); err != nil {
		t.Fatal(err)
	}
	all, err := processes(dir)
	if err != nil || len(all) != 1 || len(all[0].Command) != maxCommand ||
		!strings.HasPrefix(all[0].Command, "sh -c read line ? xxx") {
		t.Errorf("processes %.100v, %v", all, err)
	}
	many := strings.Repeat(fmt.Sprintln(os.Getpid()), maxProcesses+1)
	if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(many), 0o600); err != nil {
		t.Fatal(err)
	}
	if all, err := processes(dir); err != nil || len(all) != maxProcesses {
		t.Errorf("%d processes, %v", len(all), err)
	}
	if _, err := processes(filepath.Join(dir, "none")); !errors.Is(err, engine.ErrNotRunning) {
		t.Errorf("of a cgroup that is gone: %v", err)
	}
}
