package test

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"dewpoint/internal/api"
	"dewpoint/internal/spec"
	"dewpoint/testkit"
	"dewpoint/testkit/registrytest"

	"golang.org/x/sync/errgroup"
)

// holdings is what a node holds of the machine.
type holdings struct {
	processes, mounts, namespaces, cgroups, records, snapshots int
	descriptors, containerd, goroutines                        int
}

// TestLeak deploys and removes forty containers one by one, then has forty alive at once:
// what the node holds afterwards is what it held before. "dewlab bench deploy -parts
// alive" is the long form.
func TestLeak(t *testing.T) {
	reg := registrytest.New(t)
	img := reg.PushImage("app:1", appLayers(t, 0), appOptions())
	m := newMachine(t, reg)
	metrics := "127.0.0.1:" + freePort(t)
	m.args = []string{"--http", metrics}
	m.config += "[pack]\nlearn = \"never\"\n"
	m.start()
	c, err := api.Dial("unix://" + m.state + "/dewd.sock")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	deploy := func(name string) error {
		_, err := c.Deploy(t.Context(),
			spec.Request{Image: img.Ref, Name: name, Cmd: []string{"sleep", "1h"}, Net: "none", Ready: "none"},
			spec.Watch{})
		return err
	}
	// several gives each of n containers to do, some at once.
	several := func(n int, do func(name string) error) {
		t.Helper()
		var g errgroup.Group
		g.SetLimit(8)
		for i := range n {
			g.Go(func() error { return do(fmt.Sprintf("c%d", i)) })
		}
		if err := g.Wait(); err != nil {
			t.Fatal(err)
		}
	}
	remove := func(name string) error { return c.Remove(t.Context(), name, true) }

	several(8, deploy) // what is made once and kept, is made
	several(8, remove)
	before := m.settled(metrics, holdings{})
	for i := range 40 {
		name := fmt.Sprintf("r%d", i)
		if err := deploy(name); err != nil {
			t.Fatalf("deployment %d: %v", i, err)
		}
		if err := remove(name); err != nil {
			t.Fatalf("removal %d: %v", i, err)
		}
	}
	if after := m.settled(metrics, before); after.beyond(before) {
		t.Errorf("after 40 deployments the node holds %+v, before %+v", after, before)
	}
	several(40, deploy)
	if alive := m.holds(metrics); alive.processes < before.processes+40 || alive.mounts < before.mounts+40 {
		t.Errorf("with 40 containers alive the node holds %+v, before %+v", alive, before)
	}
	for _, kind := range []string{"mnt", "pid", "net", "ipc", "uts"} { // a process has its name a moment later
		testkit.Eventually(t, "40 containers have 40 "+kind+" namespaces of their own", func() bool {
			return m.namespaces(kind) == 40
		})
	}
	if own := len(m.cgroups("/*")); own < 40 {
		t.Errorf("40 containers have %d cgroups", own)
	}
	if kib := peakKiB(t, m.cmd.Process.Pid); kib >= 96<<10 {
		t.Errorf("dewd's memory came to %d KiB with 40 containers", kib)
	}
	several(40, remove)
	if after := m.settled(metrics, before); after.beyond(before) {
		t.Errorf("after 40 containers the node holds %+v, before %+v", after, before)
	}
}

// beyond says whether a node holds more than before. A connection more or less
// is no leak, one for every tenth container would be; nor is the directory of a
// snapshot that containerd's next collection takes.
func (h holdings) beyond(before holdings) bool {
	return h.processes > before.processes || h.mounts > before.mounts || h.namespaces > before.namespaces ||
		h.cgroups > before.cgroups ||
		h.records > before.records || h.snapshots > before.snapshots+4 ||
		h.descriptors > before.descriptors+4 || h.containerd > before.containerd+4 ||
		h.goroutines > before.goroutines+8
}

// settled is what the node holds once that is not more than before, or after two minutes: containerd
// collects snapshots in intervals of fifty times what that takes it. With nothing before, it is what it
// holds once that does not become less.
func (m *machine) settled(metrics string, before holdings) holdings {
	m.t.Helper()
	h := m.holds(metrics)
	for deadline := time.Now().Add(2 * testkit.Limit); time.Now().Before(deadline); {
		time.Sleep(300 * time.Millisecond)
		last := h
		h = m.holds(metrics)
		if before != (holdings{}) && !h.beyond(before) ||
			before == (holdings{}) && h.processes == last.processes && !last.beyond(h) && !h.beyond(last) {
			break
		}
	}
	return h
}

func (m *machine) holds(metrics string) holdings {
	m.t.Helper()
	count := func(pattern ...string) int {
		found, _ := filepath.Glob(filepath.Join(pattern...))
		return len(found)
	}
	return holdings{
		processes: len(m.processes()), mounts: len(m.mounts()), namespaces: count(m.state, "netns", "*"),
		cgroups:     len(m.cgroups("/*")),
		records:     count(m.root, "engine", "containers", "*"),
		snapshots:   count(m.root, "snapshotter", "snapshots", "*"),
		descriptors: count(fmt.Sprintf("/proc/%d/fd/*", m.cmd.Process.Pid)),
		containerd:  count(fmt.Sprintf("/proc/%d/fd/*", m.privateContainerd())),
		goroutines:  m.goroutines(metrics),
	}
}

// namespaces counts those of a kind that the containers' processes have.
func (m *machine) namespaces(kind string) int {
	seen := map[string]bool{}
	for _, pid := range m.processes() {
		if line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)); strings.HasPrefix(string(line),
			"/app\x00") {
			ns, _ := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", pid, kind))
			seen[ns] = true
		}
	}
	return len(seen)
}

// goroutines is what dewd's metrics say.
func (m *machine) goroutines(metrics string) int {
	m.t.Helper()
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 30 * time.Second}
	resp, err := client.Get("http://" + metrics + "/metrics")
	if err != nil {
		m.t.Fatal(err)
	}
	defer resp.Body.Close()
	raw, err := io.ReadAll(resp.Body)
	if err != nil {
		m.t.Fatal(err)
	}
	for line := range strings.Lines(string(raw)) {
		if n, ok := strings.CutPrefix(line, "go_goroutines "); ok {
			v, err := strconv.Atoi(strings.TrimSpace(n))
			if err != nil {
				m.t.Fatal(err)
			}
			return v
		}
	}
	m.t.Fatal("the metrics have no go_goroutines")
	return 0
}

// peakKiB is the largest resident memory that a process has had.
func peakKiB(t *testing.T, pid int) int {
	t.Helper()
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(raw)) {
		if v, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			kib, err := strconv.Atoi(strings.Fields(v)[0])
			if err != nil {
				t.Fatal(err)
			}
			return kib
		}
	}
	t.Fatal("the kernel does not tell VmHWM")
	return 0
}
