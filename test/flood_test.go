package test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"dewpoint/internal/api"
	"dewpoint/internal/spec"
	"dewpoint/testkit"
	"dewpoint/testkit/registrytest"

	"golang.org/x/sys/unix"
)

// onTmpfs puts the node's root into memory: the disk is not what is tested.
func (m *machine) onTmpfs(size string) *machine {
	m.t.Helper()
	if err := os.MkdirAll(m.root, 0o755); err != nil {
		m.t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", m.root, "tmpfs", 0, "size="+size); err != nil {
		m.t.Fatal(err)
	}
	return m
}

// overTCP makes the node listen for callers with tokens.
func (m *machine) overTCP() (as func(name string) *api.Client) {
	m.t.Helper()
	address := testkit.FreeAddress(m.t)
	dir := filepath.Dir(m.root)
	tokens := filepath.Join(dir, "tokens")
	m.config += fmt.Sprintf("[api]\nlisten = %q\ntokens = %q\n", address, tokens)
	return func(name string) *api.Client {
		m.t.Helper()
		file := filepath.Join(dir, name)
		if err := os.WriteFile(file, []byte(m.must("token", "--file", tokens, "--name", name, "deploy")),
			0o600); err != nil {
			m.t.Fatal(err)
		}
		c, err := api.DialWith("http://"+address, api.Credentials{Token: file})
		if err != nil {
			m.t.Fatal(err)
		}
		m.t.Cleanup(c.Close)
		return c
	}
}

// someWait is what the doctor says when deployments do.
var someWait = regexp.MustCompile(`\b[0-9]+ wait\b`)

// pressure is what "dew doctor" says of those that wait.
func (m *machine) pressure(ctx context.Context, c *api.Client) string {
	m.t.Helper()
	all, err := c.Doctor(ctx)
	if err != nil {
		m.t.Fatal(err)
	}
	for _, f := range all {
		if f.What == "pressure" {
			return f.Detail
		}
	}
	m.t.Fatal("the doctor does not look at pressure")
	return ""
}

// A caller who floods is told to come again; who has little there goes on beside him, both
// share what the node does, calls are answered, and dewd stays small. When he goes, nothing of his stays.
func TestFlood(t *testing.T) {
	reg := registrytest.New(t)
	img := reg.PushImage("app:1", appLayers(t, 0), appOptions())
	m := newMachine(t, reg).onTmpfs("300m")
	m.config += "[deploy]\nmax = 2\nqueue = 128\n"
	as := m.overTCP()
	scrape := m.measured(t)
	m.start()
	m.must("pull", img.Ref)
	flooder, other := as("flooder"), as("other")
	// His are not ready before he goes: each holds a place for a second.
	ctx, vanish := context.WithCancel(t.Context())
	defer vanish()
	var busy, odd atomic.Int64
	var flood sync.WaitGroup
	const many = 1000 // a caller over TCP has 1,024 calls under way at most
	for i := range many {
		flood.Go(func() {
			_, err := flooder.Deploy(ctx,
				spec.Request{Image: img.Ref, Name: fmt.Sprint("flood-", i), Net: "none", Cmd: []string{"sleep", "1h"},
					Ready: "tcp:1", ReadyTimeout: time.Hour}, spec.Watch{})
			var e *api.Error
			switch {
			case errors.As(err, &e) && e.Code == api.Busy && strings.HasPrefix(e.Remedy, "try again in ") &&
				e.Exit == api.ExitBusy:
				busy.Add(1)
			case ctx.Err() == nil:
				odd.Add(1)
				t.Errorf("one of the flood: %v", err)
			}
		})
	}
	testkit.Eventually(t, "the queue is full for him", func() bool { return busy.Load()+odd.Load() >= many-200 })
	for i := range 3 {
		if _, err := other.Deploy(t.Context(),
			spec.Request{Image: img.Ref, Name: fmt.Sprint("other-", i), Net: "none", Cmd: []string{"sleep", "1h"}},
			spec.Watch{}); err != nil {
			t.Errorf("another caller's: %v", err)
		}
		if _, err := other.List(t.Context(), true); err != nil {
			t.Error(err)
		}
	}
	if s := m.pressure(t.Context(), other); !someWait.MatchString(s) {
		t.Errorf("nobody waits any more: the test has shown nothing: %s", s)
	}
	all := scrape()
	all.exactly(t, map[series]float64{{"queue_running_limit", ""}: 2,
		{"queue_refused_total", "reason=never"}: 0})
	all.atLeast(t, map[series]float64{{"queue_waiting", "reason=turn"}: 1, {"queue_callers", ""}: 1,
		{"queue_refused_total", "reason=busy"}: 1, {"queue_admitted_total", ""}: 4,
		{"queue_promised_bytes", ""}: 1 << 20})
	if n := all.count(series{"queue_running", ""}); n > 2 {
		t.Errorf("%v are under way", n)
	}
	kib := peakKiB(t, m.cmd.Process.Pid)
	t.Logf("dewd took %d KiB at most", kib)
	if kib > 96<<10 {
		t.Errorf("dewd took %d KiB", kib)
	}
	vanish()
	flood.Wait()
	testkit.Eventually(t, "nothing of the one who flooded stays", func() bool {
		all, err := other.List(t.Context(), true)
		return err == nil && len(all) == 3 && !someWait.MatchString(m.pressure(t.Context(), other))
	})
	becomes(t, scrape, map[series]float64{{"queue_running", ""}: 0, {"queue_callers", ""}: 0,
		{"queue_waiting", ""}: 0, {"queue_promised_bytes", ""}: 0})
	if all, told := scrape(),
		busy.Load(); all.count(series{"queue_refused_total", "reason=busy"}) != float64(told) ||
		all.count(series{"api_call_seconds", "method=Deploy code=busy"}) != float64(told) {
		t.Errorf("%d were told that the node is busy, and %v are counted, %v of them calls", told,
			all.count(series{"queue_refused_total", "reason=busy"}),
			all.count(series{"api_call_seconds", "method=Deploy code=busy"}))
	}
	m.must("rm", "-f", "other-0", "other-1", "other-2")
}

// Two callers who ask for many each get every second turn.
func TestCallersShare(t *testing.T) {
	reg := registrytest.New(t)
	img := reg.PushImage("app:1", appLayers(t, 0), appOptions())
	m := newMachine(t, reg).onTmpfs("300m")
	m.config += "[deploy]\nmax = 1\n"
	as := m.overTCP()
	m.start()
	m.must("pull", img.Ref)
	var mu sync.Mutex
	var order []string
	var work sync.WaitGroup
	ask := func(who string, n int) {
		c := as(who)
		for i := range n {
			work.Go(func() {
				r, err := c.Deploy(t.Context(),
					spec.Request{Image: img.Ref, Name: fmt.Sprint(who, i), Net: "none", Cmd: []string{"sleep", "1h"}},
					spec.Watch{})
				mu.Lock()
				defer mu.Unlock()
				if order = append(order, who); err != nil || r.Stages[spec.Admitted] == 0 {
					t.Errorf("%s: %+v, %v", who, r.Stages, err)
				}
			})
		}
	}
	// One that is not ready for long holds the only slot for a second: time to queue.
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	first := as("first")
	work.Go(func() {
		_, _ = first.Deploy(ctx,
			spec.Request{Image: img.Ref, Net: "none", Cmd: []string{"sleep", "1h"}, Ready: "tcp:1",
				ReadyTimeout: time.Hour}, spec.Watch{})
	})
	ask("much", 18)
	testkit.Eventually(t, "many wait", func() bool { return someWait.MatchString(m.pressure(t.Context(), first)) })
	ask("little", 5)
	testkit.Eventually(t, "all are there", func() bool { mu.Lock(); defer mu.Unlock(); return len(order) == 23 })
	stop()
	work.Wait()
	last := len(order) - 1 - slices.Index(reversed(order), "little")
	if last >= 20 { // first come, first served would have it among the last three
		t.Errorf("the one who asked for little waited for the other: %v", order)
	}
	var all []spec.Container
	testkit.Eventually(t, "the one that was called off is gone", func() (ok bool) {
		var err error
		all, err = first.List(t.Context(), true)
		return err == nil && len(all) == 23
	})
	for _, k := range all {
		m.must("rm", "-f", k.Name)
	}
}

func reversed(s []string) []string {
	r := slices.Clone(s)
	slices.Reverse(r)
	return r
}

// A container that may take more than is free waits for it, says so, and goes on when
// there is enough; one that may take more than there is fails at once.
func TestMemoryIsWaitedFor(t *testing.T) {
	reg := registrytest.New(t)
	img := reg.PushImage("app:1", appLayers(t, 0), appOptions())
	m := newMachine(t, reg).onTmpfs("300m")
	scrape := m.measured(t)
	m.start()
	m.must("pull", img.Ref)
	var s unix.Sysinfo_t
	if err := unix.Sysinfo(&s); err != nil {
		t.Fatal(err)
	}
	half := int64(float64(s.Totalram) * float64(s.Unit) * 0.52) // two of them are more than there is
	c, err := api.Dial("unix://" + m.state + "/dewd.sock")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	deploy := func(ctx context.Context, name string, memory int64, ready string) <-chan error {
		got := make(chan error, 1)
		begun := make(chan struct{})
		go func() {
			_, err := c.Deploy(ctx,
				spec.Request{Image: img.Ref, Name: name, Net: "none", Memory: memory, Cmd: []string{"sleep", "1h"},
					Ready: ready, ReadyTimeout: time.Hour},
				spec.Watch{Reached: func(_, stage string, _ float64) {
					if stage == spec.Started {
						close(begun)
					}
				}})
			got <- err
		}()
		if ready != "" {
			<-begun
		}
		return got
	}
	err = <-deploy(t.Context(), "never", 1<<50, "")
	var e *api.Error
	if !errors.As(err, &e) || e.Code != api.NoMemory || !strings.Contains(e.Remedy, "--memory") {
		t.Errorf("a container that may take a petabyte: %v", err)
	}
	scrape().exactly(t, map[series]float64{{"queue_refused_total", "reason=never"}: 1,
		{"queue_refused_total", "reason=busy"}: 0})
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	first := deploy(ctx, "first", half, "tcp:1")
	second := deploy(t.Context(), "second", half, "")
	testkit.Eventually(t, "that it waits for memory is told", func() bool {
		return strings.Contains(m.pressure(t.Context(), c), "1 wait for memory")
	})
	becomes(t, scrape, map[series]float64{{"queue_waiting", "reason=memory"}: 1, {"queue_waiting", ""}: 1})
	if err := <-deploy(t.Context(), "small", 32<<20, ""); err != nil {
		t.Errorf("one that fits, beside it: %v", err)
	}
	select {
	case err := <-second:
		t.Errorf("it did not wait for memory: %v", err)
	default:
	}
	stop()
	if err := <-first; err == nil {
		t.Error("the one that was called off is there")
	}
	if err := <-second; err != nil {
		t.Error(err)
	}
	// It idles: what it may yet take is kept for it all the same, also by the next dewd.
	m.kill()
	m.start()
	if c, err = api.Dial("unix://" + m.state + "/dewd.sock"); err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	third := deploy(t.Context(), "third", half, "")
	testkit.Eventually(t, "another one waits for memory", func() bool {
		return strings.Contains(m.pressure(t.Context(), c), "1 wait for memory")
	})
	scrape().atLeast(t, map[series]float64{{"queue_owed_bytes", ""}: float64(half) / 2})
	m.must("rm", "-f", "second")
	if err := <-third; err != nil {
		t.Error(err)
	}
	m.must("rm", "-f", "third", "small")
}

// An image that cannot fit on the disk is told as that before the disk is full, and nothing of it is seen.
func TestDeployOnFullDisk(t *testing.T) {
	reg := registrytest.New(t)
	small := reg.PushImage("small:1", appLayers(t, 0), appOptions())
	large := reg.PushImage("large:1", appLayers(t, 40<<20), appOptions())
	m := newMachine(t, reg).onTmpfs("32m").start()
	m.must("run", "-d", "--net", "none", "--name", "before", small.Ref, "sleep", "1h")
	r := m.dew("run", "-d", "--net", "none", "--name", "web", large.Ref, "sleep", "1h")
	if r.code != 8 || !strings.Contains(r.err, "disk full") || !strings.Contains(r.err, "are not here") ||
		!strings.Contains(r.err, "dew prune") {
		t.Errorf("%+v", r)
	}
	if s := m.must("ps", "-a"); strings.Contains(s, "web") || !strings.Contains(s, "before") {
		t.Errorf("containers: %s", s)
	}
	if s := m.must("images"); strings.Contains(s, "large") {
		t.Errorf("images: %s", s)
	}
	if err := unix.Mount("tmpfs", m.root, "tmpfs", unix.MS_REMOUNT, "size=200m"); err != nil {
		t.Fatal(err)
	}
	m.must("run", "-d", "--net", "none", "--name", "web", large.Ref, "sleep", "1h")
	m.must("rm", "-f", "web", "before")
}

// BenchmarkSlots deploys 24 containers at once, with so many slots. It gives deployments
// per second and the median of their latencies in milliseconds, the queue included.
func BenchmarkSlots(b *testing.B) {
	reg := registrytest.New(b)
	img := reg.PushImage("app:1", appLayers(b, 0), appOptions())
	nodes := map[int]*api.Client{}
	all := []int{1, 2, 3, 4, 6, 8, 12, 24}
	for _, n := range all {
		m := newMachine(b, reg).onTmpfs("300m")
		m.config += fmt.Sprintf("[deploy]\nmax = %d\n", n)
		m.start().must("pull", img.Ref)
		c, err := api.Dial("unix://" + m.state + "/dewd.sock")
		if err != nil {
			b.Fatal(err)
		}
		defer c.Close()
		nodes[n] = c
	}
	type sample struct{ rate, median float64 }
	got := map[int][]sample{}
	for range b.N { // all in turn: who else is on the machine is so to all
		for _, n := range all {
			rate, median := burst(b, nodes[n], img.Ref)
			got[n] = append(got[n], sample{rate, median})
		}
	}
	for _, n := range all {
		by := func(f func(sample) float64) float64 {
			var v []float64
			for _, s := range got[n] {
				v = append(v, f(s))
			}
			slices.Sort(v)
			return v[len(v)/2]
		}
		b.ReportMetric(by(func(s sample) float64 { return s.rate }), fmt.Sprintf("slots%d/s", n))
		b.ReportMetric(by(func(s sample) float64 { return s.median }), fmt.Sprintf("slots%d-ms", n))
	}
}

// burst deploys 24 at once and removes them.
func burst(b *testing.B, c *api.Client, ref string) (rate, median float64) {
	var g sync.WaitGroup
	took := make([]float64, 24)
	begun := time.Now()
	for i := range took {
		g.Go(func() {
			_, err := c.Deploy(b.Context(),
				spec.Request{Image: ref, Name: fmt.Sprint("c", i), Net: "none", Cmd: []string{"sleep", "1h"}},
				spec.Watch{})
			if err != nil {
				b.Error(err)
			}
			took[i] = time.Since(begun).Seconds()
		})
	}
	g.Wait()
	rate = float64(len(took)) / time.Since(begun).Seconds()
	for i := range took {
		g.Go(func() {
			if err := c.Remove(b.Context(), fmt.Sprint("c", i), true); err != nil {
				b.Error(err)
			}
		})
	}
	g.Wait()
	slices.Sort(took)
	return rate, 1000 * took[len(took)/2]
}
