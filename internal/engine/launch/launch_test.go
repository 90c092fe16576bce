package launch

import (
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"go.uber.org/goleak"

	"dewpoint/testkit"
	"dewpoint/testkit/shimtest"
)

var program string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "launch")
	if err == nil {
		program, err = shimtest.Build(dir, "../../..")
	}
	if err != nil {
		panic(err)
	}
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		os.RemoveAll(dir)
		os.Exit(code)
	}))
}

func run(t *testing.T, dir string, args ...string) string {
	t.Helper()
	out, err := exec.Command(Path(dir), args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return string(out)
}

func script(t *testing.T, text string) string {
	t.Helper()
	p := filepath.Join(t.TempDir(), "program")
	if err := os.WriteFile(p, []byte("#!/bin/sh\n"+text+"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	return p
}

func launcher(t *testing.T, argv []string, runc string, hide bool) string {
	t.Helper()
	dir := t.TempDir()
	for range 2 { // the second time over the first
		if err := Make(dir, program, argv, runc, hide); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestVerbs(t *testing.T) {
	crun := script(t, `echo crun "$@"`)
	dir := launcher(t, []string{crun, "first"}, script(t, `echo runc "$@"`), false)
	for args, want := range map[string]string{
		"--root /r --log /l --log-format json create --bundle /b x": "crun first --root /r --log /l --log-format json create --bundle /b x\n",
		"--root /r start checkpoint":                                "crun first --root /r start checkpoint\n",
		"--root checkpoint --systemd-cgroup kill x":                 "crun first --root checkpoint --systemd-cgroup kill x\n",
		"--root=/r checkpoint --image-path /i create":               "runc --root=/r checkpoint --image-path /i create\n",
	} {
		if got := run(t, dir, strings.Fields(args)...); got != want {
			t.Errorf("%s: %q", args, got)
		}
	}
}

// What does not work is told with what it was about.
func TestErrors(t *testing.T) {
	dir := launcher(t, []string{"/nonexistent/crun"}, "/nonexistent/runc", false)
	for args, want := range map[string]string{"start x": "exec /nonexistent/crun: No such file",
		"checkpoint x": "exec "} {
		out, err := exec.Command(Path(dir), strings.Fields(args)...).CombinedOutput()
		if err == nil || !strings.Contains(string(out), want) {
			t.Errorf("%s: %v: %s", args, err, out)
		}
	}
	for _, text := range []string{"", "sealed\n", "sealed"} {
		if err := os.WriteFile(filepath.Join(dir, argvFile), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if out, err := exec.Command(Path(dir), "start", "x").CombinedOutput(); err == nil ||
			!strings.Contains(string(out), "names no program") {
			t.Errorf("%q: %v: %s", text, err, out)
		}
	}
}

// A program that is not a script is executed from where nobody can write to it.
func TestSealed(t *testing.T) {
	testkit.NeedRoot(t, "it makes namespaces")
	sh, err := exec.LookPath("sh")
	if err != nil {
		t.Fatal(err)
	}
	dir := launcher(t, []string{sh, "-c"}, "/none", false)
	if out := run(t, dir, `test -w /proc/$$/exe && echo writable; echo end`); out != "end\n" {
		t.Errorf("the shell says %q", out)
	}
	out, err := exec.Command(sh, "-c", `test -w /proc/$$/exe && echo writable`).CombinedOutput()
	if string(out) != "writable\n" {
		t.Errorf("without it: %q, %v", out, err)
	}
}

// Only who makes a container does not see the list, and nobody else misses it.
func TestHide(t *testing.T) {
	testkit.NeedRoot(t, "it makes namespaces")
	dir := launcher(t, []string{script(t, "cat "+controllers)}, "/none", true)
	before, err := os.ReadFile(controllers)
	if err != nil { // cgroup v2 alone, or v1 alone: there is nothing to hide
		if out, err := exec.Command(Path(dir), "create", "x").CombinedOutput(); err == nil || Crowded() {
			t.Errorf("what is not there was hidden: %s", out)
		}
		return
	}
	if out := run(t, dir, "create", "x"); out != "" {
		t.Errorf("create sees %q", out)
	}
	if out := run(t, dir, "start", "x"); out != string(before) {
		t.Errorf("start sees %q", out)
	}
	if now, err := os.ReadFile(controllers); err != nil || string(now) != string(before) {
		t.Errorf("the machine sees %q, %v", now, err)
	}
	if Crowded() != (strings.TrimSpace(string(before)) != "") {
		t.Error("Crowded is wrong")
	}
	if err := Make(dir, "/none", []string{"/none"}, "/none", false); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dir, emptyFile)); err == nil {
		t.Error("what hides stays")
	}
}

// A container that waits is started without crun, which is asked where anything
// is not as it leaves it.
func TestStart(t *testing.T) {
	crun := script(t, `echo crun "$@"`)
	dir := launcher(t, []string{crun}, "/none", false)
	root := t.TempDir()
	state := filepath.Join(root, "x")
	fifo, config := filepath.Join(state, "exec.fifo"), filepath.Join(state, "config.json")
	write := func(text string) {
		if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	byCrun := func(what string, args ...string) {
		t.Helper()
		if got := run(t, dir, args...); got != "crun "+strings.Join(args, " ")+"\n" {
			t.Errorf("%s: %q", what, got)
		}
	}
	start := []string{"--root", root, "--log", "/l", "start", "x"}
	byCrun("without a state", start...)
	if err := errors.Join(os.Mkdir(state, 0o700), syscall.Mkfifo(fifo, 0o600)); err != nil {
		t.Fatal(err)
	}
	write("{}")
	byCrun("where no process waits", start...)
	waits, err := os.OpenFile(fifo, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer waits.Close()
	byCrun("without a root", "start", "x")
	byCrun("with more arguments", append(start, "y")...)
	write(`{"hooks":{"poststart":[{"path":"/bin/true"}]}}`)
	byCrun("with something to do afterwards", start...)
	t.Setenv("NOTIFY_SOCKET", "/run/notify")
	write("{}")
	byCrun("with somebody to tell", start...)
	os.Unsetenv("NOTIFY_SOCKET")

	if got := run(t, dir, start...); got != "" {
		t.Errorf("it says %q", got)
	}
	if said, err := io.ReadAll(waits); err != nil || string(said) != "\x00" {
		t.Errorf("who waits is told %q, %v", said, err)
	}
	byCrun("a second time", start...)
}
