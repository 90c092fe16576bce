package peer

import (
	"context"
	"errors"
	"time"
)

var errStalled = errors.New("nothing moved for too long")

// watch ends a context when somebody has been waited for for too long. It is made armed.
type watch struct {
	ctx    context.Context
	cancel context.CancelCauseFunc
	timer  *time.Timer
	after  time.Duration
}

func newWatch(ctx context.Context, after time.Duration) *watch {
	return newWatchFor(ctx, after, errStalled)
}

// newWatchFor makes a watch that ends its context with the given cause.
func newWatchFor(ctx context.Context, after time.Duration, cause error) *watch {
	w := &watch{after: after}
	w.ctx, w.cancel = context.WithCancelCause(ctx)
	w.timer = time.AfterFunc(after, func() { w.cancel(cause) })
	return w
}

func (w *watch) arm()  { w.timer.Reset(w.after) }
func (w *watch) rest() { w.timer.Stop() }

// end frees the watch and ends its context.
func (w *watch) end() {
	w.timer.Stop()
	w.cancel(nil)
}
