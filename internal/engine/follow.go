package engine

import (
	"context"
	"crypto/rand"
	"fmt"
	"slices"
	"time"

	"dewpoint/internal/engine/containerd"
	"dewpoint/internal/sched"

	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	eventsapi "github.com/containerd/containerd/api/services/events/v1"
	imagesapi "github.com/containerd/containerd/api/services/images/v1"
	"github.com/containerd/containerd/api/types"
	"github.com/containerd/containerd/api/types/task"
	"github.com/containerd/errdefs"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/types/known/anypb"
)

const (
	askTimeout = 2 * time.Second  // of a question in the background
	askAgain   = time.Second      // after one that got no answer
	askAtOnce  = 8                // questions
	checkEvery = 30 * time.Second // whether processes are there that are said to run
	// settleFor is how long Start, and who must know, wait for what is in doubt.
	settleFor  = 10 * time.Second
	settleSlow = 300 * time.Millisecond // of a container that may not answer
)

// listening is the topic of the event by which the engine knows that it hears what happens.
const listening = "/dewpoint/listening"

// change takes a container's lock, and keeps what is said of it meanwhile in order, until done.
func (e *Engine) change(name string) (done func()) {
	unlock := e.names.lock(name)
	e.known.hold(name)
	return func() {
		e.known.release(name)
		unlock()
	}
}

// startFollowing keeps what is known true, and containers' output small, until Close.
func (e *Engine) startFollowing() {
	ctx, end := context.WithCancel(context.Background())
	e.life, e.unfollow = ctx, end
	e.following.Go(func() { e.follow(ctx) })
	e.following.Go(func() { e.askDoubts(ctx) })
	e.following.Go(func() { e.checkProcesses(ctx) })
	e.following.Go(func() { e.boundOutput(ctx) })
}

// Settle returns nil once List, Inspect and Images are certain of all they say, or were at a moment since the
// call, and an error when that takes too long, or ctx ends. In between they may say that a status is Unknown,
// and know of others' doings what was known last: after Start, and when containerd was restarted.
func (e *Engine) Settle(ctx context.Context) error {
	return e.settle(ctx, func(string) bool { return false })
}

// settle is Settle that does not wait long for containers of which slow is true: a shim says nothing of one
// that it restores or dumps until that is over.
func (e *Engine) settle(ctx context.Context, slow func(name string) bool) error {
	ctx, cancel := context.WithTimeout(ctx, settleFor)
	defer cancel()
	settled, look := e.known.settled(), time.NewTicker(settleSlow)
	defer look.Stop()
	for {
		select {
		case <-settled:
			return nil
		case <-look.C:
			if names, all := e.known.doubtful(); all &&
				!slices.ContainsFunc(names, func(n string) bool { return !slow(n) }) {
				return nil
			}
		case <-ctx.Done():
			return fmt.Errorf("containerd at %s does not say what its containers do: %w", e.Socket(), ctx.Err())
		}
	}
}

// Sure returns nil once Inspect is certain of a container, and an error when that takes too long, or ctx
// ends.
func (e *Engine) Sure(ctx context.Context, name string) error {
	return wrap(e.settle(ctx, func(other string) bool { return other != name }), "container %s", name)
}

func (e *Engine) follow(ctx context.Context) {
	for {
		err := e.subscribe(ctx)
		e.known.lost()
		e.feed.lost()
		if ctx.Err() != nil {
			return
		}
		e.log.Debug("event stream", "err", err)
		if !sched.Sleep(ctx, 50*time.Millisecond) {
			return
		}
	}
}

// subscribe follows one stream of events. containerd does not say when it has begun,
// so an event of the engine's own has to come back by it before anything is read.
func (e *Engine) subscribe(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	filter := `namespace==` + e.cfg.Namespace + `,topic~="^/(tasks|containers|images|dewpoint)/"`
	s, err := e.c.Events.Subscribe(ctx, &eventsapi.SubscribeRequest{Filters: []string{filter}})
	if err != nil {
		cancel()
		return err
	}
	var g errgroup.Group
	defer g.Wait()
	defer cancel()
	mine, heard := rand.Text(), make(chan struct{})
	g.Go(func() error { return e.announce(ctx, mine, heard) })
	hears := false
	for {
		env, err := s.Recv()
		if err != nil {
			return err
		}
		switch {
		case !hears && env.Topic == listening && string(env.Event.GetValue()) == mine:
			hears = true
			close(heard)
			mark := e.known.begin()
			e.feed.begin()
			g.Go(func() error { return e.reread(ctx, mark) })
		case hears:
			e.heard(env)
		}
	}
}

func (e *Engine) heard(env *types.Envelope) {
	ev, ok := decodeEvent(env)
	if !ok {
		return
	}
	e.known.happened(ev)
	if ev.Kind.public() {
		e.feed.tell(ev)
	}
}

// announce publishes an event until it is heard: containerd may begin to pass events on after it.
func (e *Engine) announce(ctx context.Context, mine string, heard <-chan struct{}) error {
	req := &eventsapi.PublishRequest{Topic: listening,
		Event: &anypb.Any{TypeUrl: "dewpoint.Listening", Value: []byte(mine)}}
	for pause := 5 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		if _, err := e.c.Events.Publish(ctx, req); err != nil && ctx.Err() == nil {
			e.log.Debug("publish an event", "err", err)
		}
		select {
		case <-heard:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pause):
		}
	}
}

// reread reads which containers and images there are, until it can.
func (e *Engine) reread(ctx context.Context, mark uint64) error {
	for {
		all, err := e.findAll(ctx)
		var images []ImageInfo
		if err == nil {
			images, err = e.listImages(ctx)
		}
		if err == nil {
			e.known.reread(mark, all, images)
			return nil
		}
		if ctx.Err() == nil {
			e.log.Warn("read what containerd has", "err", err)
		}
		if !sched.Sleep(ctx, askAgain) {
			return ctx.Err()
		}
	}
}

// findAll reads all records, one message after the other: each has a specification of some KiB.
func (e *Engine) findAll(ctx context.Context) ([]found, error) {
	ctx, cancel := context.WithTimeout(ctx, containerd.CallTimeout)
	defer cancel()
	s, err := e.c.Containers.ListStream(ctx, &containersapi.ListContainersRequest{})
	if err != nil {
		return nil, err
	}
	var all []found
	for {
		m, err := s.Recv()
		if err != nil {
			return all, containerd.EndOfStream(err)
		}
		all = append(all, e.foundIn(m.Container))
	}
}

func (e *Engine) foundIn(c *containersapi.Container) found {
	if _, ours := c.Labels[labelNet]; !ours {
		return found{name: c.ID, foreign: true}
	}
	r := toRecord(c)
	return found{name: c.ID, rec: &r, base: *e.info(r)}
}

// askDoubts asks containerd about what is in doubt.
func (e *Engine) askDoubts(ctx context.Context) {
	var g errgroup.Group
	g.SetLimit(askAtOnce)
	defer g.Wait()
	for {
		select {
		case <-ctx.Done():
			return
		case <-e.known.doubts.wake:
		}
		containers, images := e.known.questions()
		for _, name := range containers {
			g.Go(func() error { e.again(ctx, e.askContainer(ctx, name), name, ""); return nil })
		}
		for _, name := range images {
			g.Go(func() error { e.again(ctx, e.askImage(ctx, name), "", name); return nil })
		}
	}
}

// again has a question that got no answer asked again, in a while.
func (e *Engine) again(ctx context.Context, err error, container, image string) {
	if err == nil || ctx.Err() != nil {
		return
	}
	e.log.Warn("containerd does not say what it has", "container", container, "image", image, "err", err)
	e.following.Go(func() {
		if sched.Sleep(ctx, askAgain) {
			e.known.unanswered(container, image)
		}
	})
}

// askContainer asks for a container's record and its task.
func (e *Engine) askContainer(ctx context.Context, name string) error {
	for {
		mark := e.known.mark()
		f, p, err := e.find(ctx, name)
		if err != nil || e.known.answer(mark, f, p) {
			return err
		}
	}
}

func (e *Engine) find(ctx context.Context, name string) (found, *task.Process, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	r, err := e.c.Containers.Get(ctx, &containersapi.GetContainerRequest{ID: name})
	if errdefs.IsNotFound(err) {
		return found{name: name}, nil, nil
	}
	if err != nil {
		return found{}, nil, err
	}
	f := e.foundIn(r.Container)
	if f.foreign {
		return f, nil, nil
	}
	p, err := e.taskState(ctx, name)
	if errdefs.IsNotFound(err) {
		return f, nil, nil
	}
	if err == nil && taskOf(p).status == "" {
		err = fmt.Errorf("task of status %s", p.Status)
	}
	return f, p, err
}

func (e *Engine) askImage(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	for {
		mark := e.known.mark()
		r, err := e.c.Images.Get(ctx, &imagesapi.GetImageRequest{Name: name})
		var i *ImageInfo
		switch {
		case err == nil:
			i = imageInfo(r.Image)
		case !errdefs.IsNotFound(err):
			return err
		}
		if e.known.answerImage(mark, name, i) {
			return nil
		}
	}
}

// checkProcesses makes good for ends of processes that nobody told of.
func (e *Engine) checkProcesses(ctx context.Context) {
	gone := map[string]uint32{}
	for sched.Sleep(ctx, checkEvery) {
		gone = e.known.check(gone)
	}
}
