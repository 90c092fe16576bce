package test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"dewpoint/internal/checkpoint/criu"
	"dewpoint/internal/spec"

	"golang.org/x/sys/unix"
)

// steppedCRIU is a CRIU that goes on in small steps while somebody holds it: where it is killed does not
// depend on how busy the machine is.
type steppedCRIU struct{ dir string }

// newStepped makes the program, and has the node's configuration name it.
func newStepped(t *testing.T) (s steppedCRIU, config string) {
	t.Helper()
	s.dir = t.TempDir()
	script := fmt.Sprintf("#!/bin/sh\ncd / && if [ \"$1\" = swrk ] && [ -e %[1]s/hold ]; then\n\techo $$ >%[1]s/new && mv %[1]s/new %[1]s/pid && kill -STOP $$\nfi\nexec %[2]s \"$@\"\n",
		s.dir, criu.Find(t.Context(), ""))
	if err := os.WriteFile(filepath.Join(s.dir, "criu"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	return s, fmt.Sprintf("[checkpoint]\ncriu = %q\n", filepath.Join(s.dir, "criu"))
}

// kill kills the CRIU that stop stops, and says whether there was one.
func (s steppedCRIU) kill(far func() bool, done <-chan struct{}) bool {
	pid := s.stop(far, done)
	return pid != 0 && unix.Kill(pid, unix.SIGKILL) == nil
}

// stop lets the CRIUs that are started until done go on step by step, and returns the first that has come so
// far, which is stopped; 0 if there was none.
func (s steppedCRIU) stop(far func() bool, done <-chan struct{}) int {
	for {
		b, _ := os.ReadFile(filepath.Join(s.dir, "pid"))
		pid, _ := strconv.Atoi(strings.TrimSpace(string(b)))
		stopped := state(pid) == "T"
		if stopped && far() {
			return pid
		}
		if stopped {
			_ = unix.Kill(pid, unix.SIGCONT)
		}
		select {
		case <-done:
			return 0
		case <-time.After(2 * time.Millisecond):
		}
		if stopped {
			_ = unix.Kill(pid, unix.SIGSTOP)
		}
	}
}

// state is a process's in /proc: T is stopped; "" has ended.
func state(pid int) string {
	stat, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	f := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(f) == 0 {
		return ""
	}
	return f[0]
}

// during runs a command of dew, of which CRIU is killed.
func (s steppedCRIU) during(m *machine, far func() bool, args ...string) (result, bool) {
	m.t.Helper()
	hold := filepath.Join(s.dir, "hold")
	if err := os.WriteFile(hold, nil, 0o600); err != nil {
		m.t.Fatal(err)
	}
	done, killed := make(chan struct{}), make(chan bool, 1)
	go func() {
		killed <- s.kill(far, done)
		os.Remove(hold)
	}()
	r := m.dew(args...)
	close(done)
	return r, <-killed
}

// held runs a command of dew until the CRIU of it has come so far, and returns that, stopped, and what
// becomes of the command; 0 if the command has ended before.
func (s steppedCRIU) held(m *machine, far func() bool, args ...string) (pid int, becomes <-chan result) {
	m.t.Helper()
	hold := filepath.Join(s.dir, "hold")
	if err := os.WriteFile(hold, nil, 0o600); err != nil {
		m.t.Fatal(err)
	}
	defer os.Remove(hold)
	os.Remove(filepath.Join(s.dir, "pid"))
	done, r := make(chan struct{}), make(chan result, 1)
	go func() {
		r <- m.dew(args...)
		close(done)
	}()
	return s.stop(far, done), r
}

// logged reports whether a file that matches the pattern has the text.
func logged(pattern, text string) bool {
	files, _ := filepath.Glob(pattern)
	for _, f := range files {
		if b, err := os.ReadFile(f); err == nil && bytes.Contains(b, []byte(text)) {
			return true
		}
	}
	return false
}

// asker asks on one connection, which is there before what is asked about.
type asker struct {
	c net.Conn
	r *bufio.Reader
}

func (a asker) get(t *testing.T, path string) string {
	t.Helper()
	if err := a.c.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	fmt.Fprintf(a.c, "GET %s HTTP/1.1\r\nHost: x\r\n\r\n", path)
	resp, err := http.ReadResponse(a.r, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// yards are directories that CRIU makes for a restore.
func yards() map[string]bool {
	all := map[string]bool{}
	found, _ := filepath.Glob("/tmp/.criu.mntns.*")
	for _, f := range found {
		all[f] = true
	}
	return all
}

// CRIU that is killed in the middle of a dump leaves a container that runs on, with its clients, and
// nothing else; the next dump is as good as any.
func TestCheckpointDumpKilled(t *testing.T) {
	t.Parallel()
	c, config := newStepped(t)
	b := newCheckpointBed(t, config)
	_, url := b.boot(t, "saved", b.img.Ref, "--restore", "never", "-e", "MEMORY_MB=160")
	born, sum := get(t, url+"/born"), get(t, url+"/memory")
	conn, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	client := asker{conn, bufio.NewReader(conn)}
	log := filepath.Join(b.state, "criu-dump-*", "dump.log")
	count := 0
	for _, s := range []struct {
		at  string
		far func() bool
	}{
		{"its start", func() bool { return true }},
		{"the processes are held", func() bool { return logged(log, "Seized task") }},
		{"they are looked into", func() bool { return logged(log, "Dumping pages") }},
		{"memory is written", func() bool {
			return size(filepath.Join(b.root, "checkpoints/store/scratch-*/images/pages-*.img")) > 20<<20
		}},
	} {
		r, killed := c.during(b.machine, s.far, "checkpoint", "saved")
		for tries := 1; !killed && tries < 10; tries++ { // the machine was too busy to see it in time
			r, killed = c.during(b.machine, s.far, "checkpoint", "saved")
		}
		if !killed || r.code == 0 {
			t.Fatalf("at %s: killed %v, %+v", s.at, killed, r)
		}
		count++
		if got := client.get(t, "/count"); got != fmt.Sprintln(count) {
			t.Errorf("killed at %s: the client counts %q, not %d", s.at, got, count)
		}
		if left, _ := filepath.Glob(filepath.Join(b.root, "checkpoints/store/scratch-*")); len(left) > 0 {
			t.Errorf("killed at %s: %v is left", s.at, left)
		}
		if left, _ := filepath.Glob(filepath.Dir(log)); len(left) > 0 {
			t.Errorf("killed at %s: %v is left", s.at, left)
		}
		if rules := b.rules(t, "saved"); strings.Contains(rules, "CRIU") || strings.Contains(rules, "drop") ||
			strings.Contains(rules, "DROP") {
			t.Errorf("killed at %s: the container's network has the rules\n%s", s.at, rules)
		}
	}
	if got := get(t, url+"/memory"); got != sum {
		t.Errorf("its memory sums up to %q, not %q", got, sum)
	}
	b.must("checkpoint", "saved")
	rec, url := b.boot(t, "clone", b.img.Ref, "--restore", "always", "-e", "MEMORY_MB=160")
	if rec.Way.Start != "restore" || get(t, url+"/born") != born || get(t, url+"/memory") != sum {
		t.Errorf("a clone of what was dumped afterwards: %+v", rec.Way)
	}
	b.end()
}

// size is that of all files that match, in bytes.
func size(pattern string) (sum int64) {
	files, _ := filepath.Glob(pattern)
	for _, f := range files {
		if fi, err := os.Stat(f); err == nil {
			sum += fi.Size()
		}
	}
	return sum
}

// rules are the packet filters of a container's network.
func (m *machine) rules(t *testing.T, name string) string {
	t.Helper()
	var found struct{ Container spec.Container }
	m.unmarshal(t, &found, "inspect", name)
	var all []byte
	for _, list := range [][]string{{"nft", "list", "ruleset"}, {"iptables-legacy-save"},
		{"ip6tables-legacy-save"}} {
		out, err := exec.Command("nsenter",
			append([]string{"-t", strconv.Itoa(found.Container.PID), "-n", "--"}, list...)...).CombinedOutput()
		if err != nil {
			t.Errorf("%v: %v: %s", list, err, out)
		}
		all = append(all, out...)
	}
	return string(all)
}

// CRIU that is killed in the middle of a restore leaves nothing, and the container boots. What it leaves has
// the same names for all nodes of a machine, so no other test kills it at the same time.
func TestCheckpointRestoreKilled(t *testing.T) {
	c, config := newStepped(t)
	b := newCheckpointBed(t, config)
	b.boot(t, "saved", b.img.Ref, "--restore", "never", "-e", "MEMORY_MB=192")
	b.must("checkpoint", "saved")
	b.must("rm", "-f", "saved")
	before := yards()
	memory := func() bool { return b.memoryOf("clone") > 80<<20 }
	flags := []string{"run", "-d", "--name", "clone", "--net", "bridge", "--ready", "http:80/", "-e",
		"MEMORY_MB=192", "--restore"}
	for _, s := range []struct {
		at, restore string
		far         func() bool
	}{
		{"its start", "always", func() bool { return true }},
		{"memory comes", "always", memory},
		{"memory comes", "auto", memory},
	} {
		r, killed := c.during(b.machine, s.far, append(flags, s.restore, b.img.Ref)...)
		for tries := 1; !killed && tries < 10; tries++ {
			b.must("rm", "-f", "clone")
			r, killed = c.during(b.machine, s.far, append(flags, s.restore, b.img.Ref)...)
		}
		if want := map[string]int{"always": 12, "auto": 0}[s.restore]; !killed || r.code != want {
			t.Fatalf("%s, at %s: killed %v, %+v", s.restore, s.at, killed, r)
		}
		if s.restore == "always" {
			checkGone(t, b, "clone")
		}
		if s.restore == "always" && s.at == "memory comes" { // else the third time in a row is one too many
			if r := b.dew(append(flags, "always", b.img.Ref)...); r.code != 0 {
				t.Errorf("restored afterwards: %+v", r)
			}
			b.must("rm", "-f", "clone")
		}
	}
	left := func() (own []string) {
		for y := range yards() {
			if !before[y] {
				own = append(own, y)
			}
		}
		return own
	}
	if l := left(); len(l) > 0 { // another CRIU of this machine may have been in the way
		b.stop()
		b.start()
		if l = left(); len(l) > 0 {
			t.Errorf("%v is left", l)
		}
	}
	b.end()
}

// A dewd that is killed while CRIU saves or restores leaves nothing: the container that is saved runs on, one
// that is restored runs, whole, or is gone. The next dewd serves before CRIU has ended.
func TestCheckpointKilled(t *testing.T) {
	t.Parallel()
	c, config := newStepped(t)
	b := newCheckpointBed(t, config)
	const memory = "MEMORY_MB=96"
	_, url := b.boot(t, "saved", b.img.Ref, "--restore", "never", "-e", memory)
	born, sum := get(t, url+"/born"), get(t, url+"/memory")
	b.must("checkpoint", "saved")
	save := []string{"checkpoint", "saved"}
	restore := func(how string) []string {
		return []string{"run", "-d", "--name", "new", "--net", "bridge", "--ready", "http:80/", "-e", memory,
			"--restore", how, b.img.Ref}
	}
	begun := func() bool { return true }
	written := func() bool {
		return size(filepath.Join(b.root, "checkpoints/store/scratch-*/images/pages-*.img")) > 20<<20
	}
	for _, s := range []struct {
		at   string
		far  func() bool
		args []string
		late bool // CRIU goes on when the next dewd is there
	}{
		{"CRIU starts", begun, save, false},
		{"memory is written", written, save, true},
		{"CRIU starts", begun, restore("always"), true},
		{"memory comes", func() bool { return b.memoryOf("new") > 40<<20 }, restore("always"), false},
		{"memory comes", func() bool { return b.memoryOf("new") > 40<<20 }, restore("auto"), true},
	} {
		pid, becomes := c.held(b.machine, s.far, s.args...)
		for tries := 1; pid == 0 && tries < 10; tries++ { // the machine was too busy to see it in time
			<-becomes
			b.dew("rm", "-f", "new")
			pid, becomes = c.held(b.machine, s.far, s.args...)
		}
		if pid == 0 {
			t.Fatalf("%v was never seen when %s", s.args, s.at)
		}
		b.kill()
		if s.late {
			b.start()
			b.must("ps", "-a")
		}
		if err := unix.Kill(pid, unix.SIGCONT); err != nil {
			t.Errorf("%v, killed when %s: CRIU has ended already: %v", s.args, s.at, err)
		}
		if r := <-becomes; r.code == 0 {
			t.Errorf("%v, killed when %s: %+v", s.args, s.at, r)
		}
		if !s.late {
			b.start()
		}
		get(t, url+"/count")
		if s.args[0] == "run" {
			t.Logf("killed when %s: it is %s", s.at, b.whole("new", born, sum))
			b.dew("rm", "-f", "new")
			checkUnmade(t, b, "new")
		}
	}
	if b.says("the state of some containers is not known yet") { // it has waited for that
		t.Error("a dewd did not serve before a restore was over")
	}
	if got := get(t, url+"/memory"); got != sum {
		t.Errorf("the memory of the one that was saved sums up to %q, not %q", got, sum)
	}
	if rec, _ := b.boot(t, "after", b.img.Ref, "--restore", "always", "-e", memory); rec.Way.Start != "restore" {
		t.Errorf("afterwards: %+v", rec.Way)
	}
	b.end()
}

// whole waits until a container runs or is gone, and asserts that one which runs has the memory that was
// saved.
func (b *checkpointBed) whole(name, born, sum string) string {
	t := b.t.(*testing.T)
	t.Helper()
	status := ""
	b.eventually("it runs, or is gone", func() bool {
		var ps []spec.Container
		b.unmarshal(t, &ps, "ps", "-a")
		i := slices.IndexFunc(ps, func(c spec.Container) bool { return c.Name == name })
		if i < 0 {
			status = "gone"
			return true
		}
		if status = ps[i].Status; status != "running" {
			return false
		}
		at := "http://" + ps[i].IP
		for what, want := range map[string]string{"/born": born, "/memory": sum} {
			if got := answerOf(at+what, 5*time.Second); got != strings.TrimSpace(want) {
				t.Logf("%s of %s: %q", what, name, got)
				return false
			}
		}
		return true
	})
	return status
}

// answerOf is get that may fail or take so long: what it gives then is the reason.
func answerOf(url string, patience time.Duration) string {
	c := http.Client{Timeout: patience}
	r, err := c.Get(url)
	if err != nil {
		return err.Error()
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(string(b))
}

// memoryOf is what a container's processes take, in bytes.
func (m *machine) memoryOf(name string) (most int) {
	for _, dir := range m.cgroups("/" + name) {
		for _, f := range []string{"memory.usage_in_bytes", "memory.current"} {
			text, _ := os.ReadFile(filepath.Join(dir, f))
			n, _ := strconv.Atoi(strings.TrimSpace(string(text)))
			most = max(most, n)
		}
	}
	return most
}

// checkGone asserts that nothing of a container is there.
func checkGone(t *testing.T, b *checkpointBed, name string) {
	t.Helper()
	if out := b.must("ps", "-a"); strings.Contains(out, name) {
		t.Errorf("there is still\n%s", out)
	}
	if got := gone(b.strangers); len(got) > 0 {
		t.Errorf("processes left: %v", got)
	}
	checkUnmade(t, b, name)
}

// checkUnmade asserts that nothing of a container is there but what its processes might be.
func checkUnmade(t *testing.T, b *checkpointBed, name string) {
	t.Helper()
	for what, left := range map[string]func() []string{
		"cgroups": func() []string { return b.cgroups("/" + name) },
		"runc's state": func() []string {
			f, _ := filepath.Glob(filepath.Join(b.state, "runc", "*", name))
			return f
		},
		"CRIU's files": func() []string {
			f, _ := filepath.Glob(filepath.Join(b.state, "restore", name))
			return f
		},
	} {
		if got := gone(left); len(got) > 0 {
			t.Errorf("%s left: %v", what, got)
		}
	}
}

// unmarshal reads what dew prints as JSON.
func (m *machine) unmarshal(t *testing.T, v any, args ...string) {
	t.Helper()
	if err := json.Unmarshal([]byte(m.must(append([]string{"--json"}, args...)...)), v); err != nil {
		t.Fatal(err)
	}
}
