package test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"dewpoint/internal/api"
	"dewpoint/internal/spec"
	"dewpoint/testkit"
	"dewpoint/testkit/registrytest"
)

// lateConfig has memory come late to processes that are restored.
const lateConfig = "[checkpoint]\nlazy_above = \"16MB\"\n"

// lateTime is the longest that a deployment may take whose memory does not come: what a page is waited for,
// what the store is, the end of the processes, and the boot.
const lateTime = 90 * time.Second

// Where the store hangs while the memory of a restored container comes out of it, the container boots
// within bounds; and nothing of the restore is left. When the store is back, it is restored.
func lateHangs(b *faultBed) {
	program, err := os.ReadFile(filepath.Join(programs, "app"))
	b.must(err)
	// Of layers that no other image has: the second node fetches them itself, and boots without the store.
	img := b.reg.PushImage("team/late:1", []registrytest.Layer{{Tar: registrytest.Tar(
		registrytest.File{Name: "etc/", Mode: 0o755}, registrytest.File{Name: "tmp/", Mode: 0o1777},
		registrytest.File{Name: "dev/", Mode: 0o755},
		registrytest.File{Name: "app", Body: string(program), Mode: 0o755},
		registrytest.File{Name: "etc/late", Body: "late\n"})}}, appOptions())
	late := &faultRun{b: b, node: 1, name: "late", port: 990}
	request := spec.Request{Image: img.Ref, Name: late.name, Net: "host",
		Cmd: []string{"slow", fmt.Sprint(late.port)},
		// all of which has to be there
		Env: []string{"MEMORY_MB=160"}, Ready: fmt.Sprintf("http:%d/memory", late.port)}
	saving, never := request, request
	never.Restore, saving.Restore, saving.Checkpoint = "never", "never", true
	for i, r := range map[int]spec.Request{1: never, 0: saving} {
		_, err := b.Deploy(b.t.Context(), i, r)
		b.must(err)
	}
	saved := &faultRun{b: b, node: 0, name: late.name, port: late.port}
	sum, err := saved.ask("/memory")
	b.must(err)
	b.sees(1, "pop")
	late.remove()

	rec, hung := b.restoreAndHang(late, request)
	defer func() {
		if hung {
			b.HangStore(1, false)
		}
	}()
	if !hung {
		b.t.Fatal("the memory came before the store hung, each time")
	}
	if got := whys(rec, "restore: "); rec.Way.Start != "boot" || got == "" {
		b.t.Errorf("it started by %s, since %q", rec.Way.Start, got)
	}
	got, err := late.ask("/memory")
	if err != nil || got == "" || got == sum {
		b.t.Errorf("what booted answers %q, what was saved %q; %v", got, sum, err)
	}
	if !b.said(1, "a restored container is killed: the rest of its memory does not come") {
		b.t.Error("dewd does not say that memory was lost")
	}
	hung = false
	b.must(b.HangStore(1, false))
	b.heals(1, "PoP store")
	if left, err := filepath.Glob(filepath.Join(b.Nodes[1].Root(), "checkpoints", "late", "*")); err != nil ||
		len(left) > 0 {
		b.t.Errorf("marks of memory that comes: %v, %v", left, err)
	}
	if guards := b.guards(1); len(guards) > 0 {
		b.t.Errorf("guards of memory that comes: %v", guards)
	}
	late.remove()
	request.Restore, request.Ready = "always", fmt.Sprintf("http:%d/", late.port) // what was away is not damaged
	rec, err = b.Deploy(b.t.Context(), 1, request)
	b.must(err)
	if got, err := late.ask("/memory"); err != nil || got != sum || rec.Way.Start != "restore" {
		b.t.Errorf("when the store is back: %+v, %q, not %q; %v", rec.Way, got, sum, err)
	}
	late.remove()
	saved.remove()
	b.eventually("the checkpoint leaves the store", func() error {
		return b.client(0, func(ctx context.Context, c *api.Client) error {
			all, err := c.ListCheckpoints(ctx, "")
			for _, have := range all {
				err = errors.Join(err, c.RemoveCheckpoint(ctx, have.ID), fmt.Errorf("there is %s", have.ID))
			}
			return err
		})
	})
}

// restoreAndHang starts the container and has its node's store hang once its processes run, until it does so
// before all memory is there.
func (b *faultBed) restoreAndHang(c *faultRun, request spec.Request) (rec spec.Record, hung bool) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.t.Context(), 4*lateTime)
	defer cancel()
	for range 5 {
		done := make(chan error, 1)
		go func() {
			var err error
			rec, err = b.Deploy(ctx, c.node, request)
			done <- err
		}()
		began := b.begun(ctx, c, done)
		if began {
			b.must(b.HangStore(c.node, true))
		}
		at := time.Now()
		err := <-done
		if b.said(c.node, "a restored container is killed") {
			b.must(err)
			if took := time.Since(at); took > lateTime {
				b.t.Errorf("it took %v", took)
			}
			return rec, true
		}
		b.must(errors.Join(b.HangStore(c.node, false), err))
		b.t.Logf("once more: %+v", rec.Way)
		b.heals(c.node, "PoP store")
		c.remove()
	}
	return rec, false
}

// begun waits until the container's processes run, or the deployment has ended, whose result stays.
func (b *faultBed) begun(ctx context.Context, c *faultRun, done chan error) (runs bool) {
	err := b.client(c.node, func(_ context.Context, cl *api.Client) error {
		for !runs && len(done) == 0 {
			list, err := cl.List(ctx, false)
			if err != nil {
				return err
			}
			runs = slices.ContainsFunc(list, func(have spec.Container) bool {
				return have.Name == c.name && have.Status == spec.StatusRunning
			})
			time.Sleep(2 * time.Millisecond)
		}
		return nil
	})
	b.must(err)
	return runs
}

// sees waits until a node has a checkpoint that is there.
func (b *faultBed) sees(i int, there string) {
	b.t.Helper()
	testkit.Retry(b.t, b.Nodes[i].Name+" sees it", func() error {
		var all []spec.Checkpoint
		b.must(b.client(i, func(ctx context.Context, c *api.Client) (err error) {
			all, err = c.ListCheckpoints(ctx, "")
			return err
		}))
		if !slices.ContainsFunc(all, func(c spec.Checkpoint) bool { return c.Where == there }) {
			return fmt.Errorf("it has %+v", all)
		}
		return nil
	})
}

// guards are the processes of a node's dewd that guard memory on its way.
func (b *faultBed) guards(i int) (pids []int) {
	for _, pid := range b.Nodes[i].Group().Processes("dewd") {
		line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if strings.Contains(string(line), "page-guard") {
			pids = append(pids, pid)
		}
	}
	return pids
}
