package engine

import (
	"cmp"
	"context"
	"errors"
	"os"
	"path/filepath"
	"time"

	"dewpoint/internal/engine/cgroup"
)

// sweepFor is how long containerd may go on with what nobody waits for.
const sweepFor = 20 * time.Second

// TakeBack removes a container that a process which was killed was making, with what
// containerd goes on to do for it.
func (e *containers) TakeBack(ctx context.Context, name string) error {
	done := e.change(name)
	err := e.sweep(ctx, name)
	done()
	if rerr := e.Remove(ctx, name, true); !errors.Is(rerr, ErrNotFound) {
		err = errors.Join(err, rerr)
	}
	return wrap(err, "take back container %s", name)
}

// sweep ends a task of which it is not known how far its creation came. containerd goes on
// with that for a while when its client is gone, or begins to clean up when it was killed itself,
// and either may leave behind what runc has begun: sweep returns when that is over, and nothing of
// the task is left. The record has to be there still.
func (e *containers) sweep(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeout(ctx, sweepFor)
	defer cancel()
	for pause := 5 * time.Millisecond; ; pause = min(2*pause, 100*time.Millisecond) {
		err := e.killTask(ctx, name)
		cgroup.Kill(e.cfg.places().Cgroup(name))
		cgroup.Remove(e.cfg.places().Cgroup(name))
		if _, serr := os.Lstat(e.cfg.bundle(name)); err == nil && errors.Is(serr, os.ErrNotExist) {
			err = e.removeRestored(name) // nobody works on it any more
		}
		left := e.underWay(name)
		if err == nil && !left {
			return nil
		}
		select {
		case <-time.After(pause):
			continue
		case <-ctx.Done():
		}
		if left && err == nil {
			return errors.Join(e.dropBundle(name), e.removeRestored(name))
		}
		return err
	}
}

// bundle is containerd's directory of a container's task, which is there from the
// beginning of its creation on.
func (c *Config) bundle(name string) string {
	state := cmp.Or(c.ContainerdState, filepath.Dir(c.Address))
	return filepath.Join(state, "io.containerd.runtime.v2.task", c.Namespace, name)
}

// underWay reports whether containerd or runc have anything of a task.
func (e *tasks) underWay(name string) bool {
	for _, d := range append(cgroup.Dirs(e.cfg.places().Cgroup(name)), e.cfg.bundle(name), e.cfg.runcDir(name)) {
		if _, err := os.Lstat(d); err == nil {
			return true
		}
	}
	return false
}

func (e *tasks) dropBundle(name string) error {
	e.log.Warn("containerd does not end what it had begun; its directory is removed", "container", name)
	if err := unmountBelow(e.cfg.bundle(name)); err != nil {
		return err
	}
	return os.RemoveAll(e.cfg.bundle(name))
}
