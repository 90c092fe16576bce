// Package enginetest is what every checkpoint.Engine must do, as a test that
// runs real containers.
//
// They run the program in the directory workload, which takes things up, such
// as locks or timers, and tells over TCP whether they work. A Bed makes the
// containers, and restores them with whatever its engine needs.
package enginetest

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"dewpoint/internal/checkpoint"
	"dewpoint/testkit"
)

// Bed makes containers for one engine.
type Bed interface {
	Engine() checkpoint.Engine
	// Boot runs the workload with the arguments.
	Boot(t testing.TB, b Boot) Running
	// Keep copies the writable layer of a container while it is frozen, as part
	// of the checkpoint in dir.
	Keep(ctx context.Context, name, dir string) error
	// Restore starts a container of another name from what a dump and Keep made.
	Restore(t testing.TB, name, dir string) (Running, error)
	// Remove ends and removes a container.
	Remove(t testing.TB, name string)
	// Exec starts a command in a container that lasts for a while.
	Exec(t testing.TB, name string, tty bool)
}

// Boot is the order for a container.
type Boot struct {
	Name       string
	Things     []string // the workload's
	User       string   // default root
	Dumpable   bool     // what the engine cannot dump is refused to the workload
	Unconfined bool     // without a filter of system calls
}

// Running is a container that answers at Addr.
type Running struct {
	checkpoint.Container
	Addr string // with the port
}

// BuildWorkload makes the static program of the containers.
func BuildWorkload(dir string) (string, error) {
	p := filepath.Join(dir, "workload")
	cmd := exec.Command("go", "build", "-ldflags=-s -w", "-o", p, "dewpoint/testkit/enginetest/workload")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build workload: %w: %s", err, out)
	}
	return p, nil
}

// Kept are the things that work on in what is restored.
var Kept = []string{"children", "unlinked", "flock", "timer", "pidfd", "memfd", "shm", "unix", "epoll",
	"inotify", "posix", "ofd", "itimer", "ptimer", "fifo", "udp"}

// Run runs the suite.
func Run(t *testing.T, b Bed) {
	t.Run("Things", func(t *testing.T) { testThings(t, b) })
	t.Run("Clones", func(t *testing.T) { testClones(t, b) })
	t.Run("Connected", func(t *testing.T) { testConnected(t, b) })
	t.Run("Uncopied", func(t *testing.T) { testUncopied(t, b) })
	t.Run("Unfit", func(t *testing.T) { testUnfit(t, b) })
}

// Ask sends a line on a connection of its own and returns the answer.
func (r Running) Ask(what string) (string, error) {
	var err error
	deadline := time.Now().Add(testkit.Limit)
	for ; time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		var c net.Conn
		if c, err = net.DialTimeout("tcp", r.Addr, time.Second); err != nil {
			continue // it does not listen yet
		}
		defer c.Close()
		return ask(c, what)
	}
	return "", err
}

func ask(c net.Conn, what string) (string, error) {
	if err := c.SetDeadline(time.Now().Add(testkit.Limit)); err != nil {
		return "", err
	}
	fmt.Fprintln(c, what)
	s, err := bufio.NewReader(c).ReadString('\n')
	return strings.TrimSpace(s), err
}

func (r Running) mustSay(t *testing.T, what, want string) {
	t.Helper()
	if got, err := r.Ask(what); err != nil || got != want {
		t.Errorf("%s: %s is %q, %v, not %q", r.Name, what, got, err, want)
	}
}

func (r Running) count(t *testing.T) int {
	t.Helper()
	s, err := r.Ask("count")
	n, nerr := strconv.Atoi(s)
	if err = errors.Join(err, nerr); err != nil {
		t.Fatalf("%s: count: %v", r.Name, err)
	}
	return n
}

// dump makes a checkpoint of a running container.
func dump(t *testing.T, b Bed, r Running) (dir string, d checkpoint.Dumped, err error) {
	t.Helper()
	dir = t.TempDir()
	d, err = b.Engine().Dump(t.Context(), r.Container, dir, func(ctx context.Context) error {
		return b.Keep(ctx, r.Name, dir)
	})
	return dir, d, err
}

func mustDump(t *testing.T, b Bed, r Running) string {
	t.Helper()
	dir, d, err := dump(t, b, r)
	if err != nil {
		t.Fatal(err)
	}
	if d.Processes == 0 || d.Threads < d.Processes || d.Pages == 0 || d.Paused == 0 {
		t.Errorf("dumped %+v", d)
	}
	return dir
}

func boot(t *testing.T, b Bed, o Boot) Running {
	t.Helper()
	r := b.Boot(t, o)
	t.Cleanup(func() { b.Remove(t, o.Name) })
	return r
}

func restore(t *testing.T, b Bed, name, dir string) Running {
	t.Helper()
	r, err := b.Restore(t, name, dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.Remove(t, name) })
	return r
}

// testThings asks in the container that was dumped and in the restored one
// whether all works.
func testThings(t *testing.T, b Bed) {
	for _, all := range [][]string{Kept, {"memory"}} {
		one := boot(t, b, Boot{Name: "one-" + all[0], Things: all})
		for _, thing := range all {
			one.mustSay(t, thing, "ok")
		}
		dir := mustDump(t, b, one)
		two := restore(t, b, "two-"+all[0], dir)
		for _, thing := range all {
			one.mustSay(t, thing, "ok")
			two.mustSay(t, thing, "ok")
		}
	}
}

// testClones starts two at once, after the original went on.
func testClones(t *testing.T, b Bed) {
	one := boot(t, b, Boot{Name: "origin"})
	dir := mustDump(t, b, one)
	before := one.count(t)
	time.Sleep(100 * time.Millisecond)
	if n := one.count(t); n <= before {
		t.Errorf("the dumped container stands still at %d", n)
	}
	var clones [2]Running
	t.Run("both", func(t *testing.T) {
		for i := range clones {
			t.Run(fmt.Sprint(i), func(t *testing.T) {
				t.Parallel()
				var err error
				if clones[i], err = b.Restore(t, fmt.Sprintf("clone%d", i), dir); err != nil {
					t.Fatal(err)
				}
			})
		}
	})
	for _, c := range clones {
		if c.Name == "" {
			continue
		}
		t.Cleanup(func() { b.Remove(t, c.Name) })
		c.mustSay(t, "host", c.Name)
		if n := c.count(t); n == 0 {
			t.Errorf("%s began anew", c.Name)
		}
	}
	if clones[0].Addr == clones[1].Addr || clones[0].Addr == one.Addr {
		t.Errorf("addresses %s, %s, %s", one.Addr, clones[0].Addr, clones[1].Addr)
	}
}

// testConnected has a client connected: the dumped container keeps it, the
// restored one sees it closed, or the dump is refused where that was asked for.
func testConnected(t *testing.T, b Bed) {
	one := boot(t, b, Boot{Name: "server"})
	one.alone(t)
	c, err := net.Dial("tcp", one.Addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if s, err := ask(c, "host"); err != nil || s != one.Name {
		t.Fatalf("%q, %v", s, err)
	}
	refuse := one
	refuse.Options.RefuseTCP = true
	var unfit *checkpoint.UnfitError
	if _, _, err := dump(t, b, refuse); !errors.As(err, &unfit) {
		t.Errorf("dump with a client: %v", err)
	}
	dir := mustDump(t, b, one)
	if s, err := ask(c, "host"); err != nil || s != one.Name {
		t.Errorf("the client of the dumped container hears %q, %v", s, err)
	}
	restore(t, b, "server2", dir).alone(t)
}

// alone waits until a container has no connection but the question's own.
func (r Running) alone(t *testing.T) {
	t.Helper()
	for range 100 {
		if s, _ := r.Ask("conns"); s == "1" {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Errorf("%s has connections", r.Name)
}

var errCopy = errors.New("no room")

// testUncopied fails a dump after the processes were written, and before.
func testUncopied(t *testing.T, b Bed) {
	one := boot(t, b, Boot{Name: "uncopied"})
	_, err := b.Engine().Dump(t.Context(), one.Container, t.TempDir(), func(context.Context) error {
		return errCopy
	})
	if !errors.Is(err, errCopy) {
		t.Errorf("dump: %v", err)
	}
	before := one.count(t)
	if _, err := b.Engine().Dump(t.Context(), one.Container, "/proc/nothing", nil); err == nil {
		t.Error("dump into nothing succeeds")
	}
	time.Sleep(20 * time.Millisecond)
	if n := one.count(t); n <= before {
		t.Errorf("the container stands still at %d", n)
	}
	restore(t, b, "copied", mustDump(t, b, one)) // a failed dump spoils nothing
}

// testUnfit dumps what cannot be, and lets it run on.
func testUnfit(t *testing.T, b Bed) {
	for name, c := range map[string]struct {
		boot Boot
		do   func(r *Running)
		says string
	}{
		"uring":    {boot: Boot{Things: []string{"uring"}, Unconfined: true}, says: "io_uring"},
		"mptcp":    {boot: Boot{Things: []string{"mptcp"}}, says: "multipath"},
		"terminal": {do: func(r *Running) { r.TTY = true }, says: "terminal"},
		"exec":     {do: func(r *Running) { b.Exec(t, r.Name, false) }, says: "exec"},
		"exec-tty": {do: func(r *Running) { b.Exec(t, r.Name, true) }, says: "exec"},
	} {
		t.Run(name, func(t *testing.T) {
			c.boot.Name = name
			one := boot(t, b, c.boot)
			if c.do != nil {
				c.do(&one)
			}
			_, _, err := dump(t, b, one)
			var unfit *checkpoint.UnfitError
			if !errors.As(err, &unfit) || unfit.Remedy == "" || !strings.Contains(err.Error(), c.says) {
				t.Errorf("dump: %v", err)
			}
			one.count(t)
		})
	}
	t.Run("dumpable", func(t *testing.T) {
		for _, unconfined := range []bool{false, true} {
			one := boot(t, b, Boot{Name: fmt.Sprintf("dumpable-%t", unconfined), Things: []string{"uring", "mptcp"},
				Unconfined: unconfined, Dumpable: true})
			two := restore(t, b, one.Name+"2", mustDump(t, b, one))
			two.mustSay(t, "mptcp", "ok")
		}
	})
}
