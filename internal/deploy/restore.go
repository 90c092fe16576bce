package deploy

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"

	"dewpoint/internal/checkpoint"
	"dewpoint/internal/deploy/ready"
	"dewpoint/internal/engine"
	"dewpoint/internal/image"
	"dewpoint/internal/spec"
	"dewpoint/internal/trace"
)

// mode is whether the container may start from a checkpoint.
func (d *Deployer) mode(o *order) string {
	if o.Record {
		return checkpoint.Never
	}
	return cmp.Or(o.Restore, checkpoint.Auto)
}

// plan decides how the container starts. nil boots it.
func (d *Deployer) plan(ctx context.Context, o *order, r *run, img *image.Image) (*checkpoint.Plan, error) {
	mode := d.mode(o)
	if d.cfg.Checkpoints == nil {
		if mode == checkpoint.Always {
			return nil, fmt.Errorf("%w: this node makes and uses no checkpoints (checkpoint.mode in its configuration)",
				checkpoint.ErrRestore)
		}
		return nil, nil
	}
	want, err := d.spec(o, img)
	if err != nil {
		return nil, err
	}
	p, err := d.cfg.Checkpoints.Plan(ctx, want, mode, o.Checkpoint)
	if err == nil && p.Record == nil {
		r.why(p.Why)
	}
	return p, err
}

// spec is what the container is made by.
func (d *Deployer) spec(o *order, img *image.Image) (engine.Spec, error) {
	s := o.spec(img)
	if d.cfg.Checkpoints == nil {
		return s, nil
	}
	if err := d.cfg.Checkpoints.Dress(&s); err != nil {
		return s, fmt.Errorf("%w: labels of the container and its image: %w", ErrRequest, err)
	}
	return s, nil
}

// why adds to the record why the container was not restored.
func (r *run) why(s string) {
	if s == "" {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.rec.Way.Why = append(r.rec.Way.Why, "restore: "+s)
}

// again reports whether a container that could not be restored is to boot.
func again(ctx context.Context, o *order, err error) bool {
	var f *restoreError
	return errors.As(err, &f) && ctx.Err() == nil && o.Restore != checkpoint.Always
}

// restoreError is what booting instead may get over.
type restoreError struct{ err error }

func (e *restoreError) Error() string        { return fmt.Sprintf("%v: %v", checkpoint.ErrRestore, e.err) }
func (e *restoreError) Unwrap() error        { return e.err }
func (e *restoreError) Is(target error) bool { return target == checkpoint.ErrRestore }

// restore starts the container from the plan's checkpoint. Of a *restoreError
// nothing of the container is left.
func (d *Deployer) restore(ctx context.Context, o *order, r *run, img *image.Image, check ready.Check,
	plan *checkpoint.Plan) error {
	if err := o.conflict(check); err != nil {
		return err
	}
	prep := plan.Begin(ctx)
	defer prep.Release()
	err := d.prepare(ctx, r, img, plan, prep)
	if err == nil {
		err = r.permit(ctx, o)
	}
	if err == nil {
		err = d.revive(ctx, o, r, img, check, plan, prep)
	}
	var f *restoreError
	if errors.As(err, &f) && ctx.Err() == nil {
		plan.Failed(f.err)
		r.why(f.err.Error())
		r.broke(f.err)
	}
	return err
}

// prepare brings the image and the checkpoint's writable layer here, at once.
func (d *Deployer) prepare(ctx context.Context, r *run, img *image.Image, plan *checkpoint.Plan,
	prep *checkpoint.Prepared) error {
	g, gctx := errgroup.WithContext(ctx)
	g.Go(func() error { return d.mount(gctx, img, r) })
	g.Go(func() error {
		_, step := trace.Start(trace.Beside(gctx), "checkpoint")
		defer step.End()
		if err := plan.Bring(gctx, prep); err != nil {
			return &restoreError{err}
		}
		return nil
	})
	if err := g.Wait(); err != nil {
		return err
	}
	if err := plan.Extend(ctx, prep); err != nil {
		return &restoreError{err}
	}
	return nil
}

// startSlack is how long the processes of a container that is made may take to be restored, beyond what is
// expected of them to be ready. Making it takes as long for a boot.
const startSlack = 20 * time.Second

// revive makes the container and lets its processes go on. It tells of stages
// when all went well: who watches is not to see a container that goes again.
func (d *Deployer) revive(ctx context.Context, o *order, r *run, img *image.Image, check ready.Check,
	plan *checkpoint.Plan, prep *checkpoint.Prepared) error {
	want, err := d.spec(o, img)
	if err != nil {
		return err
	}
	if err := plan.Revive(ctx, &want, prep); err != nil {
		return &restoreError{err}
	}
	var waited time.Duration // for its memory
	if want.Restore != nil && want.Restore.Images != nil {
		want.Restore.Images = r.idle(want.Restore.Images, &waited)
	}
	begun := time.Now()
	c, err := d.cfg.Engine.Create(ctx, want)
	begun = begun.Add(waited)
	if err != nil {
		return unrestored(err)
	}
	sctx, cancel := context.WithTimeout(ctx, startSlack+plan.Patience(o.timeout, 0))
	defer cancel()
	r.cgroup = c.CgroupDir("memory")
	created := time.Now()
	r.step(spec.Created, created)
	err = plan.Serve(ctx, o.name, prep)
	if err == nil {
		err = d.cfg.Engine.Start(sctx, o.name)
	}
	if err != nil {
		err = plan.Explain(o.name, err)
		return errors.Join(&restoreError{err}, d.remove(c.ID()))
	}
	r.place.Started()
	restored := time.Now()
	r.step(spec.Restored, restored)
	if err = plan.After(sctx, o.name); err == nil {
		err = d.awaitRestored(ctx, o, c, check, plan.Patience(o.timeout, restored.Sub(begun)))
	}
	if err == nil {
		err = plan.Serving()
	}
	if err != nil {
		return errors.Join(&restoreError{err}, d.remove(c.ID()))
	}
	r.rec.Way.Start = "restore"
	r.tell(spec.Created, created)
	r.tell(spec.Restored, restored)
	if o.Remove {
		d.removeAtExit(c.ID(), r.watch.Hold)
	}
	r.reached(spec.Ready)
	plan.Restored(ctx, time.Since(begun).Seconds())
	r.started(true)
	return nil
}

// longWait is a wait beyond which a deployment does not keep others from the processors.
const longWait = 200 * time.Millisecond

// idle is images, which tells how long it has waited.
func (r *run) idle(images func(context.Context) (string, error),
	waited *time.Duration) func(context.Context) (string, error) {
	return func(ctx context.Context) (string, error) {
		begun := time.Now()
		long := time.AfterFunc(longWait, r.place.Started)
		defer long.Stop()
		dir, err := images(ctx)
		*waited = time.Since(begun)
		return dir, err
	}
}

// create makes a container that boots. One that is to be saved carries what that
// needs, if its image has the shell that starts it.
func (d *Deployer) create(ctx context.Context, want engine.Spec, plan *checkpoint.Plan) (*engine.Info,
	error) {
	dressed := want
	if plan.Carry(&dressed) {
		c, err := d.cfg.Engine.Create(ctx, dressed)
		if !errors.Is(err, engine.ErrNoCommand) {
			return c, err
		}
		plan.Uncarried(want.Name, err)
	}
	return d.cfg.Engine.Create(ctx, want)
}

// unrestored tells errors that booting would meet as well.
func unrestored(err error) error {
	if errors.Is(err, engine.ErrExists) || errors.Is(err, engine.ErrPortTaken) {
		return err
	}
	return &restoreError{err}
}

// awaitRestored waits for a restored container to serve. What it wrote when it
// became ready it does not write again.
func (d *Deployer) awaitRestored(ctx context.Context, o *order, made *engine.Info, check ready.Check,
	within time.Duration) error {
	c, err := d.cfg.Engine.Inspect(ctx, made.ID())
	if err != nil {
		return err
	}
	if check.Kind == ready.Log {
		return nil
	}
	short := *o
	short.timeout = within
	return d.await(ctx, &short, check, c)
}

// booted learns how long booting takes, and makes the checkpoint that is wanted.
func (d *Deployer) booted(ctx context.Context, o *order, r *run, check ready.Check, plan *checkpoint.Plan) {
	if plan == nil {
		return
	}
	var seconds float64
	if check.Kind != ready.None && check.Kind != "" {
		r.mu.Lock()
		seconds = r.rec.Stages[spec.Ready] - r.rec.Stages[spec.Created]
		r.mu.Unlock()
	}
	if !plan.Booted(ctx, seconds) {
		return
	}
	d.bg.Go(func() {
		if err := plan.Make(d.life, o.name, seconds); err != nil && d.life.Err() == nil {
			d.cfg.Log.Warn("no checkpoint was made", "container", o.name, "err", err)
		}
	})
}
