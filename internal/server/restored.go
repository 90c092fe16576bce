package server

import (
	"context"
	"errors"
	"maps"
	"time"

	"dewpoint/internal/checkpoint"
	"dewpoint/internal/deploy"
	"dewpoint/internal/engine"
	"dewpoint/internal/engine/process"
	"dewpoint/internal/spec"

	"golang.org/x/sys/unix"
)

// Lost is told of a restored container whose memory did not come: its processes are dead. One that
// was to become ready boots instead (package deploy); one that served is started anew by its command.
func (c *checkpoints) Lost(name string, err error, served bool) {
	c.log.Error("a restored container is killed: the rest of its memory does not come", "container", name, "err",
		err)
	c.news.events.add(spec.Event{Kind: spec.EventLost, Name: name, Error: err.Error()})
	if !served {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), lostTime)
	defer cancel()
	if err := c.engine.Kill(ctx, name, unix.SIGKILL); err != nil && !errors.Is(err, engine.ErrNotRunning) {
		c.log.Warn("kill what is left of it", "container", name, "err", err)
	}
	if err := c.startDeadAnew(ctx, name); err != nil {
		c.log.Error("it stays down", "container", name, "err", err)
	}
}

// lostTime bounds the end of a container and its new start.
const lostTime = 30 * time.Second

// startDeadAnew starts a container that was killed by its command, on the files that it has, unless
// it goes when it exits.
func (c *checkpoints) startDeadAnew(ctx context.Context, name string) error {
	info, err := c.engine.Inspect(ctx, name)
	if err != nil || info.Labels[deploy.LabelRemove] != "" {
		return err
	}
	if _, err := c.engine.Wait(ctx, name); err != nil && !errors.Is(err, engine.ErrNotRunning) {
		return err
	}
	if err := c.startAnew(ctx, info, nil); !errors.Is(err, engine.ErrRunning) { // by its policy
		return err
	}
	return nil
}

// startAnew starts a container that has ended by its command, on the files that it has. Labels are changed
// before, an empty value removes one.
func (c *checkpoints) startAnew(ctx context.Context, info *engine.Info, labels map[string]string) error {
	if c.manager == nil {
		return c.engine.StartAnew(ctx, info.ID(), labels, func(*engine.Info) error { return nil })
	}
	all := checkpoint.Anew(info)
	if all == nil {
		all = map[string]string{}
	}
	maps.Copy(all, labels)
	return c.engine.StartAnew(ctx, info.ID(), all, func(made *engine.Info) error {
		return c.manager.Remade(ctx, made)
	})
}

// startAbandoned starts anew the containers whose memory was coming when an earlier daemon was
// killed: their guards have ended them. Those of deployments that had not ended are the queue's business.
func (c *checkpoints) startAbandoned(ctx context.Context, unended map[string]bool) {
	if c.manager == nil {
		return
	}
	err := c.manager.Abandoned(ctx, func(ctx context.Context, name string) error {
		return c.startDead(ctx, name, unended)
	})
	if err != nil {
		c.log.Error("a container stays down", "err", err)
	}
}

// startDead starts a container anew whose processes have been killed; one that runs, or never did, stays as
// it is.
func (c *checkpoints) startDead(ctx context.Context, name string, unended map[string]bool) error {
	ctx, cancel := context.WithTimeout(ctx, lostTime)
	defer cancel()
	info, err := c.engine.Inspect(ctx, name)
	if errors.Is(err, engine.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	if info.Status == engine.Created || info.Pid != 0 && process.Alive(info.Pid) ||
		unended[info.Labels[deploy.LabelDeployment]] {
		return nil
	}
	why := "dewd was killed while the rest of its memory was coming"
	c.log.Error("a restored container has ended: "+why, "container", name)
	c.news.events.add(spec.Event{Kind: spec.EventLost, Name: name, Error: why})
	return c.startDeadAnew(ctx, name)
}
