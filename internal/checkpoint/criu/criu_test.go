package criu_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"dewpoint/internal/checkpoint"
	"dewpoint/internal/checkpoint/criu"
	"dewpoint/internal/engine"
	"dewpoint/testkit"
	"dewpoint/testkit/enginetest"
)

func TestContract(t *testing.T) {
	for name, prog := range containerds() {
		t.Run(name, func(t *testing.T) { enginetest.Run(t, newBed(t, prog)) })
	}
}

// helpers are what this program does instead of testing, as another process.
var helpers = map[string]func(){"dump": dumpForever, "probe": probeAndTell}

const helperVar, bedVar = "CRIU_TEST_HELPER", "CRIU_TEST_BED"

func helperCommand(t *testing.T, name string, cfg engine.Config) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), helperVar+"="+name,
		bedVar+"="+strings.Join([]string{cfg.Root, cfg.State, cfg.Containerd, cfg.CRIU}, ":"))
	cmd.Stderr = t.Output()
	return cmd
}

func helperConfig() engine.Config {
	f := strings.Split(os.Getenv(bedVar), ":")
	return engine.Config{Root: f[0], State: f[1], Containerd: f[2], CRIU: f[3], Snapshotter: "overlayfs"}
}

// TestProbe finds what is there, fast when it is asked again.
func TestProbe(t *testing.T) {
	ctx := t.Context()
	// As a daemon that was started with descriptors that are not its own.
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pair[0])
	defer unix.Close(pair[1])
	if _, err := unix.FcntlInt(uintptr(pair[0]), unix.F_SETFD, unix.FD_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	e := criu.New(criu.Config{Program: criu.Find(ctx, ""), State: t.TempDir()})
	a, err := e.Probe(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if a.Engine != "criu" || a.Version == "" || a.Runc == "" || a.Kernel == "" || a.PageSize == 0 ||
		len(a.CPU) == 0 || a.CgroupMode == "" {
		t.Errorf("%+v", a)
	}
	if again, err := e.Probe(ctx); err != nil || again.Version != a.Version {
		t.Errorf("again: %+v, %v", again, err)
	}
}

// script makes a program that stands for CRIU.
func script(t *testing.T, text string) string {
	t.Helper()
	p := filepath.Join(t.TempDir(), "criu")
	if err := os.WriteFile(p, []byte("#!/bin/sh\n"+text), 0o755); err != nil {
		t.Fatal(err)
	}
	return p
}

func TestUnable(t *testing.T) {
	real := criu.Find(t.Context(), "")
	for name, c := range map[string]struct{ program, says string }{
		"missing": {"/nothing/criu", "there is no CRIU at /nothing/criu"},
		"none":    {"", "CRIU is missing"},
		"old":     {script(t, "echo Version: 3.17.1"), "3.17.1 at "},
		"other":   {script(t, "echo hello"), "is it CRIU?"},
		"broken":  {script(t, "echo out of order >&2; exit 3"), "out of order"},
		"no-dump": {script(t, "case $1 in dump) echo no such luck; exit 1;; esac; exec "+real+` "$@"`),
			"dump: exit status 1: no such luck"},
		"no-restore": {script(t, "case $1 in restore) echo no such luck; exit 1;; esac; exec "+real+` "$@"`),
			"restore: exit status 1: no such luck"},
	} {
		t.Run(name, func(t *testing.T) {
			e := criu.New(criu.Config{Program: c.program, State: t.TempDir()})
			_, err := e.Probe(t.Context())
			if !errors.Is(err, checkpoint.ErrUnable) || !strings.Contains(err.Error(), c.says) {
				t.Errorf("probe: %v", err)
			}
		})
	}
}

// TestWithoutCapabilities probes in a process that may not do what CRIU does.
func TestWithoutCapabilities(t *testing.T) {
	cmd := helperCommand(t, "probe", engine.Config{State: t.TempDir(), CRIU: criu.Find(t.Context(), "")})
	var out []byte
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and never unlocked: the thread ends with what it lacks
		if err = unix.Prctl(unix.PR_CAPBSET_DROP, unix.CAP_SYS_ADMIN, 0, 0, 0); err == nil {
			out, err = cmd.Output()
		}
	}()
	<-done
	if err != nil || !strings.Contains(string(out), "dewd lacks CAP_SYS_ADMIN") {
		t.Errorf("%s, %v", out, err)
	}
}

// TestProbeKilled ends the daemon in the middle of its probe: the next one leaves nothing of it.
func TestProbeKilled(t *testing.T) {
	for _, when := range []string{"dump.log", "inventory.img", "restore.log"} {
		state := t.TempDir()
		mark := "CRIU_TEST_MARK=" + state
		cmd := helperCommand(t, "probe", engine.Config{State: state, CRIU: criu.Find(t.Context(), "")})
		cmd.Env = append(cmd.Env, mark)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		ended := make(chan struct{})
		go func() { _ = cmd.Wait(); close(ended) }()
		if !appears(filepath.Join(state, "*", when), ended) {
			t.Errorf("the probe ended before there was a %s", when)
		}
		_ = cmd.Process.Kill()
		<-ended
		criu.New(criu.Config{State: state})
		// what nobody ends takes longer
		testkit.Retry(t, "killed when there was a "+when, func() error {
			if left := marked(mark); len(left) > 0 {
				return fmt.Errorf("%v stay", left)
			}
			return nil
		})
		if left, _ := filepath.Glob(filepath.Join(state, "*")); len(left) > 0 {
			t.Errorf("files are left: %v", left)
		}
	}
}

// appears waits until there is a file, or ended is closed.
func appears(pattern string, ended <-chan struct{}) bool {
	for {
		if found, _ := filepath.Glob(pattern); len(found) > 0 {
			return true
		}
		select {
		case <-ended:
			return false
		case <-time.After(200 * time.Microsecond):
		}
	}
}

// marked are the processes that have a variable in their environment.
func marked(variable string) (found []string) {
	all, _ := filepath.Glob("/proc/[0-9]*/environ")
	for _, path := range all {
		if b, err := os.ReadFile(path); err == nil && bytes.Contains(b, []byte(variable)) {
			cmd, _ := os.ReadFile(filepath.Join(filepath.Dir(path), "cmdline"))
			found = append(found, filepath.Dir(path)+" "+strings.ReplaceAll(string(cmd), "\x00", " "))
		}
	}
	return found
}

func probeAndTell() {
	cfg := helperConfig()
	_, err := criu.New(criu.Config{Program: cfg.CRIU, State: cfg.State}).Probe(context.Background())
	fmt.Println(err)
}

// TestOtherUser dumps a process that is not root's where that is possible, and
// says why not where it is not.
func TestOtherUser(t *testing.T) {
	b := newBed(t, containerds()["2.x"])
	one := b.Boot(t, enginetest.Boot{Name: "one", User: "web"})
	defer b.Remove(t, "one")
	a, err := b.criu.Probe(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	_, err = b.criu.Dump(t.Context(), one.Container, dir, func(ctx context.Context) error {
		return b.Keep(ctx, "one", dir)
	})
	if len(a.Limits) == 0 {
		if err != nil {
			t.Fatal(err)
		}
		if _, err := b.Restore(t, "two", dir); err != nil {
			t.Fatal(err)
		}
		b.Remove(t, "two")
		return
	}
	var unfit *checkpoint.UnfitError
	if !errors.As(err, &unfit) || !strings.Contains(err.Error(), "runs as user 33") {
		t.Errorf("dump: %v", err)
	}
	if _, err := one.Ask("count"); err != nil {
		t.Error(err)
	}
}

// TestSpoilt restores from what is not as it was dumped. The bed finds what is
// left of such a container.
func TestSpoilt(t *testing.T) {
	b := newBed(t, containerds()["2.x"])
	one := b.Boot(t, enginetest.Boot{Name: "one", Things: []string{"flock"}})
	defer b.Remove(t, "one")
	b.patience = 5 * time.Second // CRIU reads short pages again and again
	for name, spoil := range map[string]func(dir string) error{
		"no-pages":    func(dir string) error { return os.Remove(filepath.Join(dir, "pages-1.img")) },
		"short-pages": func(dir string) error { return os.Truncate(filepath.Join(dir, "pages-1.img"), 4096) },
		"no-core":     func(dir string) error { return os.Remove(filepath.Join(dir, "core-1.img")) },
		"zeros": func(dir string) error {
			return os.WriteFile(filepath.Join(dir, "mm-1.img"), make([]byte, 500), 0o600)
		},
		"empty": func(dir string) error { return errors.Join(os.RemoveAll(dir), os.Mkdir(dir, 0o700)) },
		"file":  nil, // a file that the process has open
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), name)
			if err := os.Mkdir(dir, 0o700); err != nil {
				t.Fatal(err)
			}
			if spoil == nil {
				b.changed = "lock"
				defer func() { b.changed = "" }()
			}
			_, err := b.criu.Dump(t.Context(), one.Container, dir, func(ctx context.Context) error {
				return b.Keep(ctx, "one", dir)
			})
			if err != nil {
				t.Fatal(err)
			}
			if spoil != nil {
				if err := spoil(dir); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := b.Restore(t, "two", dir); err == nil {
				t.Error("it was restored")
				b.Remove(t, "two")
			}
		})
	}
}

// TestKilled ends the daemon while a container is dumped and while it stands
// still afterwards. The next one lets it run on.
func TestKilled(t *testing.T) {
	b := newBed(t, containerds()["2.x"])
	one := b.Boot(t, enginetest.Boot{Name: "one", Things: []string{"memory"}})
	defer b.Remove(t, "one")
	for _, when := range []string{"dumping", "frozen"} {
		cmd := helperCommand(t, "dump", b.cfg)
		dir := t.TempDir()
		cmd.Env = append(cmd.Env, "CRIU_TEST_DIR="+dir, fmt.Sprint("CRIU_TEST_PID=", one.PID))
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		if when == "dumping" {
			awaitFile(t, filepath.Join(dir, "pages-1.img"))
		} else if s, err := bufio.NewReader(out).ReadString('\n'); err != nil || s != "frozen\n" {
			t.Fatalf("%q, %v", s, err)
		}
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		next, err := engine.Start(t.Context(), b.cfg)
		if err != nil {
			t.Fatal(err)
		}
		b.newCRIU() // removes what is left
		before, err := one.Ask("count")
		time.Sleep(50 * time.Millisecond)
		after, err2 := one.Ask("count")
		if err != nil || err2 != nil || before == after {
			t.Errorf("killed while %s: %s, %v; %s, %v", when, before, err, after, err2)
		}
		one.Ask("memory")
		if err := next.Close(); err != nil {
			t.Error(err)
		}
	}
	// It can still be dumped.
	_, err := b.criu.Dump(t.Context(), one.Container, t.TempDir(), func(context.Context) error { return nil })
	if err != nil {
		t.Error(err)
	}
}

func awaitFile(t *testing.T, path string) {
	t.Helper()
	for range 2000 {
		if _, err := os.Stat(path); err == nil {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
	t.Fatalf("%s does not come", path)
}

func dumpForever() {
	ctx := context.Background()
	cfg := helperConfig()
	e, err := engine.Start(ctx, cfg)
	if err != nil {
		panic(err)
	}
	c := checkpoint.Container{Name: "one"}
	if _, err := fmt.Sscan(os.Getenv("CRIU_TEST_PID"), &c.PID); err != nil {
		panic(err)
	}
	_, err = criu.New(criu.Config{Containers: e, Program: cfg.CRIU, State: cfg.State}).Dump(ctx, c,
		os.Getenv("CRIU_TEST_DIR"), func(context.Context) error {
			fmt.Println("frozen")
			time.Sleep(time.Hour)
			return nil
		})
	panic(err)
}
