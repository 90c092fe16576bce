package cli

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"dewpoint/internal/spec"
	"dewpoint/testkit"
	"dewpoint/testkit/apitest"
)

// terminal is a pseudo-terminal: a program's end, and ours with what arrives there.
type terminal struct {
	master, slave *os.File
	output
}

func newTerminal(t *testing.T, cols, rows uint16) *terminal {
	t.Helper()
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0)
	}
	if err != nil {
		t.Fatal(err)
	}
	p := &terminal{master: os.NewFile(uintptr(fd), "ptmx")}
	if p.slave, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0); err != nil {
		t.Fatal(err)
	}
	p.resize(t, cols, rows)
	done := make(chan struct{})
	go func() {
		defer close(done)
		buf := make([]byte, 4096)
		for {
			n, err := p.master.Read(buf)
			_, _ = p.Write(buf[:n])
			if err != nil {
				return
			}
		}
	}()
	t.Cleanup(func() {
		p.slave.Close()
		p.master.Close()
		<-done
	})
	t.Setenv("TERM", "xterm")
	return p
}

func (p *terminal) resize(t *testing.T, cols, rows uint16) {
	t.Helper()
	if err := unix.IoctlSetWinsize(int(p.slave.Fd()), unix.TIOCSWINSZ,
		&unix.Winsize{Col: cols, Row: rows}); err != nil {
		t.Fatal(err)
	}
}

// screen is what is seen after all that was written: a terminal that knows the
// few sequences that dew uses.
func (p *terminal) screen(t *testing.T, cols int) []string {
	t.Helper()
	lines, row, col := []string{""}, 0, 0
	seq := regexp.MustCompile(`^\x1b\[(\d*)([AKJ])`)
	for s := p.text(); s != ""; {
		if m := seq.FindStringSubmatch(s); m != nil {
			switch m[2] {
			case "A":
				var n int
				fmt.Sscan(m[1], &n)
				if row -= n; row < 0 {
					t.Fatalf("the cursor left the screen")
				}
			case "K":
				lines[row] = lines[row][:min(col, len(lines[row]))]
			case "J":
				lines = lines[:row+1]
				lines[row] = lines[row][:min(col, len(lines[row]))]
			}
			s = s[len(m[0]):]
			continue
		}
		switch r := s[0]; r {
		case '\r':
			col = 0
		case '\n':
			if row++; row == len(lines) {
				lines = append(lines, "")
			}
		default:
			for len(lines[row]) <= col {
				lines[row] += " "
			}
			lines[row] = lines[row][:col] + string(r) + lines[row][col+1:]
			if col++; col > cols {
				t.Fatalf("line %q is wider than %d", lines[row], cols)
			}
		}
		s = s[1:]
	}
	for i := range lines {
		lines[i] = strings.TrimRight(lines[i], " \x00")
	}
	for len(lines) > 0 && lines[len(lines)-1] == "" {
		lines = lines[:len(lines)-1]
	}
	return lines
}

func (p *terminal) await(t *testing.T, text string) {
	t.Helper()
	testkit.Retry(t, fmt.Sprintf("%q comes", text), func() error {
		if got := p.text(); !strings.Contains(got, text) {
			return fmt.Errorf("there is %q", got)
		}
		return nil
	})
}

// dew runs a command line against a node, with standard error a terminal.
func dew(t *testing.T, n *apitest.Node, p *terminal, out io.Writer, args ...string) int {
	t.Helper()
	s := apitest.Serve(t, n)
	t.Setenv(HostVariable, s.Host)
	code := Main(t.Context(), args, Config{Version: "v0", Stdin: p.slave, Stdout: out, Stderr: p.slave})
	fmt.Fprint(p.slave, "\r\n\x00")
	p.await(t, "\x00")
	return code
}

func TestTerminalShowsBarsThenTheStages(t *testing.T) {
	n := &apitest.Node{Step: 30 * time.Millisecond}
	defer n.Close()
	n.Add(image("nginx:1"))
	p := newTerminal(t, 200, 24)
	var out bytes.Buffer
	if code := dew(t, n, p, &out, "run", "-d", "--name", "web", "nginx:1", "sleep"); code != 0 {
		t.Fatalf("exit code %d: %s", code, p.text())
	}
	if !regexp.MustCompile(`333333333333  \[=+> +\]  +\d.*/  3.0 MB    3.0 MB/s +1s`).MatchString(p.text()) {
		t.Errorf("no moving bar in %q", p.text())
	}
	got := p.screen(t, 200)
	want := []string{
		"111111111111  [" + strings.Repeat("=", 40) + "]    100 kB /  100 kB  complete",
		"333333333333  [" + strings.Repeat("=", 40) + "]    3.0 MB /  3.0 MB  complete",
		"web: ready in 0.05 s (resolved 0.01, mounted 0.02, created 0.03, started 0.04, ready 0.05), 3.1 MB from the registry",
	}
	if !slices.Equal(got, want) {
		t.Errorf("screen:\n%s", strings.Join(got, "\n"))
	}
	if out.String() != "web\n" {
		t.Errorf("standard output %q", out.String())
	}
}

func TestForegroundOutputComesAloneOnTheScreen(t *testing.T) {
	n := &apitest.Node{Step: 15 * time.Millisecond}
	defer n.Close()
	n.Add(image("nginx:1"))
	p := newTerminal(t, 80, 24)
	code := dew(t, n, p, p.slave, "run", "--ready", "log:serving", "nginx:1", "echo", "one", "echo", "serving",
		"exit", "6")
	if got := strings.Join(p.screen(t, 80), "\n"); code != 6 || got != "one\nserving" {
		t.Errorf("exit code %d, screen:\n%s", code, got)
	}
	if !strings.Contains(p.text(), "[=") {
		t.Error("there was no progress")
	}
}

func TestErrorComesAloneOnTheScreen(t *testing.T) {
	n := &apitest.Node{Step: 15 * time.Millisecond}
	defer n.Close()
	n.Add(image("nginx:1"))
	n.FailAfter("Pull", fmt.Errorf("write: %w", syscall.ENOSPC))
	p := newTerminal(t, 200, 24)
	code := dew(t, n, p, io.Discard, "pull", "nginx:1")
	got := p.screen(t, 200)
	if code != 8 || len(got) == 0 || !strings.HasPrefix(got[0], "dew: write: no space left") {
		t.Errorf("exit code %d, screen %q", code, got)
	}
}

func TestBarsFitTheTerminal(t *testing.T) {
	p := newTerminal(t, 80, 10)
	pr := &progress{screen: screen{w: p.slave, term: p.slave}, at: map[string]int{}}
	for i := range 30 {
		l := spec.LayerProgress{Digest: fmt.Sprintf("sha256:%064d", i), Size: 999_999_999_999,
			Fetched: 123_456_789_000, Rate: 1, State: spec.StateFilling}
		if i%2 == 0 {
			l.State = spec.StateComplete
		}
		pr.layers = append(pr.layers, l)
	}
	for _, cols := range []uint16{200, 80, 60, 40, 20, 3} {
		p.resize(t, cols, 10)
		lines := pr.lines()
		if len(lines) > 8 {
			t.Errorf("%d lines on 10", len(lines))
		}
		for _, l := range lines {
			if len(l) >= int(cols) {
				t.Errorf("%d columns: %q", cols, l)
			}
		}
	}
}

func TestExecOnATerminal(t *testing.T) {
	n := &apitest.Node{}
	defer n.Close()
	n.Add(image("nginx:1"))
	if _, err := n.Deploy(t.Context(), spec.Request{Image: "nginx:1", Name: "web", Cmd: []string{"sleep"}},
		spec.Watch{}); err != nil {
		t.Fatal(err)
	}
	p := newTerminal(t, 80, 24)
	before, err := unix.IoctlGetTermios(int(p.slave.Fd()), unix.TCGETS)
	if err != nil {
		t.Fatal(err)
	}
	code := make(chan int)
	s := apitest.Serve(t, n)
	t.Setenv(HostVariable, s.Host)
	go func() {
		code <- Main(context.Background(), []string{"exec", "-it", "web", "cat"},
			Config{Stdin: p.slave, Stdout: p.slave, Stderr: p.slave})
	}()
	// Raw: Ctrl-C and the end-of-file key are the container's.
	testkit.Eventually(t, "the terminal is raw", func() bool {
		now, err := unix.IoctlGetTermios(int(p.slave.Fd()), unix.TCGETS)
		return err == nil && now.Lflag&unix.ISIG == 0
	})
	if _, err := p.master.WriteString("a\x03b\x04"); err != nil {
		t.Fatal(err)
	}
	p.await(t, "a\x03b\x04")
	if err := n.Stop(t.Context(), "web", 0); err != nil {
		t.Fatal(err)
	}
	s.Stop()
	if got := <-code; got != 3 {
		t.Errorf("exit code %d of an exec whose daemon stopped", got)
	}
	after, err := unix.IoctlGetTermios(int(p.slave.Fd()), unix.TCGETS)
	if err != nil || *after != *before {
		t.Errorf("the terminal is left changed: %+v, %v", after, err)
	}
	// The reader of standard input ends with the next key.
	_, _ = p.master.WriteString("x")
}

// dew run -it passes keys on, is left by ctrl-p ctrl-q, and dew attach comes back and gets the exit status.
func TestRunOnATerminal(t *testing.T) {
	n := &apitest.Node{}
	defer n.Close()
	n.Add(image("nginx:1"))
	p := newTerminal(t, 80, 24)
	s := apitest.Serve(t, n)
	t.Setenv(HostVariable, s.Host)
	before, err := unix.IoctlGetTermios(int(p.slave.Fd()), unix.TCGETS)
	if err != nil {
		t.Fatal(err)
	}
	code := make(chan int)
	dew := func(args ...string) {
		go func() {
			code <- Main(context.Background(), args, Config{Stdin: p.slave, Stdout: p.slave, Stderr: p.slave})
		}()
	}
	types := func(s string) {
		t.Helper()
		if _, err := p.master.WriteString(s); err != nil {
			t.Fatal(err)
		}
	}
	ends := func(want int) {
		t.Helper()
		if got := <-code; got != want {
			t.Errorf("exit code %d, want %d; the screen has %q", got, want, p.text())
		}
		after, err := unix.IoctlGetTermios(int(p.slave.Fd()), unix.TCGETS)
		if err != nil || *after != *before {
			t.Errorf("the terminal is left changed: %+v, %v", after, err)
		}
	}
	dew("run", "-it", "--rm", "--name", "web", "nginx:1", "cat", "exit", "5")
	p.await(t, "80x24\r\n")
	types("a\x03b")
	p.await(t, "a\x03b")
	types("\x10\x11")
	ends(0)
	p.await(t, "web goes on; \"dew attach web\" comes back to it")

	dew("attach", "web")
	testkit.Eventually(t, "the size is told once more", func() bool {
		return strings.Count(p.text(), "80x24\r\n") == 2
	})
	types("c")
	p.await(t, "80x24\r\nc")
	types("\x10\x11")
	ends(0)

	// Left before it is ready, the terminal is itself again.
	dew("run", "-it", "--rm", "--name", "late", "--ready", "log:never", "nginx:1", "cat", "exit", "5")
	testkit.Eventually(t, "the size is told a third time", func() bool {
		return strings.Count(p.text(), "80x24\r\n") == 3
	})
	types("\x10\x11")
	p.await(t, "dew: it is left once it is ready; ctrl-c cancels it\r\n")
	if after, err := unix.IoctlGetTermios(int(p.slave.Fd()), unix.TCGETS); err != nil || *after != *before {
		t.Errorf("the terminal is not given back: %+v, %v", after, err)
	}
	if err := syscall.Kill(os.Getpid(), syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	ends(130)

	dew("attach", "web")
	testkit.Eventually(t, "the size is told a fourth time", func() bool {
		return strings.Count(p.text(), "80x24\r\n") == 4
	})
	types("d\x04")
	ends(5)
}

func TestSignalsDecideTheStatus(t *testing.T) {
	for _, c := range []struct {
		command []string
		signals []syscall.Signal
		says    []string // by the container, before each signal
		ready   string
		status  int
	}{
		{[]string{"echo", "up", "sleep"}, []syscall.Signal{syscall.SIGTERM}, []string{"up\n"}, "", 143},
		{[]string{"echo", "up", "stubborn"}, []syscall.Signal{syscall.SIGINT, syscall.SIGINT},
			[]string{"up\n", "up\nno\n"}, "", 137},
		{[]string{"sleep"}, []syscall.Signal{syscall.SIGINT}, []string{""}, "log:never", 130},
		{[]string{"sleep"}, []syscall.Signal{syscall.SIGHUP}, []string{""}, "log:never", 129},
		{[]string{"sleep"}, []syscall.Signal{syscall.SIGTERM}, []string{""}, "log:never", 143},
	} {
		t.Run(fmt.Sprint(c.command, c.signals, c.ready), func(t *testing.T) {
			n := &apitest.Node{}
			defer n.Close()
			n.Add(image("nginx:1"))
			s := apitest.Serve(t, n)
			t.Setenv(HostVariable, s.Host)
			code := make(chan int)
			out := &output{}
			go func() {
				code <- Main(context.Background(),
					append([]string{"run", "-q", "--name", "web", "--ready", c.ready, "nginx:1"}, c.command...),
					Config{Stdin: os.Stdin, Stdout: out, Stderr: io.Discard})
			}()
			testkit.Eventually(t, "the container runs", func() bool {
				list, _ := n.List(t.Context(), false)
				return len(list) > 0
			})
			for i, sig := range c.signals {
				testkit.Eventually(t, fmt.Sprintf("the container says %q", c.says[i]), func() bool {
					return out.text() == c.says[i]
				})
				if err := syscall.Kill(os.Getpid(), sig); err != nil {
					t.Fatal(err)
				}
			}
			if got := <-code; got != c.status {
				t.Errorf("status %d, want %d", got, c.status)
			}
		})
	}
}

// output keeps what a command writes.
type output struct {
	mu  sync.Mutex
	got bytes.Buffer // guarded by mu
}

func (o *output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.got.Write(b)
}

func (o *output) text() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.got.String()
}
