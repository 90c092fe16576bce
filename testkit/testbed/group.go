package testbed

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Group is a cgroup in which programs run, so that what they start can be
// counted and ended with them. cgroup v2 counts a group's CPU time without any
// controller, so it serves on machines whose controllers are v1's too.
type Group struct {
	path string
	dir  *os.File
	main *exec.Cmd     // the long-lived program that was started last
	done chan struct{} // closed when main has ended

	guard *exec.Cmd
	life  io.Closer      // what guard waits for the end of
	all   sync.WaitGroup // of those who wait for long-lived programs
}

// NewGroup makes an empty group of that name.
func NewGroup(name string) (*Group, error) {
	root, err := unified()
	if err != nil {
		return nil, err
	}
	g := &Group{path: filepath.Join(root, fmt.Sprintf("dewpoint-%d-%s", os.Getpid(), name))}
	if err := os.Mkdir(g.path, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	if g.dir, err = os.Open(g.path); err != nil {
		return nil, err
	}
	return g, g.watchOver()
}

// watchOver starts a process that kills what is in the group once this process has ended, however that came:
// what daemons start outlives a Pdeathsig.
func (g *Group) watchOver() (err error) {
	g.guard = exec.Command("sh", "-c", `read end; [ ! -d "$0" ] || echo 1 >"$0/cgroup.kill"`, g.path)
	g.guard.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if g.life, err = g.guard.StdinPipe(); err != nil {
		return err
	}
	return g.guard.Start()
}

// killStale ends the groups of processes that are gone.
func killStale(log *slog.Logger) {
	root, err := unified()
	if err != nil {
		return // NewGroup says it
	}
	groups, _ := filepath.Glob(filepath.Join(root, "dewpoint-*"))
	for _, path := range groups {
		var pid int
		if _, err := fmt.Sscanf(filepath.Base(path), "dewpoint-%d-", &pid); err == nil &&
			unix.Kill(pid, 0) == unix.ESRCH {
			log.Info("end what a dead benchmark has left", "group", path)
			if err := endGroup(path); err != nil {
				log.Warn("it stays", "err", err)
			}
		}
	}
}

func unified() (string, error) {
	raw, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(raw)) {
		if f := strings.Fields(line); len(f) > 2 && f[2] == "cgroup2" {
			return f[1], nil
		}
	}
	return "", errors.New("no cgroup v2 is mounted: mount -t cgroup2 none /sys/fs/cgroup/unified")
}

// Start starts a long-lived program in the group, beside those that are there.
// Stop and Ended are about the last one.
func (g *Group) Start(cmd *exec.Cmd) error {
	g.join(cmd)
	cmd.Cancel = func() error { return nil } // Close ends it
	if err := cmd.Start(); err != nil {
		return err
	}
	done := make(chan struct{})
	g.main, g.done = cmd, done
	g.all.Go(func() {
		defer close(done)
		cmd.Wait()
	})
	return nil
}

// StartBeside starts a program in the group for whose end the caller waits; Close
// ends it if it runs then.
func (g *Group) StartBeside(cmd *exec.Cmd) error {
	g.join(cmd)
	return cmd.Start()
}

// Run runs a program in the group to its end; its error carries its output.
func (g *Group) Run(cmd *exec.Cmd) ([]byte, error) {
	g.join(cmd)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("%s: %w: %s", strings.Join(cmd.Args, " "), err, tail(errs.String()+out.String()))
	}
	return out.Bytes(), nil
}

func tail(s string) string {
	s = strings.TrimSpace(s)
	return s[max(0, len(s)-600):]
}

func (g *Group) join(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(g.dir.Fd())}
}

// Close asks the long-lived program to end, kills after ten seconds what is
// left in the group, and removes it.
func (g *Group) Close() error {
	if g.main != nil {
		g.main.Process.Signal(unix.SIGTERM)
		select {
		case <-g.done:
		case <-time.After(10 * time.Second):
		}
	}
	g.dir.Close()
	err := endGroup(g.path)
	g.life.Close()
	g.guard.Wait()
	if err == nil {
		g.all.Wait()
	}
	return err
}

// Stop sends the long-lived program a signal, and waits for its end; what it
// started goes on. It is not an error if it has ended already.
func (g *Group) Stop(ctx context.Context, sig os.Signal) error {
	if g.main == nil {
		return nil
	}
	if err := g.main.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	select {
	case <-g.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%s does not end: %w", g.main.Args, ctx.Err())
	}
}

// Ended is closed when the long-lived program has ended; nil if none was started.
func (g *Group) Ended() <-chan struct{} { return g.done }

// Kill ends all that is in the group, as a power cut does, and waits until it
// is gone. Programs can be started in it again.
func (g *Group) Kill() error {
	if err := g.set("cgroup.kill", "1", "populated 0"); err != nil {
		return err
	}
	g.all.Wait()
	// Linux 6.18 ends at once whatever is started in a group that was killed once: a new one takes its place.
	g.dir.Close()
	err := errors.Join(removeGroup(g.path), os.Mkdir(g.path, 0o755))
	if err != nil {
		return err
	}
	g.dir, err = os.Open(g.path)
	return err
}

// Freeze stops all that is in the group in its tracks, or lets it go on.
func (g *Group) Freeze(frozen bool) error {
	if frozen {
		return g.set("cgroup.freeze", "1", "frozen 1")
	}
	return g.set("cgroup.freeze", "0", "frozen 0")
}

// set writes a file of the group, and waits until cgroup.events says so.
func (g *Group) set(file, value, event string) error {
	if err := os.WriteFile(filepath.Join(g.path, file), []byte(value), 0); err != nil {
		return err
	}
	for range 1000 {
		raw, err := os.ReadFile(filepath.Join(g.path, "cgroup.events"))
		if err != nil || strings.Contains(string(raw), event) {
			return err
		}
		time.Sleep(10 * time.Millisecond)
	}
	return fmt.Errorf("%s of %s was set to %s, and it does not come to be %q", file, g.path, value, event)
}

// Processes are the ids of the group's processes of that program, as
// /proc/PID/comm names it; "" is all of them.
func (g *Group) Processes(program string) (pids []int) {
	for _, s := range g.pids() {
		if name, _, _ := status(s); program == "" || name == program {
			pid, _ := strconv.Atoi(s)
			pids = append(pids, pid)
		}
	}
	return pids
}

// endGroup kills what is in a group and removes it.
func endGroup(path string) error {
	os.WriteFile(filepath.Join(path, "cgroup.kill"), []byte("1"), 0)
	var err error
	for range 200 { // the killed take a moment to leave
		if err = removeGroup(path); err == nil {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	return err
}

// removeGroup removes a group with the empty ones below it.
func removeGroup(path string) error {
	entries, _ := os.ReadDir(path)
	for _, e := range entries {
		if e.IsDir() {
			removeGroup(filepath.Join(path, e.Name()))
		}
	}
	if err := unix.Rmdir(path); err != nil && err != unix.ENOENT {
		return fmt.Errorf("remove %s: %w", path, err)
	}
	return nil
}

// CPU is the time on the processors that the group has used so far.
func (g *Group) CPU() (time.Duration, error) {
	raw, err := os.ReadFile(filepath.Join(g.path, "cpu.stat"))
	if err != nil {
		return 0, err
	}
	var usec int64
	if _, err := fmt.Sscanf(string(raw), "usage_usec %d", &usec); err != nil {
		return 0, fmt.Errorf("cpu.stat of %s: %w", g.path, err)
	}
	return time.Duration(usec) * time.Microsecond, nil
}

// pids lists the group's processes, those of groups below it left out.
func (g *Group) pids() []string {
	raw, _ := os.ReadFile(filepath.Join(g.path, "cgroup.procs"))
	return strings.Fields(string(raw))
}

// Memory watches the group's resident memory.
type Memory struct {
	group *Group
	stop  chan struct{}
	wait  sync.WaitGroup

	// Written by the watching goroutine alone; read after Stop.
	Peak  int64            // bytes: the largest sum over the group's processes at one moment
	PerOf map[string]int64 // bytes: the high-water mark of each program
}

// Watch resets the high-water marks and looks at the group until Stop.
func (g *Group) Watch() *Memory {
	m := &Memory{group: g, stop: make(chan struct{}), PerOf: map[string]int64{}}
	for _, pid := range g.pids() {
		os.WriteFile("/proc/"+pid+"/clear_refs", []byte("5"), 0)
	}
	m.wait.Go(func() {
		for tick := time.NewTicker(25 * time.Millisecond); ; {
			m.look()
			select {
			case <-m.stop:
				tick.Stop()
				m.look()
				return
			case <-tick.C:
			}
		}
	})
	return m
}

// Stop ends the watch.
func (m *Memory) Stop() *Memory {
	close(m.stop)
	m.wait.Wait()
	return m
}

func (m *Memory) look() {
	var sum int64
	high := map[string]int64{}
	for _, pid := range m.group.pids() {
		name, rss, hwm := status(pid)
		sum += rss
		high[name] = max(high[name], hwm)
	}
	m.Peak = max(m.Peak, sum)
	for name, hwm := range high {
		m.PerOf[name] = max(m.PerOf[name], hwm)
	}
}

// Resident is the sum of the resident memory of the group's processes now.
func (g *Group) Resident() (sum int64) {
	for _, pid := range g.pids() {
		_, rss, _ := status(pid)
		sum += rss
	}
	return sum
}

func status(pid string) (name string, rss, hwm int64) {
	raw, _ := os.ReadFile("/proc/" + pid + "/status")
	for line := range strings.Lines(string(raw)) {
		key, value, _ := strings.Cut(line, ":")
		switch key {
		case "Name":
			name = strings.TrimSpace(value)
		case "VmRSS":
			rss = kilobytes(value)
		case "VmHWM":
			hwm = kilobytes(value)
		}
	}
	return name, rss, hwm
}

func kilobytes(s string) int64 {
	n, _ := strconv.ParseInt(strings.Fields(s)[0], 10, 64)
	return n << 10
}
