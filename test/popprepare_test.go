package test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"dewpoint/internal/api"
	"dewpoint/internal/spec"
	"dewpoint/testkit/popbed"
)

// knows reports whether node i has an image, deployed or prewarmed.
func (p *pop) knows(i int, ref string) (known bool, err error) {
	err = p.client(i, func(ctx context.Context, c *api.Client) error {
		all, err := c.Images(ctx)
		known = slices.ContainsFunc(all, func(m spec.Image) bool { return m.Name == ref })
		return err
	})
	return known, err
}

// ready waits until node i has made an image ready: it knows it, and marks its layers.
func (p *pop) ready(i int, ref string) {
	p.t.Helper()
	p.eventually(fmt.Sprintf("%s on %s", ref, p.Nodes[i].Name), func() error {
		known, err := p.knows(i, ref)
		if err == nil && !known {
			err = errors.New("it is not ready")
		}
		if err == nil && p.marks(i) == nil {
			err = errors.New("nothing is marked")
		}
		return err
	})
}

// marks returns an error if node i marks layers.
func (p *pop) marks(i int) error {
	marks, err := os.ReadDir(filepath.Join(p.Nodes[i].Store, "refs", p.Nodes[i].Name))
	if err == nil && len(marks) > 0 {
		err = fmt.Errorf("%d marks, the first %s", len(marks), marks[0].Name())
	}
	return err
}

// rests returns an error if node i marks or mounts layers.
func (p *pop) rests(i int) error {
	mounts, err := os.ReadDir(filepath.Join(p.Nodes[i].Root(), "snapshotter", "m"))
	if err == nil && len(mounts) > 0 {
		err = fmt.Errorf("%d layers are mounted", len(mounts))
	}
	return errors.Join(err, p.marks(i))
}

// served deploys on node i out of the PoP, and removes the container.
func (p *pop) served(i int, ref string) {
	p.t.Helper()
	rec, err := p.deploy(i, ref, "web")
	if err == nil {
		err = p.answers(i)
	}
	if err != nil || rec.Bytes.Registry != 0 {
		p.t.Fatalf("%v, %+v", err, rec)
	}
	if err := p.Remove(p.t.Context(), i, "web"); err != nil {
		p.t.Fatal(err)
	}
}

// What one node deploys again the others prewarm, which keeps nothing in a store that needs room, is taken
// back when it is evicted, and goes on after a restart and after Redis was away.
func TestPoPPrepares(t *testing.T) {
	t.Parallel()
	p := newPoP(t, popbed.Config{Nodes: 2, Store: popbed.Dir, StoreBytes: 1 << 30})
	ctx := t.Context()
	push := func(name string) string {
		return p.reg.PushImage("team/"+name+":1", appLayers(t, 1<<20), appOptions("name", name)).Ref
	}
	twice := func(i int, ref string) {
		t.Helper()
		for range 2 {
			_, err := p.deploy(i, ref, "web")
			if err = errors.Join(err, p.Remove(ctx, i, "web")); err != nil {
				t.Fatal(err)
			}
		}
	}
	first := push("first")
	twice(0, first)
	p.ready(1, first)

	p.t.Log("it starts from there, also when dewd was started anew")
	if err := errors.Join(p.KillDewd(ctx, 1), p.StartDewd(ctx, 1)); err != nil {
		t.Fatal(err)
	}
	p.ready(1, first)
	p.served(1, first)

	p.t.Log("what was deployed while Redis was away comes when it is deployed again")
	if err := p.KillRedis(); err != nil {
		t.Fatal(err)
	}
	second := push("second")
	twice(0, second)
	if err := p.StartRedis(ctx, true); err != nil {
		t.Fatal(err)
	}
	p.settled()
	twice(0, second)
	p.eventually("the second image", func() error {
		known, err := p.knows(1, second)
		if err == nil && !known {
			err = errors.New("it is not ready")
		}
		return err
	})

	p.t.Log("it is evicted once the store needs room, and is taken back")
	forget := func(i int, o spec.PruneOptions) error {
		return p.client(i, func(ctx context.Context, c *api.Client) error { _, err := c.Prune(ctx, o); return err })
	}
	if err := forget(0, spec.PruneOptions{Images: true}); err != nil {
		t.Fatal(err)
	}
	if err := p.client(1, func(ctx context.Context, c *api.Client) error {
		return c.RemoveImage(ctx, first)
	}); err != nil {
		t.Fatal(err)
	}
	if err := forget(1, spec.PruneOptions{}); err != nil {
		t.Fatal(err)
	}
	p.eventually("the store is empty", func() error {
		if err := forget(0, spec.PruneOptions{PoP: true}); err != nil {
			return err
		}
		left, err := filepath.Glob(filepath.Join(p.Nodes[0].Store, "layers", "*.json"))
		if err == nil && len(left) > 0 {
			err = fmt.Errorf("%d layers stay: %v", len(left), p.rests(1))
		}
		return err
	})
	p.eventually("it is taken back", func() error {
		known, err := p.knows(1, second)
		if err == nil && known {
			err = errors.New("it is still known")
		}
		return err
	})
	twice(1, second)
	// the image came from the registry, this node makes it ready
	p.eventually("the node that forgot it", func() error {
		known, err := p.knows(0, second)
		if err == nil && !known {
			err = errors.New("it is not ready")
		}
		return err
	})
}
