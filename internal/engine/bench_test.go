package engine

import (
	"context"
	"flag"
	"fmt"
	"sync"
	"testing"
	"time"
)

var many = flag.Int("many", 24, "containers of one round of BenchmarkCreate")

// BenchmarkCreate makes containers and starts them, at 1, 6 and 24 in parallel,
// and removes them as many at once, for each containerd and network, with a
// shim for each container (own) and with shims that they share. Rounds of the
// two take turns if it is run with -count. Where the directories are on a disk,
// its syncs are part of it; TMPDIR=/dev/shm leaves them out.
//
//	go test -run '^$' -bench Create/2.x/none -benchtime 3x -count 3 ./internal/engine
func BenchmarkCreate(b *testing.B) {
	for name, prog := range containerds(b) {
		for _, netw := range []string{NetHost, NetNone, NetBridge} {
			bed := newBed(b, prog)
			program := bed.shims.program
			for _, parallel := range []int{1, 6, 24} {
				for _, shim := range []string{"own", "shared"} {
					b.Run(fmt.Sprintf("%s/%s/%d/%s", name, netw, parallel, shim), func(b *testing.B) {
						bed.shims.program = map[string]string{"own": "", "shared": program}[shim]
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
	tb.ReportMetric(0, "ns/op")
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
