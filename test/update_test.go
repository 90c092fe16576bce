package test

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"dewpoint/internal/spec"
	"dewpoint/testkit/registrytest"

	"golang.org/x/sys/unix"
)

// limitOf reads a file of the cgroup of a container that runs, as cgroup version 2 calls it, or version 1.
func (m *machine) limitOf(name, controller, v2, v1 string) string {
	m.t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", m.container(name).PID))
	if err != nil {
		m.t.Fatal(err)
	}
	for _, l := range strings.Split(string(b), "\n") {
		f := strings.SplitN(l, ":", 3)
		if len(f) != 3 {
			continue
		}
		path := "/sys/fs/cgroup" + f[2] + "/" + v2
		if f[0] != "0" {
			path = "/sys/fs/cgroup/" + controller + f[2] + "/" + v1
		}
		if b, err := os.ReadFile(path); err == nil && (f[0] == "0" || strings.Contains(f[1], controller)) {
			return strings.TrimSpace(string(b))
		}
	}
	return ""
}

// Limits and a policy change while a container runs, and are there when it is started again.
func TestUpdate(t *testing.T) {
	t.Parallel()
	reg := registrytest.New(t)
	img := reg.PushImage("app:1", appLayers(t, 0), appOptions())
	m := newMachine(t, reg).start()
	m.must("run", "-d", "--name", "web", "--net", "none", "-m", "128m", "--pids-limit", "100", img.Ref, "sleep", "24h")
	is := func(memory, pids, policy string) {
		t.Helper()
		if got := m.limitOf("web", "memory", "memory.max", "memory.limit_in_bytes"); got != memory &&
			(memory != "max" || len(got) < 18) { // version 1 has a large number
			t.Errorf("memory is %s, want %s", got, memory)
		}
		if got := m.limitOf("web", "pids", "pids.max", "pids.max"); got != pids {
			t.Errorf("processes are %s, want %s", got, pids)
		}
		if got := m.container("web").Restart; got != policy {
			t.Errorf("the policy is %q, want %q", got, policy)
		}
	}
	is("134217728", "100", "")
	m.must("update", "-m", "64m", "--pids-limit", "50", "--cpus", "0.5", "--restart", "always", "web")
	is("67108864", "50", "always")
	if out := m.must("inspect", "web"); !strings.Contains(out, "cpus: 0.5\n") {
		t.Errorf("inspect says\n%s", out)
	}
	if err := unix.Kill(m.container("web").PID, unix.SIGKILL); err != nil { // no person's doing
		t.Fatal(err)
	}
	m.becomes("web", spec.StatusRunning, 1)
	is("67108864", "50", "always")
	m.must("update", "-m", "0", "--pids-limit", "0", "--restart", "no", "web")
	is("max", "max", "")
	m.must("stop", "-t", "0", "web")
	m.must("update", "-m", "32m", "--restart", "unless-stopped", "web") // it is not started for that
	m.must("start", "web")
	is("33554432", "max", "unless-stopped")
	m.must("rm", "-f", "web")
}
