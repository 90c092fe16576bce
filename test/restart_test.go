package test

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"dewpoint/internal/spec"
	"dewpoint/testkit/registrytest"

	"golang.org/x/sys/unix"
)

// container is what the node says of one.
func (m *machine) container(name string) spec.Container {
	m.t.Helper()
	var i struct{ Container spec.Container }
	if err := json.Unmarshal([]byte(m.must("--json", "inspect", name)), &i); err != nil {
		m.t.Fatal(err)
	}
	return i.Container
}

// becomes waits until a container has a status, after so many restarts.
func (m *machine) becomes(name, status string, restarts int) {
	m.t.Helper()
	var c spec.Container
	m.eventually(name+" is "+status, func() bool {
		c = m.container(name)
		return c.Status == status && c.Restarts == restarts
	})
}

// crash ends a test program that serves at url.
func crash(url string) {
	if r, err := http.Get(url + "exit?3"); err == nil {
		r.Body.Close()
	}
}

// Containers stay up as their policies say: when they end, when dewd is killed, and when the machine starts
// again and no registry is there.
func TestContainersStayUp(t *testing.T) {
	t.Parallel()
	reg := registrytest.New(t)
	img := reg.PushImage("app:1", appLayers(t, 0), appOptions())
	m := newMachine(t, reg).start()
	port := freePort(t)
	url := "http://127.0.0.1:" + port + "/"
	m.must("run", "-d", "--name", "web", "--restart", "unless-stopped", "-p", port+":80", "--ready", "http:80/",
		img.Ref, "serve", "80")
	for name, policy := range map[string]string{"always": "always", "stopped": "unless-stopped"} {
		m.must("run", "-d", "--name", name, "--restart", policy, img.Ref, "sleep", "24h")
	}
	m.must("run", "-d", "--name", "job", "--restart", "on-failure", img.Ref, "exit", "0")
	m.must("run", "-d", "--name", "few", "--restart", "on-failure:2", img.Ref, "exit", "4")
	m.must("exec", "web", "/app", "append", "/etc/motd", "and more\n")
	serves := func() {
		t.Helper()
		m.eventually("it serves", func() bool { return answers(url) })
		if out := get(t, url+"cat?/etc/motd"); out != "above\nand more\n" {
			t.Errorf("its files: %q", out)
		}
	}
	crash(url)
	m.becomes("web", spec.StatusRunning, 1)
	serves()
	m.becomes("few", spec.StatusExited, 2)
	m.becomes("job", spec.StatusExited, 0)
	m.must("stop", "-t", "0", "always", "stopped")
	m.becomes("always", spec.StatusExited, 0)
	m.becomes("stopped", spec.StatusExited, 0)

	m.kill()
	crash(url)
	m.start()
	m.becomes("web", spec.StatusRunning, 2)
	serves()
	m.becomes("always", spec.StatusRunning, 0)

	for range 2 {
		m.reboot()
		reg.Close()
		m.start()
		m.becomes("always", spec.StatusRunning, 0)
		m.becomes("web", spec.StatusRunning, 2) // a start of the machine is not the container's doing
		serves()
	}
	for name, restarts := range map[string]int{"stopped": 0, "job": 0, "few": 2} {
		if c := m.container(name); c.Status != spec.StatusExited || c.Restarts != restarts {
			t.Errorf("after a reboot %s is %+v", name, c)
		}
	}
	m.must("start", "stopped")
	m.must("restart", "-t", "0", "web")
	m.becomes("web", spec.StatusRunning, 0)
	serves()
	m.must("rm", "-f", "web", "always", "stopped", "job", "few")
}

// One that ends again and again is seen to, and is ended by a stop, or by rm -f.
func TestCrashLoopIsSeen(t *testing.T) {
	t.Parallel()
	reg := registrytest.New(t)
	img := reg.PushImage("app:1", appLayers(t, 0), appOptions())
	m := newMachine(t, reg).start()
	m.must("run", "-d", "--name", "loop", "--restart", "always", img.Ref, "exit", "3")
	m.must("run", "-d", "--name", "other", "--restart", "always", img.Ref, "exit", "3")
	for range 2 { // also by the next dewd
		m.eventually("its crash loop is seen", func() bool {
			c := m.container("loop")
			return c.CrashLoop && c.Status == spec.StatusRestarting && c.ExitCode == 3 && !c.NextStart.IsZero()
		})
		if out := m.must("ps"); !strings.Contains(out, "restarting (3) in ") ||
			!strings.Contains(out, "s, crash loop, ") {
			t.Errorf("ps says\n%s", out)
		}
		m.kill()
		m.start()
	}
	m.must("stop", "loop")
	if c := m.container("loop"); c.Status != spec.StatusExited || c.CrashLoop {
		t.Errorf("it is stopped: %+v", c)
	}
	m.must("rm", "loop")
	m.must("rm", "-f", "other")

	// The policy of one that does not become ready does not hold.
	for name, flags := range map[string][]string{"ended": {"exit", "1"}, "late": {"sleep", "24h"}} {
		r := m.dew(append([]string{"run", "-d", "--name", name, "--restart", "always", "--ready", "log:never",
			"--ready-timeout", "5s", img.Ref}, flags...)...)
		if r.code != 9 {
			t.Errorf("%s: exit %d: %s", name, r.code, r.err)
		}
		m.becomes(name, spec.StatusExited, 0)
	}
	m.kill()
	m.start()
	m.must("start", "ended") // from here on it does
	m.eventually("it is started again", func() bool { return m.container("ended").Restarts > 1 })
	m.becomes("late", spec.StatusExited, 0)
	if r := m.dew("run", "--rm", "--restart", "always", img.Ref, "exit", "0"); r.code != 2 {
		t.Errorf("--rm with --restart: exit %d, %s", r.code, r.err)
	}
	m.must("rm", "-f", "ended", "late")
	m.must("rmi", img.Ref)
	m.must("prune")
	checkNothingLeft(t, m)
}

// A container that was restored starts again by its command.
func TestRestoredStartsAgain(t *testing.T) {
	t.Parallel()
	reg := registrytest.New(t)
	img := reg.PushImage("app:1", appLayers(t, 0), appOptions("slow", "80"))
	m := newMachine(t, reg).start()
	_, url := m.boot(t, "first", img.Ref, "--restore", "never")
	first := get(t, url+"/born")
	m.must("checkpoint", "first")
	m.must("rm", "-f", "first")
	rec, url := m.boot(t, "clone", img.Ref, "--restore", "always", "--restart", "always")
	if born := get(t, url+"/born"); rec.Way.Start != "restore" || born != first {
		t.Fatalf("it was not restored: %+v", rec.Way)
	}
	if err := unix.Kill(m.container("clone").PID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	m.becomes("clone", spec.StatusRunning, 1)
	m.eventually("it serves", func() bool { return answers(url + "/born") })
	if born := get(t, url+"/born"); born == first {
		t.Error("it was restored again")
	}
	m.must("rm", "-f", "clone")
}
