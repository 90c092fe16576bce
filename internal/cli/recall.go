package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"dewpoint/internal/spec"
)

// recall takes one deployment back for its person: the first signal has the node cancel it, and waits until
// nothing is left of it; the second leaves at once.
type recall struct {
	c     *call
	known chan string    // the deployment's ID, once it is accepted
	over  chan struct{}  // closed when its call has ended
	calls sync.WaitGroup // that cancel it

	mu     sync.Mutex
	ended  bool       // guarded by mu: over is closed
	status exitStatus // guarded by mu: of the command, once nothing is left
}

func newRecall(c *call) *recall {
	return &recall{c: c, known: make(chan string, 1), over: make(chan struct{})}
}

// watch also learns the deployment's ID.
func (r *recall) watch(w spec.Watch) spec.Watch {
	told := w.Deployment
	w.Deployment = func(d spec.Deployment) {
		select {
		case r.known <- d.ID:
		default:
		}
		if told != nil {
			told(d)
		}
	}
	return w
}

// cancel has the node cancel the deployment, as soon as it is known, for a signal, and gives it as it stands
// then. It is called once.
func (r *recall) cancel(ctx context.Context, sig os.Signal) (d spec.Deployment, err error) {
	r.mu.Lock()
	if r.ended {
		r.mu.Unlock()
		return d, nil
	}
	r.calls.Add(1)
	r.mu.Unlock()
	defer r.calls.Done()
	var id string
	select {
	case id = <-r.known:
	case <-r.over: // it was not accepted
		return d, nil
	case <-ctx.Done():
		return d, context.Cause(ctx)
	}
	if d, err = r.c.client.CancelDeployment(ctx, spec.DeploymentRef{ID: id}); err == nil &&
		d.State == spec.StateCanceled {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.status = statusOf(sig)
	}
	return d, err
}

// settle returns when nobody cancels the deployment any more, whose call has ended.
func (r *recall) settle() {
	r.mu.Lock()
	if !r.ended {
		r.ended = true
		close(r.over)
	}
	r.mu.Unlock()
	r.calls.Wait()
}

// outcome is what the command returns whose call with ctx has returned err. It is called once progress is off
// the screen, and says what is left after a signal.
func (r *recall) outcome(ctx context.Context, err error) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	var left exitStatus
	switch {
	case err == nil:
		return nil
	case r.status != 0:
		fmt.Fprintln(r.c.cfg.Stderr, "dew: cancelled, nothing is left")
		return r.status
	case errors.As(context.Cause(ctx), &left):
		if left != 0 {
			fmt.Fprintln(r.c.cfg.Stderr, "dew: left before it was over; see \"dew deployments\" and \"dew ps -a\"")
		}
		return left
	}
	return err
}

// tend listens to signals until end. The second, or the first if the node does not answer to it, ends the
// context, which then has the command's status as its cause.
func (r *recall) tend(ctx context.Context) (tended context.Context, end func()) {
	tended, leave := context.WithCancelCause(ctx)
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	var tending sync.WaitGroup
	tending.Go(func() {
		for n := 0; ; n++ {
			select {
			case s := <-signals:
				if n > 0 {
					leave(statusOf(s))
					return
				}
				tending.Go(func() {
					if _, err := r.cancel(tended, s); err != nil {
						leave(statusOf(s))
					}
				})
			case <-tended.Done():
				return
			}
		}
	})
	return tended, func() {
		r.settle()
		signal.Stop(signals)
		leave(nil)
		tending.Wait()
	}
}

// statusOf is the exit status of a command that a signal has ended.
func statusOf(s os.Signal) exitStatus { return exitStatus(128 + int(s.(syscall.Signal))) }
