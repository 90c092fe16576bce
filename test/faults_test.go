package test

import (
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"dewpoint/testkit"
	"dewpoint/testkit/registrytest"

	"golang.org/x/sys/unix"
)

// What can go wrong with a registry gives one clear line and its exit code,
// leaves nothing visible, and the next pull succeeds.
func TestRegistryFaults(t *testing.T) {
	t.Parallel()
	reg := registrytest.New(t)
	img := reg.PushImage("app:1", appLayers(t, 3<<20), appOptions())
	big := img.Layers[2]
	m := newMachine(t, reg).start()
	for name, c := range map[string]struct {
		fault registrytest.Fault
		auth  registrytest.Auth
		code  int // 0: dewd gets over it
		says  string
	}{
		"401": {fault: registrytest.Fault{Do: registrytest.Status, Status: 401,
			Path: registrytest.Anywhere}, code: 5, says: "dew login"},
		"403": {fault: registrytest.Fault{Do: registrytest.Status, Status: 403,
			Path: registrytest.Anywhere}, code: 5, says: "no right"},
		"404": {fault: registrytest.Fault{Do: registrytest.Status, Status: 404, Path: "/manifests/"},
			code: 4, says: "name and tag"},
		"404 blob": {fault: registrytest.Fault{Do: registrytest.Status, Status: 404, Digest: big.Digest},
			code: 4},
		"429 once": {fault: registrytest.Fault{Do: registrytest.Status, Status: 429, RetryAfter: "1",
			Digest: big.Digest, Times: 1}},
		"503 twice": {fault: registrytest.Fault{Do: registrytest.Status, Status: 503,
			Path: registrytest.Anywhere, Times: 2}},
		"cut": {fault: registrytest.Fault{Do: registrytest.Cut, At: 1 << 20, Digest: big.Digest,
			Times: 2}},
		"stall": {fault: registrytest.Fault{Do: registrytest.Stall, At: 1 << 20, Digest: big.Digest,
			Times: 1}},
		"short": {fault: registrytest.Fault{Do: registrytest.Short, At: 1000, Digest: big.Digest}, code: 6,
			says: "where"},
		"ignores Range": {fault: registrytest.Fault{Do: registrytest.IgnoreRange, Digest: big.Digest}},
		"flipped bit": {fault: registrytest.Fault{Do: registrytest.Flip, At: 1 << 20, Digest: big.Digest},
			code: 7},
		"wrong digest": {fault: registrytest.Fault{Do: registrytest.Garbage, At: 500, Path: "/manifests/"},
			code: -1},
	} {
		t.Run(name, func(t *testing.T) {
			m.t = t
			reg.Fail(c.fault)
			r := m.dew("pull", img.Ref)
			switch {
			case c.code >= 0 && r.code != c.code, c.code < 0 && r.code == 0:
				t.Errorf("exit %d, want %d: %s", r.code, c.code, r.err)
			case !strings.Contains(r.err, c.says):
				t.Errorf("%q does not say %q", r.err, c.says)
			case r.code != 0 && len(errorLines(r.err)) != 1:
				t.Errorf("not one line:\n%s", r.err)
			}
			reg.Heal()
			if r := m.dew("run", "--rm", img.Ref, "cat", "/etc/motd"); r.out != "above\n" {
				t.Errorf("afterwards: %+v", r)
			}
			m.must("rmi", img.Ref)
			m.must("prune")
		})
	}
	m.t = t
}

func errorLines(s string) []string {
	var out []string
	for line := range strings.Lines(s) {
		if strings.HasPrefix(line, "dew: ") || strings.HasPrefix(line, "\t") {
			out = append(out, line)
		}
	}
	return out
}

func TestUnreachableRegistry(t *testing.T) {
	t.Parallel()
	m := newMachine(t, nil).start()
	host := "127.0.0.1:" + freePort(t)
	r := m.dew("pull", host+"/app:1")
	if r.code != 6 || !strings.Contains(r.err, host) {
		t.Errorf("%+v", r)
	}
	reg := registrytest.New(t)
	img := reg.PushImage("app:1", appLayers(t, 0), appOptions())
	m.must("pull", img.Ref) // a loopback address needs no configuration,
	reg.Require(registrytest.Auth{Mode: registrytest.Basic, User: "u", Password: "p"})
	if r := m.dew("pull", img.Ref); r.code == 0 || !strings.Contains(r.err, "plain_http = true") { // without login
		t.Errorf("a login in clear: %+v", r)
	}
}

// kill -9 of dewd in the middle of a pull costs at most 8 MiB fetched again.
func TestKilledPullResumes(t *testing.T) {
	t.Parallel()
	reg := registrytest.New(t)
	layers := appLayers(t, 48<<20)
	img := reg.PushImage("app:1", layers, appOptions())
	big := img.Layers[2]
	m := newMachine(t, reg).start()
	reg.Fail(registrytest.Fault{Do: registrytest.Slow, At: 5 << 20, Digest: big.Digest})
	pull := exec.Command(filepath.Join(programs, "dew"), "-H", "unix://"+m.state+"/dewd.sock", "pull", img.Ref)
	if err := pull.Start(); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the pull gets on", func() bool { return reg.Served(big.Digest) >= big.Size*2/3 })
	m.kill()
	pull.Wait()
	reg.Heal()
	m.start()
	m.must("pull", img.Ref)
	if again := reg.Served(big.Digest) - big.Size; again > 8<<20 {
		t.Errorf("%d bytes were fetched again", again)
	}
	if r := m.dew("run", "--rm", img.Ref, "cat", "/etc/motd"); r.out != "above\n" {
		t.Errorf("%+v", r)
	}
}

// A registry that goes away in the middle and comes back is waited for.
func TestRegistryRestart(t *testing.T) {
	t.Parallel()
	reg := registrytest.New(t)
	img := reg.PushImage("app:1", appLayers(t, 24<<20), appOptions())
	big := img.Layers[2]
	m := newMachine(t, reg).start()
	reg.Fail(registrytest.Fault{Do: registrytest.Slow, At: 5 << 20, Digest: big.Digest})
	pull := exec.Command(filepath.Join(programs, "dew"), "-H", "unix://"+m.state+"/dewd.sock", "pull", img.Ref)
	if err := pull.Start(); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the pull gets on", func() bool { return reg.Served(big.Digest) >= big.Size/3 })
	reg.Close()
	time.Sleep(time.Second)
	if err := reg.Up(); err != nil {
		t.Fatal(err)
	}
	reg.Heal()
	if err := pull.Wait(); err != nil {
		t.Errorf("the pull: %v", err)
	}
	if again := reg.Served(big.Digest) - big.Size; again > 8<<20 {
		t.Errorf("%d bytes were fetched again", again)
	}
}

func TestDiskFull(t *testing.T) {
	t.Parallel()
	reg := registrytest.New(t)
	img := reg.PushImage("app:1", appLayers(t, 48<<20), appOptions())
	m := newMachine(t, reg)
	if err := os.MkdirAll(m.root, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", m.root, "tmpfs", 0, "size=40m"); err != nil {
		t.Fatal(err)
	}
	m.start()
	r := m.dew("pull", img.Ref)
	if r.code != 8 || !strings.Contains(r.err, "disk full") || !strings.Contains(r.err, "dew prune") {
		t.Errorf("%+v", r)
	}
	if err := unix.Mount("tmpfs", m.root, "tmpfs", unix.MS_REMOUNT, "size=200m"); err != nil {
		t.Fatal(err)
	}
	if r := m.dew("run", "--rm", img.Ref, "cat", "/etc/motd"); r.out != "above\n" {
		t.Errorf("with room again: %+v", r)
	}
}

// On a disk that is full dewd starts, says so of what needs room, and prunes: also what a pull has left that
// found no room.
func TestStartOnFullDisk(t *testing.T) {
	t.Parallel()
	reg := registrytest.New(t)
	small := reg.PushImage("small:1", appLayers(t, 0), appOptions())
	wide := reg.PushImage("wide:1", append(appLayers(t, 0), registrytest.Layer{Tar: registrytest.Tar(
		registrytest.File{Name: "wide", Body: strings.Repeat("0123456789abcdef", 4<<20)})}), appOptions())
	m := newMachine(t, reg).onTmpfs("48m").start()
	m.must("pull", small.Ref)
	if r := m.dew("pull", wide.Ref); r.code != 8 || !strings.Contains(r.err, "disk full") {
		t.Fatalf("%+v", r)
	}
	m.stop()
	left := m.diskUse("layers")
	other := filepath.Join(m.root, "other")
	if err := os.WriteFile(other, make([]byte, 64<<20), 0o600); !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("the disk is not full: %v", err)
	}
	m.start()
	r := m.dew("run", "-d", "--net", "none", "--name", "web", wide.Ref, "sleep", "1h")
	if r.code != 8 || !strings.Contains(r.err, "disk full") || !strings.Contains(r.err, "dew prune") {
		t.Errorf("%+v", r)
	}
	m.must("prune")
	if now := m.diskUse("layers"); left < 20<<20 || now > left/4 {
		t.Errorf("%d bytes of layers before dew prune, %d after", left, now)
	}
	if _, err := os.Stat(filepath.Join(m.root, "reserve")); err != nil {
		t.Errorf("with room again nothing is kept for the next time: %v", err)
	}
	if err := os.Remove(other); err != nil {
		t.Fatal(err)
	}
	if r := m.dew("run", "--rm", "--net", "none", small.Ref, "cat", "/etc/motd"); r.out != "above\n" {
		t.Errorf("with room again: %+v", r)
	}
}

// diskUse is what a directory of the node's root takes.
func (m *machine) diskUse(dir string) (bytes int64) {
	m.t.Helper()
	err := filepath.WalkDir(filepath.Join(m.root, dir), func(_ string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		fi, err := e.Info()
		if err == nil {
			bytes += fi.Sys().(*syscall.Stat_t).Blocks * 512
		}
		return err
	})
	if err != nil {
		m.t.Fatal(err)
	}
	return bytes
}

func TestSecondDewd(t *testing.T) {
	t.Parallel()
	m := newMachine(t, nil).start()
	other := exec.Command(filepath.Join(programs, "dewd"), "--root", m.root, "--state", m.state+"2")
	r := m.run(other)
	if r.code == 0 || !strings.Contains(r.err, "in use by another dewd") {
		t.Errorf("%+v", r)
	}
	m.must("ps")
	os.RemoveAll(m.state + "2")
}

func TestUnprivileged(t *testing.T) {
	t.Parallel()
	m := newMachine(t, nil)
	if err := os.Chmod(programs, 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(filepath.Join(programs, "dewd"), "--root", m.root, "--state", m.state)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	if r := m.run(cmd); r.code == 0 || !strings.Contains(r.err, "sudo") {
		t.Errorf("%+v", r)
	}
}

func TestContainerFaults(t *testing.T) {
	t.Parallel()
	reg := registrytest.New(t)
	// for s390x
	s390x := "\x7fELF\x02\x02\x01" + strings.Repeat("\x00", 10) + "\x02\x00\x16" + strings.Repeat("\x00", 100)
	img := reg.PushImage("app:1",
		append(appLayers(t, 0),
			registrytest.Layer{Tar: registrytest.Tar(registrytest.File{Name: "s390x", Body: s390x, Mode: 0o755})}),
		appOptions())
	m := newMachine(t, reg).start()
	port := freePort(t)
	for name, c := range map[string]struct {
		args []string
		code int
		says string
	}{
		"exits before it is ready": {[]string{"run", "-d", "--rm", "--ready", "tcp:" + port, img.Ref, "exit", "3"},
			9, "status 3"},
		"not ready in time": {[]string{"run", "-d", "--rm", "--ready", "tcp:" + port, "--ready-timeout",
			"300ms", img.Ref, "serve", freePort(t)}, 9, "not ready"},
		"no such command": {[]string{"run", "--rm", "--entrypoint", "/none", img.Ref}, 127, "/none"},
		"other program": {[]string{"run", "--rm", "--entrypoint", "/s390x", img.Ref}, 126,
			"another architecture (s390x)"},
		"other program, awaited": {[]string{"run", "-d", "--rm", "--ready", "tcp:" + port, "--entrypoint",
			"/s390x", img.Ref}, 126, "another architecture (s390x)"},
		"no such image":     {[]string{"run", "--rm", reg.Host() + "/none:1"}, 4, "none"},
		"bad reference":     {[]string{"run", "--rm", "UPPER/Case:1"}, 2, "UPPER"},
		"bad readiness":     {[]string{"run", "--rm", "--ready", "smtp:25", img.Ref}, 2, "smtp"},
		"no such container": {[]string{"logs", "nobody"}, 4, "nobody"},
	} {
		t.Run(name, func(t *testing.T) {
			m.t = t
			if r := m.dew(c.args...); r.code != c.code || !strings.Contains(r.err, c.says) {
				t.Errorf("exit %d, want %d: %s", r.code, c.code, r.err)
			}
		})
	}
	m.t = t
	m.must("run", "-d", "--name", "s390x", "--entrypoint", "/s390x", img.Ref)
	testkit.Eventually(t, "the output says what is wrong", func() bool {
		return strings.Contains(m.dew("logs", "s390x").err, "another architecture (s390x)")
	})
	m.must("rm", "s390x")
	m.must("run", "-d", "--name", "one", img.Ref, "serve", port)
	if r := m.dew("run", "-d", "--name", "one", img.Ref, "serve", port); r.code != 10 ||
		!strings.Contains(r.err, "one") {
		t.Errorf("a name twice: %+v", r)
	}
	if r := m.dew("rmi", img.Ref); r.code == 0 || !strings.Contains(r.err, "one") {
		t.Errorf("an image in use was removed: %+v", r)
	}
	m.must("rm", "-f", "one")
	m.must("rmi", img.Ref)
	m.must("prune")
	checkNothingLeft(t, m)
}

// What is no registry at all does not make dewd hang or crash.
func TestNotARegistry(t *testing.T) {
	t.Parallel()
	m := newMachine(t, nil).start()
	l := freePort(t)
	srv := &http.Server{Addr: "127.0.0.1:" + l,
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, "<html>hello") })}
	go srv.ListenAndServe()
	t.Cleanup(func() { srv.Close() })
	time.Sleep(50 * time.Millisecond)
	r := m.dew("pull", "127.0.0.1:"+l+"/app:1")
	if r.code == 0 || len(errorLines(r.err)) != 1 {
		t.Errorf("%+v", r)
	}
}

// A dewd that shares only the state directory with another touches nothing of it.
func TestSecondDewdOnOneState(t *testing.T) {
	t.Parallel()
	m := newMachine(t, nil).start()
	pid := m.privateContainerd()
	r := m.run(exec.Command(filepath.Join(programs, "dewd"), "--root", m.root+"2", "--state", m.state))
	if r.code == 0 || !strings.Contains(r.err, "in use by another dewd") {
		t.Errorf("%+v", r)
	}
	if now := m.privateContainerd(); now != pid {
		t.Errorf("containerd was %d, is %d", pid, now)
	}
	m.must("ps")
	m.must("doctor")
	os.RemoveAll(m.root + "2")
}

// A containerd whose socket is gone is found out by doctor and started anew.
func TestContainerdWithoutSocket(t *testing.T) {
	t.Parallel()
	m := newMachine(t, nil).start()
	pid := m.privateContainerd()
	if err := os.Remove(filepath.Join(m.state, "containerd", "containerd.sock")); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "containerd is started anew", func() bool {
		return m.privateContainerd() != pid && m.dew("doctor").code == 0
	})
	m.must("ps")
}
