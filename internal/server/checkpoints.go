package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync"
	"time"

	"dewpoint/internal/api"
	"dewpoint/internal/checkpoint"
	"dewpoint/internal/checkpoint/criu"
	"dewpoint/internal/checkpoint/dmtcp"
	"dewpoint/internal/checkpoint/store"
	"dewpoint/internal/config"
	"dewpoint/internal/deploy"
	"dewpoint/internal/engine"
	"dewpoint/internal/fetch"
	"dewpoint/internal/image"
	"dewpoint/internal/layer"
	"dewpoint/internal/pop"
	"dewpoint/internal/pop/member"
	"dewpoint/internal/spec"

	"github.com/opencontainers/go-digest"
)

// checkpoints implements api.Checkpoints, and checkpoint.Audience.
type checkpoints struct {
	manager   *checkpoint.Manager // nil: there are to be none
	saved     *store.Store        // with manager
	engine    *engine.Engine
	catalog   *fetch.Catalog
	documents *documents
	news      *news
	log       *slog.Logger
	life      context.Context // of what goes on in the background
	bg        *sync.WaitGroup // has that
}

// PageGuard is the word by which this program runs lazypages.Guard.
const PageGuard = "page-guard"

// checkpointEngines are those that the configuration allows, the one to be preferred first.
func checkpointEngines(f config.Checkpoint, e *engine.Engine, program, state string,
	log *slog.Logger) []checkpoint.Engine {
	var engines []checkpoint.Engine
	if f.Engine != "dmtcp" {
		engines = append(engines, criu.New(criu.Config{Containers: e, Program: program, State: state, Log: log}))
	}
	if f.Engine != "criu" {
		engines = append(engines, dmtcp.New(dmtcp.Config{Containers: e, Prefix: dmtcp.Find(f.DMTCP)}))
	}
	return engines
}

// begin does in the background what is due once, until ctx ends. shared says that the PoP has a store.
func (c *checkpoints) begin(ctx context.Context, shared bool) {
	c.bg.Go(func() { c.saved.Follow(ctx) })
	if shared {
		c.bg.Go(func() { c.catchUp(ctx) })
	}
	c.bg.Go(func() {
		if _, err := c.manager.Probe(ctx); err != nil && ctx.Err() == nil {
			c.log.Info("containers cannot be checkpointed here", "why", err)
		}
	})
}

// Unmade tells that a container is not saved as it was asked for.
func (c *checkpoints) Unmade(name string, why error) {
	c.news.events.add(spec.Event{Kind: spec.EventUnsaved, Name: name, Error: why.Error()})
}

// saved is the puller as the manager of checkpoints wants it.
type saved struct {
	p      *fetch.Puller
	layers *layer.Store
	member *member.Member // nil: this node is by itself
}

func (s saved) Add(ctx context.Context, path string, id digest.Digest, size int64) error {
	if s.member == nil {
		return s.p.Keep(ctx, fetch.Saved(id, size), tarFile(path))
	}
	return s.member.Keep(ctx, fetch.Saved(id, size), tarFile(path))
}

func (s saved) Bring(ctx context.Context, id digest.Digest, size int64) error {
	if s.member == nil {
		if l, err := s.layers.Get(id); err != nil || l.At != "" {
			return fmt.Errorf("layer %s is not here: %w", id, errors.Join(layer.ErrUnknown, pop.ErrStoreAway))
		}
		return nil
	}
	return s.member.BringLayer(ctx, fetch.Saved(id, size))
}

func (s saved) UploadLayer(ctx context.Context, id digest.Digest) error {
	if s.member == nil {
		return pop.ErrStoreAway
	}
	return s.member.UploadLayer(ctx, id)
}

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

// Made tells of a checkpoint, and gives it to the PoP.
func (c *checkpoints) Made(name string, r store.Record) {
	c.news.work.Add(1)
	c.log.Info("checkpoint", "container", name, "image", r.Image, "id", r.ID, "memory", r.Data.Pages, "stored",
		r.Data.Size)
	c.news.events.add(spec.Event{Kind: spec.EventCheckpointed, Name: name, Image: r.Image, Checkpoint: r.ID})
	c.bg.Go(func() {
		if err := c.manager.Publish(c.life, r); err != nil && c.life.Err() == nil {
			c.log.Warn("a checkpoint is not in the PoP's store", "id", r.ID, "err", err)
		}
	})
}

// catchUp has this node's checkpoints put into the PoP's store again that were damaged there while no dewd
// ran here. It returns when it has looked there once.
func (c *checkpoints) catchUp(ctx context.Context) {
	for {
		err := c.saved.Missed(ctx)
		if !errors.Is(err, store.ErrNoPoP) && !errors.Is(err, pop.ErrStoreAway) {
			if err != nil && ctx.Err() == nil {
				c.log.Warn("look for checkpoints that were damaged in the PoP's store", "err", err)
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

// publishPending gives the PoP those checkpoints that it could not have when they were made.
func (c *checkpoints) publishPending(ctx context.Context) {
	if c.saved == nil || len(c.saved.PendingUploads()) == 0 {
		return
	}
	c.bg.Go(func() {
		if err := c.manager.PublishPending(ctx); err != nil && ctx.Err() == nil {
			c.log.Warn("a checkpoint is still not in the PoP's store", "err", err)
		}
	})
}

// Quarantined tells of a checkpoint that is not used any more.
func (c *checkpoints) Quarantined(r store.Record, why error) {
	c.log.Error("a checkpoint is not used any more", "image", r.Image, "id", r.ID, "err", why)
	c.news.events.add(spec.Event{Kind: spec.EventQuarantined, Image: r.Image, Checkpoint: r.ID,
		Error: why.Error()})
}

// off says that they are off.
func (c *checkpoints) off() error {
	if c.manager != nil {
		return nil
	}
	e := api.New(api.Unsupported, "this node makes and uses no checkpoints")
	e.Remedy = "set checkpoint.mode = \"asked\" in its configuration"
	return e
}

// Checkpoint implements api.Checkpoints.
func (c *checkpoints) Checkpoint(ctx context.Context, r spec.CheckpointRequest) (spec.Checkpoint, error) {
	if err := c.off(); err != nil {
		return spec.Checkpoint{}, err
	}
	rec, dumped, err := c.manager.Checkpoint(ctx, r.Name,
		checkpoint.Options{Share: r.Share, Stateful: r.Stateful, TCP: r.TCP})
	if err != nil {
		return spec.Checkpoint{}, checkpointProblem(err)
	}
	out := c.checkpoint(checkpoint.Known{Listed: store.Listed{Record: rec, Local: true},
		Owner: checkpoint.OwnerOf(rec)})
	out.Paused = dumped.Paused.Seconds()
	return out, nil
}

func (c *checkpoints) checkpoint(k checkpoint.Known) spec.Checkpoint {
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
func (c *checkpoints) ListCheckpoints(ctx context.Context, img string) ([]spec.Checkpoint, error) {
	out := []spec.Checkpoint{}
	if c.manager == nil {
		return out, nil
	}
	all, err := c.manager.List(ctx)
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
			out = append(out, c.checkpoint(k))
		}
	}
	return out, nil
}

// RemoveCheckpoint implements api.Checkpoints.
func (c *checkpoints) RemoveCheckpoint(ctx context.Context, id string) error {
	if err := c.off(); err != nil {
		return err
	}
	return checkpointProblem(c.manager.Remove(ctx, id))
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

// prune removes those of images that are not here.
func (c *checkpoints) prune(ctx context.Context) ([]string, error) {
	if c.manager == nil {
		return nil, nil
	}
	here := map[string]bool{}
	for _, img := range c.catalog.All() {
		here[img.Desc.Digest.String()] = true
	}
	infos, err := c.engine.Images(ctx)
	if err != nil {
		return nil, err
	}
	for _, i := range infos {
		if img := c.documents.known(ctx, i); img != nil {
			here[img.Desc.Digest.String()] = true
		}
	}
	return c.manager.Prune(ctx, here)
}

// tidy keeps what is stored of them within its bounds.
func (c *checkpoints) tidy(ctx context.Context) {
	if c.saved == nil {
		return
	}
	if err := c.saved.Tidy(ctx); err != nil && ctx.Err() == nil {
		c.log.Warn("keep checkpoints within their bounds", "err", err)
	}
}

// findings says whether containers can be checkpointed here.
func (c *checkpoints) findings(ctx context.Context) []spec.Finding {
	f := spec.Finding{What: "checkpoints", Level: spec.LevelOK}
	if c.manager == nil {
		f.Level, f.Detail = spec.LevelNote, "off: checkpoint.mode says so"
		return []spec.Finding{f}
	}
	a, err := c.manager.Probe(ctx)
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
	for _, why := range c.manager.PassedOver() {
		out = append(out, spec.Finding{What: "checkpoints", Level: spec.LevelNote,
			Detail: "not by the engine that is preferred: " + checkpoint.Cause(why),
			Remedy: "mend that and restart dewd"})
	}
	for _, l := range a.Limits {
		out = append(out, spec.Finding{What: "checkpoints", Level: spec.LevelNote, Detail: l})
	}
	return out
}
