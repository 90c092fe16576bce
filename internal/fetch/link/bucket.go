package link

import (
	"context"
	"sync"
	"time"
)

// bucket is a token bucket: rate bytes a second, at most a tenth of a
// second's worth at once. Without a rate it lets everything pass.
type bucket struct {
	mu     sync.Mutex
	rate   float64 // 0 is none
	tokens float64
	at     time.Time
}

// newBucket returns a bucket of rate bytes a second; 0 is no bound.
func newBucket(rate int64) *bucket {
	return &bucket{rate: float64(max(rate, 0)), at: time.Now()}
}

// set changes the rate. What waits goes on by the new one within a twentieth of a second.
func (k *bucket) set(rate int64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.rate, k.tokens, k.at = float64(max(rate, 0)), 0, time.Now()
}

// limit is the rate; 0 is none.
func (k *bucket) limit() float64 {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.rate
}

// admitBytes waits until some bytes may pass and returns the part of b that they fill.
func (k *bucket) admitBytes(ctx context.Context, b []byte) ([]byte, error) {
	for len(b) > 0 {
		k.mu.Lock()
		if k.rate == 0 {
			k.mu.Unlock()
			return b, nil
		}
		now, most := time.Now(), max(k.rate/10, 1)
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
	return b, nil
}

// giveBack returns what was taken and not used.
func (k *bucket) giveBack(n int) {
	if n <= 0 {
		return
	}
	k.mu.Lock()
	k.tokens += float64(n)
	k.mu.Unlock()
}
