package engine

import (
	"context"
	"flag"
	"fmt"
	"sync"
	"testing"
	"time"
)

// BenchmarkCreate makes 24 containers and starts them, at 1, 6 and 24 in
// parallel, for each containerd and network; removing them is not counted.
func BenchmarkCreate(b *testing.B) {
	for name, prog := range containerds(b) {
		for _, netw := range []string{NetHost, NetNone, NetBridge} {
			bed := newBed(b, prog)
			for _, parallel := range []int{1, 6, 24} {
				b.Run(fmt.Sprintf("%s/%s/%d", name, netw, parallel), func(b *testing.B) { bed.createMany(b, netw, parallel) })
			}
		}
	}
}

var many = flag.Int("many", 24, "containers of one round of BenchmarkCreate")

func (b *bed) createMany(tb *testing.B, netw string, parallel int) {
	count := *many
	var took time.Duration
	for range tb.N {
		began := time.Now()
		names := make(chan string)
		var wg sync.WaitGroup
		for range parallel {
			wg.Go(func() {
				for n := range names {
					if _, err := b.Create(context.Background(), Spec{Name: n, Image: b.img, Net: netw}); err != nil {
						tb.Error(err)
						continue
					}
					if err := b.Engine.Start(context.Background(), n); err != nil {
						tb.Error(err)
					}
				}
			})
		}
		for i := range count {
			names <- fmt.Sprintf("c%d", i)
		}
		close(names)
		wg.Wait()
		took += time.Since(began)
		for i := range count {
			if err := b.Remove(context.Background(), fmt.Sprintf("c%d", i), true); err != nil {
				tb.Error(err)
			}
		}
	}
	tb.ReportMetric(float64(count*tb.N)/took.Seconds(), "containers/s")
	tb.ReportMetric(0, "ns/op")
}
