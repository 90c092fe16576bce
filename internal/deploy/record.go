package deploy

import (
	"context"
	"errors"

	"dewpoint/internal/engine"
	"dewpoint/internal/image"
	"dewpoint/internal/pack/learn"
)

// record begins to record the start, if it was asked for or teaches something;
// else the recording is nil. It waits for nothing.
func (d *Deployer) record(o *order, img *image.Image, r *run) (*learn.Recording, error) {
	switch {
	case o.Record && (d.cfg.Learner == nil || r.pull == nil):
		return nil, errNoRecord
	case o.Record:
		return d.cfg.Learner.BeginAsked(img, o.name)
	case r.pull == nil || r.pull.Lazy != nil: // its layers are not here
		return nil, nil
	}
	return d.cfg.Learner.Begin(img), nil
}

var errNoRecord = noRecord{errors.New("the start of an image that no registry gives cannot be recorded")}

type noRecord struct{ error }

func (noRecord) Kind() string   { return "unsupported" }
func (noRecord) Remedy() string { return "push the image to a registry, and run it from there" }

// watch records what is read from now on. What was asked to be recorded waits
// until the layers are whole.
func (d *Deployer) watch(ctx context.Context, o *order, r *run, rec *learn.Recording) error {
	if o.Record {
		if err := r.pull.Wait(ctx); err != nil {
			return err
		}
	}
	return rec.Watch(ctx)
}

// gone waits for the end of a container.
func (d *Deployer) gone(name string) learn.Gone {
	return func(ctx context.Context) error {
		_, err := d.cfg.Engine.Wait(ctx, name)
		if errors.Is(err, engine.ErrNotRunning) {
			return nil
		}
		return err
	}
}
