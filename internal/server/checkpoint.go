package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"dewpoint/internal/api"
	"dewpoint/internal/checkpoint"
	"dewpoint/internal/checkpoint/criu"
	"dewpoint/internal/checkpoint/dmtcp"
	"dewpoint/internal/checkpoint/store"
	"dewpoint/internal/deploy"
	"dewpoint/internal/engine"
	"dewpoint/internal/fetch"
	"dewpoint/internal/image"
	"dewpoint/internal/layer"
	"dewpoint/internal/pop"
	"dewpoint/internal/spec"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"
)

// openCheckpoints makes the part by which containers start from others' memory.
// What it lacks is found out in the background, and said by doctor.
func (d *Daemon) openCheckpoints(ctx context.Context, program string) error {
	f := d.cfg.File.Checkpoint
	if f.Off {
		return nil
	}
	dir := filepath.Join(d.cfg.Root, "checkpoints")
	var err error
	var shared func() *pop.Store
	var told func() bool
	if d.cfg.File.PoP.Redis != "" {
		told = d.puller.Hears
	}
	if d.cfg.File.PoP.Store != "" {
		shared = d.puller.Store
	}
	d.saved, err = store.Open(store.Config{Dir: filepath.Join(dir, "store"), Node: d.name, PoP: shared,
		Told: told, Peers: d.puller.Savers(), Keep: f.Keep, MaxBytes: int64(f.MaxBytes), Log: d.log})
	if err != nil {
		return err
	}
	d.checkpoints = checkpoint.New(checkpoint.Config{Engines: d.checkpointEngines(program), Containers: d.engine,
		Layers: saved{d.puller}, Store: d.saved, Dir: dir,
		Restore: criu.RestoreConfig(false), RestoreLazy: criu.RestoreConfig(true), LazyAbove: int64(f.LazyAbove),
		WorkDir: d.engine.WorkDir,
		Guard:   []string{"/proc/self/exe", PageGuard}, Lost: d.memoryLost, Explain: d.explainRestore, Node: d.name,
		Auto: f.Auto, Image: d.documents,
		Made: func(name string, r store.Record) {
			d.checkpointed(ctx, name, r)
		}, Unmade: d.unsaved, Quarantined: d.quarantined, Log: d.log})
	d.bg.Go(func() { d.saved.Follow(ctx) })
	if shared != nil {
		d.bg.Go(func() { d.catchUp(ctx) })
	}
	d.bg.Go(func() {
		if _, err := d.checkpoints.Probe(ctx); err != nil && ctx.Err() == nil {
			d.log.Info("containers cannot be checkpointed here", "why", err)
		}
	})
	return nil
}

// checkpointEngines are those that the configuration allows, the one to be preferred first.
func (d *Daemon) checkpointEngines(program string) []checkpoint.Engine {
	f := d.cfg.File.Checkpoint
	var engines []checkpoint.Engine
	if f.Engine != "dmtcp" {
		engines = append(engines,
			criu.New(criu.Config{Containers: d.engine, Program: program, State: d.cfg.State, Log: d.log}))
	}
	if f.Engine != "criu" {
		engines = append(engines, dmtcp.New(dmtcp.Config{Containers: d.engine, Prefix: dmtcp.Find(f.DMTCP)}))
	}
	return engines
}

// PageGuard is the word by which this program runs lazypages.Guard.
const PageGuard = "page-guard"

// memoryLost is told of a restored container whose memory did not come: its processes are dead. One that
// was to become ready boots instead (package deploy); one that served is started anew by its command.
func (d *Daemon) memoryLost(name string, err error, served bool) {
	d.log.Error("a restored container is killed: the rest of its memory does not come", "container", name, "err",
		err)
	d.events.add(spec.Event{Kind: spec.EventLost, Name: name, Error: err.Error()})
	if !served {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), lostTime)
	defer cancel()
	if err := d.engine.Kill(ctx, name, unix.SIGKILL); err != nil && !errors.Is(err, engine.ErrNotRunning) {
		d.log.Warn("kill what is left of it", "container", name, "err", err)
	}
	if err := d.startAnew(ctx, name); err != nil {
		d.log.Error("it stays down", "container", name, "err", err)
	}
}

// lostTime bounds the end of a container and its new start.
const lostTime = 30 * time.Second

// startAnew starts a container that was killed by its command, on the files that it has, unless
// it goes when it exits.
func (d *Daemon) startAnew(ctx context.Context, name string) error {
	c, err := d.engine.Inspect(ctx, name)
	if err != nil || c.Labels[deploy.LabelRemove] != "" {
		return err
	}
	if _, err := d.engine.Wait(ctx, name); err != nil && !errors.Is(err, engine.ErrNotRunning) {
		return err
	}
	return d.engine.StartAnew(ctx, name, checkpoint.Anew(c), func(c *engine.Info) error {
		return d.checkpoints.Remade(ctx, c)
	})
}

// startAbandoned starts anew the containers whose memory was coming when an earlier daemon was
// killed: their guards have ended them. Those of deployments that had not ended are the desk's business.
func (d *Daemon) startAbandoned(ctx context.Context, unended map[string]bool) {
	if d.checkpoints == nil {
		return
	}
	err := d.checkpoints.Abandoned(ctx, func(ctx context.Context, name string) error {
		return d.startDead(ctx, name, unended)
	})
	if err != nil {
		d.log.Error("a container stays down", "err", err)
	}
}

// startDead starts a container anew whose processes have been killed; one that runs, or never did, stays as
// it is.
func (d *Daemon) startDead(ctx context.Context, name string, unended map[string]bool) error {
	ctx, cancel := context.WithTimeout(ctx, lostTime)
	defer cancel()
	c, err := d.engine.Inspect(ctx, name)
	if errors.Is(err, engine.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	if c.Status == engine.Created || c.Pid != 0 && alive(c.Pid) || unended[c.Labels[deploy.LabelDeployment]] {
		return nil
	}
	why := "dewd was killed while the rest of its memory was coming"
	d.log.Error("a restored container has ended: "+why, "container", name)
	d.events.add(spec.Event{Kind: spec.EventLost, Name: name, Error: why})
	return d.startAnew(ctx, name)
}

// alive reports whether a process is there and no zombie.
func alive(pid uint32) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	state := string(b[strings.LastIndexByte(string(b), ')')+1:]) // behind its name
	return err == nil && !strings.HasPrefix(state, " Z") && !strings.HasPrefix(state, " X")
}

// unsaved tells that a container is not saved as it was asked for.
func (d *Daemon) unsaved(name string, why error) {
	d.events.add(spec.Event{Kind: spec.EventUnsaved, Name: name, Error: why.Error()})
}

func (d *Daemon) explainRestore(name string, err error) error {
	return criu.ExplainRestore(filepath.Join(d.engine.WorkDir(name), "restore.log"), err)
}

// documents finds those of a container's image.
func (d *Daemon) documents(ctx context.Context, ref string, target digest.Digest) *image.Image {
	return d.known(ctx, engine.ImageInfo{Name: ref, Digest: target})
}

// saved is the puller as the manager of checkpoints wants it.
type saved struct{ p *fetch.Puller }

func (s saved) Add(ctx context.Context, path string, id digest.Digest, size int64) error {
	return s.p.Keep(ctx, fetch.Saved(id, size), tarFile(path))
}

func (s saved) Bring(ctx context.Context, id digest.Digest, size int64) error {
	return s.p.Take(ctx, fetch.Saved(id, size))
}

func (s saved) Give(ctx context.Context, id digest.Digest) error { return s.p.Give(ctx, id) }

// tarFile is a source of a layer's tar.
type tarFile string

func (t tarFile) Open(_ context.Context, _ *layer.Fill, offset int64) (io.ReadCloser, error) {
	f, err := os.Open(string(t))
	if err != nil {
		return nil, err
	}
	if _, err := f.Seek(offset, io.SeekStart); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// checkpointed tells of a checkpoint, and gives it to the PoP.
func (d *Daemon) checkpointed(ctx context.Context, name string, r store.Record) {
	d.work.Add(1)
	d.log.Info("checkpoint", "container", name, "image", r.Image, "id", r.ID, "memory", r.Data.Pages, "stored",
		r.Data.Size)
	d.events.add(spec.Event{Kind: spec.EventCheckpointed, Name: name, Image: r.Image, Checkpoint: r.ID})
	d.bg.Go(func() {
		if err := d.checkpoints.Publish(ctx, r); err != nil && ctx.Err() == nil {
			d.log.Warn("a checkpoint is not in the PoP's store", "id", r.ID, "err", err)
		}
	})
}

// catchUp has checkpoints of this node's put into the PoP's store again that were damaged there while no dewd
// ran here. It returns when it has looked there once.
func (d *Daemon) catchUp(ctx context.Context) {
	for {
		err := d.saved.Missed(ctx)
		if !errors.Is(err, store.ErrNoPoP) && !errors.Is(err, pop.ErrStoreAway) {
			if err != nil && ctx.Err() == nil {
				d.log.Warn("look for checkpoints that were damaged in the PoP's store", "err", err)
			}
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(quietAfter):
		}
	}
}

// publishOwed gives the PoP those checkpoints that it could not have when they were made.
func (d *Daemon) publishOwed(ctx context.Context) {
	if d.saved == nil || len(d.saved.Owed()) == 0 {
		return
	}
	d.bg.Go(func() {
		if err := d.checkpoints.PublishOwed(ctx); err != nil && ctx.Err() == nil {
			d.log.Warn("a checkpoint is still not in the PoP's store", "err", err)
		}
	})
}

func (d *Daemon) quarantined(r store.Record, why error) {
	d.log.Error("a checkpoint is not used any more", "image", r.Image, "id", r.ID, "err", why)
	d.events.add(spec.Event{Kind: spec.EventQuarantined, Image: r.Image, Checkpoint: r.ID, Error: why.Error()})
}

// noCheckpoints says that they are off.
func (d *Daemon) noCheckpoints() error {
	if d.checkpoints != nil {
		return nil
	}
	e := api.New(api.Unsupported, "this node makes and uses no checkpoints")
	e.Remedy = "take checkpoint.off out of its configuration"
	return e
}

// Checkpoint implements api.Checkpoints.
func (d *Daemon) Checkpoint(ctx context.Context, r spec.CheckpointRequest) (spec.Checkpoint, error) {
	if err := d.noCheckpoints(); err != nil {
		return spec.Checkpoint{}, err
	}
	rec, dumped, err := d.checkpoints.Checkpoint(ctx, r.Name,
		checkpoint.Options{Share: r.Share, Stateful: r.Stateful, TCP: r.TCP})
	if err != nil {
		return spec.Checkpoint{}, checkpointProblem(err)
	}
	out := d.checkpoint(checkpoint.Known{Listed: store.Listed{Record: rec, Local: true},
		Owner: checkpoint.OwnerOf(rec)})
	out.Paused = dumped.Paused.Seconds()
	return out, nil
}

func (d *Daemon) checkpoint(k checkpoint.Known) spec.Checkpoint {
	out := spec.Checkpoint{ID: k.ID, Image: k.Image, Digest: k.Manifest, Args: append([]string{}, k.Args...),
		Created: k.Created, Node: k.Node, Engine: k.Engine,
		Size: k.Data.Size, Pages: k.Data.Pages, Boot: k.Boot, Restore: k.RestoreTime, Stateful: k.Stateful,
		Owner: k.Owner, Unfit: k.Unfit, Differs: k.Differs}
	if k.Upper != nil {
		out.Upper = k.Upper.Size
	}
	switch {
	case k.Local && k.PoP:
		out.Where = "both"
	case k.PoP:
		out.Where = "pop"
	default:
		out.Where = "node"
	}
	return out
}

// ListCheckpoints implements api.Checkpoints.
func (d *Daemon) ListCheckpoints(ctx context.Context, img string) ([]spec.Checkpoint, error) {
	out := []spec.Checkpoint{}
	if d.checkpoints == nil {
		return out, nil
	}
	all, err := d.checkpoints.List(ctx)
	if err != nil {
		return nil, checkpointProblem(err)
	}
	if img != "" {
		ref, err := image.ParseReference(img)
		if err != nil {
			return nil, errors.Join(deploy.ErrRequest, err)
		}
		img = ref.String()
	}
	for _, k := range all {
		if img == "" || k.Image == img {
			out = append(out, d.checkpoint(k))
		}
	}
	return out, nil
}

// RemoveCheckpoint implements api.Checkpoints.
func (d *Daemon) RemoveCheckpoint(ctx context.Context, id string) error {
	if err := d.noCheckpoints(); err != nil {
		return err
	}
	return checkpointProblem(d.checkpoints.Remove(ctx, id))
}

// checkpointProblem says what to do about what goes wrong with checkpoints.
func checkpointProblem(err error) error {
	var unfit *checkpoint.UnfitError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &unfit):
		e := api.New(api.Unsupported, unfit.What)
		e.Remedy = unfit.Remedy
		return e
	case errors.Is(err, store.ErrInUse):
		return api.Of(api.InUse, err)
	case errors.Is(err, checkpoint.ErrNone), errors.Is(err, store.ErrUnknown):
		e := api.Of(api.NotFound, err)
		e.Remedy = "\"dew checkpoints\" lists them"
		return e
	}
	return err
}

// pruneCheckpoints removes those of images that are not here.
func (d *Daemon) pruneCheckpoints(ctx context.Context) ([]string, error) {
	if d.checkpoints == nil {
		return nil, nil
	}
	here := map[string]bool{}
	for _, img := range d.catalog.All() {
		here[img.Desc.Digest.String()] = true
	}
	infos, err := d.engine.Images(ctx)
	if err != nil {
		return nil, err
	}
	for _, i := range infos {
		if img := d.known(ctx, i); img != nil {
			here[img.Desc.Digest.String()] = true
		}
	}
	return d.checkpoints.Prune(ctx, here)
}

// tidyCheckpoints keeps what is stored of them within its bounds.
func (d *Daemon) tidyCheckpoints(ctx context.Context) {
	if d.saved == nil {
		return
	}
	if err := d.saved.Tidy(ctx); err != nil && ctx.Err() == nil {
		d.log.Warn("keep checkpoints within their bounds", "err", err)
	}
}

// checkpointFinding says whether containers can be checkpointed here.
func (d *Daemon) checkpointFinding(ctx context.Context) []spec.Finding {
	f := spec.Finding{What: "checkpoints", Level: spec.LevelOK}
	if d.checkpoints == nil {
		f.Level, f.Detail = spec.LevelNote, "off: checkpoint.off says so"
		return []spec.Finding{f}
	}
	a, err := d.checkpoints.Probe(ctx)
	if err != nil {
		f.Level, f.Detail, f.Remedy = spec.LevelNote, err.Error(),
			"see docs/use/checkpoints.md; containers boot meanwhile"
		return []spec.Finding{f}
	}
	f.Detail = "work: " + a.Engine + " " + a.Version
	if a.Runc != "" {
		f.Detail += ", runc " + a.Runc
	}
	out := []spec.Finding{f}
	for _, why := range d.checkpoints.PassedOver() {
		out = append(out, spec.Finding{What: "checkpoints", Level: spec.LevelNote,
			Detail: "not by the engine that is preferred: " + checkpoint.Cause(why),
			Remedy: "mend that and restart dewd, or name the engine in checkpoint.engine"})
	}
	for _, l := range a.Limits {
		out = append(out, spec.Finding{What: "checkpoints", Level: spec.LevelNote, Detail: l})
	}
	return out
}
