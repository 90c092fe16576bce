package fetch

import (
	"context"
	"sync"
	"time"
)

// bucket is a token bucket: rate bytes a second, at most a tenth of a
// second's worth at once. A nil bucket lets everything pass.
type bucket struct {
	rate float64

	mu     sync.Mutex
	tokens float64
	at     time.Time
}

func newBucket(rate int64) *bucket {
	if rate <= 0 {
		return nil
	}
	return &bucket{rate: float64(rate), at: time.Now()}
}

// take waits until some bytes may pass and returns the part of b that they fill.
func (k *bucket) take(ctx context.Context, b []byte) ([]byte, error) {
	if k == nil || len(b) == 0 {
		return b, nil
	}
	most := max(k.rate/10, 1)
	for {
		k.mu.Lock()
		now := time.Now()
		k.tokens = min(most, k.tokens+now.Sub(k.at).Seconds()*k.rate)
		k.at = now
		// A few kilobytes at least, so that a slow link does not cost a system
		// call for every packet.
		want := min(float64(len(b)), max(most/2, 1))
		if k.tokens >= want {
			n := int(want)
			k.tokens -= float64(n)
			k.mu.Unlock()
			return b[:n], nil
		}
		wait := time.Duration((want - k.tokens) / k.rate * float64(time.Second))
		k.mu.Unlock()
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// giveBack returns what was taken and not used.
func (k *bucket) giveBack(n int) {
	if k == nil || n <= 0 {
		return
	}
	k.mu.Lock()
	k.tokens += float64(n)
	k.mu.Unlock()
}
