package test

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"dewpoint/testkit"
	"dewpoint/testkit/registrytest"

	"golang.org/x/sys/unix"
)

// terminal is one that a program writes to, and keeps what it has shown.
type terminal struct {
	slave  *os.File
	master *os.File
	mu     sync.Mutex
	shown  bytes.Buffer // guarded by mu
}

func newTerminal(t *testing.T, cols, rows uint16) *terminal {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	must(err)
	must(unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0))
	n, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	must(err)
	p := &terminal{master: master}
	p.slave, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	must(err)
	must(unix.IoctlSetWinsize(int(p.slave.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: rows, Col: cols}))
	over := make(chan struct{})
	go func() {
		defer close(over)
		_, _ = io.Copy(p, master) // until the last slave is closed
	}()
	t.Cleanup(func() {
		p.slave.Close()
		<-over
		master.Close()
	})
	return p
}

// Write keeps what was shown.
func (p *terminal) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.shown.Write(b)
}

func (p *terminal) shows(pattern string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return regexp.MustCompile(pattern).Match(p.shown.Bytes())
}

// On a terminal "dew deploy" shows a node's queue, what it fetches and what is ready as that goes on, and
// gives the names on its standard output.
func TestDeployOnATerminal(t *testing.T) {
	reg := registrytest.New(t)
	img := reg.PushImage("app:1", appLayers(t, 4<<20), appOptions())
	m := newMachine(t, reg).onTmpfs("300m").start()
	p := newTerminal(t, 120, 30)
	held := img.Layers[2].Digest
	reg.Fail(registrytest.Fault{Do: registrytest.Stall, At: 64 << 10, Digest: held})
	var out bytes.Buffer
	cmd := exec.Command(filepath.Join(programs, "dew"), "-H", "unix://"+m.state+"/dewd.sock",
		"deploy", "--count", "5", "--name", "web", "--net", "none", img.Ref, "sleep", "1h")
	cmd.Stdout, cmd.Stderr = &out, p.slave
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		if t.Failed() {
			p.mu.Lock()
			defer p.mu.Unlock()
			t.Logf("the terminal has shown %q", p.shown.Bytes())
		}
	})
	for _, seen := range []string{`web-\d +queued \d, link`, `web-\d +(admitted|resolved) .*MB`,
		`0 of 5 ready, 1 deploying, 4 queued`} {
		testkit.Eventually(t, seen, func() bool { return p.shows(seen) })
	}
	reg.Heal()
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	for i := range 5 {
		seen := fmt.Sprintf(`web-%d +ready +\d+\.\d\d .*boot`, i+1)
		testkit.Eventually(t, seen, func() bool { return p.shows(seen) })
	}
	if got := strings.Fields(out.String()); len(got) != 5 {
		t.Errorf("standard output is %q", out.String())
	}
	m.removeAll(t)

	// dew begins a command on the terminal.
	dew := func(args ...string) *exec.Cmd {
		t.Helper()
		cmd := exec.Command(filepath.Join(programs, "dew"),
			append([]string{"-H", "unix://" + m.state + "/dewd.sock"}, args...)...)
		cmd.Stdin, cmd.Stdout, cmd.Stderr = p.slave, p.slave, p.slave
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { cmd.Process.Kill() })
		return cmd
	}
	ends := func(cmd *exec.Cmd, code int) {
		t.Helper()
		defer time.AfterFunc(time.Minute, func() { cmd.Process.Kill() }).Stop()
		_ = cmd.Wait()
		if got := cmd.ProcessState.ExitCode(); got != code {
			t.Errorf("%q: exit code %d, want %d", cmd.Args[3:], got, code)
		}
	}
	says := func(text, shown string) {
		t.Helper()
		if _, err := p.master.WriteString(text); err != nil {
			t.Fatal(err)
		}
		testkit.Eventually(t, shown, func() bool { return p.shows(shown) })
	}
	// A terminal outlives dewd.
	m.must("run", "-dit", "--name", "talk", "--net", "none", "-e",
		"LONG="+strings.Repeat("x", 4000), img.Ref, "talk", "-")
	cmd = dew("attach", "talk")
	says("first\r", `first\r\nfirst\r\n`) // of the terminal, and of the container
	m.kill()
	ends(cmd, 3)
	m.start()
	cmd = dew("attach", "talk")
	if out := m.must("top", "talk"); !strings.Contains(out, "app talk -\n") {
		t.Errorf("its processes are %s", out)
	}
	says("second\r", `second\r\nsecond\r\n`)
	says("\x10\x11", `talk goes on; "dew attach talk" comes back to it`)
	ends(cmd, 0)
	cmd = dew("attach", "talk")
	says("third\r", `third\r\nthird\r\n`)
	if _, err := p.master.WriteString("\x04"); err != nil {
		t.Fatal(err)
	}
	ends(cmd, 0)
	if out := m.must("logs", "talk"); !strings.Contains(out, "first\r\nfirst\r\nsecond\r\nsecond\r\n") {
		t.Errorf("the logs are %q", out)
	}
	ends(dew("run", "-it", "--rm", "--net", "none", img.Ref, "exit", "5"), 5)

	// A signal before it is ready leaves nothing.
	cmd = dew("run", "--name", "called", "--net", "none", "--ready", "log:never", img.Ref, "sleep", "1h")
	m.eventually("it runs", func() bool { return strings.Contains(m.must("ps"), "called") })
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	ends(cmd, 130)
	if out := m.must("ps", "-a"); strings.Contains(out, "called") {
		t.Errorf("it is left: %s", out)
	}
	m.eventually("that is said", func() bool { return p.shows("cancelled, nothing is left") })
	if r := m.dew("run", "--name", "kept", "--net", "none", "--ready", "log:never", "--ready-timeout", "100ms",
		img.Ref, "sleep", "1h"); r.code != 9 || !strings.Contains(r.err, `remove it with "dew rm -f kept"`) {
		t.Errorf("a container that is not ready: %+v", r)
	}
	m.removeAll(t)
}
