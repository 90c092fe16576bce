package engine

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"sync"
	"time"

	tasksapi "github.com/containerd/containerd/api/services/tasks/v1"
)

// A container that was told to end is left alone for unblockAfter; what of its
// reads still waits then is unblocked every unblockEvery.
const (
	unblockAfter = 400 * time.Millisecond
	unblockEvery = 150 * time.Millisecond
)

// unblock has Config.Unblock called for a container's threads until ctx ends;
// the function that it returns waits for the end of that.
func (e *Engine) unblock(ctx context.Context, name string) (wait func()) {
	var group sync.WaitGroup
	if e.cfg.Unblock == nil {
		return group.Wait
	}
	group.Go(func() {
		for pause := unblockAfter; ; pause = unblockEvery {
			select {
			case <-time.After(pause):
			case <-ctx.Done():
				return
			}
			threads, err := e.threads(ctx, name)
			if err != nil {
				return // it has ended
			}
			e.cfg.Unblock(threads)
		}
	})
	return group.Wait
}

// threads are those of all processes of a container that runs.
func (e *Engine) threads(ctx context.Context, name string) ([]int, error) {
	r, err := e.c.tasks.ListPids(ctx, &tasksapi.ListPidsRequest{ContainerID: name})
	if err != nil {
		return nil, err
	}
	var all []int
	for _, p := range r.Processes {
		tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", p.Pid))
		if err != nil {
			continue // gone meanwhile
		}
		for _, t := range tasks {
			if tid, err := strconv.Atoi(t.Name()); err == nil {
				all = append(all, tid)
			}
		}
	}
	return all, nil
}
