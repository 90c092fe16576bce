package engine

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"

	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	tasksapi "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types"
	"github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/errdefs"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/types/known/anypb"

	"dewpoint/internal/engine/account"
	"dewpoint/internal/engine/network"
	"dewpoint/internal/engine/program"
	"dewpoint/internal/engine/state"
	"dewpoint/internal/engine/stdio"
	"dewpoint/internal/trace"
)

const (
	runtimeName = "io.containerd.runc.v2"
	typePrefix  = "types.containerd.io/opencontainers/runtime-spec/1/"
	undoTimeout = 30 * time.Second
)

// undo is the way back from a creation that fails, last step first.
type undo []func(context.Context) error

func (u *undo) add(f func(context.Context) error) { *u = append(*u, f) }

// run returns err joined with what went wrong on the way back.
func (u undo) run(ctx context.Context, err error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	for i := len(u) - 1; i >= 0; i-- {
		uerr := u[i](ctx)
		if errdefs.IsUnavailable(uerr) { // containerd has ended in the middle of it
			uerr = u[i](ctx)
		}
		if uerr != nil && !errdefs.IsNotFound(uerr) {
			err = errors.Join(err, fmt.Errorf("undo: %w", uerr))
		}
	}
	return err
}

// Create makes the container and its task, which waits for Start: snapshot,
// network and namespaces are there, the first process is not. The image must
// be registered. If Create fails nothing of the container is left. A name that
// is taken gives ErrExists.
func (e *containers) Create(ctx context.Context, s Spec) (*Info, error) {
	if err := s.validate(); err != nil {
		return nil, err
	}
	defer e.change(s.Name)()
	var back undo
	info, err := e.create(ctx, &s, &back)
	if err != nil {
		return nil, back.run(ctx, fmt.Errorf("create container %s: %w", s.Name, err))
	}
	return info, nil
}

func (e *containers) create(ctx context.Context, s *Spec, back *undo) (*Info, error) {
	mounts, err := e.reserve(context.WithoutCancel(ctx), s)
	switch {
	case err == nil:
		back.add(func(ctx context.Context) error { return e.removeSnapshot(ctx, s.Name) })
		err = ctx.Err()
	case !errors.Is(err, ErrExists):
		back.add(func(ctx context.Context) error { return e.removeUnrecorded(ctx, s.Name) })
	}
	if err != nil {
		return nil, err
	}
	if err := e.ports.Claim(s.Name, s.Ports, true); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrPortTaken, err)
	}
	back.add(func(context.Context) error { e.ports.Release(s.Name); return nil })
	if err := os.MkdirAll(e.cfg.dir(s.Name), 0o711); err != nil {
		return nil, err
	}
	back.add(func(context.Context) error { return os.RemoveAll(e.cfg.dir(s.Name)) })
	files := network.FilesIn(e.cfg.dir(s.Name))
	if err := errors.Join(e.makeOwn(s), files.Keep(s.naming())); err != nil {
		return nil, err
	}
	release, err := e.makeSources(s, mounts)
	if err != nil {
		return nil, err
	}
	defer release()

	// The record and the network are made at once; what each has to take
	// back is known before it begins.
	rec := state.Record{Name: s.Name, Net: s.Net, Ports: s.Ports}
	back.add(func(ctx context.Context) error { return e.disconnect(ctx, rec) })
	g, gctx := errgroup.WithContext(ctx)
	var addr netip.Addr
	g.Go(func() (err error) {
		addr, err = e.network(gctx, rec)
		return err
	})
	var made bool
	var at time.Time
	g.Go(func() (err error) {
		made, at, err = e.putRecord(gctx, s, mounts)
		return err
	})
	err = g.Wait()
	rec.Made = at
	if made {
		back.add(func(ctx context.Context) error { return e.deleteRecord(ctx, s.Name) })
	}
	if err != nil {
		return nil, err
	}
	var opts *anypb.Any // the record's
	restored := s.Restore != nil && s.Restore.Images != nil
	if restored {
		back.add(func(context.Context) error { return e.removeRestored(s.Name) })
		if opts, err = e.prepareRestore(s); err != nil {
			return nil, err
		}
	}
	back.add(func(ctx context.Context) error { return e.sweep(ctx, s.Name) })
	pid, err := e.newTask(ctx, s.Name, s.labels(), mounts, opts)
	if err == nil && restored {
		err = e.bringImages(ctx, s)
	}
	if err != nil {
		return nil, err
	}
	info := e.cfg.places().Describe(rec)
	info.Image, info.Digest, info.Labels = s.Image.Ref.String(), s.Image.Target.Digest, s.labels()
	info.Status, info.Pid, info.Addr = Created, pid, addr
	if addr.IsValid() {
		e.state.Addressed(s.Name, addr)
	}
	return info, nil
}

// reserve takes the name by making the snapshot under it. What a crash has
// left under the name is removed. A call that fails may have been heard: when
// containerd ends in the middle of it, the snapshot is there or comes back.
// So the context should not end before the call does, nor should putRecord's:
// containerd would go on, and have made what was taken back before it was there.
func (e *containers) reserve(ctx context.Context, s *Spec) ([]*types.Mount, error) {
	ctx, step := trace.Start(ctx, "snapshot")
	defer step.End()
	req := &snapshotsapi.PrepareSnapshotRequest{
		Snapshotter: e.cfg.Snapshotter, Key: s.Name, Parent: s.parent(),
		Labels: map[string]string{labelGCRoot: time.Now().UTC().Format(time.RFC3339)},
	}
	r, err := e.c.Snapshots.Prepare(ctx, req)
	if errdefs.IsAlreadyExists(err) {
		_, gerr := e.state.Record(ctx, s.Name)
		if gerr == nil {
			return nil, ErrExists
		}
		if !errdefs.IsNotFound(gerr) {
			return nil, gerr
		}
		if err := e.removeRemains(ctx, s.Name); err != nil {
			return nil, err
		}
		r, err = e.c.Snapshots.Prepare(ctx, req)
	}
	if err != nil {
		return nil, fmt.Errorf("snapshot: %w", err)
	}
	return r.Mounts, nil
}

// removeUnrecorded removes the snapshot, unless it is that of a container.
func (e *containers) removeUnrecorded(ctx context.Context, name string) error {
	if _, err := e.state.Record(ctx, name); !errdefs.IsNotFound(err) {
		return err
	}
	return e.removeSnapshot(ctx, name)
}

// network makes the namespace and the files, and connects the bridge. It
// takes nothing back itself.
func (e *containers) network(ctx context.Context, r state.Record) (netip.Addr, error) {
	ctx, step := trace.Start(ctx, "network")
	defer step.End()
	var addr netip.Addr
	ns := e.cfg.netns(r.Name)
	if r.Net != NetHost && !network.IsNS(ns) {
		if err := network.RemoveNS(ns); err != nil {
			return addr, err
		}
		if err := network.NewNS(ns); err != nil {
			return addr, err
		}
	}
	if r.Net == NetBridge {
		var err error
		if addr, err = e.bridge.Add(ctx, r.Name, ns, r.Ports); err != nil {
			return addr, err
		}
		if err := os.WriteFile(e.cfg.places().Address(r.Name), []byte(addr.String()), 0o644); err != nil {
			return addr, err
		}
	}
	return addr, network.FilesIn(e.cfg.dir(r.Name)).Write(r.Name, r.Net == NetHost, addr)
}

// disconnect undoes network, whatever of it was done.
func (e *containers) disconnect(ctx context.Context, r state.Record) error {
	if r.Net == NetHost {
		return nil
	}
	ns := e.cfg.netns(r.Name)
	var err error
	if r.Net == NetBridge {
		err = e.bridge.Remove(ctx, r.Name, ns, r.Ports)
	}
	return errors.Join(err, network.RemoveNS(ns))
}

// putRecord says whether the record was made, and when.
func (e *containers) putRecord(ctx context.Context, s *Spec, mounts []*types.Mount) (made bool, at time.Time,
	err error) {
	ctx, step := trace.Start(ctx, "record")
	defer step.End()
	u, err := account.Lookup(cmp.Or(s.User, s.Image.Spec.Config.User),
		account.Unmounted(e.cfg.execDir(), mounts))
	if err != nil {
		if s.User != "" {
			err = fmt.Errorf("%w: --%w", ErrOption, err)
		}
		return false, at, err
	}
	o, err := e.cfg.ociSpec(s, u)
	if err != nil {
		return false, at, err
	}
	spec, err := jsonAny("Spec", o)
	if err != nil {
		return false, at, err
	}
	opts, err := plainAny(e.runtimeOptions())
	if err != nil {
		return false, at, err
	}
	r, err := e.c.Containers.Create(context.WithoutCancel(ctx),
		&containersapi.CreateContainerRequest{Container: &containersapi.Container{
			ID: s.Name, Image: s.Image.Ref.String(), Labels: s.labels(),
			Runtime:     &containersapi.Container_Runtime{Name: runtimeName, Options: opts},
			Spec:        spec,
			Snapshotter: e.cfg.Snapshotter, SnapshotKey: s.Name,
		}})
	if err == nil {
		at = r.Container.CreatedAt.AsTime()
		e.state.Recorded(r.Container)
	} else {
		e.state.Unsure(s.Name)
	}
	if errdefs.IsAlreadyExists(err) {
		return false, at, ErrExists
	}
	// A call that failed otherwise may have been heard.
	return true, at, wrap(err, "record")
}

// runcOptions are those of a task that runc makes. They keep its state in a
// directory of the engine's own, so that a container of another containerd on
// this machine may have the same name.
func (e *core) runcOptions() *options.Options {
	return &options.Options{BinaryName: e.runc, Root: e.cfg.runcRoot()}
}

func jsonAny(kind string, v any) (*anypb.Any, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return nil, err
	}
	return &anypb.Any{TypeUrl: typePrefix + kind, Value: b}, nil
}

func parseSpec(a *anypb.Any) (*specs.Spec, error) {
	var o specs.Spec
	if a.GetTypeUrl() != typePrefix+"Spec" {
		return nil, fmt.Errorf("container specification of type %q", a.GetTypeUrl())
	}
	return &o, json.Unmarshal(a.Value, &o)
}

// newTask starts the shim, which mounts the snapshot, has runc make the
// container, and copies its output to the two files whoever else lives. labels are
// the container's. opts are the runtime's, unless nil in place of the record's.
func (e *tasks) newTask(ctx context.Context, name string, labels map[string]string, mounts []*types.Mount,
	opts *anypb.Any) (uint32, error) {
	ctx, step := trace.Start(ctx, "task")
	defer step.End()
	req := &tasksapi.CreateTaskRequest{ContainerID: name, Rootfs: mounts, Options: opts}
	if err := stdio.Of(labels).Prepare(e.cfg.places(), req); err != nil {
		return 0, err
	}
	seat, err := e.seat(ctx, name)
	if err != nil {
		return 0, err
	}
	req.RuntimePath = seat.path()
	pid, err := e.makeTask(ctx, req, seat.name())
	if err == nil {
		e.state.Made(name, pid)
	} else {
		e.state.Unsure(name)
	}
	seat.done(err == nil)
	if err == nil {
		err = e.alone(ctx, name, pid)
	}
	return pid, err
}

// seat waits for a place in a shim.
func (e *tasks) seat(ctx context.Context, name string) (seat, error) {
	ctx, step := trace.Start(ctx, "seat")
	defer step.End()
	s, err := e.shims.takeSeat(ctx, name)
	return s, wrap(err, "shim")
}

// makeTask asks containerd for the task, in the named group of shims.
func (e *tasks) makeTask(ctx context.Context, req *tasksapi.CreateTaskRequest, group string) (uint32,
	error) {
	ctx, step := trace.Start(ctx, "make")
	defer step.End()
	if err := os.WriteFile(e.shimFile(req.ContainerID), []byte(group), 0o600); err != nil {
		return 0, err
	}
	r, err := e.c.Tasks.Create(ctx, req)
	if err != nil {
		return 0, fmt.Errorf("task: %w", program.BadCommand(err))
	}
	return r.Pid, nil
}

func (e *roots) removeSnapshot(ctx context.Context, key string) error {
	_, err := e.c.Snapshots.Remove(ctx,
		&snapshotsapi.RemoveSnapshotRequest{Snapshotter: e.cfg.Snapshotter, Key: key})
	if errdefs.IsNotFound(err) {
		return nil
	}
	return wrap(err, "remove snapshot %s", key)
}

func (e *containers) deleteRecord(ctx context.Context, name string) error {
	defer e.records.lock(name)()
	_, err := e.c.Containers.Delete(ctx, &containersapi.DeleteContainerRequest{ID: name})
	if errdefs.IsNotFound(err) {
		err = nil
	}
	if err == nil {
		e.state.Unrecorded(name)
	} else {
		e.state.Unsure(name)
	}
	return wrap(err, "delete record %s", name)
}
