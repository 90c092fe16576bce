package engine

import (
	"context"
	"sync"
	"testing"
	"time"

	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	imagesapi "github.com/containerd/containerd/api/services/images/v1"
	tasksapi "github.com/containerd/containerd/api/services/tasks/v1"
	"golang.org/x/sys/unix"

	"dewpoint/internal/engine/containerd"
	"dewpoint/testkit"
)

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
