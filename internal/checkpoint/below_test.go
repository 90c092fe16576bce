package checkpoint

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"dewpoint/internal/pop"
)

// Who reads what does not come is waited for no longer, and nothing is taken from it while it reads.
func TestLowerHangs(t *testing.T) {
	for want, called := range map[error]bool{pop.ErrStoreAway: false, context.Canceled: true} {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			l, back, gone := &lower{}, make(chan struct{}), false
			l.then(func() { gone = true })
			if called {
				cancel()
			}
			if err := l.read(ctx, new(atomic.Int64), func() error { <-back; return nil }); !errors.Is(err, want) {
				t.Errorf("%v, not %v", err, want)
			}
			l.close()
			if synctest.Wait(); gone {
				t.Errorf("%v: what it reads is gone", want)
			}
			close(back)
			if synctest.Wait(); !gone {
				t.Errorf("%v: what it read stays", want)
			}
		})
	}
}

// One from which something comes is waited for, however long.
func TestLowerSlow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, done := &lower{}, &atomic.Int64{}
		defer l.close()
		err := l.read(t.Context(), done, func() error {
			for range 30 {
				time.Sleep(standstill / 2)
				done.Add(1)
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	})
}
