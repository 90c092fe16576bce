package engine

import (
	"context"
	"os"
	"sync"
	"testing"
	"time"

	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	imagesapi "github.com/containerd/containerd/api/services/images/v1"
	tasksapi "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types/task"
	"golang.org/x/sys/unix"

	"dewpoint/internal/engine/containerd"
	"dewpoint/testkit"
)

// oneKnown is what is known of one running container, a, whose process is this one.
func oneKnown() *known {
	k := newKnown()
	k.reread(k.begin(), nil, nil)
	k.hold("a")
	k.recorded(record{name: "a"}, Info{Name: "a"})
	k.made("a", uint32(os.Getpid()))
	k.begun("a", uint32(os.Getpid()))
	k.release("a")
	return k
}

func (k *known) want(t *testing.T, s Status, sure bool) {
	t.Helper()
	if i, _, is := k.get("a"); i == nil || i.Status != s || is != sure {
		t.Fatalf("%+v, sure: %t; want %s, %t", i, is, s, sure)
	}
}

func TestKnown(t *testing.T) {
	pid := uint32(os.Getpid())
	running := &task.Process{Pid: pid, Status: task.Status_RUNNING}
	stopped := &task.Process{Pid: pid, Status: task.Status_STOPPED, ExitStatus: 3}
	a := found{name: "a", rec: &record{name: "a"}, base: Info{Name: "a"}}
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
			k.hold("a")
			k.untasked("a")
			k.happened(Event{Kind: EventExited, Name: "a", Pid: pid, Exit: 3})
			k.made("a", pid)
			k.begun("a", pid)
			k.release("a")
			k.want(t, Stopped, true)
		},
		"an answer that is older than an event does not count": func(t *testing.T, k *known) {
			k.happened(Event{Kind: eventRelabelled, Name: "a"})
			mark := k.mark()
			k.ended("a", pid, Exit{Status: 3})
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
			k.hold("a")
			k.unrecorded("a")
			if k.answer(mark, a, running); len(k.list()) != 0 {
				t.Error("it is back")
			}
			k.release("a")
			k.answer(k.mark(), found{name: "a"}, nil)
			if i, _, sure := k.get("a"); i != nil || !sure || len(k.containers) != 0 {
				t.Errorf("%v %t %v", i, sure, k.containers)
			}
		},
		"another's new task is asked about": func(t *testing.T, k *known) {
			k.ended("a", pid, Exit{})
			k.happened(Event{Kind: EventCreated, Name: "a", Pid: 1})
			if all, _ := k.questions(); len(all) != 1 {
				t.Errorf("asks about %v", all)
			}
			k.want(t, Stopped, false)
		},
		"what went while everything was read does not come back": func(t *testing.T, k *known) {
			mark := k.begin()
			k.hold("a")
			k.unrecorded("a")
			k.release("a")
			k.happened(Event{Kind: EventRemoved, Name: "b"})
			k.reread(mark, []found{a, {name: "b", rec: &record{name: "b"}}}, nil)
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

// What is known is said without a call: containerd is stopped meanwhile.
func TestListAsksNobody(t *testing.T) {
	eachContainerd(t, func(t *testing.T, b *bed) {
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		b.run(Spec{Name: "runs", Net: NetNone})
		if _, err := b.Create(ctx, Spec{Name: "waits", Image: b.img, Net: NetNone}); err != nil {
			t.Fatal(err)
		}
		r, err := b.c.Containers.Get(ctx, &containersapi.GetContainerRequest{ID: "runs"})
		if err != nil {
			t.Fatal(err)
		}
		if err := b.Settle(ctx); err != nil {
			t.Fatal(err)
		}
		pid := b.containerdPid()
		if err := unix.Kill(pid, unix.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		defer unix.Kill(pid, unix.SIGCONT)
		all, err := b.List(ctx)
		if err != nil || len(all) != 2 || all[0].Status != Running || all[0].Pid == 0 || all[1].Status != Created {
			t.Errorf("list: %+v, %v", all, err)
		}
		if i, err := b.Inspect(ctx, "runs"); err != nil || i.Status != Running {
			t.Errorf("inspect: %+v, %v", i, err)
		}
		if _, err := b.Inspect(ctx, "nobody"); err == nil {
			t.Error("nobody is there")
		}
		if oci, err := b.OCI(ctx, "runs"); err != nil || string(oci) != string(r.Container.Spec.Value) {
			t.Errorf("the specification differs, or %v", err)
		}
		if images, err := b.Images(ctx); err != nil || len(images) != 1 {
			t.Errorf("images: %+v, %v", images, err)
		}
		if err := unix.Kill(pid, unix.SIGCONT); err != nil {
			t.Fatal(err)
		}
		if err := b.Remove(ctx, "runs", true); err != nil {
			t.Fatal(err)
		}
		if all, err := b.List(ctx); err != nil || len(all) != 1 {
			t.Errorf("after the removal: %+v, %v", all, err)
		}
		if err := b.Engine.Start(ctx, "waits"); err != nil {
			t.Fatal(err)
		}
		if i, err := b.Inspect(ctx, "waits"); err != nil || i.Status != Running {
			t.Errorf("after the start: %+v, %v", i, err)
		}
	})
}

// Who hears that a container has exited does not see it running.
func TestListKnowsEvents(t *testing.T) {
	b := newBed(t, containerds(t)["2.x"])
	ctx, cancel := context.WithCancel(t.Context())
	var wrong []*Info
	var seen sync.WaitGroup
	seen.Add(5)
	done, listening := make(chan error, 1), make(chan bool, 1)
	go func() {
		done <- b.Events(ctx, func(ev Event) {
			switch ev.Kind {
			case EventLost:
				listening <- true
			case EventExited:
				if i, err := b.Inspect(ctx, ev.Name); err != nil || i.Status != Stopped || i.Exit == nil ||
					i.Exit.Status != 137 {
					wrong = append(wrong, i)
				}
				seen.Done()
			}
		})
	}()
	<-listening
	for _, name := range []string{"a", "b", "c", "d", "e"} {
		b.run(Spec{Name: name, Net: NetNone})
		i, err := b.Inspect(ctx, name)
		if err != nil {
			t.Fatal(err)
		}
		if err := unix.Kill(int(i.Pid), unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
	}
	seen.Wait()
	cancel()
	<-done
	for _, i := range wrong {
		t.Errorf("after its end: %+v", i)
	}
}

// What other clients of containerd do is seen.
func TestListSeesOthers(t *testing.T) {
	eachContainerd(t, func(t *testing.T, b *bed) {
		ctx := t.Context()
		c, err := containerd.Dial(b.Socket(), b.cfg.Namespace)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Conn.Close()
		b.run(Spec{Name: "a", Net: NetNone})
		r, err := c.Containers.Get(ctx, &containersapi.GetContainerRequest{ID: "a"})
		if err != nil {
			t.Fatal(err)
		}
		its := func() *Info { i, _ := b.Inspect(ctx, "a"); return i }

		r.Container.Labels["told"] = "by another"
		if _, err := c.Containers.Update(ctx,
			&containersapi.UpdateContainerRequest{Container: r.Container,
				UpdateMask: fieldMask([]string{"labels"})}); err != nil {
			t.Fatal(err)
		}
		testkit.Eventually(t, "a has another label", func() bool { return its().Labels["told"] != "" })
		if _, err := c.Tasks.Pause(ctx, &tasksapi.PauseTaskRequest{ContainerID: "a"}); err != nil {
			t.Fatal(err)
		}
		testkit.Eventually(t, "a is paused", func() bool { return its().Status == Paused })
		if _, err := c.Tasks.Resume(ctx, &tasksapi.ResumeTaskRequest{ContainerID: "a"}); err != nil {
			t.Fatal(err)
		}
		testkit.Eventually(t, "a runs on", func() bool { return its().Status == Running })
		if _, err := c.Tasks.Kill(ctx, &tasksapi.KillRequest{ContainerID: "a", Signal: 9, All: true}); err != nil {
			t.Fatal(err)
		}
		testkit.Eventually(t, "a has ended", func() bool { i := its(); return i.Status == Stopped && i.Exit != nil })

		other := r.Container
		other.ID, other.SnapshotKey = "copy", ""
		if _, err := c.Containers.Create(ctx, &containersapi.CreateContainerRequest{Container: other}); err != nil {
			t.Fatal(err)
		}
		listed := func() int { all, _ := b.List(ctx); return len(all) }
		testkit.Eventually(t, "two are listed", func() bool { return listed() == 2 })
		if _, err := c.Containers.Delete(ctx, &containersapi.DeleteContainerRequest{ID: "copy"}); err != nil {
			t.Fatal(err)
		}
		testkit.Eventually(t, "one is listed", func() bool { return listed() == 1 })

		img := &imagesapi.Image{Name: "other.invalid/i:1", Target: descriptor(b.img.Target)}
		if _, err := c.Images.Create(ctx, &imagesapi.CreateImageRequest{Image: img}); err != nil {
			t.Fatal(err)
		}
		images := func() int { all, _ := b.Images(ctx); return len(all) }
		testkit.Eventually(t, "there are two images", func() bool { return images() == 2 })
		if _, err := c.Images.Delete(ctx, &imagesapi.DeleteImageRequest{Name: img.Name}); err != nil {
			t.Fatal(err)
		}
		testkit.Eventually(t, "there is one image", func() bool { return images() == 1 })
	})
}

// What happens while containerd is away is known when it is back, and until then a container
// whose process is gone is not said to run.
func TestListAfterContainerd(t *testing.T) {
	eachContainerd(t, func(t *testing.T, b *bed) {
		ctx := t.Context()
		b.runMany("ends", "stays")
		i, err := b.Inspect(ctx, "ends")
		if err != nil {
			t.Fatal(err)
		}
		if err := unix.Kill(b.containerdPid(), unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		if err := unix.Kill(int(i.Pid), unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		testkit.Eventually(t, "it does not run", func() bool {
			i, err := b.Inspect(ctx, "ends")
			return err == nil && i.Status != Running
		})
		testkit.Eventually(t, "its end is known", func() bool {
			i, err := b.Inspect(ctx, "ends")
			return err == nil && i.Status == Stopped
		})
		if err := b.Settle(ctx); err != nil {
			t.Fatal(err)
		}
		all, err := b.List(ctx)
		if err != nil || len(all) != 2 || all[0].Status != Stopped || all[1].Status != Running {
			t.Errorf("list: %+v, %v", all, err)
		}
	})
}
