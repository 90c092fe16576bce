//go:build dmtcp

package test

import (
	"encoding/json"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"dewpoint/internal/spec"
	"dewpoint/testkit"
	"dewpoint/testkit/registrytest"
)

// pythonApp is the test program in a language whose programs are linked dynamically. It takes a second to
// start.
const pythonApp = `
import http.server, os, socket, sys, time
time.sleep(1)
born = repr(time.time())
open("/state", "w").write(born)
count = 0
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global count
        count += 1
        if self.path == "/exit":
            os._exit(7)
        body = {"/born": born, "/host": socket.gethostname(), "/count": str(count), "/state": open("/state").read()}.get(self.path, "ok")
        print("asked for", self.path, flush=True)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body.encode())
    def log_message(self, *a):
        pass
http.server.HTTPServer(("", int(sys.argv[1]) if len(sys.argv) > 1 else 80), Handler).serve_forever()
`

// pushPython pushes an image that sees the host's programs at /usr.
func pushPython(reg *registrytest.Server) registrytest.Pushed {
	files := []registrytest.File{
		{Name: "etc/"}, {Name: "dev/"}, {Name: "usr/"}, {Name: "tmp/", Mode: 0o1777},
		{Name: "app.py", Body: pythonApp},
	}
	for _, dir := range []string{"bin", "sbin", "lib", "lib64"} {
		files = append(files, registrytest.File{Name: dir, Link: "usr/" + dir})
	}
	config := ocispec.ImageConfig{Entrypoint: []string{"/usr/bin/python3", "/app.py"},
		Env: []string{"PATH=/usr/bin:/usr/sbin"}}
	return reg.PushImage("team/python:1", []registrytest.Layer{{Tar: registrytest.Tar(files...)}},
		registrytest.Options{Config: config})
}

// awaitCheckpoint waits for the one that is being made.
func (m *machine) awaitCheckpoint(t *testing.T) spec.Checkpoint {
	t.Helper()
	var all []spec.Checkpoint
	testkit.Eventually(t, "a checkpoint is made", func() bool {
		all = m.checkpoints(t)
		return len(all) == 1
	})
	return all[0]
}

// Where CRIU does not work, DMTCP saves what was started for it, and restores it.
func TestCheckpointByDMTCP(t *testing.T) {
	if _, err := exec.LookPath("dmtcp_launch"); err != nil {
		t.Fatal(err)
	}
	reg := registrytest.New(t)
	img := pushPython(reg)
	m := newMachine(t, reg)
	whole := m.config
	m.config += "[checkpoint]\ncriu = \"/bin/true\"\n"
	m.start()
	usr := []string{"-v", "/usr:/usr:ro"}
	rec, url := m.boot(t, "first", img.Ref, append(usr, "--checkpoint")...)
	if rec.Way.Start != "boot" {
		t.Errorf("the first start: %+v", rec.Way)
	}
	cp := m.awaitCheckpoint(t)
	if cp.Engine != "dmtcp" || !slices.Equal(cp.Args, []string{"/usr/bin/python3", "/app.py"}) ||
		cp.Pages < 1<<20 || cp.Upper == 0 || cp.Unfit != "" {
		t.Errorf("the checkpoint is %+v", cp)
	}
	born, counted := get(t, url+"/born"), 0
	if n, err := fmt.Sscan(get(t, url+"/count"), &counted); n != 1 || counted < 2 {
		t.Errorf("the container that was saved has counted %d, %v", counted, err)
	}
	for i, mode := range []string{"always", "always", "never"} {
		name := fmt.Sprint("clone-", i)
		rec, url := m.boot(t, name, img.Ref, append(usr, "--restore", mode)...)
		if restored := mode != "never"; (rec.Way.Start == "restore") != restored ||
			(get(t, url+"/born") == born) != restored || (get(t, url+"/state") == born) != restored {
			t.Errorf("%s, with --restore %s, has the record %+v", name, mode, rec)
		}
		if got := get(t, url+"/host"); got != name {
			t.Errorf("the host name of %s is %q", name, got)
		}
		if got := m.must("logs", name); !strings.Contains(got, "asked for /host") {
			t.Errorf("%s has written %q", name, got)
		}
	}
	for name, says := range map[string]string{"clone-0": "dmtcp cannot save again",
		"clone-2": "not started for checkpoints by dmtcp"} {
		if r := m.dew("checkpoint", name); r.code != 12 || !strings.Contains(r.err, says) {
			t.Errorf("checkpoint of %s: %+v", name, r)
		}
	}
	m.exits(t, "first", url)
	m.must(append(append([]string{"run", "-d", "--name", "hosts", "--checkpoint", "--restore", "never"}, usr...),
		img.Ref, freePort(t))...)
	if e := m.event(spec.EventUnsaved); e.Name != "hosts" || !strings.Contains(e.Error, "host's network") {
		t.Errorf("on the host's network: %+v", e)
	}
	m.must("rm", "-f", "first", "clone-0", "clone-1", "clone-2", "hosts")
	m.stop()
	m.config = whole + "[checkpoint]\nengine = \"criu\"\n"
	m.start()
	if all := m.checkpoints(t); len(all) != 1 || all[0].Unfit != "engine dmtcp, here criu" {
		t.Errorf("with CRIU there are %+v", all)
	}
	if r := m.dew(append(append([]string{"run", "-d", "--net", "bridge", "--restore", "always"}, usr...),
		img.Ref)...); r.code != 12 || !strings.Contains(r.err, "engine dmtcp, here criu") {
		t.Errorf("always, by CRIU: %+v", r)
	}
	m.must("checkpoints", "rm", cp.ID)
	m.must("rmi", img.Ref)
	m.must("prune")
	checkNothingLeft(t, m)
}

// What cannot carry DMTCP boots as ever, and it is told why it is not saved.
func TestNotCarriedByDMTCP(t *testing.T) {
	reg := registrytest.New(t)
	img := slowApp(t, reg, nil) // no shell, and linked statically
	m := newMachine(t, reg)
	m.config += "[checkpoint]\nengine = \"dmtcp\"\n"
	m.start()
	rec, url := m.boot(t, "web", img.Ref, "--checkpoint")
	get(t, url+"/born")
	if e := m.event(spec.EventUnsaved); rec.Way.Start != "boot" || e.Name != "web" ||
		!strings.Contains(e.Error, "/bin/sh") {
		t.Errorf("started by %s, event %+v", rec.Way.Start, e)
	}
	if all := m.checkpoints(t); len(all) > 0 {
		t.Errorf("saved: %+v", all)
	}
	var found []spec.Finding
	if err := json.Unmarshal([]byte(m.dew("--json", "doctor").out), &found); err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(found, func(f spec.Finding) bool {
		return f.What == "checkpoints" && f.Level == spec.LevelOK && strings.HasPrefix(f.Detail, "work: dmtcp ")
	}) {
		t.Errorf("doctor: %+v", found)
	}
}

// exits has a container's first process end, whose status is the container's.
func (m *machine) exits(t *testing.T, name, url string) {
	t.Helper()
	_ = exec.Command("curl", "-s", "-m", "10", url+"/exit").Run() // it does not answer
	var all []spec.Container
	deadline := time.Now().Add(testkit.Limit)
	for ; time.Now().Before(deadline); time.Sleep(50 * time.Millisecond) {
		if err := json.Unmarshal([]byte(m.must("--json", "ps", "-a")), &all); err != nil {
			t.Fatal(err)
		}
		if slices.ContainsFunc(all, func(c spec.Container) bool { return c.Name == name && c.ExitCode == 7 }) {
			return
		}
	}
	t.Errorf("%s does not end with status 7: %+v", name, all)
}
