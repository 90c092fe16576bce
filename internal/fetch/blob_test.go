package fetch

import (
	"testing"

	"dewpoint/internal/fetch/link"
)

// A layer moves in the class of whoever waits for it most urgently, until the
// last of them has gone.
func TestWaitsAreCounted(t *testing.T) {
	b := &blob{c: &common{cfg: Config{Link: link.New(link.Config{})}}, class: link.Background,
		base: link.Background, gate: make(chan struct{})}
	want := func(c link.Class) {
		t.Helper()
		if got := b.classNow(); got != c {
			t.Errorf("class %d, not %d", got, c)
		}
	}
	first, second := b.wait(link.Demand), b.wait(link.Demand)
	want(link.Demand)
	if b.gate != nil {
		t.Error("who waits stands at the gate")
	}
	first()
	want(link.Demand)
	b.raise(link.Startup, true)
	want(link.Demand)
	second()
	want(link.Startup)
}
