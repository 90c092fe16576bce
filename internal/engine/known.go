package engine

import (
	"context"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/containerd/containerd/api/types/task"
	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// known is what containerd said of tasks, when it made them, by its events, or
// when it was asked, so that List need not ask it: it asks shim after shim, each
// of which may be busy making another container. What a task was said to be
// holds while its first process lives, or once that has ended, until the engine
// makes or deletes the task. The zero value is ready, and safe for concurrent
// use.
type known struct {
	mu     sync.Mutex
	tasks  map[string]knownTask // guarded by mu
	forgot uint64               // times; guarded by mu
}

type knownTask struct {
	*task.Process
	started uint64 // startTime of the process
}

// forget is to be called before and after a task is made or deleted.
func (k *known) forget(name string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.forgot++
	delete(k.tasks, name)
}

// get is nil where containerd has to be asked.
func (k *known) get(name, cgroup string) *task.Process {
	k.mu.Lock()
	t := k.tasks[name]
	k.mu.Unlock()
	if t.Process == nil || t.Status == task.Status_STOPPED {
		return t.Process
	}
	if !lives(t.Pid, t.started) {
		return nil
	}
	if frozen, err := freezerOf(cgroup).frozen(); frozen || err != nil {
		return nil
	}
	return t.Process
}

// put keeps what containerd said, unless something was forgotten since then.
func (k *known) put(name string, p *task.Process, then uint64) {
	switch p.Status {
	case task.Status_CREATED, task.Status_RUNNING, task.Status_STOPPED:
	default:
		return
	}
	t := knownTask{Process: p}
	if p.Status != task.Status_STOPPED {
		var err error
		if t.started, err = startTime(int(p.Pid)); err != nil {
			return
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.forgot != then {
		return
	}
	if k.tasks == nil {
		k.tasks = make(map[string]knownTask)
	}
	k.tasks[name] = t
}

// made keeps that a task is there, whose first process waits for its start.
func (k *known) made(name string, pid uint32) {
	k.put(name, &task.Process{Pid: pid, Status: task.Status_CREATED}, k.times())
}

// begun keeps that a task that was made runs, if it has not ended already.
func (k *known) begun(name string, pid uint32) {
	k.turn(name, pid, &task.Process{Pid: pid, Status: task.Status_RUNNING})
}

// ended keeps how a task's first process ended.
func (k *known) ended(name string, pid uint32, x Exit) {
	k.turn(name, pid, &task.Process{Status: task.Status_STOPPED, ExitStatus: uint32(x.Status), ExitedAt: timestamppb.New(x.At)})
}

// turn replaces what is known of the same process, unless it has ended. Of a
// task that is not known, one that is deleted perhaps, nothing is kept.
func (k *known) turn(name string, pid uint32, to *task.Process) {
	k.mu.Lock()
	defer k.mu.Unlock()
	t := k.tasks[name]
	if t.Process == nil || t.Status == task.Status_STOPPED || t.Pid != pid {
		return
	}
	k.tasks[name] = knownTask{Process: to, started: t.started}
}

func (k *known) times() uint64 {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.forgot
}

// lives says whether the process is there and has not ended.
func lives(pid uint32, started uint64) bool {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(int(pid)) + "/stat")
	if err != nil {
		return false
	}
	s := string(b)
	f := strings.Fields(s[strings.LastIndexByte(s, ')')+1:])
	return len(f) > 19 && f[0] != "Z" && f[0] != "X" && f[19] == strconv.FormatUint(started, 10)
}

// askTimeout bounds the question to one shim of a list.
const askTimeout = 2 * time.Second

// knownTask is what is known of a task, else what containerd says; nil if there
// is none, or its shim does not answer.
func (e *Engine) knownTask(ctx context.Context, name string) *task.Process {
	if p := e.known.get(name, e.cgroup(name)); p != nil {
		return p
	}
	if e.shims.makes(name) {
		return nil // and its shim may be busy with it
	}
	then := e.known.times()
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	p, err := e.taskState(ctx, name)
	if err == nil {
		e.known.put(name, p, then)
	} else if !errdefs.IsNotFound(err) {
		e.log.Warn("state of a task", "container", name, "err", err)
	}
	return p
}
