package mount

import (
	"fmt"
	"testing"
	"time"

	"dewpoint/testkit"
)

// Work that hangs at one target keeps nobody from another one, and no lock outlives its use.
func TestTargetsHaveLocksOfTheirOwn(t *testing.T) {
	b := &backend{}
	unlock := b.lock("stuck")
	others := make(chan struct{})
	go func() {
		defer close(others)
		for i := range 1000 {
			b.lock(fmt.Sprint(i))()
		}
	}()
	select {
	case <-others:
	case <-time.After(testkit.Limit):
		t.Fatal("a target waits for another one's work")
	}
	second := make(chan struct{})
	go func() {
		b.lock("stuck")()
		close(second)
	}()
	testkit.Eventually(t, "two are at the target", func() bool {
		b.mu.Lock()
		defer b.mu.Unlock()
		return b.targets["stuck"].users == 2
	})
	select {
	case <-second:
		t.Error("two work at one target")
	default:
	}
	unlock()
	<-second
	testkit.Eventually(t, "no lock is left", func() bool {
		b.mu.Lock()
		defer b.mu.Unlock()
		return len(b.targets) == 0
	})
}
