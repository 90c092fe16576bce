package test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"dewpoint/internal/api"
	"dewpoint/internal/spec"
	"dewpoint/testkit/popbed"
)

// What becomes of checkpoints' clones: they are saved again, they come from other nodes, and
// they start anew when their memory was not all there.

// A clone is saved as what it is by then, with the files that it was restored with, and so is
// a clone of that.
func TestCheckpointOfClone(t *testing.T) {
	t.Parallel()
	b := newCheckpointBed(t, "")
	state := b.born
	for i := range 3 {
		name := fmt.Sprint("clone-", i)
		rec, url := b.boot(t, name, b.img.Ref, "--restore", "always")
		if rec.Way.Start != "restore" {
			t.Fatalf("%+v", rec.Way)
		}
		if i < 2 { // the last one writes nothing
			line := fmt.Sprintf("line %d\n", i)
			b.must("exec", name, "/app", "append", "/state", line)
			state += line
		}
		for what, want := range map[string]string{"/born": b.born, "/host": name + "\n", "/cat?/state": state,
			"/count": fmt.Sprintln(i + 1)} {
			if got := get(t, url+what); got != want {
				t.Errorf("%s of %s is %q, not %q", what, name, got, want)
			}
		}
		b.must("checkpoint", name)
		b.must("rm", "-f", name)
	}
	rec, url := b.boot(t, "last", b.img.Ref, "--restore", "always")
	if got := get(t, url+"/cat?/state"); rec.Way.Start != "restore" || got != state {
		t.Errorf("%+v: it reads %q, not %q", rec.Way, got, state)
	}
	if got := get(t, url+"/count"); got != "4\n" {
		t.Errorf("the last one counts %q", got)
	}
	b.end()
}

// A clone whose memory is on its way is saved when all of it is there.
func TestCheckpointOfLateClone(t *testing.T) {
	t.Parallel()
	m, img, flags, sum := newLateBed(t, 192, "1MB")
	for i := range 2 {
		name := fmt.Sprint("clone-", i)
		rec, url := m.boot(t, name, img.Ref, flags...)
		if rec.Way.Start != "restore" {
			t.Fatalf("%+v", rec.Way)
		}
		if i == 0 {
			m.must("checkpoint", name)
		}
		if got := get(t, url+"/memory"); got != sum {
			t.Errorf("the memory of %s sums up to %q, not %q", name, got, sum)
		}
		m.must("rm", "-f", name)
	}
	m.must("rmi", img.Ref)
	m.must("prune")
	checkNothingLeft(t, m)
}

// clone starts a container on node i from the checkpoint whose clones count from count on: it is there soon,
// and older ones may be there before. It asserts what the container has come to.
func (p *pop) clone(i int, request spec.Request, born string, count int) {
	p.t.Helper()
	request.Checkpoint, request.Restore = false, "always"
	p.eventually("a start on "+p.Nodes[i].Name, func() error {
		rec, err := p.Deploy(p.t.Context(), i, request)
		if err != nil {
			return err
		}
		got, err := p.get(i, "/count")
		if rec.Way.Start != "restore" || err != nil || got != fmt.Sprintln(count) {
			err = fmt.Errorf("%+v: it counts %q, %v", rec.Way, got, err)
			return errors.Join(err, p.Remove(p.t.Context(), i, request.Name))
		}
		return nil
	})
	for _, what := range []string{"/born", "/cat?/state"} {
		if got, err := p.get(i, what); err != nil || got != born {
			p.t.Errorf("%s of the clone on %s is %q, %v; not %q", what, p.Nodes[i].Name, got, err, born)
		}
	}
}

// saveClone saves a clone on node i.
func (p *pop) saveClone(i int, name string) {
	p.t.Helper()
	err := p.client(i, func(ctx context.Context, c *api.Client) error {
		_, err := c.Checkpoint(ctx, spec.CheckpointRequest{Name: name})
		return err
	})
	if err != nil {
		p.t.Fatal(err)
	}
}

// Nodes that have no store in common give checkpoints to each other: one that another made, and one that
// was made of a clone of it.
func TestCheckpointFromPeers(t *testing.T) {
	t.Parallel()
	p := newPoP(t, popbed.Config{Nodes: 3, Store: popbed.None})
	img := p.reg.PushImage("team/slow:1", appLayers(t, 0), appOptions("slow", "80"))
	request := spec.Request{Image: img.Ref, Name: "web", Net: "host", Ready: "http:80/", Checkpoint: true}
	if _, err := p.Deploy(t.Context(), 0, request); err != nil {
		t.Fatal(err)
	}
	born, err := p.get(0, "/born")
	if err != nil {
		t.Fatal(err)
	}
	p.clone(1, request, born, 1)
	err = p.client(1, func(ctx context.Context, c *api.Client) error {
		all, err := c.ListCheckpoints(ctx, "")
		if err == nil && (len(all) != 1 || all[0].Where != "node" || all[0].Node != p.Nodes[0].Name) {
			err = fmt.Errorf("there are %+v", all)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
	p.private(1)
	p.saveClone(1, "web")
	if err := p.KillNode(0); err != nil { // nobody else has what it made but node 1
		t.Fatal(err)
	}
	p.clone(2, request, born, 2)
}

// private asserts that nobody else can read what a node has saved.
func (p *pop) private(i int) {
	p.t.Helper()
	dir := filepath.Join(p.Nodes[i].Root(), "checkpoints", "store")
	err := filepath.Walk(dir, func(path string, fi os.FileInfo, err error) error {
		if err == nil && fi.Mode().Perm()&0o077 != 0 {
			p.t.Errorf("%s has mode %v", strings.TrimPrefix(path, dir), fi.Mode())
		}
		return err
	})
	if err != nil {
		p.t.Error(err)
	}
}
