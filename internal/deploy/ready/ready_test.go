package ready

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"dewpoint/internal/engine/network"
	"dewpoint/internal/spec"
	"dewpoint/testkit"
)

// TestMain is also the program that the tests wait for.
func TestMain(m *testing.M) {
	if role := os.Getenv("READY_TEST_ROLE"); role != "" {
		play(role, os.Getenv("READY_TEST_ARG"))
		return
	}
	testkit.RequireRoot(m, "they make network namespaces and cgroups")
	goleak.VerifyTestMain(m)
}

func play(role, arg string) {
	addr, after, _ := strings.Cut(arg, " ")
	d, _ := time.ParseDuration(after)
	time.Sleep(d)
	switch role {
	case "serve":
		started := time.Now()
		http.HandleFunc("/warm", func(w http.ResponseWriter, _ *http.Request) {
			if time.Since(started) < 100*time.Millisecond {
				w.WriteHeader(503)
			}
		})
		http.HandleFunc("/moved", func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "/never", http.StatusFound)
		})
		http.HandleFunc("/bad", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(500) })
		fmt.Println(http.ListenAndServe(addr, nil))
	case "die":
		fmt.Fprintln(os.Stderr, "cannot read /etc/app.conf")
		os.Exit(3)
	}
}

// box is a process in the place of a container.
type box struct {
	cmd  *exec.Cmd
	done chan struct{}
	log  string
}

// start runs the role in a cgroup of its own, as a container would be, and in
// the network namespace ns unless that is "".
func start(t *testing.T, ns, role, arg string) *box {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	b := &box{done: make(chan struct{}), log: filepath.Join(t.TempDir(), "out.log")}
	args := []string{self}
	if ns != "" {
		args = []string{"nsenter", "--net=" + ns, self}
	}
	b.cmd = exec.Command(args[0], args[1:]...)
	b.cmd.Env = append(os.Environ(), "READY_TEST_ROLE="+role, "READY_TEST_ARG="+arg)
	f, err := os.Create(b.log)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b.cmd.Stdout, b.cmd.Stderr = f, f
	if err := b.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	cg := "/sys/fs/cgroup/pids"
	if _, err := os.Stat(cg); err != nil {
		cg = "/sys/fs/cgroup"
	}
	cg = fmt.Sprintf("%s/ready-test-%d", cg, b.cmd.Process.Pid)
	if err := os.Mkdir(cg, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(cg+"/cgroup.procs", []byte(strconv.Itoa(b.cmd.Process.Pid)), 0o644); err != nil &&
		role != "die" {
		t.Fatal(err)
	}
	go func() { _ = b.cmd.Wait(); close(b.done) }()
	t.Cleanup(func() {
		_ = b.cmd.Process.Kill()
		<-b.done
		for range 100 {
			if os.Remove(cg) == nil {
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
		t.Errorf("cgroup %s stays", cg)
	})
	return b
}

func (b *box) target() Target {
	return Target{Host: true, Pid: b.cmd.Process.Pid, Logs: []string{b.log},
		Exited: func(ctx context.Context) (int, error) {
			select {
			case <-b.done:
				return b.cmd.ProcessState.ExitCode(), nil
			case <-ctx.Done():
				return 0, ctx.Err()
			}
		}}
}

func freePort(t *testing.T) uint16 { return uint16(testkit.FreePort(t)) }

func within(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

func mustParse(t *testing.T, how string) spec.ReadyCheck {
	t.Helper()
	c, err := spec.ParseReadyCheck(how, nil)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestImageHealthcheck(t *testing.T) {
	hc, err := ImageHealthcheck([]byte(`{"config":{"Healthcheck":{"Test":["CMD-SHELL","curl localhost"],"Interval":5000000000,"Retries":2,"StartPeriod":1000000000}}}`))
	if err != nil {
		t.Fatal(err)
	}
	c, err := spec.ParseReadyCheck("", hc)
	if err != nil || c.String() != `cmd:["/bin/sh","-c","curl localhost"]` || c.Patience != 11*time.Second ||
		c.TryTimeout != 30*time.Second {
		t.Errorf("%+v, %v", c, err)
	}
	if c, err := spec.ParseReadyCheck("tcp:1", hc); err != nil || c.Kind != spec.ReadyTCP {
		t.Errorf("the given check does not go first: %v, %v", c, err)
	}
	for raw, want := range map[string]spec.ReadyKind{`{}`: spec.ReadyNone, `{"config":{}}`: spec.ReadyNone,
		`{"config":{"Healthcheck":{"Test":["NONE"]}}}`:     spec.ReadyNone,
		`{"config":{"Healthcheck":{"Test":["CMD","/x"]}}}`: spec.ReadyCommand} {
		hc, err := ImageHealthcheck([]byte(raw))
		if err != nil {
			t.Fatal(err)
		}
		if c, err := spec.ParseReadyCheck("", hc); err != nil || c.Kind != want {
			t.Errorf("%s gives %s, %v", raw, c, err)
		}
	}
}

func TestTCP(t *testing.T) {
	p := freePort(t)
	c := mustParse(t, fmt.Sprintf("tcp:%d", p))
	if err := Conflict(c); err != nil {
		t.Fatal(err)
	}
	b := start(t, "", "serve", fmt.Sprintf("127.0.0.1:%d 100ms", p))
	if err := Wait(within(t, 10*time.Second), c, b.target()); err != nil {
		t.Fatal(err)
	}
	var taken *TakenError
	if err := Conflict(c); !errors.As(err, &taken) ||
		!strings.Contains(taken.By, strconv.Itoa(b.cmd.Process.Pid)) {
		t.Errorf("conflict: %v", err)
	}
}

// TestPrompt measures what lies between the moment of serving and that of knowing.
func TestPrompt(t *testing.T) {
	p := freePort(t)
	served := make(chan time.Time, 1)
	over := make(chan struct{})
	defer close(over)
	go func() {
		time.Sleep(20 * time.Millisecond)
		l, err := net.Listen("tcp4", fmt.Sprintf("127.0.0.1:%d", p))
		served <- time.Now()
		if err == nil {
			<-over
			l.Close()
		}
	}()
	if err := Wait(within(t, 5*time.Second), mustParse(t, fmt.Sprintf("tcp:%d", p)), Target{}); err != nil {
		t.Fatal(err)
	}
	if late := time.Since(<-served); late > 25*time.Millisecond {
		t.Errorf("known %v after it was so", late)
	} else {
		t.Logf("known %v after it was so", late)
	}
}

func TestHTTP(t *testing.T) {
	p := freePort(t)
	b := start(t, "", "serve", fmt.Sprintf(":%d", p))
	for _, path := range []string{"warm", "moved"} {
		if err := Wait(within(t, 10*time.Second), mustParse(t, fmt.Sprintf("http:%d/%s", p, path)),
			b.target()); err != nil {
			t.Errorf("%s: %v", path, err)
		}
	}
	err := Wait(within(t, 300*time.Millisecond), mustParse(t, fmt.Sprintf("http:%d/bad", p)), b.target())
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "500") {
		t.Errorf("bad: %v", err)
	}
}

func TestRefused(t *testing.T) {
	err := Wait(within(t, 100*time.Millisecond), mustParse(t, fmt.Sprintf("tcp:%d", freePort(t))), Target{})
	var nr *NotReadyError
	if !errors.As(err, &nr) || !strings.Contains(err.Error(), "connection refused") {
		t.Errorf("got %v", err)
	}
}

func TestDies(t *testing.T) {
	b := start(t, "", "die", " 50ms")
	began := time.Now()
	err := Wait(within(t, 10*time.Second), mustParse(t, fmt.Sprintf("tcp:%d", freePort(t))), b.target())
	var exit *ExitError
	if !errors.As(err, &exit) || exit.Status != 3 ||
		!strings.Contains(err.Error(), "cannot read /etc/app.conf") || time.Since(began) > testkit.Limit {
		t.Errorf("after %v: %v", time.Since(began), err)
	}
}

// TestStranger has another process answer on the port.
func TestStranger(t *testing.T) {
	p := freePort(t)
	l, err := net.Listen("tcp4", fmt.Sprintf("127.0.0.1:%d", p))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	b := start(t, "", "serve", fmt.Sprintf("127.0.0.1:%d 10s", p))
	err = Wait(within(t, 300*time.Millisecond), mustParse(t, fmt.Sprintf("tcp:%d", p)), b.target())
	var taken *TakenError
	var nr *NotReadyError
	if !errors.As(err, &nr) || !errors.As(nr.Last, &taken) ||
		!strings.Contains(taken.By, strconv.Itoa(os.Getpid())) {
		t.Errorf("got %v", err)
	}
}

func TestNamespace(t *testing.T) {
	ns := filepath.Join(t.TempDir(), "ns")
	if err := network.NewNS(ns); err != nil {
		t.Fatal(err)
	}
	defer network.RemoveNS(ns)
	b := start(t, ns, "serve", "127.0.0.1:80 50ms")
	target := b.target()
	target.Host, target.NetNS = false, ns
	for _, spec := range []string{"tcp:80", "http:80/moved"} {
		if err := Wait(within(t, 10*time.Second), mustParse(t, spec), target); err != nil {
			t.Errorf("%s: %v", spec, err)
		}
	}
}

func TestLog(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	empty := filepath.Join(t.TempDir(), "err")
	if err := os.WriteFile(empty, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	target := Target{Logs: []string{path, empty}}
	c := mustParse(t, "log:^listening on port [0-9]+$")
	done := make(chan error, 1)
	go func() { done <- Wait(within(t, 10*time.Second), c, target) }()
	for _, s := range []string{"starting\nnot listening on port 1\n", "listening ", "on port 8"} {
		select {
		case err := <-done:
			t.Fatalf("before %q: %v", s, err)
		case <-time.After(20 * time.Millisecond):
		}
		if _, err := f.WriteString(s); err != nil {
			t.Fatal(err)
		}
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	err = Wait(within(t, 100*time.Millisecond), mustParse(t, "log:never"), target)
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("never: %v", err)
	}
}

type runner struct{ fails int }

func (r *runner) Run(context.Context, []string) (int, []byte, error) {
	if r.fails--; r.fails >= 0 {
		return 2, []byte("no response\n"), nil
	}
	return 0, nil, nil
}

func TestCommand(t *testing.T) {
	c := mustParse(t, "cmd:pg_isready")
	if err := Wait(within(t, 5*time.Second), c, Target{Runner: &runner{fails: 3}}); err != nil {
		t.Error(err)
	}
	c.Patience = 100 * time.Millisecond
	err := Wait(within(t, 5*time.Second), c, Target{Runner: &runner{fails: 1 << 30}})
	if !errors.Is(err, ErrUnhealthy) || !strings.Contains(err.Error(), "status 2: no response") {
		t.Errorf("got %v", err)
	}
}

func TestNone(t *testing.T) {
	if err := Wait(t.Context(), spec.ReadyCheck{}, Target{}); err != nil {
		t.Error(err)
	}
}

func FuzzProc(f *testing.F) {
	f.Add("   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 12345 1",
		"4:memory:/a\n0::/b")
	f.Fuzz(func(t *testing.T, line, cgroup string) {
		if inode, ok := listening(line, ":1F90"); ok && inode == "" {
			t.Error("no inode")
		}
		_ = past(line)
		if d := cgroupDir(cgroup); d != "" && !strings.HasPrefix(d, "/sys/fs/cgroup") &&
			!strings.Contains(cgroup, "..") {
			t.Errorf("directory %q", d)
		}
	})
}

// FuzzImageHealthcheck takes the configuration of an image.
func FuzzImageHealthcheck(f *testing.F) {
	f.Add([]byte(`{"config":{"Healthcheck":{"Test":["CMD-SHELL","a"],"Interval":5,"Retries":2}}}`))
	f.Add([]byte(`{"config":{"Healthcheck":{"Test":["CMD","a"],"Interval":9223372036854775807,"Retries":2}}}`))
	f.Add([]byte(`{"config":{"Healthcheck":{"Test":["NONE"],"Timeout":-1}}}`))
	f.Fuzz(func(t *testing.T, config []byte) {
		hc, err := ImageHealthcheck(config)
		if err != nil || hc.None() {
			return
		}
		if d := hc.Defaults(); d.Interval <= 0 || d.Timeout <= 0 || d.StartInterval <= 0 ||
			d.StartPeriod < 0 || d.Retries <= 0 {
			t.Fatalf("%+v", d)
		}
		c, err := spec.ParseReadyCheck("", hc)
		if (err == nil) != (hc.Fits() == nil) && len(strings.Join(hc.Test, " ")) <= 3000 {
			t.Fatalf("%+v: %v, %v", hc, err, hc.Fits())
		}
		if err == nil && (len(c.Args) == 0 || c.Patience <= 0 || c.TryTimeout <= 0) {
			t.Fatalf("%+v gives %+v", hc, c)
		}
	})
}
