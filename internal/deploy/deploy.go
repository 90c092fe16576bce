// Package deploy carries one deployment from the instruction until the
// application serves, and records when each stage was reached.
//
// A run is one deployment: parse understands it, enter gives it a place in the queue (package admit), carry
// takes it from there to its end, and deploy is its work, first line to last (run.go). A recorder keeps its
// stage times, so every surface shows the same ones. The image's layers go on to their completion when the
// container is ready already; Audience.Done gets the record with that moment. The Deployer has what runs
// share. The Queue answers for deployments: it writes them into the journal before they begin, and tells who
// watches.
package deploy

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"dewpoint/internal/checkpoint"
	"dewpoint/internal/deploy/admit"
	"dewpoint/internal/engine"
	"dewpoint/internal/fetch"
	"dewpoint/internal/pack/learn"
	"dewpoint/internal/spec"
	"dewpoint/internal/trace"
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
	// Reached tells of a stage of a deployment that a Queue has accepted.
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

// Deployer has what runs share: the parts of the node, the queue, and what goes on behind deployments that
// are ready. It is safe for concurrent use.
type Deployer struct {
	cfg       Config
	admission *admit.Admitter // the queue; it has a lock of its own
	limits    limits          // has a lock of its own
	life      context.Context
	stop      context.CancelFunc
	bg        sync.WaitGroup // what goes on behind deployments that are ready
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
	cfg.Admit.Limits = &d.limits
	if cfg.Disk != nil {
		cfg.Admit.Disk = cfg.Disk
	}
	if cfg.Audience == nil {
		d.cfg.Audience = deaf{}
	}
	d.admission = admit.New(cfg.Admit)
	d.life, d.stop = context.WithCancel(context.Background())
	return d
}

// Close ends what goes on in the background. Containers are not touched, and
// fills keep their progress.
func (d *Deployer) Close() {
	d.stop()
	d.admission.Close()
	d.bg.Wait()
}

// LabelRemove marks containers that are removed when they exit.
const LabelRemove = "dewpoint.remove"

// Pull brings an image here whole and registers it, without a container.
func (d *Deployer) Pull(ctx context.Context, req spec.PullRequest, w spec.Watch) (spec.Record, error) {
	r, err := d.parse(spec.Request{Image: req.Image, Lazy: req.Lazy, Order: req.Order,
		Inflaters: req.Inflaters})
	if err != nil {
		return spec.Record{}, err
	}
	r.pullOnly, r.blobs, r.name = true, req.Blobs, ""
	if err := r.enter(nil, false); err != nil {
		return spec.Record{}, err
	}
	return d.carry(ctx, r, w)
}

// Admission is how the queue stands.
func (d *Deployer) Admission() admit.Stats { return d.admission.Stats() }

// Runs takes in a container that runs again.
func (d *Deployer) Runs(c *engine.Info) { d.limits.add(c.CgroupDir("memory")) }

// TakeOver takes up the containers that an earlier daemon has left: what they may take of memory,
// and the end of those with LabelRemove.
func (d *Deployer) TakeOver(ctx context.Context) error {
	all, err := d.cfg.Engine.List(ctx)
	if err != nil {
		return err
	}
	for _, c := range all {
		if c.Status != engine.Stopped {
			d.Runs(c)
		}
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

// remove takes a container away whatever becomes of the caller.
func (d *Deployer) remove(id string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(d.life), 30*time.Second)
	defer cancel()
	if err := d.cfg.Engine.Remove(ctx, id, true); err != nil && !errors.Is(err, engine.ErrNotFound) {
		return err
	}
	return nil
}
