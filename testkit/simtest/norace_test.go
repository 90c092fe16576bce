//go:build !race

package simtest

import (
	"testing"
	"testing/synctest"

	"dewpoint/testkit"
)

// How many schedules are run: always the same, and others each time.
const (
	usual   = 300
	unusual = 300
)

// TestSame shows that a seed decides what happens. The race detector has goroutines run in
// an order of its own.
func TestSame(t *testing.T) {
	testkit.Long(t)
	for seed := uint64(1); seed <= 20; seed++ {
		var sums [2]uint64
		for i := range sums {
			synctest.Test(t, func(t *testing.T) { sums[i] = schedule(t, seed) })
		}
		if sums[0] != sums[1] {
			t.Errorf("seed %d gives two schedules", seed)
		}
	}
}
