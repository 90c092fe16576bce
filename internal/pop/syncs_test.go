package pop

import (
	"errors"
	"sync/atomic"
	"testing"
	"time"
)

// Who waits for a directory's fsync shares it with all who wait, and none that began before
// he came serves him.
func TestDirSharesSyncs(t *testing.T) {
	d := NewDir(t.TempDir(), time.Minute)
	var began atomic.Int32
	goOn := make(chan struct{})
	failed := errors.New("the second")
	d.fsync = func(string) error {
		n := began.Add(1)
		<-goOn
		if n == 2 {
			return failed
		}
		return nil
	}
	first := make(chan error, 1)
	go func() { first <- d.SyncDir(t.Context(), ".") }()
	for began.Load() == 0 {
		time.Sleep(time.Millisecond)
	}
	const others = 9
	ended := make(chan error, others)
	for range others {
		go func() { ended <- d.SyncDir(t.Context(), ".") }()
	}
	for len(d.stuck) < others+1 { // calls that run
		time.Sleep(time.Millisecond)
	}
	time.Sleep(10 * time.Millisecond) // until they wait; one that comes later has a third to itself
	close(goOn)
	if err := <-first; err != nil {
		t.Error(err)
	}
	shared := 0
	for range others {
		if err := <-ended; errors.Is(err, failed) {
			shared++
		} else if err != nil {
			t.Error(err)
		}
	}
	if n := began.Load(); shared == 0 || n < 2 || int(n) > 2+others-shared {
		t.Errorf("%d fsyncs, %d callers shared the second", n, shared)
	}
	if err := d.SyncDir(t.Context(), "."); err != nil {
		t.Error(err)
	}
}
