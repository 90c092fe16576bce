// Package deploy carries one deployment from the instruction until the
// application serves, and records when each stage was reached.
//
// Deployer.deploy is the deployment, first line to last; before it stands the door of package admit, which
// says when it may go on. Deployer alone records the stage times, so every surface shows the same ones. The
// image's layers go on to their completion when the container is ready already; Audience.Done gets the record
// with that moment.
package deploy

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"sync"
	"time"

	"dewpoint/internal/checkpoint"
	"dewpoint/internal/deploy/admit"
	"dewpoint/internal/deploy/ready"
	"dewpoint/internal/engine"
	"dewpoint/internal/engine/network"
	"dewpoint/internal/fetch"
	"dewpoint/internal/fetch/link"
	"dewpoint/internal/image"
	"dewpoint/internal/pack/learn"
	"dewpoint/internal/registry"
	"dewpoint/internal/restart"
	"dewpoint/internal/spec"
	"dewpoint/internal/trace"

	"github.com/containerd/errdefs"
)

// ErrRequest is wrapped by errors about the request itself.
var ErrRequest = errors.New("bad request")

// Config names the parts that a Deployer works with. Puller and Engine are required.
type Config struct {
	Puller       *fetch.Puller
	Engine       *engine.Engine
	Node         string         // this node's name, for records
	ReadyTimeout time.Duration  // where a request says none; 0 is a minute
	Log          *slog.Logger   // nil discards
	Learner      *learn.Learner // records starts; nil does not
	// Checkpoints has what containers start from instead of booting; nil has nothing.
	Checkpoints *checkpoint.Manager
	// Admit says how many deployments the node bears at once.
	Admit    admit.Config
	Disk     Disk     // nil is without end
	Audience Audience // nil: nobody wants to know
	// Traces gets the spans of deployments, which their records have anyway. May be nil.
	Traces *trace.Exporter
}

// Disk is where images go.
type Disk interface {
	admit.Room
	// MakeFree lets go of bytes that nothing uses, if there are so many.
	MakeFree(ctx context.Context, bytes int64)
}

// Audience is told what becomes of deployments and pulls. No method may block.
type Audience interface {
	// Reached tells of a stage of a deployment that a Desk has accepted.
	Reached(d spec.Deployment, stage string, at float64)
	// Ended tells of one that is answered: it is ready, pulled, or failed for that reason.
	Ended(r spec.Record, err error)
	// Done tells of one that is over: all its layers are complete, or it failed.
	Done(r spec.Record)
}

// deaf is an audience of nobody.
type deaf struct{}

func (deaf) Reached(spec.Deployment, string, float64) {}
func (deaf) Ended(spec.Record, error)                 {}
func (deaf) Done(spec.Record)                         {}

// Deployer deploys. It is safe for concurrent use.
type Deployer struct {
	cfg  Config
	door *admit.Admitter
	owed limits
	life context.Context
	stop context.CancelFunc
	bg   sync.WaitGroup // what goes on behind deployments that are ready
}

// New returns a Deployer. Close must follow.
func New(cfg Config) *Deployer {
	if cfg.ReadyTimeout == 0 {
		cfg.ReadyTimeout = time.Minute
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	d := &Deployer{cfg: cfg}
	cfg.Admit.Limits = &d.owed
	if cfg.Disk != nil {
		cfg.Admit.Disk = cfg.Disk
	}
	if cfg.Audience == nil {
		d.cfg.Audience = deaf{}
	}
	d.door = admit.New(cfg.Admit)
	d.life, d.stop = context.WithCancel(context.Background())
	return d
}

// Close ends what goes on in the background. Containers are not touched, and
// fills keep their progress.
func (d *Deployer) Close() {
	d.stop()
	d.door.Close()
	d.bg.Wait()
}

// LabelRemove marks containers that are removed when they exit.
const LabelRemove = "dewpoint.remove"

// Deploy carries req until the container is ready. If ctx ends before, or
// anything fails before the container has started, nothing of it is left. A
// container that starts and is not ready in time is stopped; it, or one that
// exits before, is kept for inspection, unless req.Remove or req.Record.
func (d *Deployer) Deploy(ctx context.Context, req spec.Request, w spec.Watch) (spec.Record, error) {
	o, err := d.parse(req)
	if err != nil {
		return spec.Record{}, err
	}
	t, err := d.enter(o, nil, false)
	if err != nil {
		return spec.Record{}, err
	}
	return d.carry(ctx, o, t, w)
}

// deploy is one deployment.
func (d *Deployer) deploy(ctx context.Context, o *order, r *run) error {
	if d.cfg.Checkpoints != nil && d.mode(o) != checkpoint.Never {
		d.bg.Go(func() { d.cfg.Checkpoints.Look(ctx) })
	}
	img, err := d.resolve(ctx, o, r)
	if err != nil {
		return err
	}
	check, err := d.check(o, img)
	if err != nil {
		return err
	}
	plan, err := d.plan(ctx, o, r, img)
	if err != nil {
		return err
	}
	if plan != nil && plan.Record != nil {
		if err := d.restore(ctx, o, r, img, check, plan); !again(ctx, o, err) {
			return err
		}
	}
	rec, err := d.record(o, img, r)
	if err != nil {
		return err
	}
	if err := d.boot(ctx, o, r, img, check, rec, plan); err != nil {
		rec.Drop()
		return err
	}
	rec.Ready(d.gone(o.name))
	return nil
}

// boot is what a recorded start may record.
func (d *Deployer) boot(ctx context.Context, o *order, r *run, img *image.Image, check ready.Check,
	rec *learn.Recording, plan *checkpoint.Plan) error {
	if err := d.mount(ctx, img, r); err != nil {
		return err
	}
	if err := d.watch(ctx, o, r, rec); err != nil {
		return err
	}
	if err := o.conflict(check); err != nil {
		return err
	}
	want, err := d.spec(o, img)
	if err != nil {
		return err
	}
	if err := r.permit(ctx, o); err != nil {
		return err
	}
	c, err := d.create(ctx, want, plan)
	if err != nil {
		return err
	}
	r.cgroup = c.CgroupDir("memory")
	if d.cfg.Checkpoints != nil {
		if err := d.cfg.Checkpoints.Created(img, c); err != nil {
			return errors.Join(err, d.remove(c.ID()))
		}
	}
	r.reached(spec.Created)
	if err := d.cfg.Engine.Start(ctx, o.name); err != nil {
		return errors.Join(err, d.remove(c.ID()))
	}
	r.place.Started()
	r.rec.Way.Start = "boot"
	r.reached(spec.Started)
	read := make(chan struct{}) // closed when nobody asks any more what the container has said
	defer close(read)
	if o.Remove {
		d.removeAtExit(c.ID(), read, r.watch.Hold)
	}
	if err := d.await(ctx, o, check, c); err != nil {
		return d.unready(ctx, o, c, err)
	}
	r.reached(spec.Ready)
	d.booted(ctx, o, r, check, plan)
	r.started(check.Kind != ready.None && check.Kind != "")
	return nil
}

// Pull brings an image here whole and registers it, without a container.
func (d *Deployer) Pull(ctx context.Context, req spec.PullRequest, w spec.Watch) (spec.Record, error) {
	o, err := d.parse(spec.Request{Image: req.Image, Lazy: req.Lazy, Order: req.Order,
		Inflaters: req.Inflaters})
	if err != nil {
		return spec.Record{}, err
	}
	o.pull = true
	t, err := d.enter(o, nil, false)
	if err != nil {
		return spec.Record{}, err
	}
	defer t.Done(0)
	begun := time.Now()
	err = t.Wait(ctx)
	r := d.begin(ctx, begun, o.ref.String(), "", w)
	r.place = t
	if err == nil {
		r.reached(spec.Admitted)
		err = d.pull(r.trace.Into(ctx), o, r, req.Blobs)
	}
	t.Done(0)
	return r.end(err), err
}

func (d *Deployer) pull(ctx context.Context, o *order, r *run, blobs bool) error {
	img, err := d.resolve(ctx, o, r)
	if err != nil {
		return err
	}
	if err := d.mount(ctx, img, r); err != nil {
		return err
	}
	r.place.Here()
	if blobs {
		n, err := d.cfg.Puller.CopyBlobs(ctx, img, o.options(), d.cfg.Engine.WriteBlob)
		r.fetched(n)
		if err != nil {
			return err
		}
	}
	return r.settle(ctx)
}

// resolve finds out what the image is and lets its layers begin to fill.
func (d *Deployer) resolve(ctx context.Context, o *order, r *run) (*image.Image, error) {
	opts := o.options()
	if here, _ := d.cfg.Puller.Here(o.ref, opts); !here && o.PullPolicy == "never" {
		return d.local(ctx, o, r, fmt.Errorf("%w: the image %s, and --pull never keeps dewd from fetching it",
			errAbsent, o.ref))
	}
	opts.Known = func(img *image.Image) {
		r.reached(spec.Resolved)
		r.reg = d.register(trace.Beside(ctx), img)
	}
	pull, err := d.cfg.Puller.Pull(r.life, o.ref, opts)
	if err != nil {
		return d.local(ctx, o, r, err)
	}
	r.follow(pull)
	return pull.Image, d.fit(ctx, r)
}

// mount waits until containerd has the image, layer by layer as they can be mounted:
// at once in a lazy start, else when they are readable. An error of any layer ends it at once.
func (d *Deployer) mount(ctx context.Context, img *image.Image, r *run) error {
	if r.pull == nil { // containerd has it
		return r.mounted(d.cfg.Engine.Register(ctx, img, nil))
	}
	ctx, cancel := context.WithCancel(ctx)
	var filling sync.WaitGroup
	defer filling.Wait()
	defer cancel()
	filling.Go(func() {
		if err := r.pull.WaitMountable(ctx); err != nil && ctx.Err() == nil { // else it is this wait that ends
			r.reg.end(err)
		}
	})
	err := r.reg.wait(ctx)
	if err == nil {
		err = r.pull.WaitMountable(ctx) // also what containerd had of an earlier time is here
	}
	return r.mounted(err)
}

// errAbsent says that an image is to be here and is not.
var errAbsent = fmt.Errorf("%w on this node", errdefs.ErrNotFound)

// local falls back on an image that containerd has though no registry gives
// it: one that was built or imported here.
func (d *Deployer) local(ctx context.Context, o *order, r *run, cause error) (*image.Image, error) {
	var re *registry.Error
	if o.pull || o.PullPolicy == "always" || !errors.As(cause, &re) && !errors.Is(cause, errAbsent) {
		return nil, cause
	}
	img, err := d.cfg.Engine.LocalImage(ctx, o.ref)
	if err != nil {
		if !errdefs.IsNotFound(err) {
			d.cfg.Log.Warn("look for the image in containerd", "image", o.ref, "err", err)
		}
		return nil, cause
	}
	r.rec.Digest = img.Target.Digest.String()
	r.rec.Way = spec.Way{Pull: "local",
		Why: []string{"the registry does not give it, containerd has it: " + cause.Error()}}
	r.reached(spec.Resolved)
	return img, nil
}

func (d *Deployer) check(o *order, img *image.Image) (ready.Check, error) {
	hc, err := ready.ImageHealthcheck(img.Config)
	if err != nil {
		return ready.Check{}, err
	}
	c, err := ready.Parse(o.Ready, hc)
	if err != nil {
		return ready.Check{}, fmt.Errorf("%w: %w", ErrRequest, err)
	}
	return c, nil
}

// await blocks until the container serves.
func (d *Deployer) await(ctx context.Context, o *order, check ready.Check, c *engine.Info) error {
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	err := ready.Wait(ctx, check, ready.Target{
		Host: c.Net == engine.NetHost, Addr: c.Addr, NetNS: nsOf(c), Pid: int(c.Pid),
		Logs: []string{c.Stdout, c.Stderr}, Runner: runner{d.cfg.Engine, c.ID()},
		Exited: func(ctx context.Context) (int, error) {
			e, err := d.cfg.Engine.Wait(ctx, c.ID())
			return e.Status, err
		},
	})
	var exit *ready.ExitError
	if errors.As(err, &exit) {
		return cmp.Or(d.cfg.Engine.Unexecuted(ctx, o.name, exit.Status), err)
	}
	return err
}

// nsOf is the namespace to connect from: a bridge's addresses are reached
// from the host, a container with no network only from inside.
func nsOf(c *engine.Info) string {
	if c.Net == engine.NetNone {
		return c.NetNS
	}
	return ""
}

// unready decides what becomes of a container that does not serve: it is
// stopped, behind the caller's back, and kept, so that its logs can be read; nothing of it stays if the
// caller has gone, wanted it removed, or wanted no more than a recording.
func (d *Deployer) unready(ctx context.Context, o *order, c *engine.Info, err error) error {
	if o.Terms.Detach && context.Cause(ctx) == error(errStop) {
		return err // it goes on, and the next daemon waits for it
	}
	if ctx.Err() != nil || o.Remove || o.Record {
		return errors.Join(err, d.remove(c.ID()))
	}
	if o.restarts() { // before its deployment has ended
		rerr := d.cfg.Engine.Relabel(context.WithoutCancel(ctx), c.ID(), restart.Failed())
		if rerr != nil && !errors.Is(rerr, engine.ErrNotFound) {
			d.cfg.Log.Error("a container that is not ready starts again", "name", o.name, "err", rerr)
		}
	}
	d.bg.Go(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(d.life), 2*stopGrace)
		defer cancel()
		if serr := d.cfg.Engine.Stop(ctx, c.ID(), stopGrace); serr != nil &&
			!errors.Is(serr, engine.ErrNotRunning) && !errors.Is(serr, engine.ErrNotFound) {
			d.cfg.Log.Warn("stop a container that is not ready", "name", o.name, "err", serr)
		}
	})
	return err
}

// stopGrace is how long a container that is not ready in time may take to end.
const stopGrace = 5 * time.Second

// remove takes a container away whatever becomes of the caller.
func (d *Deployer) remove(id string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(d.life), 30*time.Second)
	defer cancel()
	if err := d.cfg.Engine.Remove(ctx, id, true); err != nil && !errors.Is(err, engine.ErrNotFound) {
		return err
	}
	return nil
}

// TakeOver takes up the containers that an earlier daemon has left: what they may take of memory,
// and the end of those with LabelRemove.
func (d *Deployer) TakeOver(ctx context.Context) error {
	all, err := d.cfg.Engine.List(ctx)
	if err != nil {
		return err
	}
	d.owed.account(all)
	for _, c := range all {
		if c.Labels[LabelRemove] != "" {
			d.removeAtExit(c.ID())
		}
	}
	return nil
}

// removeAtExit removes a container when it has exited and all of hold, but those that are nil, are closed.
func (d *Deployer) removeAtExit(id string, hold ...<-chan struct{}) {
	d.bg.Go(func() {
		if _, err := d.cfg.Engine.Wait(d.life, id); err != nil && !errors.Is(err, engine.ErrNotRunning) {
			return
		}
		for _, h := range hold {
			if h == nil {
				continue
			}
			select {
			case <-h:
			case <-d.life.Done():
				return
			}
		}
		if err := d.remove(id); err != nil {
			d.cfg.Log.Error("remove a container that has exited", "name", engine.Name(id), "err", err)
		}
	})
}

// order is a request that was understood.
type order struct {
	spec.Request
	ref     image.Reference
	name    string
	ports   []network.Port
	timeout time.Duration
	pull    bool
	// Of the Desk: the deployment's ID, and what returns once the journal has it for good;
	// "" and nil of what it has not taken in.
	id      string
	written func(context.Context) error
}

func (d *Deployer) parse(req spec.Request) (*order, error) {
	ref, err := image.ParseReference(req.Image)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrRequest, err)
	}
	o := &order{Request: req, ref: ref, name: req.Name, timeout: req.ReadyTimeout}
	if o.name == "" {
		o.name = madeUpName(ref)
	}
	if err := engine.ValidName(o.name); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrRequest, err)
	}
	if o.timeout <= 0 {
		o.timeout = d.cfg.ReadyTimeout
	}
	if o.Net == "" && len(req.Ports) > 0 {
		o.Net = engine.NetBridge
	}
	for _, f := range []struct {
		flag, value string
		allowed     []string
	}{
		{"lazy", req.Lazy, []string{"", "auto", "never"}},
		{"restore", req.Restore, []string{"", checkpoint.Auto, checkpoint.Never, checkpoint.Always}},
		{"order", req.Order, []string{"", "layers", "parallel"}},
		{"net", o.Net, []string{"", engine.NetHost, engine.NetBridge, engine.NetNone}},
	} {
		if !contains(f.allowed, f.value) {
			return nil, fmt.Errorf("%w: --%s %s: want one of%s", ErrRequest, f.flag, f.value,
				strings.Join(f.allowed, " "))
		}
	}
	if req.Memory != 0 && req.Memory < minMemory {
		return nil, fmt.Errorf("%w: --memory %d: a container needs at least %d MiB", ErrRequest, req.Memory,
			minMemory>>20)
	}
	if _, err := spec.ParseRestart(req.Restart); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrRequest, err)
	}
	o.ports, err = ports(req.Ports)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrRequest, err)
	}
	return o, nil
}

// minMemory is what runc itself takes in a container's cgroup (as docker has it).
const minMemory = 6 << 20

func contains(all []string, s string) bool {
	for _, x := range all {
		if x == s {
			return true
		}
	}
	return false
}

func ports(in []spec.Port) ([]network.Port, error) {
	var out []network.Port
	for _, p := range in {
		n := network.Port{Host: p.Host, Container: p.Container, Protocol: p.Protocol}
		if n.Protocol == "" {
			n.Protocol = "tcp"
		}
		if p.HostIP != "" {
			var err error
			if n.HostIP, err = netip.ParseAddr(p.HostIP); err != nil {
				return nil, err
			}
		}
		out = append(out, n)
	}
	return out, nil
}

// madeUpName is the last part of the repository, cut to what a name may have,
// and some random digits.
func madeUpName(ref image.Reference) string {
	base := ref.Path[strings.LastIndexByte(ref.Path, '/')+1:]
	base = base[:min(len(base), 56)]
	b := make([]byte, 3)
	rand.Read(b)
	return base + "-" + hex.EncodeToString(b)
}

// options are those of the order's pull. A container takes the image that is
// here, as docker run does, unless it is to ask always; a pull asks the registry.
func (o *order) options() fetch.Options {
	return fetch.Options{Local: !o.pull && o.PullPolicy != "always",
		Lazy: !o.pull && !o.Record && o.Lazy != "never", Order: link.Order(o.Order), Inflaters: o.Inflaters}
}

func (o *order) spec(img *image.Image) engine.Spec {
	s := engine.Spec{Name: o.name, Image: img, Entrypoint: o.Entrypoint, Cmd: o.Cmd, Env: o.Env, Net: o.Net,
		Ports: o.ports, Volumes: o.Volumes, Memory: o.Memory, CPUs: o.CPUs, Options: o.Options}
	s.Labels = o.labels()
	return s
}

// conflict refuses a check that another process of the host would pass.
func (o *order) conflict(c ready.Check) error {
	if o.Net != "" && o.Net != engine.NetHost {
		return nil
	}
	return c.Conflict()
}

// runner runs a health check in the container.
type runner struct {
	e  *engine.Engine
	id string
}

// maxOutput bounds what is kept of a health check's output.
const maxOutput = 4 << 10

func (r runner) Run(ctx context.Context, args []string) (int, []byte, error) {
	out := &tail{}
	status, err := r.e.Exec(ctx, r.id, engine.ExecSpec{Args: args, Stdout: out, Stderr: out})
	return status, out.b, err
}

// tail keeps the end of what is written to it. Safe for concurrent use.
type tail struct {
	mu sync.Mutex
	b  []byte
}

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.b = append(t.b, p...)
	if n := len(t.b) - maxOutput; n > 0 {
		t.b = append(t.b[:0], t.b[n:]...)
	}
	return len(p), nil
}
