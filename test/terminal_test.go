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

	"dewpoint/testkit"
	"dewpoint/testkit/registrytest"

	"golang.org/x/sys/unix"
)

// terminal is one that a program writes to, and keeps what it has shown.
type terminal struct {
	slave *os.File
	mu    sync.Mutex
	shown bytes.Buffer // guarded by mu
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
	p := &terminal{}
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
}
