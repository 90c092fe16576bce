package engine

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"

	tasksapi "github.com/containerd/containerd/api/services/tasks/v1"
)

// A container that was told to end is left alone for unblockAfter; what of its
// reads still waits then is unblocked every unblockEvery.
const (
	unblockAfter = 400 * time.Millisecond
	unblockEvery = 150 * time.Millisecond
)

// unblock has Config.Unblock called for the threads of a container that have not
// taken the signal sig, until ctx ends; the function that it returns waits for
// the end of that. A process that handles the signal reads on in peace.
func (e *tasks) unblock(ctx context.Context, name string, sig syscall.Signal) (wait func()) {
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
			threads, err := e.threads(ctx, name, sig)
			if err != nil {
				return // it has ended
			}
			e.cfg.Unblock(threads)
		}
	})
	return group.Wait
}

// threads are those of a container's processes for which sig is pending.
func (e *tasks) threads(ctx context.Context, name string, sig syscall.Signal) ([]int, error) {
	r, err := e.c.Tasks.ListPids(ctx, &tasksapi.ListPidsRequest{ContainerID: name})
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
			status, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/status", p.Pid, t.Name()))
			if err != nil || !pending(status, sig) {
				continue
			}
			if tid, err := strconv.Atoi(t.Name()); err == nil {
				all = append(all, tid)
			}
		}
	}
	return all, nil
}

// pending reports whether a signal waits for a thread, or for any of its
// process, by what proc(5) says of the thread.
func pending(status []byte, sig syscall.Signal) bool {
	for line := range bytes.Lines(status) {
		name, value, _ := bytes.Cut(line, []byte(":"))
		if !bytes.Equal(name, []byte("SigPnd")) && !bytes.Equal(name, []byte("ShdPnd")) {
			continue
		}
		mask, err := strconv.ParseUint(string(bytes.TrimSpace(value)), 16, 64)
		if err == nil && mask&(1<<(sig-1)) != 0 {
			return true
		}
	}
	return false
}
