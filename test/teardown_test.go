package test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"dewpoint/testkit/registrytest"
)

// What a package's removal relies on: containers keep dewd on the machine, and without them nothing of it
// stays but files.
func TestTeardown(t *testing.T) {
	t.Parallel()
	reg := registrytest.New(t)
	img := reg.PushImage("app:1", appLayers(t, 0), appOptions())
	m := newMachine(t, reg).start()
	teardown := func(args ...string) (string, error) {
		out, err := exec.Command(filepath.Join(programs, "dewd"),
			append([]string{"teardown", "--root", m.root, "--state", m.state}, args...)...).CombinedOutput()
		return string(out), err
	}
	m.must("run", "-d", "--name", "web", "--net", "bridge", img.Ref, "sleep", "1h")
	if out, err := teardown("--check"); err == nil || !strings.Contains(out, "/web:") {
		t.Errorf("a container runs, and it may go: %v %s", err, out)
	}
	if out, err := teardown(); err == nil || !strings.Contains(out, "in use by a dewd") {
		t.Errorf("dewd runs, and it goes: %v %s", err, out)
	}
	m.stop()
	if out, err := teardown(); err == nil || !strings.Contains(out, "/web:") {
		t.Errorf("a container runs without dewd, and it goes: %v %s", err, out)
	}
	m.start().must("rm", "-f", "web")
	m.stop()
	if out, err := teardown(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if left := m.mounts(); len(left) > 0 {
		t.Errorf("mounts are left: %q", left)
	}
	if left := m.processes(); len(left) > 0 {
		for _, pid := range left {
			line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
			if len(line) > 0 { // else it has ended, and its parent has not looked yet
				t.Errorf("a process is left: %q", line)
			}
		}
	}
	if left := m.cgroups(""); len(left) > 0 {
		t.Errorf("cgroups are left: %q", left)
	}
	if _, err := os.Stat("/sys/class/net/" + m.bridge()); err == nil {
		t.Error("the bridge is left")
	}
}
