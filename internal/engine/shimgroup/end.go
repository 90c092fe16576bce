package shimgroup

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	taskv2 "github.com/containerd/containerd/api/runtime/task/v2"
	taskv3 "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/ttrpc"

	"dewpoint/internal/engine/process"
)

const (
	startTimeout = 10 * time.Second // of a shim that is being started
	endTimeout   = 2 * time.Second
)

// Shim is a connection to the shim of a group.
type Shim struct{ conn net.Conn }

// Find connects to the shim of a group; nil if none listens.
func Find(dir string) *Shim {
	socket := Socket(dir)
	if socket == "" {
		return nil
	}
	c, err := net.DialTimeout("unix", socket, endTimeout)
	if err != nil {
		return nil
	}
	return &Shim{c}
}

// End ends the shim of a group that no container is in, and removes the group.
// It waits for a shim that is being started.
func End(dir string) error {
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	unlock := Lock(ctx, dir)
	defer unlock()
	Find(dir).End()
	return Remove(dir)
}

// End asks a shim to end. If it goes on, since its books name a container that containerd does not know,
// its process is ended after two seconds, but not if that has children: they may be somebody's
// containers. A nil shim has ended.
func (s *Shim) End() {
	if s == nil {
		return
	}
	t := ttrpc.NewClient(s.conn)
	defer t.Close()
	ctx, cancel := context.WithTimeout(context.Background(), endTimeout)
	defer cancel()
	p := hold(ctx, t)
	// containerd 1.6 and 2.x speak different versions of it. That the connection ends is the answer.
	_, err := taskv3.NewTTRPCTaskClient(t).Shutdown(ctx, &taskv3.ShutdownRequest{})
	if err != nil && ctx.Err() == nil {
		_, _ = taskv2.NewTTRPCTaskClient(t).Shutdown(ctx, &taskv2.ShutdownRequest{})
	}
	if p == nil {
		return
	}
	defer p.Close()
	if !p.Wait(ctx) && childless(p.PID) {
		ctx, cancel := context.WithTimeout(context.Background(), endTimeout)
		defer cancel()
		_ = p.Terminate(ctx)
	}
}

// hold takes hold of the process that answers; nil if that cannot be told. The shim names its number. It
// still answers after the number was taken hold of: so the number was not another process's by then.
func hold(ctx context.Context, t *ttrpc.Client) *process.Process {
	pid := number(ctx, t)
	if pid == 0 {
		return nil
	}
	p, err := process.Open(pid, nil)
	if err != nil {
		return nil
	}
	if number(ctx, t) != pid {
		p.Close()
		return nil
	}
	return p
}

// number asks a shim for its process's number; 0 if it does not answer.
func number(ctx context.Context, t *ttrpc.Client) int {
	if r, err := taskv3.NewTTRPCTaskClient(t).Connect(ctx, &taskv3.ConnectRequest{}); err == nil {
		return int(r.ShimPid)
	}
	r, err := taskv2.NewTTRPCTaskClient(t).Connect(ctx, &taskv2.ConnectRequest{})
	if err != nil {
		return 0
	}
	return int(r.ShimPid)
}

// childless says whether a process is known to have no children (proc_pid_task_children(5)).
func childless(pid int) bool {
	threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, f := range threads {
		if b, err := os.ReadFile(f); err != nil || len(bytes.TrimSpace(b)) > 0 {
			return false
		}
	}
	return len(threads) > 0
}
