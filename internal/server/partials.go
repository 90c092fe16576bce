package server

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"dewpoint/internal/engine"
	"dewpoint/internal/fetch"
	"dewpoint/internal/layer"
	"dewpoint/internal/layer/datafs"
	"dewpoint/internal/server/metrics"
	"dewpoint/internal/snapshot"
	"dewpoint/internal/spec"

	"github.com/opencontainers/go-digest"
)

// partials are the layers that are mounted before they are complete: what datafs, the store, the puller and
// the snapshotter have to tell each other of them. datafs may be older than all of these: what it tells waits
// until they are there. It is safe for concurrent use.
type partials struct {
	server *datafsServer   // nil if there are to be none
	opened context.Context // ends when the parts are there that join names
	open   context.CancelFunc
	life   context.Context // ends when dewd does
	end    context.CancelFunc
	engine *late[*engine.Engine]
	events *events
	log    *slog.Logger
	bg     *sync.WaitGroup // has what goes on in the background

	layers  *layer.Store // what follows holds once opened has ended
	catalog *fetch.Catalog
	puller  *fetch.Puller
	snaps   *snapshot.Snapshotter
}

// openPartials takes over a datafs that an earlier dewd has left. Else one is
// started when the first layer is to be served: a node without packs has none.
func openPartials(ctx context.Context, cfg Config, tree bool, p *partials) error {
	p.opened, p.open = context.WithCancel(context.Background())
	p.life, p.end = context.WithCancel(context.Background())
	if cfg.File.Lazy.Mode == "never" {
		return nil
	}
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	p.server = &datafsServer{probed: make(chan struct{}), slow: map[digest.Digest][]string{}, log: p.log,
		cfg: datafs.Config{State: cfg.State, Exec: []string{exe, "datafs"}, Log: p.log, Want: p.want,
			Released: p.released, Lost: p.lost, Healed: p.healed}}
	p.onceOpen(p.renewOrphans)
	if _, err := os.Stat(filepath.Join(cfg.State, "datafs.sock")); err == nil {
		c, err := p.server.running()
		if err == nil {
			p.server.found = c.Layers()
		}
		if len(p.server.found) > 0 {
			close(p.server.probed) // it works: containers read by it
			return nil
		}
		if err != nil {
			p.log.Error("the datafs of an earlier dewd cannot be taken over", "err", err)
		}
	}
	p.bg.Go(func() {
		defer close(p.server.probed)
		p.server.unusable = datafs.Probe(ctx,
			datafs.ProbeConfig{Dir: cfg.Root, Exec: p.server.cfg.Exec, Tree: tree, Log: p.log})
		if p.server.unusable != nil && ctx.Err() == nil {
			p.log.Warn("images are pulled whole: layers cannot be served before they are", "err", p.server.unusable)
		}
	})
	return nil
}

// join names the parts that datafs is older than, and tells them what it has told meanwhile.
func (p *partials) join(l *layer.Store, c *fetch.Catalog, puller *fetch.Puller, snaps *snapshot.Snapshotter) {
	p.layers, p.catalog, p.puller, p.snaps = l, c, puller, snaps
	p.open()
	p.failOrphans()
	puller.Revive()
}

// rest ends a datafs that serves nothing, and else leaves it to the next dewd.
func (p *partials) rest(last bool) {
	if last {
		p.end()
	}
	if p.server != nil {
		p.server.rest(last)
	}
}

// layerServer is datafs as the store of layers wants it; nil without it.
func (p *partials) layerServer() layer.Server {
	if p.server == nil {
		return nil
	}
	return p.server
}

// unblock ends the waits of a container that is to end; nil without datafs.
func (p *partials) unblock() func([]int) {
	if p.server == nil {
		return nil
	}
	return func(threads []int) {
		if c := p.server.there(); c != nil {
			c.Unblock(threads)
		}
	}
}

// renewOrphans mounts those partial layers anew that no datafs served any more
// when this dewd started: it died with the dewd before.
func (p *partials) renewOrphans() {
	var orphans []digest.Digest
	for _, l := range p.layers.Partials() {
		if !slices.Contains(p.server.found, l.Layer.DiffID) {
			orphans = append(orphans, l.Layer.DiffID)
		}
	}
	if len(orphans) > 0 {
		p.bg.Go(func() { p.tellLost(orphans, "datafs died together with dewd") })
	}
	for _, id := range orphans {
		p.renew(id)
	}
}

// failOrphans ends the reads of layers that datafs has and the store knows
// nothing of: nobody will bring what they wait for.
func (p *partials) failOrphans() {
	if p.server == nil {
		return
	}
	c := p.server.there()
	if c == nil {
		return
	}
	for _, id := range c.Layers() {
		if p.layers.Partial(id) == nil {
			p.log.Error("a layer that containers read by datafs is not known any more: what they lack of it gives I/O errors", "layer", id)
			c.Abort(id)
			c.Remove(id)
		}
	}
}

// findings says whether images can run before they are whole.
func (p *partials) findings(context.Context) []spec.Finding {
	f := spec.Finding{What: "lazy starts", Level: spec.LevelOK,
		Detail: "images with a startup pack run before they are here"}
	if p.server == nil {
		f.Level, f.Detail = spec.LevelNote,
			"switched off (lazy.mode in the configuration): images are pulled whole"
		return []spec.Finding{f}
	}
	if <-p.server.probed; p.server.unusable != nil {
		f.Level, f.Detail = spec.LevelNote, "images are pulled whole: "+p.server.unusable.Error()
		f.Remedy = "a kernel with FUSE (/dev/fuse) is needed, for EROFS over it Linux 6.12"
	} else if c := p.server.there(); c != nil && c.Down() {
		f.Level, f.Detail = spec.LevelBad,
			"datafs has died and does not start: images are pulled whole, and reads of what images lacked fail"
		f.Remedy = "see dewd's log; then restart the containers that events (\"lost\") name"
	}
	return []spec.Finding{f}
}

// lost is called by datafs when what is mounted of layers gives errors from now on.
func (p *partials) lost(ids []digest.Digest) {
	p.onceOpen(func() {
		p.bg.Go(func() { p.tellLost(ids, "datafs died, and no other could take its place") })
	})
}

// tellLost says which containers run by layers that give errors.
func (p *partials) tellLost(ids []digest.Digest, why string) {
	if len(ids) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(p.life, time.Minute)
	defer cancel()
	hurt, err := p.runBy(ctx, ids)
	if len(hurt) == 0 { // of another client of containerd, or its image is not known any more
		p.events.add(spec.Event{Kind: spec.EventLost, Error: why + ": containers that read layers before they are whole get I/O errors; restart them"})
	}
	names := make([]string, len(hurt))
	for i, c := range hurt {
		names[i] = c.Name
		p.events.add(spec.Event{Kind: spec.EventLost, Name: c.Name, Image: c.Image,
			Error: why + ": reads of what the image lacked then give I/O errors; restart the container"})
	}
	p.log.Error(why+": containers that run before their image is whole get I/O errors; restart them once "+
		"`dew doctor` says that lazy starts work", "containers", names, "layers", ids, "err", err)
}

// tellLeft says which containers run with a layer that has left the PoP's store.
func (p *partials) tellLeft(id digest.Digest, why string) {
	ctx, cancel := context.WithTimeout(p.life, time.Minute)
	defer cancel()
	hurt, err := p.runBy(ctx, []digest.Digest{id})
	for _, c := range hurt {
		p.events.add(spec.Event{Kind: spec.EventLost, Name: c.Name, Image: c.Image, Layer: id.String(), Error: why})
		p.log.Warn("a container runs with the files of a layer that has left the PoP's store: restart it",
			"container", c.Name, "image", c.Image, "layer", id)
	}
	if err != nil && p.life.Err() == nil {
		p.log.Warn("which containers run with a layer that has left the PoP's store is not known", "layer", id,
			"err", err)
	}
}

// runBy lists the containers that run and whose images have one of the layers.
func (p *partials) runBy(ctx context.Context, ids []digest.Digest) (found []*engine.Info, err error) {
	e, err := p.engine.wait(ctx)
	if err != nil {
		return nil, err
	}
	all, err := e.List(ctx)
	images := map[digest.Digest]bool{}
	for _, id := range ids {
		for _, img := range p.catalog.WithLayer(id) {
			images[img.Desc.Digest], images[img.Target.Digest] = true, true
		}
	}
	for _, c := range all {
		if images[c.Digest] && c.Status != engine.Stopped && c.Status != engine.Created {
			found = append(found, c)
		}
	}
	return found, err
}

// healed is called by datafs when a layer that was lost can be mounted anew, which new containers get.
func (p *partials) healed(id digest.Digest) {
	p.onceOpen(func() { p.bg.Go(func() { p.renew(id) }) })
}

// renew mounts a layer anew, for containers that start from here on.
func (p *partials) renew(id digest.Digest) {
	if err := p.snaps.Renew(p.life, id); err != nil && p.life.Err() == nil {
		p.log.Error("mount a layer anew", "layer", id, "err", err)
	}
}

// want is called by datafs when something waits for bytes of a layer.
func (p *partials) want(id digest.Digest, from, to int64) {
	p.onceOpen(func() { p.puller.Want(id, from, to) })
}

// onceOpen calls f, at once or when the parts are there that datafs is older than.
func (p *partials) onceOpen(f func()) {
	if p.opened.Err() != nil {
		f()
		return
	}
	context.AfterFunc(p.opened, f)
}

// released is called by datafs when nothing uses a layer any more that was removed.
func (p *partials) released(id digest.Digest) {
	p.onceOpen(func() {
		p.layers.Release(id)
		if len(p.layers.Partials()) == 0 {
			p.bg.Go(func() { p.server.rest(false) }) // not within the client's call
		}
	})
}

// partialsAudience is fetch's Audience.
type partialsAudience struct {
	*partials
	metrics *metrics.Set
}

// Waited counts a wait for absent bytes.
func (a partialsAudience) Waited(took time.Duration) { a.metrics.Waited(took) }

// Whole mounts a layer that is whole now from its own file, for containers that
// start from here on.
func (p *partials) Whole(id digest.Digest) {
	if p.opened.Err() == nil { // nothing is mounted yet
		return
	}
	p.renew(id)
}

// mismatched is told by the store of bytes that a container may have read and that turn out not to be the
// layer's.
func (p *partials) mismatched(l *layer.Partial, why error) {
	p.onceOpen(func() { p.quarantine(l, why) })
}

func (p *partials) quarantine(l *layer.Partial, why error) {
	id := l.Layer.DiffID
	p.puller.Mismatched(l, why)
	p.log.Error("a startup pack does not match the layer, or the layer changed: the pack is quarantined", "image", l.Origin.Ref, "layer",
		id, "err", why)
	if err := p.puller.Quarantine(l.Origin.Manifest, why); err != nil {
		p.log.Error("record a quarantine", "err", err)
	}
	p.events.add(spec.Event{Kind: spec.EventMismatch, Image: l.Origin.Ref, Error: why.Error()})
}
