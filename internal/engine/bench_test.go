package engine

import (
	"context"
	"flag"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"dewpoint/internal/engine/cgroup"
)

var many = flag.Int("many", 24, "containers of one round of BenchmarkCreate")

// BenchmarkCreate makes containers and starts them, at 1, 6 and 24 in parallel, and removes them as many at
// once, for each containerd and network: by runc with a shim for each container (own) and with shims that
// they share (shared), and by crun with shared shims (crun). For rounds that take turns run it several times.
// Where the directories are on a disk, its syncs are part of it; TMPDIR=/dev/shm leaves them out. What the
// processor did for a container (cpu-ms) is that of the cgroup that the benchmark runs in, if it has one of
// its own.
//
//	go test -run '^$' -bench Create/2.x/none -benchtime 3x -count 3 ./internal/engine
func BenchmarkCreate(b *testing.B) {
	for name, prog := range containerds(b) {
		for _, netw := range []string{NetHost, NetNone, NetBridge} {
			bed := newBedOf(b, prog, RuntimeRunc)
			program, runc := bed.shims.program, bed.maker
			crun, err := bed.crunMaker(context.Background())
			if err != nil {
				b.Fatal(err)
			}
			for _, parallel := range []int{1, 6, 24} {
				for _, shim := range []string{"own", "shared", "crun"} {
					b.Run(fmt.Sprintf("%s/%s/%d/%s", name, netw, parallel, shim), func(b *testing.B) {
						bed.shims.program, bed.maker = program, runc
						switch shim {
						case "own":
							bed.shims.program = ""
						case "crun":
							bed.maker = crun
						}
						bed.createMany(b, netw, parallel)
					})
				}
			}
		}
	}
}

func (b *bed) createMany(tb *testing.B, netw string, parallel int) {
	ctx := context.Background()
	var made, removed time.Duration
	before := processorTime()
	for range tb.N {
		made += atOnce(*many, parallel, func(n string) {
			_, err := b.Create(ctx, Spec{Name: n, Image: b.img, Net: netw})
			if err == nil {
				err = b.Engine.Start(ctx, n)
			}
			if err != nil {
				tb.Error(err)
			}
		})
		removed += atOnce(*many, parallel, func(n string) {
			if err := b.Remove(ctx, n, true); err != nil {
				tb.Error(err)
			}
		})
	}
	count := float64(*many * tb.N)
	tb.ReportMetric(count/made.Seconds(), "started/s")
	tb.ReportMetric(count/removed.Seconds(), "removed/s")
	if used := processorTime() - before; used > 0 {
		tb.ReportMetric(float64(used.Microseconds())/1000/count, "cpu-ms")
	}
	tb.ReportMetric(0, "ns/op")
}

// processorTime is what the cgroup has used of the processor, 0 if it is the machine's.
func processorTime() time.Duration {
	b, _ := os.ReadFile("/proc/self/cgroup")
	for l := range strings.Lines(string(b)) {
		f := strings.SplitN(strings.TrimSpace(l), ":", 3)
		if len(f) != 3 || f[2] == "/" {
			continue
		}
		if f[1] == "cpuacct" || f[1] == "cpu,cpuacct" {
			n, _ := os.ReadFile("/sys/fs/cgroup/cpuacct" + f[2] + "/cpuacct.usage")
			ns, _ := strconv.ParseInt(strings.TrimSpace(string(n)), 10, 64)
			return time.Duration(ns)
		}
		if f[1] == "" && cgroup.Unified() {
			n, _ := os.ReadFile("/sys/fs/cgroup" + f[2] + "/cpu.stat")
			var us int64
			_, _ = fmt.Sscanf(string(n), "usage_usec %d", &us)
			return time.Duration(us) * time.Microsecond
		}
	}
	return 0
}

// atOnce calls f for each of count names, so many in parallel, and says how long all took.
func atOnce(count, parallel int, f func(name string)) time.Duration {
	began := time.Now()
	names := make(chan string)
	var wg sync.WaitGroup
	for range parallel {
		wg.Go(func() {
			for n := range names {
				f(n)
			}
		})
	}
	for i := range count {
		names <- fmt.Sprintf("c%d", i)
	}
	close(names)
	wg.Wait()
	return time.Since(began)
}
