package test

import (
	"strings"
	"testing"
	"time"

	"dewpoint/internal/spec"
	"dewpoint/testkit/registrytest"
)

// fares waits until a container has a health, after so many restarts.
func (m *machine) fares(name, health string, restarts int) {
	m.t.Helper()
	var c spec.Container
	m.eventually(name+" is "+health, func() bool {
		c = m.container(name)
		return c.Status == spec.StatusRunning && c.Health == health && c.Restarts == restarts
	})
}

// A container is checked as its image says while it runs. With a policy it is started again when it is not
// well, without one it runs on. The next dewd knows how it was, and checks on.
func TestHealth(t *testing.T) {
	t.Parallel()
	reg := registrytest.New(t)
	o := appOptions()
	o.Health = spec.Health{Test: []string{"CMD", "/app", "once", "/once", "0s"}, Interval: time.Hour}
	img := reg.PushImage("app:1", appLayers(t, 0), o)
	m := newMachine(t, reg).start()
	// What the checks look for is a file of the image; whoever moves it makes the container ill.
	check := []string{"--health-cmd", `["/app","chmod","/etc/motd","644"]`, "--health-interval", "200ms", "--health-retries",
		"2", "--net", "none"}
	run := func(name string, flags ...string) {
		t.Helper()
		m.must(append(append([]string{"run", "-d", "--name", name}, flags...), img.Ref, "sleep", "24h")...)
	}
	run("alone", check...)
	run("up", append(check, "--restart", "on-failure")...)
	run("image", "--health-interval", "300ms", "--net", "none")
	run("none", "--no-healthcheck", "--net", "none")
	for _, name := range []string{"alone", "up", "image"} {
		m.fares(name, spec.HealthHealthy, 0)
	}
	if c := m.container("none"); c.Health != "" {
		t.Errorf("it is not to be checked: %+v", c)
	}
	if out := m.must("ps"); strings.Count(out, "running, healthy ") != 3 {
		t.Errorf("ps says\n%s", out)
	}
	m.must("exec", "alone", "/app", "rename", "/etc/motd", "/etc/gone")
	m.fares("alone", spec.HealthUnhealthy, 0)
	if c := m.container("alone"); !strings.Contains(c.HealthError, "status 1: ") {
		t.Errorf("why: %q", c.HealthError)
	}
	m.kill()
	m.start()
	m.fares("alone", spec.HealthUnhealthy, 0)
	m.must("exec", "alone", "/app", "rename", "/etc/gone", "/etc/motd")
	m.fares("alone", spec.HealthHealthy, 0)

	// It is ill until it is started again, by a policy under which it would stay down if it had ended well.
	m.must("exec", "up", "/app", "rename", "/etc/motd", "/etc/gone")
	m.eventually("it is started again", func() bool { return m.container("up").Restarts > 0 })
	m.eventually("it is made well", func() bool { // the process may end before it has told its status
		_ = m.dew("exec", "up", "/app", "rename", "/etc/gone", "/etc/motd")
		return m.container("up").Health == spec.HealthHealthy
	})

	m.must("restart", "-t", "0", "alone")
	m.fares("alone", spec.HealthHealthy, 0)
	m.must("stop", "-t", "0", "up")
	if c := m.container("up"); c.Status != spec.StatusExited || c.Health != "" {
		t.Errorf("it is stopped: %+v", c)
	}
	m.must("rm", "-f", "alone", "up", "image", "none")
}
