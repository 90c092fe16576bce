package deploy

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"

	"dewpoint/internal/checkpoint"
	"dewpoint/internal/engine"
	"dewpoint/internal/spec"
	"dewpoint/internal/trace"
)

// restoreError is what booting instead may get over.
type restoreError struct{ err error }

func (e *restoreError) Error() string        { return fmt.Sprintf("%v: %v", checkpoint.ErrRestore, e.err) }
func (e *restoreError) Unwrap() error        { return e.err }
func (e *restoreError) Is(target error) bool { return target == checkpoint.ErrRestore }

// restore starts the container from the plan's checkpoint. Of a *restoreError
// nothing of the container is left.
func (r *run) restore(ctx context.Context) error {
	if err := r.conflict(r.check); err != nil {
		return err
	}
	prep := r.plan.Begin(ctx)
	defer prep.Release()
	err := r.prepare(ctx, prep)
	if err == nil {
		err = r.permit(ctx)
	}
	if err == nil {
		err = r.revive(ctx, prep)
	}
	var f *restoreError
	if errors.As(err, &f) && ctx.Err() == nil {
		r.plan.Failed(f.err)
		r.unrestored(f.err)
	}
	return err
}

// prepare brings the image and the checkpoint's writable layer here, at once.
func (r *run) prepare(ctx context.Context, prep *checkpoint.Prepared) error {
	g, gctx := errgroup.WithContext(ctx)
	g.Go(func() error { return r.mount(gctx) })
	g.Go(func() error {
		_, step := trace.Start(trace.Beside(gctx), "checkpoint")
		defer step.End()
		if err := r.plan.Bring(gctx, prep); err != nil {
			return &restoreError{err}
		}
		return nil
	})
	if err := g.Wait(); err != nil {
		return err
	}
	if err := r.plan.Extend(ctx, prep); err != nil {
		return &restoreError{err}
	}
	return nil
}

// startSlack is how long the processes of a container that is made may take to be restored, beyond what is
// expected of them to be ready. Making it takes as long for a boot.
const startSlack = 20 * time.Second

// longWait is a wait beyond which a deployment does not keep others from the processors.
const longWait = 200 * time.Millisecond

// revive makes the container and lets its processes go on. It tells of stages
// when all went well: who watches is not to see a container that goes again.
func (r *run) revive(ctx context.Context, prep *checkpoint.Prepared) (err error) {
	want, e := *r.want, r.d.cfg.Engine
	if err := r.plan.Revive(ctx, &want, prep); err != nil {
		return &restoreError{err}
	}
	var waited time.Duration // for its memory
	if want.Restore != nil && want.Restore.Images != nil {
		images := want.Restore.Images
		want.Restore.Images = func(ctx context.Context) (string, error) {
			begun := time.Now()
			long := time.AfterFunc(longWait, r.place.Started)
			defer long.Stop()
			dir, err := images(ctx)
			waited = time.Since(begun)
			return dir, err
		}
	}
	begun := time.Now()
	r.container, err = e.Create(ctx, want)
	begun = begun.Add(waited)
	switch {
	case errors.Is(err, engine.ErrExists) || errors.Is(err, engine.ErrPortTaken): // so would it be of a boot
		return err
	case err != nil:
		return &restoreError{err}
	}
	sctx, cancel := context.WithTimeout(ctx, startSlack+r.plan.Patience(r.timeout, 0))
	defer cancel()
	created := time.Now()
	r.step(spec.Created, created)
	err = r.plan.Serve(ctx, r.name, prep)
	if err == nil {
		err = e.Start(sctx, r.name)
	}
	if err != nil {
		err = r.plan.Explain(r.name, err)
		return errors.Join(&restoreError{err}, r.d.remove(r.container.ID()))
	}
	r.place.Started()
	restored := time.Now()
	r.step(spec.Restored, restored)
	if err = r.plan.After(sctx, r.name); err == nil {
		err = r.awaitAgain(ctx, r.container.ID(), true, r.plan.Patience(r.timeout, restored.Sub(begun)))
	}
	if err == nil {
		err = r.plan.Serving()
	}
	if err != nil {
		return errors.Join(&restoreError{err}, r.d.remove(r.container.ID()))
	}
	r.note(func(rec *spec.Record) { rec.Way.Start = "restore" })
	r.tell(spec.Created, created)
	r.tell(spec.Restored, restored)
	if r.Remove {
		r.d.removeAtExit(r.container.ID(), r.watch.Hold)
	}
	r.reached(spec.Ready)
	r.plan.Restored(ctx, time.Since(begun).Seconds())
	if r.pull != nil {
		r.pull.Background()
	}
	return nil
}
