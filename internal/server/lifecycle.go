package server

import (
	"context"
	"errors"
	"fmt"
	"time"

	"dewpoint/internal/deploy"
	"dewpoint/internal/engine"
	"dewpoint/internal/engine/limits"
	"dewpoint/internal/spec"

	"golang.org/x/sys/unix"
)

// defaultStop is how long a container may take to end when it is asked to.
const defaultStop = 10 * time.Second

// patience is a timeout of the API's in the engine's terms.
func patience(timeout time.Duration) time.Duration {
	if timeout < 0 {
		return defaultStop
	}
	return timeout
}

// Stop implements api.Containers.
func (c *containers) Stop(ctx context.Context, name string, timeout time.Duration) error {
	return c.supervisor.Stop(ctx, name, patience(timeout))
}

// Start implements api.Containers.
func (c *containers) Start(ctx context.Context, name string) error {
	i, err := c.startable(ctx, name)
	if err != nil || i == nil {
		return err
	}
	if err = c.supervisor.Start(ctx, i.ID()); errors.Is(err, engine.ErrRunning) {
		return nil
	}
	return err
}

// startable is a container that may be started; nil if it is about to be by its deployment.
func (c *containers) startable(ctx context.Context, name string) (*engine.Info, error) {
	i, err := c.engine.Inspect(ctx, name)
	switch {
	case err != nil:
		return nil, err
	case i.Status == engine.Created && c.queue.GoesOn(i.Labels[deploy.LabelDeployment]):
		return nil, nil
	case i.Labels[deploy.LabelRemove] != "" && i.Status == engine.Stopped:
		return nil, fmt.Errorf("start container %s: it is removed, as it has ended: %w", i.Name,
			engine.ErrNotFound)
	}
	return i, nil
}

// Restart implements api.Containers.
func (c *containers) Restart(ctx context.Context, name string, timeout time.Duration) error {
	i, err := c.startable(ctx, name)
	if err != nil || i == nil {
		return err
	}
	if i.Labels[deploy.LabelRemove] != "" {
		return fmt.Errorf("%w: restart container %s: it is removed when it ends; deploy it without --rm", deploy.ErrRequest,
			i.Name)
	}
	return c.supervisor.Restart(ctx, i.ID(), patience(timeout))
}

// Kill implements api.Containers.
func (c *containers) Kill(ctx context.Context, name, signal string) error {
	sig := unix.SIGKILL
	if signal != "" {
		var err error
		if sig, err = engine.ParseSignal(signal); err != nil {
			return fmt.Errorf("%w: %w", deploy.ErrRequest, err)
		}
	}
	return c.supervisor.Kill(ctx, name, sig)
}

// Update implements api.Containers.
func (c *containers) Update(ctx context.Context, name string, u spec.Update) error {
	if err := u.Validate(); err != nil {
		return fmt.Errorf("%w: %w", deploy.ErrRequest, err)
	}
	i, err := c.engine.Inspect(ctx, name)
	if err != nil {
		return err
	}
	if u.Restart != nil && *u.Restart != spec.RestartNo && i.Labels[deploy.LabelRemove] != "" {
		return fmt.Errorf("%w: update container %s: it is removed when it ends, and does not start again",
			deploy.ErrRequest, i.Name)
	}
	if u.Memory != nil || u.CPUs != nil || u.Pids != nil {
		err := c.engine.Limit(ctx, i.ID(), func(l *limits.Limits) {
			r := spec.Request{Memory: l.Memory, CPUs: l.CPUs, Options: spec.Options{PidsLimit: l.Pids}}
			u.In(&r)
			*l = limits.Limits{Memory: r.Memory, CPUs: r.CPUs, Pids: r.PidsLimit}
		})
		if err != nil {
			return err
		}
		c.limited(i)
	}
	if u.Restart != nil { // last: the limits may be refused
		if err := c.supervisor.SetPolicy(ctx, i, *u.Restart); err != nil {
			return err
		}
	}
	if asked, _ := c.queue.RequestOf(i.Labels); asked != nil {
		u.In(asked)
		return c.engine.Relabel(ctx, i.ID(), map[string]string{deploy.LabelRequest: deploy.Asked(*asked)})
	}
	return nil
}

// Remove implements api.Containers.
func (c *containers) Remove(ctx context.Context, name string, force bool) error {
	if err := validName(name); err != nil {
		return err
	}
	return c.supervisor.Remove(ctx, name, force)
}

// Wait implements api.Containers.
func (c *containers) Wait(ctx context.Context, name string) (int, error) {
	name = c.id(ctx, name)
	e, err := c.engine.Wait(ctx, name)
	if errors.Is(err, engine.ErrNotRunning) {
		i, unknown := c.engine.Inspect(ctx, name)
		switch {
		case errors.Is(unknown, engine.ErrNotFound):
			err = unknown
		case unknown == nil && i.Exit != nil: // its task is gone, and how it ended is known
			e, err = *i.Exit, nil
		}
	}
	if err == nil {
		err = c.engine.Unexecuted(ctx, engine.Name(name), e.Status)
	}
	return e.Status, err
}
