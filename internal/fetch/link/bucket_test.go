package link

import (
	"context"
	"testing"
	"time"
)

// A new rate holds for what waits already, and none lets all pass.
func TestBucketChanges(t *testing.T) {
	k := newBucket(10)
	b := make([]byte, 1<<20)
	taken := make(chan int)
	go func() {
		for range 2 {
			got, _ := k.admitBytes(context.Background(), b)
			taken <- len(got)
		}
	}()
	first := <-taken
	k.set(0)
	select {
	case n := <-taken:
		if first >= n || n != len(b) {
			t.Errorf("%d bytes passed at 10 bytes a second, %d without a rate", first, n)
		}
	case <-time.After(5 * time.Second):
		t.Error("what waited does not know that the rate is gone")
	}
	if k.set(1 << 20); k.limit() != 1<<20 {
		t.Errorf("the rate is %v", k.limit())
	}
}

func TestBucket(t *testing.T) {
	k := newBucket(1 << 20)
	begin := time.Now()
	buf, n := make([]byte, 64<<10), 0
	for n < 512<<10 {
		b, err := k.admitBytes(t.Context(), buf)
		if err != nil {
			t.Fatal(err)
		}
		n += len(b)
	}
	if d := time.Since(begin); d < 350*time.Millisecond {
		t.Errorf("half a second's worth passed in %s", d)
	}
}
