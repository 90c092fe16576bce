package state

import (
	"os"
	"testing"

	"github.com/containerd/containerd/api/types/task"
)

// oneKnown is what is known of one running container, a, whose process is this one.
func oneKnown() *known {
	k := newKnown()
	k.reread(k.begin(), nil, nil)
	k.Hold("a")
	k.recorded(Record{Name: "a"}, Info{Name: "a"})
	k.Made("a", uint32(os.Getpid()))
	k.Begun("a", uint32(os.Getpid()))
	k.Release("a")
	return k
}

func (k *known) want(t *testing.T, s Status, sure bool) {
	t.Helper()
	if i, _, is := k.Get("a"); i == nil || i.Status != s || is != sure {
		t.Fatalf("%+v, sure: %t; want %s, %t", i, is, s, sure)
	}
}

func TestKnown(t *testing.T) {
	pid := uint32(os.Getpid())
	running := &task.Process{Pid: pid, Status: task.Status_RUNNING}
	stopped := &task.Process{Pid: pid, Status: task.Status_STOPPED, ExitStatus: 3}
	a := found{name: "a", rec: &Record{Name: "a"}, base: Info{Name: "a"}}
	tests := map[string]func(t *testing.T, k *known){
		"events that come late say nothing": func(t *testing.T, k *known) {
			for _, ev := range []Event{{Kind: eventRecorded}, {Kind: EventCreated, Pid: pid},
				{Kind: EventStarted, Pid: pid}, {Kind: EventExited, Pid: 1}, {Kind: eventUntasked, Pid: 1}} {
				ev.Name = "a"
				k.happened(ev)
			}
			k.want(t, Running, true)
		},
		"an end counts before the engine's own call has returned": func(t *testing.T, k *known) {
			k.Hold("a")
			k.Untasked("a", nil)
			k.happened(Event{Kind: EventExited, Name: "a", Pid: pid, Exit: 3})
			k.Made("a", pid)
			k.Begun("a", pid)
			k.Release("a")
			k.want(t, Stopped, true)
		},
		"an answer that is older than an event does not count": func(t *testing.T, k *known) {
			k.happened(Event{Kind: eventRelabelled, Name: "a"})
			mark := k.mark()
			k.Ended("a", pid, Exit{Status: 3})
			if k.answer(mark, a, running) {
				t.Error("taken")
			}
			k.want(t, Stopped, false)
			if !k.answer(k.mark(), a, stopped) {
				t.Error("not taken")
			}
			k.want(t, Stopped, true)
		},
		"an answer that is older than the engine's own change does not count": func(t *testing.T, k *known) {
			k.happened(Event{Kind: EventRemoved, Name: "a"})
			mark := k.mark()
			k.Hold("a")
			k.Unrecorded("a")
			if k.answer(mark, a, running); len(k.list()) != 0 {
				t.Error("it is back")
			}
			k.Release("a")
			k.answer(k.mark(), found{name: "a"}, nil)
			if i, _, sure := k.Get("a"); i != nil || !sure || len(k.containers) != 0 {
				t.Errorf("%v %t %v", i, sure, k.containers)
			}
		},
		"another's new task is asked about": func(t *testing.T, k *known) {
			k.Ended("a", pid, Exit{})
			k.happened(Event{Kind: EventCreated, Name: "a", Pid: 1})
			if all, _ := k.questions(); len(all) != 1 {
				t.Errorf("asks about %v", all)
			}
			k.want(t, Stopped, false)
		},
		"what went while everything was read does not come back": func(t *testing.T, k *known) {
			mark := k.begin()
			k.Hold("a")
			k.Unrecorded("a")
			k.Release("a")
			k.happened(Event{Kind: EventRemoved, Name: "b"})
			k.reread(mark, []found{a, {name: "b", rec: &Record{Name: "b"}}}, nil)
			k.answer(k.mark(), found{name: "a"}, nil)
			if all := k.list(); len(all) != 0 {
				t.Errorf("%+v", all[0])
			}
		},
		"without events, a process that is gone is not said to run": func(t *testing.T, k *known) {
			k.lost()
			k.want(t, Running, false) // the kernel shows it
			k.containers["a"].task.started++
			k.want(t, Unknown, false)
		},
		"a process that is gone though nobody told is asked about": func(t *testing.T, k *known) {
			k.containers["a"].task.started++
			before := k.check(nil)
			k.want(t, Running, true)
			k.check(before)
			k.want(t, Unknown, false)
		},
		"who waits for certainty gets it": func(t *testing.T, k *known) {
			calm := k.settled()
			<-calm
			mark := k.begin()
			calm = k.settled()
			k.reread(mark, []found{a}, nil)
			select {
			case <-calm:
				t.Error("the task was not asked about")
			default:
			}
			k.answer(k.mark(), a, stopped)
			<-calm
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) { test(t, oneKnown()) })
	}
}
