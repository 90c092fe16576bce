package cli

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"dewpoint/internal/spec"
	"dewpoint/testkit"
	"dewpoint/testkit/apitest"
)

// Many deployments are a table that lives, and stays as a plain one.
func TestFleetOnATerminal(t *testing.T) {
	n := &apitest.Node{Step: 30 * time.Millisecond}
	defer n.Close()
	n.Add(image("nginx:1"))
	p := newTerminal(t, 120, 24)
	var out bytes.Buffer
	if code := dew(t, n, p, &out, "deploy", "--count", "3", "--parallel", "1", "--name", "web", "nginx:1",
		"sleep"); code != 0 {
		t.Fatalf("exit code %d: %s", code, p.text())
	}
	for _, seen := range []string{`web-\d +queued \d, turn +\d+\.\d\d s`,
		`web-\d +deploying .*\[=+> *\] +\d.* / +3.1 MB`, `\d of 3 ready, 1 deploying, \d queued`} {
		if !regexp.MustCompile(seen).MatchString(p.text()) {
			t.Errorf("no %q in %q", seen, p.text())
		}
	}
	got := p.screen(t, 120)
	if len(got) != 4 || !strings.HasPrefix(got[0], "NAME ") ||
		!regexp.MustCompile(`web-\d +ready +0.05 +3.1 MB +0 B +whole, boot`).MatchString(strings.Join(got, "\n")) ||
		strings.Contains(p.text(), "\x1b[2J") {
		t.Errorf("screen:\n%s", strings.Join(got, "\n"))
	}
	if got := strings.Fields(out.String()); len(got) != 3 {
		t.Errorf("standard output %q", out.String())
	}
}

// What does not fit the terminal is counted, and what is under way is shown first; nothing is
// wider or higher than the terminal.
func TestFleetFitsTheTerminal(t *testing.T) {
	p := newTerminal(t, 80, 12)
	f := &fleet{screen: screen{w: p.slave, term: p.slave}, begun: time.Now()}
	for i := range 200 {
		m := &member{Deployment: spec.Deployment{Name: fmt.Sprintf("with-a-rather-long-name-%d", i),
			State: spec.StateQueued, Position: i + 1, Waits: spec.WaitsMemory}}
		switch {
		case i%50 == 20:
			m.State, m.layers = spec.StateDeploying,
				map[string]spec.LayerProgress{"a": {Size: 999_999_999_999, Fetched: 123_456_789_000}}
		case i%50 == 21:
			m.ended, m.failure = true,
				&spec.Failure{Code: "disk_full", Message: strings.Repeat("kein Platz für Schönes ", 20)}
		case i < 100:
			m.ended = true
		}
		f.rows = append(f.rows, m)
	}
	for _, cols := range []uint16{200, 80, 40, 20, 3} {
		p.resize(t, cols, 12)
		lines := f.lines()
		if len(lines) > 11 {
			t.Errorf("%d lines on 12", len(lines))
		}
		for _, l := range lines {
			if utf8.RuneCountInString(l) >= int(cols) {
				t.Errorf("%d columns: %q", cols, l)
			}
		}
		if cols != 200 {
			continue
		}
		for i, name := range []string{"-20 ", "-21 ", "-70 ", "-71 ", "-100 ", "-101 ", "-120 ", "-121 ", "-170 ",
			"-171 "} {
			if !strings.Contains(lines[i], "name"+name) {
				t.Errorf("line %d is %q, want %s", i, lines[i], name)
			}
		}
		if want := "190 more; 96 of 200 ready, 4 deploying, 96 queued, 4 failed"; lines[10] != want {
			t.Errorf("last line %q", lines[10])
		}
	}
}

// A terminal that becomes narrower breaks the lines of the old picture, which is replaced all the same.
func TestScreenResized(t *testing.T) {
	p := newTerminal(t, 40, 24)
	s := screen{w: p.slave, term: p.slave}
	s.draw([]string{strings.Repeat("a", 39), "b"})
	p.resize(t, 20, 24)
	if got := s.rows(); got != 3 {
		t.Errorf("%d rows, want 3", got)
	}
	p.resize(t, 10, 3)
	if got := s.rows(); got != 2 {
		t.Errorf("%d rows of a terminal of 3, want 2", got)
	}
}

// The first signal cancels what is not ready and leaves what is; nothing else stays.
func TestFleetInterrupted(t *testing.T) {
	n := &apitest.Node{}
	defer n.Close()
	n.Add(image("nginx:1"))
	s := apitest.Serve(t, n)
	t.Setenv(HostVariable, s.Host)
	code := make(chan int)
	var out bytes.Buffer
	file := t.TempDir() + "/s.yaml"
	text := "- {image: 'nginx:1', name: good, cmd: [sleep]}\n- {image: 'nginx:1', name: slow, cmd: [sleep], ready: 'log:never'}\n- {image: 'nginx:1', name: next, cmd: [sleep]}\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	var errs bytes.Buffer
	go func() {
		code <- Main(context.Background(), []string{"deploy", "--parallel", "1", "--spec", file},
			Config{Stdin: os.Stdin, Stdout: &out, Stderr: &errs})
	}()
	state := func(name string) string {
		all, err := n.ListDeployments(t.Context(), spec.DeploymentQuery{All: true})
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range all {
			if d.Name == name {
				return d.State
			}
		}
		return ""
	}
	busy := func() bool { // two are ready or on their way; the order of turns is the node's
		list, _ := n.List(t.Context(), false)
		for _, c := range list {
			if c.Name == "slow" {
				return true
			}
		}
		return false
	}
	testkit.Eventually(t, "both are under way", busy)
	good := state("good") == spec.StateDone
	if err := syscall.Kill(os.Getpid(), syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	if got := <-code; got != 130 {
		t.Errorf("exit code %d\n%s", got, errs.String())
	}
	if got := state("slow"); got != spec.StateCanceled {
		t.Errorf("slow is %s", got)
	}
	if good && (state("good") != spec.StateDone || !strings.Contains(out.String(), "good\n")) {
		t.Errorf("good is %s, printed %q", state("good"), out.String())
	}
	list, err := n.List(t.Context(), true)
	for _, c := range list {
		if err != nil || c.Name == "slow" {
			t.Errorf("%v %v", list, err)
		}
	}
}
