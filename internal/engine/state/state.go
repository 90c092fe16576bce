// Package state knows what containerd has of ours: the containers with the state of their tasks, and the
// images. [State.List], [State.Inspect] and [State.Images] answer from memory alone, since containerd
// takes its time while containers are made, and asks shim after shim about tasks, each of which may be
// busy making another one.
//
// What is known is true by three means. What the engine does itself it writes down before its method
// returns (Recorded, Made, Begun, Ended, Untasked, Unrecorded). What others do, and how processes end,
// containerd's events tell. Whatever does not fit what is known is a doubt, about which State asks in the
// background; the answer counts unless something else was said meanwhile. When the stream of events
// breaks, all is read anew and everything becomes a doubt once there is another stream.
//
// As long as there is a doubt, or no stream, the last that was known is said, but of a process only if
// the kernel shows it, else that its status is [Unknown].
//
// [Places] says where the files of a container are, of which an address is part of what is known.
package state

import (
	"context"
	"crypto/rand"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	eventsapi "github.com/containerd/containerd/api/services/events/v1"
	imagesapi "github.com/containerd/containerd/api/services/images/v1"
	tasksapi "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types"
	"github.com/containerd/containerd/api/types/task"
	"github.com/containerd/errdefs"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/types/known/anypb"

	"dewpoint/internal/engine/containerd"
	"dewpoint/internal/sched"
)

const (
	askTimeout = 2 * time.Second  // of a question in the background
	askAgain   = time.Second      // after one that got no answer
	askAtOnce  = 8                // questions
	checkEvery = 30 * time.Second // whether processes are there that are said to run
	// settleFor is how long who starts, and who must know, wait for what is in doubt.
	settleFor  = 10 * time.Second
	settleSlow = 300 * time.Millisecond // of a container that may not answer
)

// listening is the topic of the event by which the engine knows that it hears what happens.
const listening = "/dewpoint/listening"

// Config says whose state is kept.
type Config struct {
	Namespace string // containerd's
	Socket    string // containerd's, for messages
	Places    Places
	Log       *slog.Logger
}

// State is the state of one namespace of a containerd. See the package comment. It is safe for concurrent
// use.
type State struct {
	*known
	cfg  Config
	c    *containerd.Client
	log  *slog.Logger
	feed feed

	end  context.CancelFunc
	work sync.WaitGroup // what end ends
}

// Follow keeps what is known true until Close. It does not wait: see Settle.
func Follow(c *containerd.Client, cfg Config) *State {
	ctx, end := context.WithCancel(context.Background())
	s := &State{known: newKnown(), cfg: cfg, c: c, log: cfg.Log, end: end}
	s.work.Go(func() { s.follow(ctx) })
	s.work.Go(func() { s.askDoubts(ctx) })
	s.work.Go(func() { s.checkProcesses(ctx) })
	return s
}

// Close ends following.
func (s *State) Close() {
	s.end()
	s.work.Wait()
}

// Recorded says that a container's record was made, whose task comes next.
func (s *State) Recorded(c *containersapi.Container) {
	r := toRecord(c)
	s.recorded(r, *s.cfg.Places.Describe(r))
}

// Relabelled says that a container's record was changed.
func (s *State) Relabelled(c *containersapi.Container) { s.relabelled(s.foundIn(c)) }

var errOthers = fmt.Errorf("it belongs to another client of containerd: %w", errdefs.ErrInvalidArgument)

// Record asks for a container's record.
func (s *State) Record(ctx context.Context, name string) (Record, error) {
	r, err := s.c.Containers.Get(ctx, &containersapi.GetContainerRequest{ID: name})
	if err != nil {
		return Record{}, err
	}
	if _, ours := r.Container.Labels[LabelNet]; !ours {
		return Record{}, fmt.Errorf("container %s: %w", name, errOthers)
	}
	return toRecord(r.Container), nil
}

// Records asks for those of all containers of ours.
func (s *State) Records(ctx context.Context) ([]Record, error) {
	r, err := s.c.Containers.List(ctx,
		&containersapi.ListContainersRequest{Filters: []string{`labels."` + LabelNet + `"`}})
	if err != nil {
		return nil, err
	}
	out := make([]Record, len(r.Containers))
	for i, c := range r.Containers {
		out[i] = toRecord(c)
	}
	return out, nil
}

// Task asks for the state of a container's task.
func (s *State) Task(ctx context.Context, name string) (*task.Process, error) {
	r, err := s.c.Tasks.Get(ctx, &tasksapi.GetRequest{ContainerID: name})
	if err != nil {
		return nil, err
	}
	return r.Process, nil
}

// Images lists the images of the namespace by name, those of other clients too, from what the engine
// has in memory, as List does.
func (s *State) Images(ctx context.Context) ([]ImageInfo, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("list images: %w", err)
	}
	return s.imageList(), nil
}

// List describes all containers, by name, from what the engine has in memory. What it
// has done itself when List is called, and whatever containerd has told by then, is seen. Others may
// call it as often as they like: the labels are not copied.
func (s *State) List(ctx context.Context) ([]*Info, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("list containers: %w", err)
	}
	return s.list(), nil
}

// Inspect describes one container, as List does.
func (s *State) Inspect(ctx context.Context, id string) (*Info, error) {
	name := Name(id)
	i, others, sure := s.Get(name)
	if i == nil && !sure { // a container that another client has just made, perhaps
		if err := s.askContainer(ctx, name); err != nil {
			return nil, fmt.Errorf("inspect container %s: %w", name, err)
		}
		i, others, _ = s.Get(name)
	}
	switch {
	case others:
		return nil, fmt.Errorf("inspect container %s: %w", name, errOthers)
	case i == nil || !means(id, i.Created):
		return nil, fmt.Errorf("inspect container %s: %w", name, ErrNotFound)
	}
	return i, nil
}

// Settle returns nil once List, Inspect and Images are certain of all they say, or were at a moment since the
// call, and an error when that takes too long, or ctx ends. In between they may say that a status is Unknown,
// and know of others' doings what was known last: after Start, and when containerd was restarted.
func (s *State) Settle(ctx context.Context) error {
	return s.SettleBut(ctx, func(string) bool { return false })
}

// SettleBut is Settle that does not wait long for containers of which slow is true: a shim says nothing
// of one that it restores or dumps until that is over.
func (s *State) SettleBut(ctx context.Context, slow func(name string) bool) error {
	ctx, cancel := context.WithTimeout(ctx, settleFor)
	defer cancel()
	settled, look := s.settled(), time.NewTicker(settleSlow)
	defer look.Stop()
	for {
		select {
		case <-settled:
			return nil
		case <-look.C:
			if names, all := s.doubtful(); all &&
				!slices.ContainsFunc(names, func(n string) bool { return !slow(n) }) {
				return nil
			}
		case <-ctx.Done():
			return fmt.Errorf("containerd at %s does not say what its containers do: %w", s.cfg.Socket, ctx.Err())
		}
	}
}

// Sure returns nil once Inspect is certain of a container, and an error when that takes too long, or ctx
// ends.
func (s *State) Sure(ctx context.Context, name string) error {
	if err := s.SettleBut(ctx, func(other string) bool { return other != name }); err != nil {
		return fmt.Errorf("container %s: %w", name, err)
	}
	return nil
}

func (s *State) follow(ctx context.Context) {
	for {
		err := s.subscribe(ctx)
		s.lost()
		s.feed.lost()
		if ctx.Err() != nil {
			return
		}
		s.log.Debug("event stream", "err", err)
		if !sched.Sleep(ctx, 50*time.Millisecond) {
			return
		}
	}
}

// subscribe follows one stream of events. containerd does not say when it has begun,
// so an event of the engine's own has to come back by it before anything is read.
func (s *State) subscribe(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	filter := `namespace==` + s.cfg.Namespace + `,topic~="^/(tasks|containers|images|dewpoint)/"`
	events, err := s.c.Events.Subscribe(ctx, &eventsapi.SubscribeRequest{Filters: []string{filter}})
	if err != nil {
		cancel()
		return err
	}
	var g errgroup.Group
	defer g.Wait()
	defer cancel()
	mine, heard := rand.Text(), make(chan struct{})
	g.Go(func() error { return s.announce(ctx, mine, heard) })
	hears := false
	for {
		env, err := events.Recv()
		if err != nil {
			return err
		}
		switch {
		case !hears && env.Topic == listening && string(env.Event.GetValue()) == mine:
			hears = true
			close(heard)
			mark := s.begin()
			s.feed.begin()
			g.Go(func() error { return s.reread(ctx, mark) })
		case hears:
			s.heard(env)
		}
	}
}

func (s *State) heard(env *types.Envelope) {
	ev, ok := decodeEvent(env)
	if !ok {
		return
	}
	s.happened(ev)
	if ev.Kind.public() {
		s.feed.tell(ev)
	}
}

// announce publishes an event until it is heard: containerd may begin to pass events on after it.
func (s *State) announce(ctx context.Context, mine string, heard <-chan struct{}) error {
	req := &eventsapi.PublishRequest{Topic: listening,
		Event: &anypb.Any{TypeUrl: "dewpoint.Listening", Value: []byte(mine)}}
	for pause := 5 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		if _, err := s.c.Events.Publish(ctx, req); err != nil && ctx.Err() == nil {
			s.log.Debug("publish an event", "err", err)
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
func (s *State) reread(ctx context.Context, mark uint64) error {
	for {
		all, err := s.findAll(ctx)
		var images []ImageInfo
		if err == nil {
			images, err = s.listImages(ctx)
		}
		if err == nil {
			s.known.reread(mark, all, images)
			return nil
		}
		if ctx.Err() == nil {
			s.log.Warn("read what containerd has", "err", err)
		}
		if !sched.Sleep(ctx, askAgain) {
			return ctx.Err()
		}
	}
}

// findAll reads all records, one message after the other: each has a specification of some KiB.
func (s *State) findAll(ctx context.Context) ([]found, error) {
	ctx, cancel := context.WithTimeout(ctx, containerd.CallTimeout)
	defer cancel()
	list, err := s.c.Containers.ListStream(ctx, &containersapi.ListContainersRequest{})
	if err != nil {
		return nil, err
	}
	var all []found
	for {
		m, err := list.Recv()
		if err != nil {
			return all, containerd.EndOfStream(err)
		}
		all = append(all, s.foundIn(m.Container))
	}
}

func (s *State) foundIn(c *containersapi.Container) found {
	if _, ours := c.Labels[LabelNet]; !ours {
		return found{name: c.ID, others: true}
	}
	r := toRecord(c)
	return found{name: c.ID, rec: &r, base: *s.cfg.Places.Describe(r)}
}

// askDoubts asks containerd about what is in doubt.
func (s *State) askDoubts(ctx context.Context) {
	var g errgroup.Group
	g.SetLimit(askAtOnce)
	defer g.Wait()
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.doubts.wake:
		}
		containers, images := s.questions()
		for _, name := range containers {
			g.Go(func() error { s.again(ctx, s.askContainer(ctx, name), name, ""); return nil })
		}
		for _, name := range images {
			g.Go(func() error { s.again(ctx, s.askImage(ctx, name), "", name); return nil })
		}
	}
}

// again has a question that got no answer asked again, in a while.
func (s *State) again(ctx context.Context, err error, container, image string) {
	if err == nil || ctx.Err() != nil {
		return
	}
	s.log.Warn("containerd does not say what it has", "container", container, "image", image, "err", err)
	s.work.Go(func() {
		if sched.Sleep(ctx, askAgain) {
			s.unanswered(container, image)
		}
	})
}

// askContainer asks for a container's record and its task.
func (s *State) askContainer(ctx context.Context, name string) error {
	for {
		mark := s.mark()
		f, p, err := s.find(ctx, name)
		if err != nil || s.answer(mark, f, p) {
			return err
		}
	}
}

func (s *State) find(ctx context.Context, name string) (found, *task.Process, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	r, err := s.c.Containers.Get(ctx, &containersapi.GetContainerRequest{ID: name})
	if errdefs.IsNotFound(err) {
		return found{name: name}, nil, nil
	}
	if err != nil {
		return found{}, nil, err
	}
	f := s.foundIn(r.Container)
	if f.others {
		return f, nil, nil
	}
	p, err := s.Task(ctx, name)
	if errdefs.IsNotFound(err) {
		return f, nil, nil
	}
	if err == nil && taskOf(p).status == "" {
		err = fmt.Errorf("task of status %s", p.Status)
	}
	return f, p, err
}

func (s *State) askImage(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	for {
		mark := s.mark()
		r, err := s.c.Images.Get(ctx, &imagesapi.GetImageRequest{Name: name})
		var i *ImageInfo
		switch {
		case err == nil:
			i = ImageInfoOf(r.Image)
		case !errdefs.IsNotFound(err):
			return err
		}
		if s.answerImage(mark, name, i) {
			return nil
		}
	}
}

// checkProcesses makes good for ends of processes that nobody told of.
func (s *State) checkProcesses(ctx context.Context) {
	gone := map[string]uint32{}
	for sched.Sleep(ctx, checkEvery) {
		gone = s.check(gone)
	}
}
func (s *State) listImages(ctx context.Context) ([]ImageInfo, error) {
	r, err := s.c.Images.List(ctx, &imagesapi.ListImagesRequest{})
	if err != nil {
		return nil, fmt.Errorf("list images: %w", err)
	}
	out := make([]ImageInfo, len(r.Images))
	for i, m := range r.Images {
		out[i] = *ImageInfoOf(m)
	}
	return out, nil
}
