package deploy

import (
	"errors"
	"fmt"
	"path/filepath"
	"runtime"
	"testing"

	"dewpoint/internal/deploy/admit"
	"dewpoint/internal/spec"
	"dewpoint/testkit"
)

// fullQueue fills a queue with so many detached deployments behind one that has the only
// slot, and returns the bytes of heap and stacks that each takes.
func fullQueue(tb testing.TB, n int) float64 {
	d := New(Config{Admit: admit.Config{Max: 1, Queue: 2 * n, PerCaller: n}})
	defer d.Close()
	first, err := d.admission.Enter(admit.Claim{})
	if err != nil {
		tb.Fatal(err)
	}
	defer first.Done(0)
	k, err := NewQueue(QueueConfig{Deployer: d, Path: filepath.Join(tb.TempDir(), "deployments")})
	if err != nil {
		tb.Fatal(err)
	}
	defer k.Close()
	req := spec.Request{Image: "registry.example/team/app:1", Name: "app", Net: "none",
		Cmd: []string{"serve", "--port", "8080"}, Memory: 64 << 20}
	for i := range 8 {
		req.Env = append(req.Env, fmt.Sprintf("VARIABLE_%d=the value of a variable", i))
	}
	before := memoryNow()
	if err := k.Many(tb.Context(),
		spec.Many{Requests: []spec.Request{req}, Count: n, Terms: spec.Terms{Detach: true, Key: "k"}},
		spec.ManyWatch{Watch: func(int) spec.Watch { return spec.Watch{} }}); err != nil {
		tb.Fatal(err)
	}
	// each has come to its wait
	testkit.Eventually(tb, "the queue fills", func() bool {
		k.mu.Lock()
		defer k.mu.Unlock()
		return len(k.live) == n && d.admission.Stats().Waiting[spec.WaitsTurn] == n
	})
	list := k.List(spec.DeploymentQuery{})
	if len(list) != n || list[n-1].Position != n {
		tb.Fatalf("%d are listed, the last %+v", len(list), list[len(list)-1])
	}
	list = nil
	return float64(memoryNow()-before) / float64(n)
}

func memoryNow() int64 {
	var s runtime.MemStats
	for range 2 {
		runtime.GC()
	}
	runtime.ReadMemStats(&s)
	return int64(s.HeapAlloc + s.StackInuse)
}

// A queue that is as full as it can be made by one call takes little of dewd's memory.
func TestMemoryOfAFullQueue(t *testing.T) {
	const n, most = spec.MaxMany, 16 << 10
	if per := fullQueue(t, n); per > most {
		t.Errorf("each of %d takes %.0f bytes, want at most %d", n, per, most)
	} else {
		t.Logf("each of %d takes %.0f bytes", n, per)
	}
}

// BenchmarkFullQueue fills the queue and gives the bytes that each deployment takes there.
func BenchmarkFullQueue(b *testing.B) {
	for _, n := range []int{1024, spec.MaxMany} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			var per float64
			for b.Loop() {
				per = fullQueue(b, n)
			}
			b.ReportMetric(per, "B/deployment")
			b.ReportMetric(per*float64(n)/(1<<20), "MiB")
		})
	}
}

// What can never fit, or comes to a full queue, is refused before anything is made of it.
func TestEnterRefuses(t *testing.T) {
	d := New(Config{Admit: admit.Config{Max: 1, Queue: 1, Memory: func() (admit.Memory, error) {
		return admit.Memory{Available: 1 << 30, Total: 1 << 30}, nil
	}}})
	defer d.Close()
	k, err := NewQueue(QueueConfig{Deployer: d, Path: filepath.Join(t.TempDir(), "deployments")})
	if err != nil {
		t.Fatal(err)
	}
	defer k.Close()
	deploy := func(memory int64) error {
		_, err := k.Deploy(t.Context(), spec.Request{Image: "app:1", Memory: memory}, spec.Watch{})
		return err
	}
	var never *admit.NeverError
	if err := deploy(2 << 30); !errors.As(err, &never) {
		t.Errorf("%v", err)
	}
	for range 2 {
		r, err := d.parse(spec.Request{Image: "app:1"})
		if err == nil {
			err = r.enter(nil, false)
		}
		if err != nil {
			t.Fatal(err)
		}
		defer r.place.Done(0)
	}
	var busy *admit.BusyError
	if err := deploy(0); !errors.As(err, &busy) {
		t.Errorf("%v", err)
	}
}
