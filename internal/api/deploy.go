package api

import (
	"cmp"
	"context"
	"errors"
	"sync"
	"time"

	"connectrpc.com/connect"

	pb "dewpoint/internal/api/gen/dewpoint/v1"
	"dewpoint/internal/spec"
)

// follow runs work, which tells f, and sends what it is told until work has
// returned. A send that fails ends work's context.
func follow(ctx context.Context, f *feed, work func(context.Context) error, send func(news) error) error {
	return pump(ctx, f.wake, work, func() error { return send(f.drain()) })
}

// pump runs work, and send whenever wake says that there is something, until work has
// returned. A send that fails ends work's context.
func pump(ctx context.Context, wake <-chan struct{}, work func(context.Context) error,
	send func() error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	done := make(chan error, 1)
	go func() { done <- work(ctx) }()
	var sent error
	flush := func() {
		if sent != nil {
			return
		}
		if sent = send(); sent != nil {
			cancel(sent)
		}
	}
	for {
		select {
		case <-wake:
			flush()
		case err := <-done:
			flush()
			return errors.Join(err, sent)
		}
	}
}

func (h *handler) Pull(ctx context.Context, req *connect.Request[pb.PullRequest],
	stream *connect.ServerStream[pb.PullResponse]) error {
	r := pullFrom(req.Msg)
	if err := r.Validate(); err != nil {
		return bad(err)
	}
	f := newFeed()
	var record spec.Record
	err := follow(ctx, f, func(ctx context.Context) error {
		return h.guard("Pull", func() (err error) {
			record, err = h.node.Pull(ctx, r, spec.Watch{Reached: f.reached, Layer: f.layer})
			return err
		})
	}, func(n news) error {
		return sendPull(stream, n)
	})
	if record.Image != "" {
		err = errors.Join(err,
			stream.Send(&pb.PullResponse{Step: &pb.PullResponse_Record{Record: recordOf(record)}}))
	}
	return h.fail(ctx, err)
}

func sendPull(stream *connect.ServerStream[pb.PullResponse], n news) error {
	if len(n.layers) > 0 {
		step := &pb.PullResponse_Layers{Layers: &pb.Layers{Layers: n.layers}}
		if err := stream.Send(&pb.PullResponse{Step: step}); err != nil {
			return err
		}
	}
	for _, s := range n.stages {
		if err := stream.Send(&pb.PullResponse{Step: &pb.PullResponse_Stage{Stage: s}}); err != nil {
			return err
		}
	}
	return nil
}

func (h *handler) Deploy(ctx context.Context, req *connect.Request[pb.DeployRequest],
	stream *connect.ServerStream[pb.DeployResponse]) error {
	r, err := requestOf(ctx, req.Msg.GetSpec(), callerOf(ctx).terms(req.Msg.Key, req.Msg.Deadline.AsDuration()))
	if err != nil {
		return h.fail(ctx, err)
	}
	if req.Msg.Attach && r.Terms.Key != "" {
		return bad(errors.New("a deployment that is attached to has no key: its output is sent once"))
	}
	d := &deploying{h: h, req: r, feed: newFeed(), stream: stream}
	if req.Msg.Attach {
		d.attached = newAttached(ctx, d)
		defer d.attached.close()
	}
	record, err := d.run(ctx)
	if record.Image != "" {
		err = errors.Join(err,
			d.send(&pb.DeployResponse{Step: &pb.DeployResponse_Record{Record: recordOf(record)}}))
	}
	if d.attached != nil {
		err = d.attached.end(record.Name, err)
	}
	return h.fail(ctx, err)
}

// deploying is one call of Deploy.
type deploying struct {
	h        *handler
	req      spec.Request
	feed     *feed
	attached *attached // or nil

	mu     sync.Mutex
	stream *connect.ServerStream[pb.DeployResponse] // guarded by mu
}

// send sends what the feed was told, then m: who is sent output knows of what was reached before it.
func (d *deploying) send(m *pb.DeployResponse) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.tell(); err != nil {
		return err
	}
	return d.stream.Send(m)
}

func (d *deploying) run(ctx context.Context) (record spec.Record, err error) {
	w := spec.Watch{Reached: d.feed.reached, Layer: d.feed.layer, Deployment: d.feed.deployment}
	if d.attached != nil {
		w.Hold, w.Reached = d.attached.hold, d.attached.reached
	}
	err = pump(ctx, d.feed.wake, func(ctx context.Context) error {
		return d.h.guard("Deploy", func() (err error) {
			record, err = d.h.node.Deploy(ctx, d.req, w)
			return err
		})
	}, d.progress)
	return record, err
}

func (d *deploying) progress() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.tell()
}

// tell sends what the feed was told. It is called with mu held.
func (d *deploying) tell() error {
	n := d.feed.drain()
	if n.deployment != nil {
		step := &pb.DeployResponse_Deployment{Deployment: n.deployment}
		if err := d.stream.Send(&pb.DeployResponse{Step: step}); err != nil {
			return err
		}
	}
	if len(n.layers) > 0 {
		step := &pb.DeployResponse_Layers{Layers: &pb.Layers{Layers: n.layers}}
		if err := d.stream.Send(&pb.DeployResponse{Step: step}); err != nil {
			return err
		}
	}
	for _, s := range n.stages {
		if err := d.stream.Send(&pb.DeployResponse{Step: &pb.DeployResponse_Stage{Stage: s}}); err != nil {
			return err
		}
	}
	return nil
}

// attached is the part of a Deploy that stays with the container: from its
// creation on it sends its output, and waits for its status. The container is
// held until that is done.
type attached struct {
	d      *deploying
	ctx    context.Context
	cancel context.CancelFunc
	hold   chan struct{}
	free   func() // closes hold, once

	once   sync.Once // begin, or never
	output pending
	exit   pending
	id     string // of the container, once exit is done; its name where that is not known
}

// pending is what a goroutine will find out; its fields hold once done is closed.
type pending struct {
	done   chan struct{}
	status int
	err    error
}

func (p *pending) run(f func() (int, error)) {
	defer close(p.done)
	p.status, p.err = f()
}

func newAttached(ctx context.Context, d *deploying) *attached {
	a := &attached{d: d, hold: make(chan struct{})}
	a.output.done, a.exit.done = make(chan struct{}), make(chan struct{})
	a.free = sync.OnceFunc(func() { close(a.hold) })
	a.ctx, a.cancel = context.WithCancel(ctx)
	return a
}

// reached is the Watch's. The container exists from Created on.
func (a *attached) reached(name, stage string, at float64) {
	if stage == spec.Created {
		a.begin(name)
	}
	a.d.feed.reached(name, stage, at)
}

func (a *attached) begin(name string) {
	a.once.Do(func() {
		go a.output.run(func() (int, error) {
			return 0, a.d.h.guard("Logs", func() error {
				return a.d.h.node.Logs(a.ctx, name, spec.LogOptions{Follow: true}, a.emit)
			})
		})
		go a.exit.run(func() (status int, err error) {
			err = a.d.h.guard("Wait", func() (err error) {
				i, _ := a.d.h.node.Inspect(a.ctx, name)
				a.id = cmp.Or(i.Container.ID, name)
				status, err = a.d.h.node.Wait(a.ctx, a.id)
				return err
			})
			return status, err
		})
	})
}

// never keeps begin from beginning, if it has not.
func (a *attached) never() {
	a.once.Do(func() {
		close(a.output.done)
		close(a.exit.done)
	})
}

func (a *attached) emit(c spec.LogChunk) error {
	return a.d.send(&pb.DeployResponse{Step: &pb.DeployResponse_Output{Output: outputOf(c)}})
}

// lastWords is how long the output of a container that failed to become ready
// is waited for.
const lastWords = time.Second

// end stays until the container has exited, sends its status and, when it was
// to be removed, does that first. A deployment that has failed with err
// sends the output that is there.
func (a *attached) end(name string, err error) error {
	if err != nil {
		a.never()
		select {
		case <-a.output.done:
		case <-time.After(lastWords):
		}
		return err
	}
	a.begin(name)
	<-a.output.done
	<-a.exit.done
	if err := errors.Join(a.exit.err, a.output.err); err != nil {
		return err
	}
	a.free()
	if a.d.req.Remove {
		// The node removes it too; whoever comes second finds nothing, though another container has its name.
		if err := a.d.h.node.Remove(a.ctx, a.id, true); err != nil && a.d.h.classify(err).Code != NotFound {
			return err
		}
	}
	exit := &pb.Exit{Status: int32(a.exit.status)}
	return a.d.send(&pb.DeployResponse{Step: &pb.DeployResponse_Exit{Exit: exit}})
}

// close lets go of the container, and returns when nothing uses the stream.
func (a *attached) close() {
	a.never()
	a.cancel()
	a.free()
	<-a.output.done
	<-a.exit.done
}
