package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"dewpoint/testkit/testbed"
)

// underLoad calls the API of a node with many containers alive while 24 deployments are under way at
// all times: each thread deploys, removes, and deploys again.
func (b *deployBench) underLoad(ctx context.Context, l *deployLineup) error {
	head := []string{"engine", "call", "calls", "failed", "p50, ms", "p99, ms", "largest, ms", "idle p50, ms",
		"idle p99, ms", "deployments meanwhile", "failed"}
	var rows [][]string
	for _, m := range l.engines {
		more, err := b.underLoadOf(ctx, l, m)
		if err != nil {
			return err
		}
		rows = append(rows, more...)
	}
	b.report.markdown(b.title(fmt.Sprintf("API calls while %d deployments are under way and %d containers alive, %s of load", b.containers, b.alive, b.seconds)), head, rows)
	for _, verdict := range b.verdicts {
		b.report.note(verdict)
	}
	return nil
}

// underLoadOf is underLoad of one engine. It gives a row for each call.
func (b *deployBench) underLoadOf(ctx context.Context, l *deployLineup, m manyEngine) (rows [][]string,
	err error) {
	var s deploySample
	all := []toDeploy{b.sleeper(l)}
	all[0].args = []string{"sh", "-c", "ls -l /; sleep 3600"} // its log is asked for
	for len(all) < b.alive {
		all = append(all, b.sleeper(l))
	}
	done := s.deployAll(ctx, m.ways()[1], all, b.containers)
	defer func() { err = errors.Join(err, removeAll(ctx, m, done)) }()
	if s.Failed > 0 {
		return nil, fmt.Errorf("%d of %d that are to be alive failed: %s", s.Failed, b.alive, s.Error)
	}
	if err := l.settle(ctx); err != nil {
		return nil, err
	}
	idle := probe(ctx, m, all[0].name, 2*time.Second)
	load := l.load(ctx, m)
	memory := m.session().group.Watch()
	loaded := probe(ctx, m, all[0].name, b.seconds)
	memory.Stop()
	made, failed, err := load()
	if err != nil {
		return nil, err
	}
	rows, worst, err := b.loadRows(m.name(), idle, loaded, strconv.Itoa(made), strconv.Itoa(failed))
	b.figure(m.name(), "deployments meanwhile", "deployments", float64(made))
	b.figure(m.name(), "memory under load, all programs", "MiB", float64(memory.Peak)/(1<<20))
	if m.name() == "dewd" {
		dewd := float64(memory.PerOf["dewd"]) / (1 << 20)
		b.figure(m.name(), "memory under load, dewd", "MiB", dewd)
		b.verdicts = append(b.verdicts,
			fmt.Sprintf("\nAPI calls under that load, p99 of the slowest kind: %s ms; target below 50, and none fails: %s\n\ndewd's largest memory meanwhile: %.1f MiB; target below 96: %s\n",
				milli(worst), met(worst < 0.05 && err == nil), dewd, met(dewd < 96)))
	}
	if err != nil {
		b.verdicts = append(b.verdicts, fmt.Sprintf("\nThe first calls that failed: %v\n", err))
	}
	return rows, nil
}

// loadRows is a row for each call of an engine, the p99 of the slowest in seconds, and the first failure of
// each.
func (b *deployBench) loadRows(engine string, idle, loaded map[string]calledTimes,
	more ...string) (rows [][]string, worst float64, err error) {
	for _, name := range slices.Sorted(maps.Keys(loaded)) {
		t, quiet := loaded[name], idle[name]
		for _, first := range []error{quiet.err, t.err} {
			if first != nil {
				err = errors.Join(err, fmt.Errorf("%s %s: %w", engine, name, first))
			}
		}
		row := []string{engine, name, strconv.Itoa(len(t.seconds)), strconv.Itoa(quiet.failed + t.failed)}
		for _, v := range []float64{t.quantile(0.5), t.quantile(0.99), t.quantile(1), quiet.quantile(0.5),
			quiet.quantile(0.99)} {
			row = append(row, milli(v))
		}
		rows = append(rows, append(row, more...))
		worst = max(worst, t.quantile(0.99))
		b.figure(engine, name+" under load", "s", t.seconds...)
		b.figure(engine, name+" idle", "s", quiet.seconds...)
		b.figure(engine, name+" failed", "calls", float64(quiet.failed+t.failed))
	}
	return rows, worst, err
}

func milli(seconds float64) string { return fmt.Sprintf("%.2f", seconds*1e3) }

// calledTimes is what calls of one kind took, and how many failed.
type calledTimes struct {
	seconds []float64
	failed  int
	err     error // the first
}

// quantile is without end where no call was answered.
func (t calledTimes) quantile(q float64) float64 {
	if len(t.seconds) == 0 {
		return math.Inf(1)
	}
	return quantile(t.seconds, q)
}

// callTimeout is when a call that has no answer has failed.
const callTimeout = 30 * time.Second

// probe calls each of an engine's calls again and again, two milliseconds apart. The last ones are waited
// for.
func probe(ctx context.Context, m manyEngine, container string, length time.Duration) map[string]calledTimes {
	var mu sync.Mutex
	var probing sync.WaitGroup
	all := map[string]calledTimes{}
	begun := time.Now()
	for name, call := range m.calls(container) {
		probing.Go(func() {
			var t calledTimes
			for ctx.Err() == nil && time.Since(begun) < length {
				t.add(ctx, call)
				time.Sleep(2 * time.Millisecond)
			}
			mu.Lock()
			all[name] = t
			mu.Unlock()
		})
	}
	probing.Wait()
	return all
}

// add calls once.
func (t *calledTimes) add(ctx context.Context, call func(context.Context) error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	start := time.Now()
	err := call(ctx)
	if err == nil {
		t.seconds = append(t.seconds, time.Since(start).Seconds())
		return
	}
	t.failed++
	if t.err == nil {
		t.err = err
	}
}

// load deploys and removes by the API until the function that it returns is
// called, which gives how many deployments there were.
func (l *deployLineup) load(ctx context.Context, m manyEngine) func() (made, failed int, err error) {
	end := make(chan struct{})
	var made, failed atomic.Int64
	var removal atomic.Pointer[error]
	var deploying sync.WaitGroup
	w := m.ways()[1]
	for i := range l.b.containers {
		deploying.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-end:
					return
				case <-ctx.Done():
					return
				default:
				}
				c := toDeploy{name: fmt.Sprintf("b%d-load-%s-%d-%d", os.Getpid(), m.name(), i, n),
					image: testbed.Address + "/" + l.b.o.images[0],
					args:  strings.Fields(l.b.commands[0]), net: l.b.net}
				if _, err := w.deploy(ctx, c); err != nil {
					failed.Add(1)
					continue
				}
				made.Add(1)
				if err := m.remove(ctx, c.name); err != nil {
					removal.Store(&err)
				}
			}
		})
	}
	return func() (int, int, error) {
		close(end)
		deploying.Wait()
		if err := removal.Load(); err != nil {
			return 0, 0, *err
		}
		return int(made.Load()), int(failed.Load()), ctx.Err()
	}
}

// footprint is what a node takes of the machine at one moment.
type footprint struct {
	Deployments int `json:"deployments"` // so far
	Alive       int `json:"alive"`       // containers at that moment
	Processes   int `json:"processes"`   // of dewd with its containerd and shims, and in the containers
	Mounts      int `json:"mounts"`
	Namespaces  int `json:"namespaces"` // network namespaces that files hold
	Cgroups     int `json:"cgroups"`
	Descriptors int `json:"descriptors"` // of dewd
	Containerd  int `json:"containerd"`  // descriptors of its containerd
	Goroutines  int `json:"goroutines"`  // of dewd
	RSS         int `json:"rss"`         // KiB, of dewd
	Anon        int `json:"anon"`        // KiB of that which are no pages of files
	// KiB of dewd's Go heap that are allocated, garbage since the last collection included
	Heap       int `json:"heap"`
	EngineRSS  int `json:"engine_rss"`  // KiB, of its containerd
	EngineAnon int `json:"engine_anon"` // KiB of that which are no pages of files
}

// take looks at a node.
func (m *manyDewd) take(ctx context.Context) (f footprint, err error) {
	g := m.s.group
	groups, inContainers := containerGroups()
	f.Cgroups, f.Processes = groups, len(g.Processes(""))+len(inContainers)
	for _, pid := range g.Processes("dewd") { // datafs is the same program
		if cmd, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)); strings.Contains(string(cmd),
			"\x00--config\x00") {
			f.Descriptors, f.RSS, f.Anon = descriptors(pid), statusKiB(pid, "VmRSS"), statusKiB(pid, "RssAnon")
			f.Mounts = mountsUnder(pid, m.s.dir)
		}
	}
	for _, pid := range g.Processes("containerd") {
		f.Containerd += descriptors(pid)
		f.EngineRSS, f.EngineAnon = f.EngineRSS+statusKiB(pid, "VmRSS"), f.EngineAnon+statusKiB(pid, "RssAnon")
	}
	ns, _ := filepath.Glob(m.s.path("state/netns/*"))
	f.Namespaces = len(ns)
	told, err := m.told(ctx, "go_goroutines", "go_memstats_heap_alloc_bytes")
	if err == nil {
		f.Goroutines, f.Heap = int(told[0]), int(told[1])>>10
	}
	return f, err
}

func descriptors(pid int) int {
	fds, _ := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	return len(fds)
}

func statusKiB(pid int, what string) int {
	raw, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	for line := range strings.Lines(string(raw)) {
		if value, ok := strings.CutPrefix(line, what+":"); ok {
			kib, _ := strconv.Atoi(strings.Fields(value)[0])
			return kib
		}
	}
	return 0
}

// mountsUnder counts the mounts below a directory that a process sees.
func mountsUnder(pid int, dir string) (n int) {
	raw, _ := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", pid))
	for line := range strings.Lines(string(raw)) {
		if f := strings.Fields(line); len(f) > 4 && strings.HasPrefix(f[4], dir+"/") {
			n++
		}
	}
	return n
}

// containerGroups counts the cgroups of this program's containers in all
// hierarchies, by the name that their containers have, and lists who is in them.
func containerGroups() (groups int, pids []int) {
	mine := fmt.Sprintf("b%d-", os.Getpid())
	filepath.WalkDir("/sys/fs/cgroup", func(path string, d os.DirEntry, err error) error {
		if err != nil || !d.IsDir() || !strings.HasPrefix(d.Name(), mine) {
			return nil
		}
		groups++
		raw, _ := os.ReadFile(filepath.Join(path, "cgroup.procs"))
		for _, f := range strings.Fields(string(raw)) {
			if pid, err := strconv.Atoi(f); err == nil {
				pids = append(pids, pid)
			}
		}
		return nil
	})
	slices.Sort(pids)
	return groups, slices.Compact(pids)
}

// told is what dewd's metrics say of some that have no labels.
func (m *manyDewd) told(ctx context.Context, names ...string) ([]float64, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+dewdAt+"/metrics", nil)
	if err != nil {
		return nil, err
	}
	client := http.Client{Transport: &http.Transport{DialContext: m.s.bed.Dial, DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	raw, err := io.ReadAll(io.LimitReader(resp.Body, 4<<20))
	if err != nil {
		return nil, err
	}
	out := make([]float64, len(names))
	for i, name := range names {
		_, rest, _ := strings.Cut(string(raw), "\n"+name+" ")
		value, _, _ := strings.Cut(rest, "\n")
		if out[i], err = strconv.ParseFloat(value, 64); err != nil {
			return nil, fmt.Errorf("http://%s/metrics does not tell %s: %w", dewdAt, name, err)
		}
	}
	return out, nil
}
