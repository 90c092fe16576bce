package engine

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"dewpoint/internal/engine/cgroup"
	"dewpoint/internal/sched"
)

// lockLooks is the time between two looks for processes that wait for a lock.
const lockLooks = 500 * time.Millisecond

// watchLocks ends a restore, with the reason, that waits for a lock which others hold: CRIU takes the locks
// again that the processes had, and waits for each as long as it takes. It returns when ctx ends.
func (e *restores) watchLocks(ctx context.Context, name string, end context.CancelCauseFunc) {
	before := map[string]string{}
	for sched.Sleep(ctx, lockLooks) {
		procs, _ := cgroup.Processes(e.cfg.places().Cgroup(name))
		locks, _ := os.ReadFile("/proc/locks")
		now := waiters(string(locks), procs)
		for pid, holder := range now {
			if before[pid] == holder { // for a whole round
				end(fmt.Errorf("a file that it had locked is locked by process %s: end that one, or let it unlock the file, and try again", holder))
				return
			}
		}
		before = now
	}
}

// waiters says of those of the processes that wait for a lock who holds it, by what is in /proc/locks: a
// line for each lock, and behind it lines with an arrow for who waits.
func waiters(locks string, pids []string) map[string]string {
	wait := map[string]string{}
	holder := ""
	for line := range strings.Lines(locks) {
		f := strings.Fields(line)
		const kinds = 4 // number, kind, strictness, access; then the process
		switch {
		case len(f) > kinds+1 && f[1] == "->":
			if pid := f[kinds+1]; slices.Contains(pids, pid) {
				wait[pid] = holder
			}
		case len(f) > kinds:
			holder = f[kinds]
		}
	}
	return wait
}
