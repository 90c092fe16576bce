package api

import (
	"sync"
	"testing"
	"time"

	"dewpoint/internal/spec"
	"dewpoint/testkit"
)

// A pull that reports each chunk must cost its reader, and itself, next to nothing.
func TestFeedKeepsTheNewestAndAllStages(t *testing.T) {
	f := newFeed()
	var wg sync.WaitGroup
	for _, digest := range []string{"a", "b", "c", "d"} {
		wg.Go(func() {
			for i := range int64(10_000) {
				f.layer(spec.LayerProgress{Digest: digest, Size: 10_000, Fetched: i + 1})
			}
		})
	}
	for _, s := range []string{spec.Resolved, spec.Mounted, spec.Ready} {
		f.reached("web", s, 1)
	}
	wg.Wait()
	<-f.wake
	got := f.drain()
	stages, layers := got.stages, got.layers
	if len(stages) != 3 || stages[2].Stage != spec.Ready {
		t.Errorf("stages %v", stages)
	}
	if len(layers) != 4 {
		t.Errorf("%d reports of 4 layers", len(layers))
	}
	for _, l := range layers {
		if l.Fetched != 10_000 {
			t.Errorf("layer %v is not the newest", l)
		}
	}
	if again := f.drain(); again.stages != nil || again.layers != nil {
		t.Errorf("taken twice: %v, %v", again.stages, again.layers)
	}
	f.layer(spec.LayerProgress{Digest: "a"})
	select {
	case <-f.wake:
	case <-time.After(testkit.Limit):
		t.Error("a layer was not announced")
	}
}

func BenchmarkFeedLayer(b *testing.B) {
	f := newFeed()
	for b.Loop() {
		f.layer(spec.LayerProgress{Digest: "a", Size: 10_000, Fetched: 1, State: spec.StateFilling})
	}
}
