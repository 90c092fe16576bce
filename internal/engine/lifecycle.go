package engine

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	tasksapi "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types"
	"github.com/containerd/containerd/api/types/task"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/fieldmaskpb"

	"dewpoint/internal/engine/network"
	"dewpoint/internal/engine/state"
	"dewpoint/internal/sched"
)

// Start runs the first process of a container that was created, or anew one
// that has ended, also after a reboot. ErrRunning if it runs.
func (e *containers) Start(ctx context.Context, name string) error {
	defer e.change(name)()
	if e.isRestore(name) {
		return wrap(e.startRestored(ctx, name), "restore container %s", name)
	}
	err := e.startTask(ctx, name)
	if err == nil {
		return nil
	}
	if errdefs.IsNotFound(err) || errdefs.IsFailedPrecondition(err) || errdefs.IsUnknown(err) {
		err = e.restart(ctx, name, err, nil)
	}
	return wrap(err, "start container %s", name)
}

// StartAnew starts a container that has ended by its command, also one that was to be restored, or was
// restored just when who did so ended. Labels are changed before that, an empty value removes one. created is
// called when the container is made again, and its processes are not. ErrRunning if it runs, with nothing
// changed.
func (e *containers) StartAnew(ctx context.Context, id string, labels map[string]string,
	created func(*Info) error) error {
	name := Name(id)
	defer e.change(name)()
	err := e.ended(ctx, id)
	if err == nil {
		err = os.RemoveAll(e.cfg.imagesDir(name))
	}
	if err == nil {
		err = e.relabel(ctx, name, labels)
	}
	if err == nil {
		err = e.restart(ctx, name, errdefs.ErrFailedPrecondition, created)
	}
	return wrap(err, "start container %s anew", name)
}

// Relabel changes labels of a container; an empty value removes one.
func (e *containers) Relabel(ctx context.Context, id string, labels map[string]string) error {
	name := Name(id)
	defer e.change(name)()
	_, err := e.recordOf(ctx, id)
	if err == nil {
		err = e.relabel(ctx, name, labels)
	}
	return wrap(err, "change labels of container %s", name)
}

// StopSignal is what Stop sends a container.
func StopSignal(i *Info) unix.Signal { return stopSignal(i.Labels) }

// recordOf is the record of the container that a name or an ID stands for; ErrNotFound.
func (e *core) recordOf(ctx context.Context, id string) (state.Record, error) {
	r, err := e.state.Record(ctx, Name(id))
	if err == nil {
		err = r.Meant(id)
	}
	return r, notFound(err)
}

// ended returns nil of a container whose process does not run.
func (e *containers) ended(ctx context.Context, id string) error {
	r, err := e.recordOf(ctx, id)
	if err != nil {
		return err
	}
	p, err := e.state.Task(ctx, r.Name)
	if err == nil && (p.Status == task.Status_RUNNING || p.Status == task.Status_PAUSED) {
		return ErrRunning
	}
	if errdefs.IsNotFound(err) {
		return nil
	}
	return err
}

// relabel changes labels of a container's record; an empty value removes one.
func (e *containers) relabel(ctx context.Context, name string, labels map[string]string) error {
	if len(labels) == 0 {
		return nil
	}
	mask := &fieldmaskpb.FieldMask{}
	for k := range labels {
		mask.Paths = append(mask.Paths, "labels."+k)
	}
	r, err := e.c.Containers.Update(ctx,
		&containersapi.UpdateContainerRequest{Container: &containersapi.Container{ID: name, Labels: labels},
			UpdateMask: mask})
	if err != nil {
		e.state.Unsure(name)
		return notFound(err)
	}
	e.state.Relabelled(r.Container)
	return nil
}

// restart makes the task anew where the old one is over; why is what starting
// the old one said. created, unless nil, is called before its process starts.
func (e *containers) restart(ctx context.Context, name string, why error, created func(*Info) error) error {
	r, err := e.state.Record(ctx, name)
	if err != nil {
		return notFound(err)
	}
	p, err := e.state.Task(ctx, name)
	switch {
	case errdefs.IsNotFound(err):
	case err != nil:
		return err
	case p.Status == task.Status_RUNNING || p.Status == task.Status_PAUSED:
		return ErrRunning
	case p.Status == task.Status_CREATED && created == nil:
		return why
	case p.Status == task.Status_CREATED:
		if err := e.killTask(ctx, name); err != nil {
			return err
		}
	default:
		if err := e.deleteTask(ctx, name); err != nil {
			return err
		}
	}
	if err := e.reconnect(ctx, r); err != nil {
		return err
	}
	m, err := e.c.Snapshots.Mounts(ctx, &snapshotsapi.MountsRequest{Snapshotter: e.cfg.Snapshotter, Key: name})
	if err != nil {
		return err
	}
	if err := e.renewTask(ctx, r, m.Mounts); err != nil {
		return err
	}
	if created != nil {
		var i *Info
		if i, err = e.state.Inspect(ctx, name); err == nil {
			err = created(i)
		}
	}
	if err == nil {
		err = e.startTask(ctx, name)
	}
	if err != nil { // one that is made and never started would be in the way
		return errors.Join(err, e.killTask(context.WithoutCancel(ctx), name))
	}
	return nil
}

func (e *tasks) startTask(ctx context.Context, name string) error {
	r, err := e.c.Tasks.Start(ctx, &tasksapi.StartRequest{ContainerID: name})
	if err != nil {
		e.state.Unsure(name)
		return err
	}
	e.state.Begun(name, r.Pid)
	return nil
}

// renewTask makes the task of a container that had one. containerd takes a
// moment to clean up behind a shim that was killed.
func (e *tasks) renewTask(ctx context.Context, r state.Record, mounts []*types.Mount) error {
	ctx, cancel := context.WithTimeout(ctx, undoTimeout)
	defer cancel()
	opts, err := plainAny(e.runtimeOptions()) // the record's may be of another time
	if err != nil {
		return err
	}
	for {
		_, err := e.newTask(ctx, r.Name, r.Labels, mounts, opts)
		if !errdefs.IsAlreadyExists(err) || !sched.Sleep(ctx, 20*time.Millisecond) {
			return err
		}
	}
}

// reconnect gives a stopped container its network back after a reboot.
func (e *containers) reconnect(ctx context.Context, r state.Record) error {
	if r.Net == NetHost || network.IsNS(e.cfg.netns(r.Name)) {
		return nil
	}
	if err := e.disconnect(ctx, r); err != nil { // what the state directory remembers
		return err
	}
	addr, err := e.network(ctx, r)
	if err != nil {
		return errors.Join(err, e.disconnect(context.WithoutCancel(ctx), r))
	}
	e.state.Addressed(r.Name, addr)
	return nil
}

func stopSignal(labels map[string]string) unix.Signal {
	if sig, err := ParseSignal(labels[labelStop]); err == nil {
		return sig
	}
	return unix.SIGTERM
}

// Kill sends a signal to the container's first process, SIGKILL to all.
// ErrNotRunning if it does not run.
func (e *tasks) Kill(ctx context.Context, id string, sig unix.Signal) error {
	name := Name(id)
	defer e.records.lock(name)()
	if id != name {
		if _, err := e.recordOf(ctx, id); err != nil {
			return fmt.Errorf("kill container %s: %w", name, err)
		}
	}
	_, err := e.c.Tasks.Kill(ctx,
		&tasksapi.KillRequest{ContainerID: name, Signal: uint32(sig), All: sig == unix.SIGKILL})
	if errdefs.IsNotFound(err) {
		err = ErrNotRunning
	}
	return wrap(err, "kill container %s", name)
}

// Stop sends the image's stop signal, SIGTERM by default, and SIGKILL when
// the container still runs after grace. It returns when the container has
// ended, at once if it does not run.
func (e *containers) Stop(ctx context.Context, id string, grace time.Duration) error {
	name := Name(id)
	r, err := e.recordOf(ctx, id)
	if err != nil {
		return fmt.Errorf("stop container %s: %w", name, err)
	}
	id = e.cfg.places().Describe(r).ID()
	if err := e.Kill(ctx, id, stopSignal(r.Labels)); err != nil {
		if gone(err) {
			return nil
		}
		return err
	}
	soft, cancel := context.WithTimeout(ctx, grace)
	unblocked := e.unblock(soft, name, stopSignal(r.Labels))
	_, err = e.Wait(soft, id)
	cancel()
	unblocked()
	if err == nil || gone(err) {
		return nil
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err := e.Kill(ctx, id, unix.SIGKILL); err != nil && !gone(err) {
		return err
	}
	if _, err = e.Wait(ctx, id); gone(err) {
		return nil
	}
	return err
}

// gone reports whether err says that a container does not run, or is not there any more.
func gone(err error) bool { return errors.Is(err, ErrNotRunning) || errors.Is(err, ErrNotFound) }

// Wait returns when the container's first process has ended, at once if that
// is so already. ErrNotRunning if there is no task whose end could be told,
// as after a reboot. It outlasts restarts of containerd.
func (e *tasks) Wait(ctx context.Context, id string) (Exit, error) {
	name := Name(id)
	if id != name {
		if _, err := e.state.Inspect(ctx, id); err != nil {
			return Exit{}, fmt.Errorf("wait for container %s: %w", name, err)
		}
	}
	return e.waitProcess(ctx, name, "")
}

func (e *tasks) waitProcess(ctx context.Context, name, exec string) (Exit, error) {
	pid := e.state.Pid(name)
	r, err := e.c.Tasks.Wait(ctx, &tasksapi.WaitRequest{ContainerID: name, ExecID: exec})
	switch {
	case err == nil:
		x := Exit{Status: int(r.ExitStatus), At: r.ExitedAt.AsTime()}
		if exec == "" && pid != 0 {
			e.state.Ended(name, pid, x)
		}
		return x, nil
	case ctx.Err() != nil:
		return Exit{}, ctx.Err()
	case errdefs.IsNotFound(err):
		return Exit{}, fmt.Errorf("wait for container %s: %w", name, ErrNotRunning)
	}
	return Exit{}, fmt.Errorf("wait for container %s: %w", name, err)
}

// Remove takes the container away with all that belongs to it. A running one
// gives ErrRunning unless force is set, which kills it. What a failed or
// interrupted Remove has left, the next one removes. ErrNotFound if there is
// no such container, and then nothing of it either.
func (e *containers) Remove(ctx context.Context, id string, force bool) error {
	name := Name(id)
	if err := ValidName(name); err != nil {
		return err
	}
	defer e.change(name)()
	r, err := e.state.Record(ctx, name)
	if errdefs.IsNotFound(err) {
		e.state.Unrecorded(name)
		return errors.Join(fmt.Errorf("remove container %s: %w", name, ErrNotFound), e.removeRemains(ctx, name))
	}
	if err == nil {
		err = r.Meant(id)
	}
	if err == nil {
		err = e.remove(ctx, r, force)
	}
	return wrap(err, "remove container %s", name)
}

func (e *containers) remove(ctx context.Context, r state.Record, force bool) error {
	if err := e.removeTask(ctx, r.Name, force); err != nil {
		return err
	}
	if err := e.disconnect(ctx, r); err != nil {
		return err
	}
	e.ports.Release(r.Name)
	if err := e.removeSnapshot(ctx, r.Name); err != nil {
		return err
	}
	if err := errors.Join(e.removeRestored(r.Name), os.RemoveAll(e.cfg.dir(r.Name))); err != nil {
		return err
	}
	return e.deleteRecord(ctx, r.Name)
}

// removeTask ends a container's task. One that was made and never started is killed
// first, also without force: its process has its output open, for whose end the
// shim would wait ten seconds before it has the runtime delete it.
func (e *tasks) removeTask(ctx context.Context, name string, force bool) error {
	if e.unstarted(ctx, name) {
		return e.killTask(ctx, name)
	}
	err := e.deleteTask(ctx, name)
	switch {
	case err == nil:
		return nil
	case force:
		return e.killTask(ctx, name)
	}
	if p, serr := e.state.Task(ctx, name); serr == nil && p.Status != task.Status_STOPPED {
		return ErrRunning
	}
	return err
}

// unstarted says whether a task was made and not started yet. containerd is asked
// unless it is known that this is not so.
func (e *tasks) unstarted(ctx context.Context, name string) bool {
	if i, _, sure := e.state.Get(name); sure && i != nil && i.Status != Created {
		return false
	}
	p, err := e.state.Task(ctx, name)
	return err == nil && p.Status == task.Status_CREATED
}

// removeRemains removes what a container without a record has left.
func (e *containers) removeRemains(ctx context.Context, name string) error {
	e.ports.Release(name)
	return errors.Join(
		e.disconnect(ctx, state.Record{Name: name, Net: NetBridge}),
		e.removeSnapshot(ctx, name),
		e.removeRestored(name),
		os.RemoveAll(e.cfg.dir(name)))
}

// ttrpcClosed is in the text of an error of containerd's whose connection to a shim has ended.
const ttrpcClosed = "ttrpc: closed"

// deleteTask ends a task whose process is not running, and its shim.
func (e *tasks) deleteTask(ctx context.Context, name string) error {
	left, err := e.shims.leave(ctx, name)
	if err != nil {
		return err
	}
	_, err = e.c.Tasks.Delete(ctx, &tasksapi.DeleteTaskRequest{ContainerID: name})
	if err != nil && strings.Contains(err.Error(), ttrpcClosed) {
		// The shim has ended before its answer was out; containerd knows whether the task has.
		_, err = e.c.Tasks.Delete(ctx, &tasksapi.DeleteTaskRequest{ContainerID: name})
	}
	if errdefs.IsNotFound(err) {
		err = nil
	}
	if err == nil {
		e.state.Untasked(name, nil)
	} else {
		e.state.Unsure(name)
	}
	left(err == nil)
	return err
}

// alone makes sure that the end of a task's process is not taken for that of another one, which had the
// same number: it deletes the task of a container that has ended so, in the same shim.
func (e *tasks) alone(ctx context.Context, name string, pid uint32) error {
	for _, other := range e.state.EndedWith(pid) {
		if other == name || !e.shims.confuses(name, other) {
			continue
		}
		if err := e.outlive(ctx, other, pid); err != nil {
			return fmt.Errorf("delete the task of %s, whose process had the same number: %w", other, err)
		}
	}
	return nil
}

// outlive deletes the task of a container that has ended, whose process had that number. How it ended stays
// known until the daemon ends.
func (e *tasks) outlive(ctx context.Context, name string, pid uint32) error {
	defer e.change(name)()
	if !slices.Contains(e.state.EndedWith(pid), name) {
		return nil
	}
	i, _, _ := e.state.Get(name)
	err := e.deleteTask(ctx, name)
	if err == nil && i != nil {
		e.state.Untasked(name, i.Exit)
	}
	return err
}

// killTask ends a task in whatever state it is.
func (e *tasks) killTask(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeout(ctx, undoTimeout)
	defer cancel()
	if err := e.Kill(ctx, name, unix.SIGKILL); err == nil {
		if _, err := e.Wait(ctx, name); err != nil && !errors.Is(err, ErrNotRunning) {
			return err
		}
	} else if !errors.Is(err, ErrNotRunning) {
		e.log.Debug("kill", "container", name, "err", err)
	}
	return e.deleteTask(ctx, name)
}

func notFound(err error) error {
	if errdefs.IsNotFound(err) {
		return ErrNotFound
	}
	return err
}

// ParseSignal reads "TERM", "SIGTERM" or "15", and Linux's "RTMIN+3".
func ParseSignal(s string) (unix.Signal, error) {
	if n, err := strconv.Atoi(s); err == nil && n > 0 && n < 65 {
		return unix.Signal(n), nil
	}
	name := "SIG" + strings.TrimPrefix(strings.ToUpper(s), "SIG")
	if sig := unix.SignalNum(name); sig != 0 {
		return sig, nil
	}
	if off, ok := strings.CutPrefix(name, "SIGRTMIN"); ok {
		n, err := strconv.Atoi("0" + strings.TrimPrefix(off, "+"))
		if err == nil && n <= 30 {
			return unix.Signal(34 + n), nil
		}
	}
	return 0, fmt.Errorf("signal %q is unknown", s)
}
