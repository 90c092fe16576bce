package deploy

import (
	"context"
	"errors"
	"fmt"
	"time"

	"dewpoint/internal/checkpoint"
	"dewpoint/internal/deploy/admit"
	"dewpoint/internal/deploy/journal"
	"dewpoint/internal/engine"
	"dewpoint/internal/spec"

	"golang.org/x/sync/semaphore"
)

// Recover takes up what an earlier Queue has accepted and not ended. A container that has started is waited
// for again, until it is ready; hooks run again in one that was restored. Of others nothing is left, nor of
// one whose restore cannot be brought to its end: a detached deployment begins anew, with its name, its place
// behind those that were accepted before it, and its deadline; one whose caller was connected fails. Recover
// returns when each is known again, by its ID and its key; they go on behind it.
func (k *Queue) Recover(ctx context.Context) error {
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
func (k *Queue) Unended() map[string]bool {
	ids := map[string]bool{}
	for _, e := range k.j.Open() {
		ids[e.ID] = true
	}
	return ids
}

// takeUp is called with mu held.
func (k *Queue) takeUp(e journal.Entry, c *engine.Info, groups map[string]*admit.Group,
	undoing *semaphore.Weighted) {
	e.Request.Terms = spec.Terms{Caller: e.Caller, Admin: e.Admin, Key: e.Key, Detach: e.Detached}
	r, err := k.d.parse(e.Request)
	if err != nil {
		r = &run{d: k.d, order: order{Request: e.Request, name: e.Name}}
	}
	t := k.newTask(context.Background(), r, e)
	has := c != nil && started(c)
	g := group(groups, e)
	switch {
	case has:
		t.stand.State = spec.StateDeploying
	case err == nil && e.Detached:
		err = r.enter(g, true)
	}
	k.begin(t, func() (spec.Record, error) {
		if err != nil {
			return spec.Record{}, err
		}
		if has {
			rec, err := k.make.adopt(t.ctx, r, c, e.Asked, t.watch())
			if err != errIncomplete {
				return rec, err
			}
		}
		if c != nil {
			if err := t.takeBack(undoing); err != nil {
				return spec.Record{}, err
			}
		}
		if !e.Detached {
			return spec.Record{}, errKilled
		}
		if has { // it has no place in the queue yet
			if err := t.enter(g, true); err != nil {
				return spec.Record{}, err
			}
		}
		return k.make.carry(t.ctx, r, t.watch())
	})
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
	return t.k.make.takeBack(context.WithoutCancel(t.ctx), t.run.name)
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

// errIncomplete says that a container was restored by an earlier daemon, and is not one of its own yet.
var errIncomplete = errors.New("its restore was under way")

// adopt keeps the contract of maker.
func (d *Deployer) adopt(ctx context.Context, r *run, c *engine.Info, asked time.Time,
	w spec.Watch) (spec.Record, error) {
	rec := spec.Record{ID: r.id, Name: r.name, Image: r.ref.String(), Digest: c.Digest.String(),
		Node: d.cfg.Node, Stages: map[string]float64{},
		Way: spec.Way{Start: "boot",
			Why: []string{"dewd was started anew meanwhile: what came before is not known"}}}
	restored := c.Labels[checkpoint.LabelRestored] != ""
	if restored {
		rec.Way.Start = "restore"
		if err := d.complete(ctx, r.name); err != nil {
			if ctx.Err() == nil {
				d.cfg.Log.Warn("a container whose restore was under way is taken back", "name", r.name, "err", err)
			}
			return spec.Record{}, errIncomplete
		}
	}
	r.container = c
	img, err := d.cfg.Engine.LocalImage(ctx, r.ref)
	if err == nil {
		r.check, err = r.checkOf(img)
	}
	if err == nil {
		err = r.awaitAgain(ctx, r.name, restored, r.timeout) // c may be from when less was known
	}
	if err == nil {
		rec.Stages[spec.Ready] = time.Since(asked).Seconds()
		w.Reached(r.name, spec.Ready, rec.Stages[spec.Ready])
	} else {
		err = why(ctx, r.unready(ctx, err))
		rec.Error = err.Error()
	}
	d.cfg.Audience.Ended(rec, err)
	d.cfg.Audience.Done(rec)
	return rec, err
}

// complete makes a container one of its own that an earlier daemon has restored.
func (d *Deployer) complete(ctx context.Context, name string) error {
	if d.cfg.Checkpoints == nil {
		return errors.New("this daemon makes and uses no checkpoints")
	}
	if err := d.cfg.Engine.Sure(ctx, name); err != nil { // the restore may not be over
		return err
	}
	return d.cfg.Checkpoints.Again(ctx, name)
}
