package engine

import (
	"context"
	"errors"
	"io"
	"strings"
	"time"

	eventsapi "github.com/containerd/containerd/api/events"
	subscribeapi "github.com/containerd/containerd/api/services/events/v1"
	"github.com/containerd/containerd/api/types"
	"google.golang.org/protobuf/proto"
)

// EventKind says what happened to a container.
type EventKind string

const (
	EventCreated EventKind = "created" // its task is there
	EventStarted EventKind = "started"
	EventExited  EventKind = "exited" // its first process has ended
	EventOOM     EventKind = "oom"
	EventPaused  EventKind = "paused"
	EventResumed EventKind = "resumed"
	EventRemoved EventKind = "removed"
	// EventLost says that events may have been missed, as while containerd
	// was restarted: List tells the present state.
	EventLost EventKind = "lost"
)

// Event is one change of a container. Name is "" for EventLost.
type Event struct {
	Time time.Time
	Kind EventKind
	Name string
	Pid  uint32
	Exit int // status, for EventExited
}

// Events calls fn for each event from now on, one after another, until ctx
// ends, whose error it returns. It begins with EventLost, once it listens.
func (e *Engine) Events(ctx context.Context, fn func(Event)) error {
	for {
		err := e.subscribe(ctx, fn)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		e.log.Debug("event stream", "err", err)
		if !sleep(ctx, 50*time.Millisecond) {
			return ctx.Err()
		}
	}
}

func (e *Engine) subscribe(ctx context.Context, fn func(Event)) error {
	filter := `namespace==` + e.cfg.Namespace + `,topic~="^/(tasks|containers/delete)"`
	s, err := e.c.events.Subscribe(ctx, &subscribeapi.SubscribeRequest{Filters: []string{filter}})
	if err != nil {
		return err
	}
	fn(Event{Time: time.Now(), Kind: EventLost})
	for {
		env, err := s.Recv()
		if err != nil {
			return err
		}
		if ev, ok := decodeEvent(env); ok {
			if ev.Kind == EventExited {
				e.known.ended(ev.Name, ev.Pid, Exit{ev.Exit, ev.Time})
			}
			fn(ev)
		}
	}
}

// decodeEvent is false for events that say nothing of a container's life:
// those of exec processes, and kinds that are not listed above.
func decodeEvent(env *types.Envelope) (Event, bool) {
	ev := Event{Time: env.Timestamp.AsTime()}
	v := env.Event.GetValue()
	name := env.Event.GetTypeUrl()
	switch name[strings.LastIndexByte(name, '/')+1:] {
	case "containerd.events.TaskCreate":
		var m eventsapi.TaskCreate
		err := proto.Unmarshal(v, &m)
		ev.Kind, ev.Name, ev.Pid = EventCreated, m.ContainerID, m.Pid
		return ev, err == nil
	case "containerd.events.TaskStart":
		var m eventsapi.TaskStart
		err := proto.Unmarshal(v, &m)
		ev.Kind, ev.Name, ev.Pid = EventStarted, m.ContainerID, m.Pid
		return ev, err == nil
	case "containerd.events.TaskExit":
		var m eventsapi.TaskExit
		err := proto.Unmarshal(v, &m)
		ev.Kind, ev.Name, ev.Pid, ev.Exit = EventExited, m.ContainerID, m.Pid, int(m.ExitStatus)
		if m.ExitedAt != nil {
			ev.Time = m.ExitedAt.AsTime()
		}
		return ev, err == nil && m.ID == m.ContainerID
	case "containerd.events.TaskOOM":
		var m eventsapi.TaskOOM
		err := proto.Unmarshal(v, &m)
		ev.Kind, ev.Name = EventOOM, m.ContainerID
		return ev, err == nil
	case "containerd.events.TaskPaused":
		var m eventsapi.TaskPaused
		err := proto.Unmarshal(v, &m)
		ev.Kind, ev.Name = EventPaused, m.ContainerID
		return ev, err == nil
	case "containerd.events.TaskResumed":
		var m eventsapi.TaskResumed
		err := proto.Unmarshal(v, &m)
		ev.Kind, ev.Name = EventResumed, m.ContainerID
		return ev, err == nil
	case "containerd.events.ContainerDelete":
		var m eventsapi.ContainerDelete
		err := proto.Unmarshal(v, &m)
		ev.Kind, ev.Name = EventRemoved, m.ID
		return ev, err == nil
	}
	return ev, false
}

// endOfStream is nil for the end of a stream, else the error as the engine gives it.
func endOfStream(err error) error {
	if errors.Is(err, io.EOF) {
		return nil
	}
	return toNative(err)
}
