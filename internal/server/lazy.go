package server

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"dewpoint/internal/fetch"
	"dewpoint/internal/layer"
	"dewpoint/internal/layer/bdi"
	"dewpoint/internal/layer/datafs"
	"dewpoint/internal/layer/mount"
	"dewpoint/internal/pack"
	"dewpoint/internal/spec"

	"github.com/opencontainers/go-digest"
)

// openDatafs takes over a datafs that an earlier dewd has left. Else one is
// started when the first layer is to be served: a node without packs has none.
func (d *Daemon) openDatafs(ctx context.Context) error {
	if d.cfg.File.Lazy.Never {
		return nil
	}
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	d.server = &server{probed: make(chan struct{}), slow: map[digest.Digest][]string{}, log: d.log,
		cfg: datafs.Config{State: d.cfg.State, Exec: []string{exe, "datafs"}, Log: d.log, Want: d.want,
			Released: d.released, Lost: d.lost}}
	d.onceOpen(d.renewOrphans)
	if _, err := os.Stat(filepath.Join(d.cfg.State, "datafs.sock")); err == nil {
		c, err := d.server.running()
		if err == nil {
			d.server.found = c.Layers()
		}
		if len(d.server.found) > 0 {
			close(d.server.probed) // it works: containers read by it
			return nil
		}
		if err != nil {
			d.log.Error("the datafs of an earlier dewd cannot be taken over", "err", err)
		}
	}
	d.bg.Go(func() {
		defer close(d.server.probed)
		d.server.unusable = datafs.Probe(ctx,
			datafs.ProbeConfig{Dir: d.cfg.Root, Exec: d.server.cfg.Exec, Tree: d.lazyTree(), Log: d.log})
		if d.server.unusable != nil && ctx.Err() == nil {
			d.log.Warn("images are pulled whole: layers cannot be served before they are", "err", d.server.unusable)
		}
	})
	return nil
}

// renewOrphans mounts those partial layers anew that no datafs served any more
// when this dewd started: it died with the dewd before.
func (d *Daemon) renewOrphans() {
	var orphans []digest.Digest
	for _, p := range d.layers.Partials() {
		if !slices.Contains(d.server.found, p.Layer.DiffID) {
			orphans = append(orphans, p.Layer.DiffID)
		}
	}
	if len(orphans) > 0 {
		d.log.Error("datafs died together with dewd: containers that ran before their image was whole get I/O errors; start them again", "layers", orphans)
		d.events.add(spec.Event{Kind: spec.EventLost,
			Error: "datafs died together with dewd: containers that ran before their image was whole get I/O errors"})
	}
	d.renew(orphans)
}

// failOrphans ends the reads of layers that datafs has and the store knows
// nothing of: nobody will bring what they wait for.
func (d *Daemon) failOrphans() {
	if d.server == nil {
		return
	}
	c := d.server.there()
	if c == nil {
		return
	}
	for _, id := range c.Layers() {
		if d.layers.Partial(id) == nil {
			d.log.Error("a layer that containers read by datafs is not known any more: what they lack of it gives I/O errors", "layer", id)
			c.Abort(id)
			c.Remove(id)
		}
	}
}

// lazyFinding says whether images can run before they are whole.
func (d *Daemon) lazyFinding() spec.Finding {
	f := spec.Finding{What: "lazy starts", Level: spec.LevelOK,
		Detail: "images with a startup pack run before they are here"}
	if d.server == nil {
		f.Level, f.Detail = spec.LevelNote,
			"switched off (lazy.never in the configuration): images are pulled whole"
		return f
	}
	if <-d.server.probed; d.server.unusable != nil {
		f.Level, f.Detail = spec.LevelNote, "images are pulled whole: "+d.server.unusable.Error()
		f.Remedy = "a kernel with FUSE (/dev/fuse) is needed, for EROFS over it Linux 6.12"
	}
	return f
}

// lazyTree reports whether partial layers are shown as trees: EROFS reads them
// from a file only with the file-backed mount.
func (d *Daemon) lazyTree() bool { return d.backend.Name() != mount.EROFS }

// layerServer is datafs as the layer store wants it; nil without it.
func (d *Daemon) layerServer() layer.Server {
	if d.server == nil {
		return nil
	}
	return d.server
}

// server is datafs, started when it is needed, with what it needs of the mounts
// over it. It is safe for concurrent use.
type server struct {
	cfg      datafs.Config
	log      *slog.Logger
	probed   chan struct{}   // closed when unusable is set
	unusable error           // why layers cannot be served here, or nil
	found    []digest.Digest // what a datafs of an earlier dewd served; set before there are layers

	mu     sync.Mutex
	client *datafs.Client             // nil while there is no datafs
	slow   map[digest.Digest][]string // mounts that do not read ahead, by layer
}

// startTime bounds how long it takes to start a datafs.
const startTime = 30 * time.Second

// running returns the datafs, which it starts if need be.
func (s *server) running() (*datafs.Client, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.client != nil {
		return s.client, nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), startTime)
	defer cancel()
	c, err := datafs.Start(ctx, s.cfg)
	if err != nil {
		return nil, err
	}
	s.client = c
	return c, nil
}

// there is the datafs that runs, or nil.
func (s *server) there() *datafs.Client {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.client
}

// Add implements layer.Server.
func (s *server) Add(id digest.Digest, data, present *os.File) (string, error) {
	if <-s.probed; s.unusable != nil {
		return "", s.unusable
	}
	c, err := s.running()
	if err != nil {
		return "", err
	}
	return c.Add(id, data, present)
}

// Tree implements layer.Server.
func (s *server) Tree(id digest.Digest, index *os.File) (string, error) {
	c, err := s.running()
	if err != nil {
		return "", err
	}
	return c.Tree(id, index)
}

// Present implements layer.Server.
func (s *server) Present(id digest.Digest, from, to int64) {
	if c := s.there(); c != nil {
		c.Present(id, from, to)
	}
}

// Warm implements layer.Server.
func (s *server) Warm(id digest.Digest, from, to int64) {
	if c := s.there(); c != nil {
		c.Warm(id, from, to)
	}
}

// Fail implements layer.Server.
func (s *server) Fail(id digest.Digest, from, to int64) {
	if c := s.there(); c != nil {
		c.Fail(id, from, to)
	}
}

// Mounting implements layer.Server: the kernel must not read ahead into what is
// absent, which readers of what is there would wait for.
func (s *server) Mounting(id digest.Digest, target string, mount func() error) error {
	names, err := bdi.Without(target, mount)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.slow[id] = append(s.slow[id], names...)
	return err
}

// usualReadAhead is the kernel's default, in KiB.
const usualReadAhead = 128

// Remove implements layer.Server. What is mounted of a layer that is whole may
// read ahead from now on; of one that is not, nothing is mounted.
func (s *server) Remove(id digest.Digest) {
	s.mu.Lock()
	names := s.slow[id]
	delete(s.slow, id)
	s.mu.Unlock()
	for _, name := range names {
		_ = bdi.SetReadAhead(name, usualReadAhead) // those that are gone cannot be set
	}
	if c := s.there(); c != nil {
		c.Remove(id)
	}
}

// rest ends a datafs that serves nothing, and else leaves it to the next dewd.
func (s *server) rest(last bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.client == nil {
		return
	}
	err := s.client.Shutdown()
	if err == nil {
		s.client = nil
		return
	}
	if last {
		err = s.client.Close()
		s.client = nil
	}
	if err != nil {
		s.log.Debug("datafs stays", "why", err)
	}
}

// unblock ends the waits of a container that is to end; nil without a server.
func (d *Daemon) unblock() func([]int) {
	if d.server == nil {
		return nil
	}
	return func(threads []int) {
		if c := d.server.there(); c != nil {
			c.Unblock(threads)
		}
	}
}

// lost is called by datafs when what is mounted of layers gives errors from now
// on: new containers get new mounts.
func (d *Daemon) lost(ids []digest.Digest) {
	d.log.Error("datafs died and the kernel cannot resend what it left (before Linux 6.9): containers that run before their image is whole get I/O errors; start them again",
		"layers", ids)
	d.onceOpen(func() { d.renew(ids) })
}

// renew mounts layers anew, for containers that start from here on.
func (d *Daemon) renew(ids []digest.Digest) {
	for _, id := range ids {
		if err := d.snaps.Renew(context.Background(), id); err != nil {
			d.log.Error("mount a layer anew", "layer", id, "err", err)
		}
	}
}

// want is called by datafs when something waits for bytes of a layer.
func (d *Daemon) want(id digest.Digest, from, to int64) {
	d.onceOpen(func() { d.puller.Want(id, from, to) })
}

// onceOpen calls f, at once or when the parts are there that datafs is older than.
func (d *Daemon) onceOpen(f func()) {
	if d.opened.Err() != nil {
		f()
		return
	}
	context.AfterFunc(d.opened, f)
}

// released is called by datafs when nothing uses a layer any more that was removed.
func (d *Daemon) released(id digest.Digest) {
	d.onceOpen(func() {
		d.layers.Release(id)
		if len(d.layers.Partials()) == 0 {
			d.bg.Go(func() { d.server.rest(false) }) // not within the client's call
		}
	})
}

// packConfig is where packs come from.
func (d *Daemon) packConfig() (fetch.PackConfig, error) {
	c := fetch.PackConfig{Dir: filepath.Join(d.cfg.Root, "packs"), Trust: d.cfg.File.Pack.Trust,
		MaxBytes: int64(d.cfg.File.Pack.MaxBytes)}
	if err := os.MkdirAll(c.Dir, 0o700); err != nil {
		return c, err
	}
	key, err := readKey(d.cfg.File.Pack.Key)
	c.Key = key
	return c, err
}

func readKey(path string) (ed25519.PublicKey, error) {
	if path == "" {
		return nil, nil
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	key, err := pack.ParsePublicKey(b)
	if err != nil {
		return nil, fmt.Errorf("pack.key: %s: %w", path, err)
	}
	return key, nil
}

func (d *Daemon) lazyConfig() fetch.LazyConfig {
	l := d.cfg.File.Lazy
	c := fetch.LazyConfig{Never: d.server == nil, Wait: time.Duration(l.Wait), Delay: time.Duration(l.Delay),
		Off:   l.Off,
		Whole: d.whole, Room: d.room, Waited: d.metrics.Waited}
	if l.Hours != "" {
		c.Hours = l.Between
	}
	return c
}

// whole mounts a layer that is whole now from its own file, for containers that
// start from here on.
func (d *Daemon) whole(id digest.Digest) {
	if d.snaps == nil {
		return
	}
	if err := d.snaps.Renew(context.Background(), id); err != nil {
		d.log.Error("containers that start go on reading a layer through datafs", "layer", id, "err", err)
	}
}

// room frees disk for bytes that a running container needs.
func (d *Daemon) room(ctx context.Context, bytes int64) {
	freed, err := d.puller.Collect(ctx, bytes, d.inUse)
	d.metrics.Evicted(len(freed.Layers), freed.Bytes)
	if err != nil || freed.Bytes < bytes {
		d.log.Error("the disk is full: containers that run before their image is whole may get I/O errors; free some space",
			"freed", freed.Bytes, "wanted", bytes, "err", err)
	}
}

// lied is called when bytes that a container may have read turn out not to be
// the layer's.
func (d *Daemon) lied(p *layer.Partial, why error) {
	id := p.Layer.DiffID
	d.puller.Lied(p, why)
	d.log.Error("a startup pack lied, or the layer changed: it is quarantined", "image", p.Origin.Ref, "layer",
		id, "err", why)
	if err := d.puller.Quarantine(p.Origin.Manifest, why); err != nil {
		d.log.Error("record a quarantine", "err", err)
	}
	d.events.add(spec.Event{Kind: spec.EventLied, Image: p.Origin.Ref, Error: why.Error()})
	if d.cfg.File.Pack.Lied != "stop" {
		return
	}
	for _, img := range d.catalog.WithLayer(id) { // they have run with its bytes, whosever pack it was
		d.bg.Go(func() { d.stopAll(img.Desc.Digest.String(), img.Target.Digest.String()) })
	}
}

// stopAll stops the containers of an image.
func (d *Daemon) stopAll(digests ...string) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	all, err := d.engine.List(ctx)
	for _, c := range all {
		for _, dgst := range digests {
			if c.Digest.String() == dgst {
				err = errors.Join(err, d.engine.Stop(ctx, c.Name, 0))
			}
		}
	}
	if err != nil {
		d.log.Error("stop containers whose startup pack lied", "err", err)
	}
}
