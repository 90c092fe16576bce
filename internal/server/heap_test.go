package server

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"testing"

	"dewpoint/testkit"
)

func TestHeapGrowth(t *testing.T) {
	const mib = 1 << 20
	for _, c := range []struct {
		live uint64
		want int
	}{{0, 50}, {4 * mib, 300}, {8 * mib, 100}, {12 * mib, 50}, {30 * mib, 50}} {
		if got := growth(c.live); got != c.want {
			t.Errorf("growth(%d MiB) = %d %%, want %d", c.live/mib, got, c.want)
		}
	}
}

// TestPaceHeap has what is in use change and sees that the rules follow, collection after collection.
func TestPaceHeap(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(100))
	paceHeap()
	percent := func() int {
		p := debug.SetGCPercent(100)
		debug.SetGCPercent(p)
		return p
	}
	follows := func(what string, as func(percent int) bool) {
		t.Helper()
		testkit.Retry(t, what, func() error {
			runtime.GC()
			if p := percent(); !as(p) {
				return fmt.Errorf("the heap may grow by %d %%", p)
			}
			return nil
		})
	}
	much := make([]byte, 3*smallHeap)
	follows("much in use", func(p int) bool { return p == heapGrowth })
	runtime.KeepAlive(much)
	much = nil
	follows("little in use", func(p int) bool { return p > heapGrowth })
	much = make([]byte, 3*smallHeap)
	follows("much again", func(p int) bool { return p == heapGrowth })
	runtime.KeepAlive(much)
}
