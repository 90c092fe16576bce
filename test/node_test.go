// Package test drives dewd and dew from outside, as their users do, on real
// containerds with a registry that misbehaves on command.
package test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"dewpoint/internal/spec"
	"dewpoint/testkit"
	"dewpoint/testkit/registrytest"
	"dewpoint/testkit/shimtest"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"
)

// programs is the directory of dewd, dew and app, built once.
var programs string

func TestMain(m *testing.M) {
	testkit.RequireRoot(m, "they mount and run containers")
	os.Setenv("DEWPOINT_TUNING", "1") // they shorten clocks
	code := 1
	dir, err := os.MkdirTemp("", "dewtest")
	if err == nil {
		programs = dir
		if err = build(); err == nil {
			code = m.Run()
		}
		os.RemoveAll(dir)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	os.Exit(code)
}

func build() error {
	for _, b := range []struct {
		pkg string
		env string
	}{{"dewpoint/cmd/dewd", ""}, {"dewpoint/cmd/dew", ""}, {"dewpoint/test/app", "CGO_ENABLED=0"}} {
		args := []string{"build", "-o", programs + "/", "-tags", "grpcnotrace"}
		if exec.Command("pkg-config", "--exists", "libisal").Run() == nil {
			args[len(args)-1] += ",isal"
		}
		cmd := exec.Command("go", append(args, b.pkg)...)
		cmd.Env = append(os.Environ(), b.env)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("build %s: %w\n%s", b.pkg, err, out)
		}
	}
	_, err := shimtest.Build(programs, "..")
	return err
}

// machine is one node: a dewd with directories of its own.
type machine struct {
	t      testing.TB
	root   string // --root
	state  string // --state
	config string // of dewd, TOML
	args   []string
	under  []string   // a command that runs dewd in its place
	files  []*os.File // that it inherits, from descriptor 3 on
	cmd    *exec.Cmd
	log    string // path of dewd's output
}

// newMachine makes a node that trusts reg over plain HTTP. It is not started.
func newMachine(t testing.TB, reg *registrytest.Server) *machine {
	t.Helper()
	dir, err := os.MkdirTemp("/var/tmp", "dew")
	if err != nil {
		t.Fatal(err)
	}
	m := &machine{t: t, root: filepath.Join(dir, "r"), state: filepath.Join(dir, "s"),
		log: filepath.Join(dir, "log")}
	m.config = "[node]\nname = \"n1\"\n[registries]\nstall_timeout = \"2s\"\n"
	if reg != nil {
		m.config += fmt.Sprintf("[registry.%q]\nplain_http = true\n", reg.Host())
	}
	t.Cleanup(func() {
		if t.Failed() {
			b, _ := os.ReadFile(m.log)
			t.Logf("dewd said:\n%s", b)
		}
		m.destroy()
		if err := os.RemoveAll(dir); err != nil {
			t.Errorf("the node left something behind: %v", err)
		}
	})
	return m
}

// start runs dewd until it answers.
func (m *machine) start() *machine {
	m.t.Helper()
	if err := m.launch(); err != nil {
		m.t.Fatal(err)
	}
	deadline := time.Now().Add(testkit.Limit)
	for time.Now().Before(deadline) {
		if c, err := net.Dial("unix", filepath.Join(m.state, "dewd.sock")); err == nil {
			c.Close()
			return m
		}
		if m.exited() {
			break
		}
		time.Sleep(20 * time.Millisecond)
	}
	b, _ := os.ReadFile(m.log)
	m.t.Fatalf("dewd does not answer:\n%s", b)
	return nil
}

func (m *machine) launch() error {
	file := m.root + ".toml"
	if err := os.WriteFile(file, []byte(m.config), 0o600); err != nil {
		return err
	}
	out, err := os.OpenFile(m.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer out.Close()
	args := append(slices.Clone(m.under), filepath.Join(programs, "dewd"), "--config", file, "--root", m.root,
		"--state", m.state)
	args = append(args, m.args...)
	m.cmd = exec.Command(args[0], args[1:]...)
	m.cmd.Stdout, m.cmd.Stderr, m.cmd.ExtraFiles = out, out, m.files
	if err := m.cmd.Start(); err != nil {
		return err
	}
	return nil
}

func (m *machine) exited() bool {
	var ws syscall.WaitStatus
	pid, _ := syscall.Wait4(m.cmd.Process.Pid, &ws, syscall.WNOHANG, nil)
	return pid != 0
}

// kill ends dewd as a crash does.
func (m *machine) kill() {
	m.t.Helper()
	if m.cmd == nil {
		return
	}
	m.cmd.Process.Kill()
	m.cmd.Wait()
	m.cmd = nil
}

// stop ends dewd as an operator does.
func (m *machine) stop() {
	m.t.Helper()
	if m.cmd == nil {
		return
	}
	m.cmd.Process.Signal(unix.SIGTERM)
	done := make(chan error, 1)
	go func() { done <- m.cmd.Wait() }()
	select {
	case err := <-done:
		if err != nil {
			m.t.Errorf("dewd ended with %v", err)
		}
	case <-time.After(testkit.Limit):
		m.t.Error("dewd does not end")
		m.kill()
	}
	m.cmd = nil
}

// privateContainerd is the pid of the containerd that dewd started, or 0.
func (m *machine) privateContainerd() int {
	b, err := os.ReadFile(filepath.Join(m.state, "containerd", "containerd.pid"))
	if err != nil {
		return 0
	}
	pid, _ := strconv.Atoi(strings.Fields(string(b) + " ")[0])
	return pid
}

// reboot takes away what a reboot takes: dewd, containerd, containers, mounts, the bridge
// and what lies in --state.
func (m *machine) reboot() {
	m.t.Helper()
	m.kill()
	m.endContainers()
	m.unmount()
	m.removeBridge()
	if err := os.RemoveAll(m.state); err != nil {
		m.t.Fatal(err)
	}
}

func (m *machine) endContainers() {
	pids := m.processes()
	for _, pid := range pids {
		unix.Kill(pid, unix.SIGKILL)
	}
	for deadline := time.Now().Add(testkit.Limit); len(m.processes()) > 0 && time.Now().Before(deadline); {
		time.Sleep(20 * time.Millisecond)
	}
}

// processes are those of this node: their command line, or the container's
// root, names its directories.
func (m *machine) processes() []int {
	var pids []int
	if pid := m.privateContainerd(); pid > 0 && unix.Kill(pid, 0) == nil {
		pids = append(pids, pid)
	}
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, d := range dirs {
		pid, _ := strconv.Atoi(filepath.Base(d))
		if pid == os.Getpid() {
			continue
		}
		line, _ := os.ReadFile(d + "/cmdline")
		mounts, _ := os.ReadFile(d + "/mountinfo")
		first, _, _ := bytes.Cut(mounts, []byte("\n"))
		if bytes.Contains(line, []byte(m.state)) || bytes.Contains(first, []byte(m.root)) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// mounts are those below the node's directories, the newest first.
func (m *machine) mounts() []string {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		m.t.Fatal(err)
	}
	var at []string
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 4 && strings.HasPrefix(f[4], filepath.Dir(m.root)+"/") {
			at = append([]string{f[4]}, at...)
		}
	}
	return at
}

func (m *machine) unmount() {
	for _, at := range m.mounts() {
		unix.Unmount(at, unix.MNT_DETACH)
	}
}

func (m *machine) destroy() {
	m.kill()
	m.endContainers()
	m.unmount()
	m.clean()
}

// result is what a command gave.
type result struct {
	out, err string
	code     int
}

// dew runs the command line client.
func (m *machine) dew(args ...string) result {
	m.t.Helper()
	return m.run(exec.Command(filepath.Join(programs, "dew"),
		append([]string{"-H", "unix://" + m.state + "/dewd.sock"}, args...)...))
}

func (m *machine) run(cmd *exec.Cmd) result {
	m.t.Helper()
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	timer := time.AfterFunc(2*time.Minute, func() { cmd.Process.Kill() })
	defer timer.Stop()
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		m.t.Fatalf("%v: %v", cmd.Args, err)
	}
	return result{out.String(), errs.String(), cmd.ProcessState.ExitCode()}
}

// must is dew that has to succeed.
func (m *machine) must(args ...string) string {
	m.t.Helper()
	r := m.dew(args...)
	if r.code != 0 {
		m.t.Fatalf("dew %s: exit %d\n%s%s", strings.Join(args, " "), r.code, r.out, r.err)
	}
	return r.out
}

// record is must for commands that print a deployment record.
func (m *machine) record(args ...string) spec.Record {
	m.t.Helper()
	var rec spec.Record
	out := m.must(append([]string{"--json"}, args...)...)
	if err := json.Unmarshal([]byte(out), &rec); err != nil {
		m.t.Fatalf("dew %s: %v in %q", strings.Join(args, " "), err, out)
	}
	return rec
}

// appLayers are the test program in two layers, and noise of size bytes in a third.
func appLayers(t testing.TB, noise int) []registrytest.Layer {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(programs, "app"))
	if err != nil {
		t.Fatal(err)
	}
	l := []registrytest.Layer{
		{Tar: registrytest.Tar(
			registrytest.File{Name: "etc/", Mode: 0o755}, registrytest.File{Name: "tmp/", Mode: 0o1777},
			registrytest.File{Name: "dev/", Mode: 0o755},
			registrytest.File{Name: "etc/motd", Body: "below\n"}, registrytest.File{Name: "etc/gone", Body: "x"})},
		{Tar: registrytest.Tar(
			registrytest.File{Name: "app", Body: string(b), Mode: 0o755},
			registrytest.File{Name: "etc/motd", Body: "above\n"}, registrytest.File{Name: "etc/.wh.gone"})},
	}
	if noise > 0 {
		l = append(l, registrytest.Layer{Tar: registrytest.RandomTar(1, 16, noise)})
	}
	return l
}

func appOptions(args ...string) registrytest.Options {
	return registrytest.Options{Config: ocispec.ImageConfig{Entrypoint: []string{"/app"}, Cmd: args,
		Env: []string{"PATH=/"}}}
}

func freePort(t *testing.T) string { return strconv.Itoa(testkit.FreePort(t)) }

func get(t *testing.T, url string) string {
	t.Helper()
	c := http.Client{Timeout: 5 * time.Second}
	r, err := c.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}
