package state

import (
	"context"
	"strings"
	"sync"
	"time"

	eventsapi "github.com/containerd/containerd/api/events"
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

// What else containerd tells, of which nobody but the engine hears.
const (
	eventRecorded   EventKind = "recorded" // a container's record is there
	eventRelabelled EventKind = "relabelled"
	eventUntasked   EventKind = "untasked" // a task was deleted
	eventImage      EventKind = "image"    // something happened to the image Name
)

func (k EventKind) public() bool {
	switch k {
	case eventRecorded, eventRelabelled, eventUntasked, eventImage:
		return false
	}
	return true
}

// Events calls fn for each event from now on, one after another, until ctx
// ends, whose error it returns. It begins with EventLost, once the engine listens. What
// an event says List knows already. Who is slow loses events, and is told so.
func (s *State) Events(ctx context.Context, fn func(Event)) error {
	l := s.feed.join()
	defer s.feed.leave(l)
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-l.more:
		}
		for _, ev := range s.feed.take(l) {
			fn(ev)
		}
	}
}

// keepEvents is how many events wait for one who is slow.
const keepEvents = 4096

// feed passes events on to those who asked for them. The zero value is ready, and
// safe for concurrent use.
type feed struct {
	mu        sync.Mutex
	listening bool // guarded by mu, as the listeners
	listeners map[*listener]bool
}

type listener struct {
	more  chan struct{} // gets a value when there is an event; has room for one
	queue []Event
}

func (f *feed) join() *listener {
	f.mu.Lock()
	defer f.mu.Unlock()
	l := &listener{more: make(chan struct{}, 1)}
	if f.listeners == nil {
		f.listeners = map[*listener]bool{}
	}
	f.listeners[l] = true
	if f.listening {
		l.add(Event{Time: time.Now(), Kind: EventLost})
	}
	return l
}

func (f *feed) leave(l *listener) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.listeners, l)
}

func (f *feed) take(l *listener) []Event {
	f.mu.Lock()
	defer f.mu.Unlock()
	q := l.queue
	l.queue = nil
	return q
}

func (f *feed) begin() {
	f.mu.Lock()
	f.listening = true
	f.mu.Unlock()
	f.tell(Event{Time: time.Now(), Kind: EventLost})
}

func (f *feed) lost() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.listening = false
}

func (f *feed) tell(ev Event) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for l := range f.listeners {
		l.add(ev)
	}
}

// add needs the feed's mu.
func (l *listener) add(ev Event) {
	if len(l.queue) == keepEvents {
		l.queue = []Event{{Time: ev.Time, Kind: EventLost}}
	}
	l.queue = append(l.queue, ev)
	select {
	case l.more <- struct{}{}:
	default:
	}
}

// decodeEvent is false for events that say nothing of a container's life:
// those of exec processes, and kinds that are not listed above.
func decodeEvent(env *types.Envelope) (Event, bool) {
	ev := Event{Time: env.Timestamp.AsTime()}
	decode := func(m proto.Message) bool { return proto.Unmarshal(env.Event.GetValue(), m) == nil }
	ok := false
	name := env.Event.GetTypeUrl()
	switch name[strings.LastIndexByte(name, '/')+1:] {
	case "containerd.events.TaskCreate":
		var m eventsapi.TaskCreate
		ok = decode(&m)
		ev.Kind, ev.Name, ev.Pid = EventCreated, m.ContainerID, m.Pid
	case "containerd.events.TaskStart":
		var m eventsapi.TaskStart
		ok = decode(&m)
		ev.Kind, ev.Name, ev.Pid = EventStarted, m.ContainerID, m.Pid
	case "containerd.events.TaskExit":
		var m eventsapi.TaskExit
		ok = decode(&m)
		ev.Kind, ev.Name, ev.Pid, ev.Exit = EventExited, m.ContainerID, m.Pid, int(m.ExitStatus)
		if m.ExitedAt != nil {
			ev.Time = m.ExitedAt.AsTime()
		}
		ok = ok && m.ID == m.ContainerID
	case "containerd.events.TaskOOM":
		var m eventsapi.TaskOOM
		ok = decode(&m)
		ev.Kind, ev.Name = EventOOM, m.ContainerID
	case "containerd.events.TaskPaused":
		var m eventsapi.TaskPaused
		ok = decode(&m)
		ev.Kind, ev.Name = EventPaused, m.ContainerID
	case "containerd.events.TaskResumed":
		var m eventsapi.TaskResumed
		ok = decode(&m)
		ev.Kind, ev.Name = EventResumed, m.ContainerID
	case "containerd.events.TaskDelete":
		var m eventsapi.TaskDelete
		ok = decode(&m)
		ev.Kind, ev.Name, ev.Pid = eventUntasked, m.ContainerID, m.Pid
		ok = ok && (m.ID == "" || m.ID == m.ContainerID)
	case "containerd.events.ContainerCreate":
		var m eventsapi.ContainerCreate
		ok = decode(&m)
		ev.Kind, ev.Name = eventRecorded, m.ID
	case "containerd.events.ContainerUpdate":
		var m eventsapi.ContainerUpdate
		ok = decode(&m)
		ev.Kind, ev.Name = eventRelabelled, m.ID
	case "containerd.services.images.v1.ImageCreate", "containerd.services.images.v1.ImageUpdate",
		"containerd.services.images.v1.ImageDelete":
		var m eventsapi.ImageDelete // the name is the first field of each
		ok = decode(&m)
		ev.Kind, ev.Name = eventImage, m.Name
	case "containerd.events.ContainerDelete":
		var m eventsapi.ContainerDelete
		ok = decode(&m)
		ev.Kind, ev.Name = EventRemoved, m.ID
	}
	return ev, ok
}
