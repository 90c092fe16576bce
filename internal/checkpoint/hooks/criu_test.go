package hooks

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"dewpoint/testkit"

	"golang.org/x/sys/unix"
)

// bed is a process to be dumped once and restored many times, and the directories
// that a container would mount. It has a process namespace of its own, and all else
// is the host's.
type bed struct {
	root, images, port string
	env                []string
	agents             string        // Install's directory
	alive              int           // the first process, in the host's numbering
	caches             time.Duration // for how long it may keep randomness of the kernel; agents end that
}

func newBed(t *testing.T) *bed {
	t.Helper()
	b := &bed{root: t.TempDir(), images: t.TempDir(), port: freePort(t)}
	if err := os.MkdirAll(b.root+StateDir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := Prepare(b.root); err != nil {
		t.Fatal(err)
	}
	var err error
	if b.agents, err = Install(t.TempDir()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.kill() })
	return b
}

func freePort(t *testing.T) string { return strconv.Itoa(testkit.FreePort(t)) }

// activate sets the environment as for a container, with the bed's paths.
func (b *bed) activate(env []string, agents ...Agent) {
	for _, e := range Activate(env, agents) {
		e = strings.ReplaceAll(e, AgentsDir, b.agents)
		b.env = append(b.env, strings.ReplaceAll(e, StateDir, b.root+StateDir))
	}
}

func (b *bed) start(t *testing.T, args ...string) {
	t.Helper()
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Env = append([]string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}, b.env...)
	cmd.SysProcAttr = &unix.SysProcAttr{Cloneflags: unix.CLONE_NEWPID, Setsid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	b.alive = cmd.Process.Pid
	ended := make(chan struct{})
	go func() { _ = cmd.Wait(); close(ended) }()
	t.Cleanup(func() { b.kill(); <-ended })
}

// draw asks the process for its next values, by name.
func (b *bed) draw(t *testing.T) map[string]string {
	t.Helper()
	var err error
	for range 400 {
		var c net.Conn
		if c, err = net.Dial("tcp", "127.0.0.1:"+b.port); err == nil {
			text, err := io.ReadAll(c)
			c.Close()
			if err != nil {
				t.Fatal(err)
			}
			values := map[string]string{}
			for _, f := range strings.Fields(string(text)) {
				k, v, _ := strings.Cut(f, "=")
				values[k] = v
			}
			return values
		}
		time.Sleep(25 * time.Millisecond)
	}
	t.Fatal(err)
	return nil
}

func criu(t *testing.T, args ...string) {
	t.Helper()
	tools := os.Getenv("DEWPOINT_TOOLS")
	if tools == "" {
		tools = "/var/cache/dewpoint/tools"
	}
	if out, err := exec.Command(filepath.Join(tools, "criu/bin/criu"), args...).CombinedOutput(); err != nil {
		t.Fatalf("criu %s (scripts/install test installs it): %v\n%s", args[0], err, out)
	}
}

// dump ends the process.
func (b *bed) dump(t *testing.T) {
	t.Helper()
	criu(t, "dump", "-t", strconv.Itoa(b.alive), "-D", b.images, "-v1", "--shell-job", "--tcp-close")
	b.alive = 0
}

func (b *bed) restore(t *testing.T) {
	t.Helper()
	pidfile := filepath.Join(t.TempDir(), "pid")
	criu(t, "restore", "-d", "-D", b.images, "-v1", "--shell-job", "--tcp-close", "--pidfile", pidfile)
	text, err := os.ReadFile(pidfile)
	if err != nil {
		t.Fatal(err)
	}
	b.alive, _ = strconv.Atoi(string(text))
}

// kill ends the namespace's first process, and with it the others, and waits for that.
func (b *bed) kill() {
	if b.alive == 0 {
		return
	}
	_ = unix.Kill(b.alive, unix.SIGKILL)
	for range 400 {
		if state, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", b.alive)); len(state) == 0 ||
			strings.Contains(string(state), ") Z ") {
			break
		}
		time.Sleep(5 * time.Millisecond)
	}
	b.alive = 0
}

// clones are the values that two restores of one dump draw; with asks for After.
func (b *bed) clones(t *testing.T, with bool) (one, two map[string]string) {
	t.Helper()
	b.draw(t)
	if !with {
		time.Sleep(b.caches)
	}
	b.dump(t)
	var drawn [2]map[string]string
	for i := range drawn {
		b.restore(t)
		if with {
			if err := (Runner{}).After(t.Context(), Container{Root: b.root, Exec: noExec}); err != nil {
				t.Fatal(err)
			}
		}
		drawn[i] = b.draw(t)
		b.kill()
	}
	return drawn[0], drawn[1]
}

func noExec(context.Context, []string, []string, io.Writer) (int, error) {
	panic("no command is there")
}

// checkClones wants that without agents exactly these values repeat, so that the
// table in docs/use/uniqueness.md is true, and that with them none does.
func checkClones(t *testing.T, agent Agent, repeats []string, start func(t *testing.T, b *bed)) {
	testkit.NeedRoot(t, "CRIU makes clones")
	t.Run("without", func(t *testing.T) {
		b := newBed(t)
		start(t, b)
		one, two := b.clones(t, false)
		var same []string
		for k := range one {
			if one[k] == two[k] {
				same = append(same, k)
			}
		}
		slices.Sort(same)
		slices.Sort(repeats)
		if !slices.Equal(same, repeats) {
			t.Errorf("repeated: %q, want %q\n%v\n%v", same, repeats, one, two)
		}
	})
	t.Run("with", func(t *testing.T) {
		b := newBed(t)
		b.activate(nil, agent)
		start(t, b)
		b.draw(t)
		if err := present(Container{Root: b.root,
			Labels: map[string]string{LabelAgents: string(agent)}}); err != nil {
			t.Error(err)
		}
		one, two := b.clones(t, true)
		if len(one) < len(repeats) {
			t.Errorf("drawn: %v", one)
		}
		for k := range one {
			if one[k] == two[k] {
				t.Errorf("%s is %s in both clones", k, one[k])
			}
		}
	})
}

func TestPython(t *testing.T) {
	repeats := []string{"random", "instance", "gauss", "numpy", "default_rng", "state", "openssl"}
	checkClones(t, Python, repeats, func(t *testing.T, b *bed) {
		b.start(t, "/usr/bin/python3", "testdata/draw.py", b.port)
	})
}

func TestNode(t *testing.T) {
	var repeats []string
	for _, k := range []string{"math", "uuid", "webuuid", "int", "bytes", "key", "web", "pool"} {
		repeats = append(repeats, k, "worker-"+k)
	}
	checkClones(t, Node, repeats, func(t *testing.T, b *bed) {
		b.start(t, "node", "testdata/draw.js", b.port)
	})
}

func TestJVM(t *testing.T) {
	repeats := []string{"math", "local", "split"}
	checkClones(t, JVM, repeats, func(t *testing.T, b *bed) {
		b.caches = 200 * time.Millisecond // SecureRandom keeps what it has read of the kernel for 100 ms
		b.start(t, "java", "-Xverify:all", "-XX:-UsePerfData", "-Xmx64m", "-XX:+UseSerialGC", "-Dport="+b.port,
			"-jar", "testdata/draw.jar")
	})
}
