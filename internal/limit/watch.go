package limit

import (
	"context"
	"time"
)

// Watch ends a context when somebody has been waited for for too long. It is made armed.
type Watch struct {
	Ctx    context.Context // of the waiting
	Cancel context.CancelCauseFunc
	timer  *time.Timer
	after  time.Duration
}

// NewWatch makes a watch that ends its context with the given cause. End must follow.
func NewWatch(ctx context.Context, after time.Duration, cause error) *Watch {
	w := &Watch{after: after}
	w.Ctx, w.Cancel = context.WithCancelCause(ctx)
	w.timer = time.AfterFunc(after, func() { w.Cancel(cause) })
	return w
}

// Arm begins to count the time anew.
func (w *Watch) Arm() { w.timer.Reset(w.after) }

// Rest stops counting it: nobody is waited for.
func (w *Watch) Rest() { w.timer.Stop() }

// End frees the watch and ends its context.
func (w *Watch) End() {
	w.timer.Stop()
	w.Cancel(nil)
}
