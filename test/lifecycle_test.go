package test

import (
	"net/http"
	"strings"
	"testing"

	"dewpoint/testkit/registrytest"
)

// A container that has ended keeps its files, its output, its name and its port, and starts anew with them.
func TestStartStopKill(t *testing.T) {
	t.Parallel()
	reg := registrytest.New(t)
	img := reg.PushImage("app:1", appLayers(t, 0), appOptions())
	m := newMachine(t, reg).start()
	port := freePort(t)
	m.must("run", "-d", "--name", "web", "-p", port+":80", "--ready", "http:80/", img.Ref, "serve", "80")
	m.must("exec", "web", "/app", "append", "/etc/motd", "and more\n")
	served := 1
	serves := func() {
		t.Helper()
		m.eventually("it serves", func() bool { return answers("http://127.0.0.1:" + port + "/") })
		if out := get(t, "http://127.0.0.1:"+port+"/cat?/etc/motd"); out != "above\nand more\n" {
			t.Errorf("its files: %q", out)
		}
		if out := m.must("logs", "web"); strings.Count(out, "serving") != served {
			t.Errorf("after %d starts its output is %q", served, out)
		}
	}
	serves()
	fails := func(code int, args ...string) {
		t.Helper()
		if r := m.dew(args...); r.code != code {
			t.Errorf("dew %v: exit %d, want %d: %s", args, r.code, code, r.err)
		}
	}
	ended := func(status string) {
		t.Helper()
		if out := m.must("wait", "web"); out != status+"\n" {
			t.Errorf("wait gave %q, want %s", out, status)
		}
		if out := m.must("ps", "-a"); !strings.Contains(out, "exited ("+status+")") {
			t.Errorf("it has not ended with %s:\n%s", status, out)
		}
		fails(10, "kill", "web")
	}
	const terminated = "2" // as Go ends the first process of a container
	m.must("stop", "-t", "30s", "web")
	ended(terminated)
	m.must("start", "web")
	m.must("start", "web") // it runs: nothing is done
	served++
	serves()

	m.must("restart", "web")
	served++
	serves()
	m.must("kill", "web")
	ended("137")
	m.kill()
	m.start()
	m.must("restart", "--time", "1", "web") // one that has ended is started
	served++
	serves()
	m.must("kill", "--signal", "SIGTERM", "web")
	ended(terminated)

	m.reboot()
	reg.Close()
	m.start()
	m.must("start", "web")
	served++
	serves()
	fails(2, "kill", "-s", "HANGUP", "web")
	fails(4, "start", "nobody")
	fails(4, "restart", "nobody")
	fails(4, "kill", "nobody")
	fails(4, "wait", "nobody")
	m.must("rm", "-f", "web")
	m.must("rmi", img.Ref)
	m.must("prune")
	checkNothingLeft(t, m)
}

// answers reports whether something serves at url.
func answers(url string) bool {
	r, err := http.Get(url)
	if err != nil {
		return false
	}
	r.Body.Close()
	return r.StatusCode == http.StatusOK
}
