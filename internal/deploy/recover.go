package deploy

import (
	"context"
	"errors"
	"fmt"
	"time"

	"dewpoint/internal/checkpoint"
	"dewpoint/internal/deploy/admit"
	"dewpoint/internal/deploy/journal"
	"dewpoint/internal/deploy/ready"
	"dewpoint/internal/engine"
	"dewpoint/internal/spec"

	"golang.org/x/sync/semaphore"
)

// Recover takes up what an earlier Desk has accepted and not ended. A container that has started is waited
// for again, until it is ready; hooks run again in one that was restored. Of others nothing is left, nor of
// one whose restore cannot be brought to its end: a detached deployment begins anew, with its name, its place
// behind those that were accepted before it, and its deadline; one whose caller was connected fails. Recover
// returns when each is known again, by its ID and its key; they go on behind it.
func (k *Desk) Recover(ctx context.Context) error {
	open := k.j.Open()
	if len(open) == 0 {
		return nil
	}
	have, err := k.make.made(ctx)
	if err != nil {
		return fmt.Errorf("deployments of an earlier daemon: %w", err)
	}
	k.cfg.Log.Info("deployments of an earlier daemon go on", "number", len(open))
	k.mu.Lock()
	defer k.mu.Unlock()
	undoing := semaphore.NewWeighted(8)
	groups := map[string]*admit.Group{}
	for _, e := range open {
		k.takeUp(e, have[e.ID], groups, undoing)
	}
	return nil
}

// Unended are the IDs of the deployments that Recover will take up.
func (k *Desk) Unended() map[string]bool {
	ids := map[string]bool{}
	for _, e := range k.j.Open() {
		ids[e.ID] = true
	}
	return ids
}

// takeUp is called with mu held.
func (k *Desk) takeUp(e journal.Entry, c *engine.Info, groups map[string]*admit.Group,
	undoing *semaphore.Weighted) {
	e.Request.Terms = spec.Terms{Caller: e.Caller, Admin: e.Admin, Key: e.Key, Detach: e.Detached}
	o, err := k.d.parse(e.Request)
	if err != nil {
		o = &order{Request: e.Request, name: e.Name}
	}
	t := k.newTask(context.Background(), o, e)
	if err == nil && e.Detached && (c == nil || !started(c)) {
		t.place, err = k.d.enter(o, group(groups, e), true)
	}
	if c != nil && started(c) {
		t.stand.State = spec.StateDeploying
	}
	g := group(groups, e)
	k.begin(t, func() (spec.Record, error) {
		if err != nil {
			return spec.Record{}, err
		}
		if c != nil && started(c) && k.make.complete(t.ctx, o.name, c) {
			return k.make.adopt(t.ctx, o, c, e.Asked, t.watch())
		}
		if c != nil {
			if err := t.takeBack(undoing); err != nil {
				return spec.Record{}, err
			}
		}
		if !e.Detached {
			return spec.Record{}, errKilled
		}
		if err := t.queue(g); err != nil {
			return spec.Record{}, err
		}
		return t.carry()
	})
}

// queue gives the task a place in the queue, if it has none.
func (t *task) queue(g *admit.Group) (err error) {
	t.k.mu.Lock()
	defer t.k.mu.Unlock()
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.place == nil {
		t.place, err = t.k.d.enter(t.order, g, true)
	}
	return err
}

// group is the one that e was asked for in.
func group(groups map[string]*admit.Group, e journal.Entry) *admit.Group {
	if e.Parallel <= 0 {
		return nil
	}
	g := groups[e.Group]
	if g == nil {
		g = &admit.Group{Limit: e.Parallel}
		groups[e.Group] = g
	}
	return g
}

// started reports whether a container's first process runs or has run, or may.
func started(c *engine.Info) bool {
	return c.Status == engine.Running || c.Status == engine.Paused || c.Status == engine.Unknown || c.Exit != nil
}

// takeBack removes what there is of a container that has not started, or that is not complete.
func (t *task) takeBack(undoing *semaphore.Weighted) error {
	if err := undoing.Acquire(t.ctx, 1); err != nil {
		return context.Cause(t.ctx)
	}
	defer undoing.Release(1)
	return t.k.make.takeBack(context.WithoutCancel(t.ctx), t.order.name)
}

// made keeps the contract of maker.
func (d *Deployer) made(ctx context.Context) (map[string]*engine.Info, error) {
	list, err := d.cfg.Engine.List(ctx)
	have := map[string]*engine.Info{}
	for _, c := range list {
		have[c.Labels[LabelDeployment]] = c
	}
	return have, err
}

// takeBack keeps the contract of maker.
func (d *Deployer) takeBack(ctx context.Context, name string) error {
	return d.cfg.Engine.TakeBack(ctx, name)
}

// complete keeps the contract of maker.
func (d *Deployer) complete(ctx context.Context, name string, c *engine.Info) bool {
	if c.Labels[checkpoint.LabelRestored] == "" {
		return true
	}
	err := errors.New("this daemon makes and uses no checkpoints")
	if d.cfg.Checkpoints != nil {
		if err = d.cfg.Engine.Sure(ctx, name); err == nil { // the restore may not be over
			err = d.cfg.Checkpoints.Again(ctx, name)
		}
	}
	if err != nil && ctx.Err() == nil {
		d.cfg.Log.Warn("a container whose restore was under way is taken back", "name", name, "err", err)
	}
	return err == nil
}

// adopt keeps the contract of maker.
func (d *Deployer) adopt(ctx context.Context, o *order, c *engine.Info, asked time.Time,
	w spec.Watch) (spec.Record, error) {
	rec := spec.Record{ID: o.id, Name: o.name, Image: o.ref.String(), Digest: c.Digest.String(),
		Node: d.cfg.Node, Stages: map[string]float64{},
		Way: spec.Way{Start: "boot",
			Why: []string{"dewd was started anew meanwhile: what came before is not known"}}}
	if c.Labels[checkpoint.LabelRestored] != "" {
		rec.Way.Start = "restore"
	}
	err := d.awaitAgain(ctx, o, c)
	if err == nil {
		rec.Stages[spec.Ready] = time.Since(asked).Seconds()
		w.Reached(o.name, spec.Ready, rec.Stages[spec.Ready])
	} else {
		err = why(ctx, d.unready(ctx, o, c, err))
		rec.Error = err.Error()
	}
	d.cfg.Audience.Ended(rec, err)
	d.cfg.Audience.Done(rec)
	return rec, err
}

func (d *Deployer) awaitAgain(ctx context.Context, o *order, c *engine.Info) error {
	img, err := d.cfg.Engine.LocalImage(ctx, o.ref)
	if err != nil {
		return err
	}
	check, err := d.check(o, img)
	if err != nil {
		return err
	}
	now, err := d.cfg.Engine.Inspect(ctx, o.name) // c may be from when less was known
	if err != nil {
		return err
	}
	if check.Kind == ready.Log && c.Labels[checkpoint.LabelRestored] != "" {
		return nil
	}
	return d.await(ctx, o, check, now)
}

// why is the error of a deployment that failed with err: that it was called off, if it was.
func why(ctx context.Context, err error) error {
	if e, off := context.Cause(ctx).(*ended); off && err != nil {
		return e
	}
	return err
}
