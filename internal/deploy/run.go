package deploy

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"dewpoint/internal/checkpoint"
	"dewpoint/internal/deploy/admit"
	"dewpoint/internal/deploy/ready"
	"dewpoint/internal/engine"
	"dewpoint/internal/health"
	"dewpoint/internal/image"
	"dewpoint/internal/pack/learn"
	"dewpoint/internal/registry"
	"dewpoint/internal/restart"
	"dewpoint/internal/spec"
	"dewpoint/internal/trace"

	"github.com/containerd/errdefs"
)

// run is the deployment of one container, or the pull of one image: what was asked for, what there is of it
// by now, what is told of it. Its life stands below from top to bottom. One goroutine carries it and sets its
// fields, but for those of the recorder that have a lock.
type run struct {
	d *Deployer
	order
	written func(context.Context) error // returns once the journal has the order for good; nil without a Queue
	place   *admit.Ticket               // in the queue; nil before enter

	// Nil until it has left the queue, since thousands may wait there.
	*recorder
	life    context.Context // of the image's fills
	release context.CancelFunc
	reg     *registration // of the image; nil before it is known, and if containerd has it

	img       *image.Image
	check     spec.ReadyCheck
	want      *engine.Spec     // what the container is made by
	plan      *checkpoint.Plan // nil boots
	container *engine.Info     // nil before it is made
}

// enter takes a place in the queue, which carry gives back. It waits for nothing.
// g may be nil. What was accepted before gets a place though the queue be full.
func (r *run) enter(g *admit.Group, accepted bool) (err error) {
	here, absent := true, int64(0)
	if r.d.cfg.Puller != nil {
		here, absent = r.d.cfg.Puller.PullIsLocal(r.ref, r.options())
	}
	if r.pullOnly {
		here = false // it needs no slot
	}
	c := admit.Claim{Caller: r.Terms.Caller, Image: r.ref.String(), Memory: r.Memory, Fetch: !here,
		Host: r.ref.Host, Absent: absent, Group: g, Accepted: accepted}
	if !r.options().Lazy {
		c.Image += " whole" // who does not need that does not wait for it
	}
	r.place, err = r.d.admission.Enter(c)
	return err
}

// carry keeps the contract of maker: it takes a run from the queue to its end.
func (d *Deployer) carry(ctx context.Context, r *run, w spec.Watch) (spec.Record, error) {
	begun := time.Now()
	err := r.place.Wait(ctx) // without anything of the work yet: thousands may wait
	r.begin(ctx, begun, w)
	if err == nil {
		r.reached(spec.Admitted)
		work := r.deploy
		if r.pullOnly {
			work = r.bring
		}
		err = work(r.trace.Into(ctx))
	}
	var used int64 // bytes of memory
	if err == nil && r.container != nil {
		d.Runs(r.container)
		used = memoryIn(r.container.CgroupDir("memory"))
	}
	r.place.Done(used)
	err = why(ctx, err)
	return r.end(err), err
}

// begin begins the record, with the clock at begun.
func (r *run) begin(ctx context.Context, begun time.Time, w spec.Watch) {
	r.recorder = newRecorder(ctx, r.d.cfg.Traces, begun,
		spec.Record{ID: r.id, Name: r.name, Image: r.ref.String(), Node: r.d.cfg.Node}, w)
	r.life, r.release = context.WithCancel(r.trace.Into(r.d.life))
}

// why is the error of a deployment that failed with err: that it was called off, if it was.
func why(ctx context.Context, err error) error {
	if e, off := context.Cause(ctx).(*ended); off && err != nil {
		return e
	}
	return err
}

// deploy is one deployment.
func (r *run) deploy(ctx context.Context) error {
	if r.d.cfg.Checkpoints != nil && r.mode != checkpoint.Never {
		r.d.bg.Go(func() { r.d.cfg.Checkpoints.Look(ctx) })
	}
	if err := r.resolve(ctx); err != nil {
		return err
	}
	if err := r.decide(ctx); err != nil {
		return err
	}
	if r.plan != nil && r.plan.Record != nil {
		err := r.restore(ctx)
		var f *restoreError
		if !errors.As(err, &f) || ctx.Err() != nil || r.mode == checkpoint.Always {
			return err
		}
	}
	return r.boot(ctx)
}

// bring is one pull.
func (r *run) bring(ctx context.Context) error {
	if err := r.resolve(ctx); err != nil {
		return err
	}
	if err := r.mount(ctx); err != nil {
		return err
	}
	r.place.ImageIsHere()
	if r.blobs {
		n, err := r.d.cfg.Puller.CopyBlobs(ctx, r.img, r.options(), r.d.cfg.Engine.WriteBlob)
		r.note(func(rec *spec.Record) { rec.Bytes.Registry += n })
		if err != nil {
			return err
		}
	}
	return r.settle(ctx)
}

// errAbsent says that an image is to be here and is not.
var errAbsent = fmt.Errorf("%w on this node", errdefs.ErrNotFound)

// resolve finds out what the image is and lets its layers begin to fill.
func (r *run) resolve(ctx context.Context) error {
	opts := r.options()
	if here, _ := r.d.cfg.Puller.PullIsLocal(r.ref, opts); !here && r.PullPolicy == "never" {
		return r.resolveLocal(ctx,
			fmt.Errorf("%w: the image %s, and --pull never keeps dewd from fetching it", errAbsent, r.ref))
	}
	opts.Known = func(img *image.Image) {
		r.reached(spec.Resolved)
		r.reg = r.d.register(trace.Beside(ctx), img)
	}
	pull, err := r.d.cfg.Puller.Pull(r.life, r.ref, opts)
	if err != nil {
		return r.resolveLocal(ctx, err)
	}
	r.img = pull.Image
	r.reg.follow(pull)
	r.follow(pull)
	return r.fit(ctx)
}

// resolveLocal falls back on an image that containerd has though no registry gives
// it: one that was built or imported here.
func (r *run) resolveLocal(ctx context.Context, cause error) error {
	var re *registry.Error
	if r.pullOnly || r.PullPolicy == "always" || !errors.As(cause, &re) && !errors.Is(cause, errAbsent) {
		return cause
	}
	img, err := r.d.cfg.Engine.LocalImage(ctx, r.ref)
	if err != nil {
		if !errdefs.IsNotFound(err) {
			r.d.cfg.Log.Warn("look for the image in containerd", "image", r.ref, "err", err)
		}
		return cause
	}
	r.img = img
	r.note(func(rec *spec.Record) {
		rec.Digest = img.Target.Digest.String()
		rec.Way = spec.Way{Pull: "local",
			Why: []string{"the registry does not give it, containerd has it: " + cause.Error()}}
	})
	r.reached(spec.Resolved)
	return nil
}

// fit refuses an image that is to be here whole and is certain not to fit on the disk,
// unless room can be made.
func (r *run) fit(ctx context.Context) error {
	if r.pull.Local || r.pull.Lazy != nil {
		return nil
	}
	var absent int64
	for _, l := range r.pull.Progress() {
		if !l.State.Usable() {
			absent += l.Layer.Size - here(l)
		}
	}
	err := r.place.Resolved(absent)
	var full *admit.DiskError
	if errors.As(err, &full) && r.d.cfg.Disk != nil {
		r.d.cfg.Disk.MakeFree(ctx, full.Need-full.Have)
		err = r.place.Resolved(absent)
	}
	return err
}

// decide finds out what the container is made by, when it is ready, and whether it starts from a checkpoint.
func (r *run) decide(ctx context.Context) (err error) {
	if r.check, err = r.checkOf(r.img); err != nil {
		return err
	}
	want := r.spec(r.img)
	switch check, err := r.health(r.img); {
	case err != nil:
		return err
	case check.Fits() != nil: // the image's
		r.d.cfg.Log.Warn("its health is not checked", "container", r.name, "because", check.Fits())
	default:
		want.Labels = health.Keep(want.Labels, check)
	}
	r.want = &want
	if r.d.cfg.Checkpoints == nil {
		if r.mode == checkpoint.Always {
			return fmt.Errorf("%w: this node makes and uses no checkpoints (checkpoint.mode in its configuration)",
				checkpoint.ErrRestore)
		}
		return nil
	}
	if err := r.d.cfg.Checkpoints.Dress(r.want); err != nil {
		return fmt.Errorf("%w: labels of the container and its image: %w", ErrRequest, err)
	}
	r.plan, err = r.d.cfg.Checkpoints.Plan(ctx, *r.want, r.mode, r.Checkpoint)
	if err == nil && r.plan.Record == nil && r.plan.Why != "" {
		r.note(func(rec *spec.Record) { rec.Way.Why = append(rec.Way.Why, "restore: "+r.plan.Why) })
	}
	return err
}

// mount waits until containerd has the image, layer by layer as they can be mounted:
// at once in a lazy start, else when they are readable. An error of any layer ends it at once.
func (r *run) mount(ctx context.Context) error {
	var err error
	if r.pull == nil { // containerd has it
		err = r.d.cfg.Engine.Register(ctx, r.img, nil)
	} else {
		err = r.reg.wait(ctx)
	}
	if err == nil {
		r.reached(spec.Mounted)
	}
	return err
}

// permit returns when the container may be made: there is room for it, and the journal knows of it.
func (r *run) permit(ctx context.Context) error {
	if err := r.place.Run(ctx); err != nil || r.written == nil {
		return err
	}
	return r.written(ctx)
}

// boot makes the container and starts its command. The start is recorded, if that was asked for or teaches
// something.
func (r *run) boot(ctx context.Context) (err error) {
	rec, err := r.recording()
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			rec.Drop()
			return
		}
		rec.Ready(func(ctx context.Context) error {
			_, err := r.d.cfg.Engine.Wait(ctx, r.name)
			if errors.Is(err, engine.ErrNotRunning) {
				return nil
			}
			return err
		})
	}()
	if err := r.mount(ctx); err != nil {
		return err
	}
	if r.Record { // of layers that are whole
		if err := r.pull.Wait(ctx); err != nil {
			return err
		}
	}
	if err := rec.Watch(ctx); err != nil {
		return err
	}
	if err := r.conflict(r.check); err != nil {
		return err
	}
	if err := r.permit(ctx); err != nil {
		return err
	}
	if r.container, err = r.create(ctx); err != nil {
		return err
	}
	if r.d.cfg.Checkpoints != nil {
		if err := r.d.cfg.Checkpoints.Created(r.img, r.container); err != nil {
			return errors.Join(err, r.d.remove(r.container.ID()))
		}
	}
	r.reached(spec.Created)
	if err := r.d.cfg.Engine.Start(ctx, r.name); err != nil {
		return errors.Join(err, r.d.remove(r.container.ID()))
	}
	r.place.Started()
	r.note(func(rec *spec.Record) { rec.Way.Start = "boot" })
	r.reached(spec.Started)
	read := make(chan struct{}) // closed when nobody asks any more what the container has said
	defer close(read)
	if r.Remove {
		r.d.removeAtExit(r.container.ID(), read, r.watch.Hold)
	}
	if err := r.await(ctx, r.container, r.timeout); err != nil {
		return r.unready(ctx, err)
	}
	r.reached(spec.Ready)
	r.booted(ctx)
	return nil
}

// recording begins to record the start; nil if it is not to be recorded. It waits for nothing.
func (r *run) recording() (*learn.Recording, error) {
	switch {
	case r.Record && (r.d.cfg.Learner == nil || r.pull == nil):
		return nil, errNoRecord
	case r.Record:
		return r.d.cfg.Learner.BeginAsked(r.img, r.name)
	case r.pull == nil || r.pull.Lazy != nil: // its layers are not here
		return nil, nil
	}
	return r.d.cfg.Learner.Begin(r.img), nil
}

// create makes a container that boots. One that is to be saved carries what that
// needs, if its image has the shell that starts it.
func (r *run) create(ctx context.Context) (*engine.Info, error) {
	carries := *r.want
	if r.plan.Carry(&carries) {
		c, err := r.d.cfg.Engine.Create(ctx, carries)
		if !errors.Is(err, engine.ErrNoCommand) {
			return c, err
		}
		r.plan.Uncarried(r.name, err)
	}
	return r.d.cfg.Engine.Create(ctx, *r.want)
}

// await blocks until the container serves, so long at most.
func (r *run) await(ctx context.Context, c *engine.Info, atMost time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, atMost)
	defer cancel()
	e := r.d.cfg.Engine
	err := ready.Wait(ctx, r.check, ready.Target{
		Host: c.Net == engine.NetHost, Addr: c.Addr, NetNS: nsOf(c), Pid: int(c.Pid),
		Logs: []string{c.Stdout, c.Stderr}, Runner: runner{e, c.ID()},
		Exited: func(ctx context.Context) (int, error) {
			x, err := e.Wait(ctx, c.ID())
			return x.Status, err
		},
	})
	var exit *ready.ExitError
	if errors.As(err, &exit) {
		return cmp.Or(e.Unexecuted(ctx, r.name, exit.Status), err)
	}
	return err
}

// awaitAgain is await, for a container of which more is known than when it was made. What a restored one
// wrote when it became ready it does not write again.
func (r *run) awaitAgain(ctx context.Context, id string, restored bool, atMost time.Duration) error {
	now, err := r.d.cfg.Engine.Inspect(ctx, id)
	if err != nil || restored && r.check.Kind == spec.ReadyLog {
		return err
	}
	return r.await(ctx, now, atMost)
}

// nsOf is the namespace to connect from: a bridge's addresses are reached
// from the host, a container with no network only from inside.
func nsOf(c *engine.Info) string {
	if c.Net == engine.NetNone {
		return c.NetNS
	}
	return ""
}

// stopGrace is how long a container that is not ready in time may take to end.
const stopGrace = 5 * time.Second

// unready decides what becomes of a container that does not serve: it is
// stopped, behind the caller's back, and kept, so that its logs can be read; nothing of it stays if the
// caller has gone, wanted it removed, or wanted no more than a recording.
func (r *run) unready(ctx context.Context, err error) error {
	if r.Terms.Detach && context.Cause(ctx) == error(errStop) {
		return err // it goes on, and the next daemon waits for it
	}
	id, e := r.container.ID(), r.d.cfg.Engine
	if ctx.Err() != nil || r.Remove || r.Record {
		rerr := r.d.remove(id)
		if ctx.Err() == nil && !r.Record && rerr == nil {
			return &UnreadyError{Name: r.name, Err: err}
		}
		return errors.Join(err, rerr)
	}
	if r.restarts() { // before its deployment has ended
		rerr := e.Relabel(context.WithoutCancel(ctx), id, restart.Failed())
		if rerr != nil && !errors.Is(rerr, engine.ErrNotFound) {
			r.d.cfg.Log.Error("a container that is not ready starts again", "name", r.name, "err", rerr)
		}
	}
	r.d.bg.Go(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(r.d.life), 2*stopGrace)
		defer cancel()
		if serr := e.Stop(ctx, id, stopGrace); serr != nil &&
			!errors.Is(serr, engine.ErrNotRunning) && !errors.Is(serr, engine.ErrNotFound) {
			r.d.cfg.Log.Warn("stop a container that is not ready", "name", r.name, "err", serr)
		}
	})
	return &UnreadyError{Name: r.name, Kept: true, Err: err}
}

// UnreadyError says what is left of a container that did not serve: itself, stopped, or nothing.
type UnreadyError struct {
	Name string
	Kept bool
	Err  error // why it did not
}

func (e *UnreadyError) Error() string { return e.Err.Error() }
func (e *UnreadyError) Unwrap() error { return e.Err }

// booted learns how long booting takes, makes the checkpoint that is wanted, and lets what the start did
// without come.
func (r *run) booted(ctx context.Context) {
	checked := r.check.Kind != spec.ReadyNone && r.check.Kind != ""
	var seconds float64
	if checked {
		r.note(func(rec *spec.Record) { seconds = rec.Stages[spec.Ready] - rec.Stages[spec.Created] })
	}
	if r.plan.Booted(ctx, seconds) {
		r.d.bg.Go(func() {
			err := r.plan.Make(r.d.life, r.name, seconds)
			if err != nil && r.d.life.Err() == nil {
				r.d.cfg.Log.Warn("no checkpoint was made", "container", r.name, "err", err)
			}
		})
	}
	switch {
	case r.pull == nil:
	case checked:
		r.pull.Background()
	default:
		r.pull.BackgroundSoon()
	}
}

// settle blocks until every layer is complete.
func (r *run) settle(ctx context.Context) error {
	if r.pull == nil {
		return nil
	}
	if err := r.pull.WaitComplete(ctx); err != nil {
		return err
	}
	r.reached(spec.Complete)
	return nil
}

// end closes the record of a run that ended with err. After a success the
// layers that are not complete yet go on, and Audience.Done gets the record with
// the moment when they are; after a failure they are given up.
func (r *run) end(err error) spec.Record {
	r.reg.close()
	r.hush()
	if err != nil && r.pull != nil {
		r.pull.Background()
	}
	r.traced(err)
	rec := r.snapshot(err)
	r.d.cfg.Audience.Ended(rec, err)
	finish := func(rec spec.Record) {
		r.release()
		r.d.cfg.Audience.Done(rec)
	}
	if _, done := rec.Stages[spec.Complete]; done || err != nil || r.pull != nil && r.pull.Deferred() {
		finish(rec)
		return rec
	}
	r.d.bg.Go(func() {
		err := r.settle(r.life)
		if errors.Is(err, context.Canceled) {
			r.release()
			return
		}
		if err != nil {
			r.d.cfg.Log.Error("the image runs, and not all is well", "image", r.ref, "err", err)
		}
		finish(r.snapshot(err))
	})
	return rec
}
