package test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"dewpoint/internal/api"
	"dewpoint/internal/spec"
	"dewpoint/testkit"
	"dewpoint/testkit/registrytest"

	"golang.org/x/sys/unix"
)

// waitsFor reports whether the deployment of a name is in the queue for a reason.
func waitsFor(t *testing.T, c *api.Client, name, reason string) bool {
	t.Helper()
	all, err := c.ListDeployments(t.Context(), spec.DeploymentQuery{})
	if err != nil {
		t.Fatal(err)
	}
	return slices.ContainsFunc(all, func(d spec.Deployment) bool {
		return d.Name == name && d.State == spec.StateQueued && d.Waits == reason && d.Position > 0
	})
}

// begin deploys in the background.
func begin(ctx context.Context, c *api.Client, r spec.Request) <-chan error {
	over := make(chan error, 1)
	go func() { _, err := c.Deploy(ctx, r, spec.Watch{}); over <- err }()
	return over
}

// available is MemAvailable in bytes.
func available(t *testing.T) int64 {
	t.Helper()
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(b), "MemAvailable:")
	kib, err := strconv.ParseInt(strings.Fields(rest + " ?")[0], 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return kib << 10
}

// hoard is memory that this process holds.
type hoard [][]byte

// fill takes memory until no more than leave is available.
func (h *hoard) fill(t *testing.T, leave int64) {
	t.Helper()
	for available(t) > leave {
		b, err := unix.Mmap(-1, 0, 64<<20, unix.PROT_READ|unix.PROT_WRITE,
			unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_POPULATE)
		if err != nil {
			t.Fatal(err)
		}
		*h = append(*h, b)
	}
}

func (h *hoard) release(t *testing.T) {
	t.Helper()
	for _, b := range *h {
		if err := unix.Munmap(b); err != nil {
			t.Error(err)
		}
	}
	*h = nil
}

// While other processes hold the machine's memory, a deployment waits, says for what, and nothing of it
// is made; it goes on when they let go.
func TestMemoryIsShort(t *testing.T) {
	reg := registrytest.New(t)
	img := reg.PushImage("app:1", appLayers(t, 0), appOptions())
	m := newMachine(t, reg).onTmpfs("300m")
	// The reserve is close to what there is: little has to be taken. What others take or give back meanwhile is
	// less than margin.
	have := available(t)
	margin := min(1<<30, have/8)
	reserve := have - 2*margin
	m.config += fmt.Sprintf("[deploy]\nreserve = \"%dMiB\"\n", reserve>>20)
	m.start()
	m.must("pull", img.Ref)
	c := m.client(t)
	if _, err := c.Deploy(t.Context(), quiet(img.Ref, "before", spec.Terms{}), spec.Watch{}); err != nil {
		t.Fatal(err)
	}
	var held hoard
	defer held.release(t)
	held.fill(t, reserve-margin)
	over := begin(t.Context(), c, quiet(img.Ref, "web", spec.Terms{}))
	testkit.Eventually(t, "it waits for memory", func() bool {
		select {
		case err := <-over:
			t.Fatalf("it did not wait for memory: %v, and %d MiB are available of a reserve of %d", err,
				available(t)>>20, reserve>>20)
		default:
		}
		return waitsFor(t, c, "web", "memory")
	})
	if s := m.pressure(t.Context(), c); !strings.Contains(s, "1 wait for memory") {
		t.Errorf("the doctor says %q", s)
	}
	if _, have := m.deployments(t); have["web"].Name != "" || have["before"].Status != spec.StatusRunning {
		t.Errorf("while one waits for memory there are %v", have)
	}
	held.release(t)
	if err := <-over; err != nil {
		t.Error(err)
	}
	m.removeAll(t)
}

// A registry from which as many images are fetched as may be has the next one wait for the link; what is here
// already and what comes from another registry passes it.
func TestLinkIsWaitedFor(t *testing.T) {
	reg, other := registrytest.New(t), registrytest.New(t)
	push := func(reg *registrytest.Server, name string, seed uint64) registrytest.Pushed {
		return reg.PushImage(name+":1",
			append(appLayers(t, 0), registrytest.Layer{Tar: registrytest.RandomTar(seed, 4, 1<<20)}), appOptions())
	}
	first, second, elsewhere := push(reg, "first", 1), push(reg, "second", 2), push(other, "elsewhere", 3)
	here := reg.PushImage("here:1", appLayers(t, 0), appOptions())
	m := newMachine(t, reg).onTmpfs("300m")
	m.config += fmt.Sprintf("[registry.%q]\nplain_http = true\n[deploy]\nfetch = 1\n", other.Host())
	scrape := m.measured(t)
	m.start()
	m.must("pull", here.Ref)
	c := m.client(t)
	held := first.Layers[2].Digest
	reg.Fail(registrytest.Fault{Do: registrytest.Hang, Digest: held})
	one := begin(t.Context(), c, quiet(first.Ref, "one", spec.Terms{}))
	testkit.Eventually(t, "the first image is being fetched", func() bool { return reg.Count(string(held)) > 0 })
	two := begin(t.Context(), c, quiet(second.Ref, "two", spec.Terms{}))
	testkit.Eventually(t, "the second waits for the link", func() bool { return waitsFor(t, c, "two", "link") })
	becomes(t, scrape, map[series]float64{{"queue_waiting", "reason=link"}: 1, {"queue_waiting", ""}: 1})
	for name, ref := range map[string]string{"here": here.Ref, "elsewhere": elsewhere.Ref} {
		if _, err := c.Deploy(t.Context(), quiet(ref, name, spec.Terms{}), spec.Watch{}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if !waitsFor(t, c, "two", "link") {
		t.Error("the second does not wait for the link any more")
	}
	if n := reg.Count(string(second.Layers[2].Digest)); n != 0 {
		t.Errorf("the second image's layer was asked for %d times while it waited", n)
	}
	reg.Heal()
	for _, over := range []<-chan error{one, two} {
		if err := <-over; err != nil {
			t.Error(err)
		}
	}
	m.removeAll(t)
}

// While other work presses the processors, fewer containers are made at once, and those that wait for that
// say so.
func TestProcessorsArePressed(t *testing.T) {
	reg := registrytest.New(t)
	img := reg.PushImage("app:1", appLayers(t, 0), appOptions())
	m := newMachine(t, reg).onTmpfs("300m")
	most := 4 * runtime.NumCPU()
	m.config += fmt.Sprintf("[deploy]\nmax = %d\n", most)
	scrape := m.measured(t)
	m.start()
	m.must("pull", img.Ref)
	c := m.client(t)
	spin(t, 4*runtime.NumCPU()) // fewer may be spread so that one of them has a processor to itself
	becomes(t, scrape, map[series]float64{{"queue_running_limit", ""}: float64(runtime.NumCPU())})
	// They are not ready before they are called off: each holds its slot for a second.
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var all []<-chan error
	for _, name := range names("c", most) {
		r := quiet(img.Ref, name, spec.Terms{})
		r.Ready = "log:never"
		all = append(all, begin(ctx, c, r))
	}
	testkit.Eventually(t, "one waits for the processors", func() bool {
		list, err := c.ListDeployments(t.Context(), spec.DeploymentQuery{})
		if err != nil {
			t.Fatal(err)
		}
		return slices.ContainsFunc(list, func(d spec.Deployment) bool {
			return d.State == spec.StateQueued && d.Waits == "cpu"
		})
	})
	stop()
	for _, over := range all {
		if err := <-over; err == nil {
			t.Error("what was called off is there")
		}
	}
	testkit.Eventually(t, "nothing of them stays", func() bool {
		list, err := c.List(t.Context(), true)
		return err == nil && len(list) == 0
	})
}

// spin keeps processors busy with what yields to all else until the test ends.
func spin(t *testing.T, n int) {
	t.Helper()
	for range n {
		// ends though this process be killed
		cmd := exec.Command("chrt", "--idle", "0", "timeout", "-s", "KILL", "120", "sh", "-c",
			"while :; do :; done")
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			unix.Kill(-cmd.Process.Pid, unix.SIGKILL)
			cmd.Wait()
		})
	}
}

// Of many images that are deployed at once onto a disk that has no room for all, some come and run, the
// others fail and say that the disk is full, and nothing of these is seen. With room again they come, too.
func TestDiskFillsUnderMany(t *testing.T) {
	const images, noise = 7, 12 << 20
	reg := registrytest.New(t)
	m := newMachine(t, reg).onTmpfs("64m")
	m.config += "[deploy]\nfetch = 2\n" // so that the first two have room
	m.start()
	c := m.client(t)
	var many spec.Many
	for i, name := range names("web", images) {
		img := reg.PushImage(fmt.Sprintf("app%d:1", i),
			append(appLayers(t, 0), registrytest.Layer{Tar: registrytest.RandomTar(uint64(i), 4, noise)}),
			appOptions())
		many.Requests = append(many.Requests, quiet(img.Ref, name, spec.Terms{}))
	}
	deploy := func(many spec.Many) (failed spec.Many) {
		t.Helper()
		done := 0
		err := c.DeployMany(t.Context(), many, spec.ManyWatch{Ended: func(i int, _ spec.Record, f *spec.Failure) {
			switch {
			case f == nil:
				done++
				return
			case f.Code != "disk_full" || f.Message == "" || !strings.Contains(f.Remedy, "dew prune"):
				t.Errorf("%s: %+v", many.Requests[i].Name, f)
			}
			failed.Requests = append(failed.Requests, many.Requests[i])
		}})
		if err != nil || done+len(failed.Requests) != len(many.Requests) || done == 0 {
			t.Fatalf("%d of %d are done, %d have failed, %v", done, len(many.Requests), len(failed.Requests), err)
		}
		return failed
	}
	failed := deploy(many)
	if len(failed.Requests) < 2 {
		t.Fatalf("%d of %d have failed: the disk was not full", len(failed.Requests), images)
	}
	_, have := m.deployments(t)
	seen := m.must("images")
	for _, r := range many.Requests {
		none := slices.ContainsFunc(failed.Requests, func(f spec.Request) bool { return f.Name == r.Name })
		if (have[r.Name].Status == spec.StatusRunning) == none || none && have[r.Name].Name != "" {
			t.Errorf("%s has failed: %t, and its container is %+v", r.Name, none, have[r.Name])
		}
		repository, _, _ := strings.Cut(r.Image[strings.LastIndexByte(r.Image, '/')+1:], ":")
		if !none && !strings.Contains(seen, repository) { // one that failed may have come to its container
			t.Errorf("%s runs, and there are the images\n%s", r.Name, seen)
		}
		if !none && m.must("exec", r.Name, "/app", "cat", "/etc/motd") != "above\n" {
			t.Errorf("%s does not run", r.Name)
		}
	}
	if err := unix.Mount("tmpfs", m.root, "tmpfs", unix.MS_REMOUNT, "size=300m"); err != nil {
		t.Fatal(err)
	}
	if again := deploy(failed); len(again.Requests) > 0 {
		t.Errorf("with room again %d have failed", len(again.Requests))
	}
	m.removeAll(t)
}
