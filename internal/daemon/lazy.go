package daemon

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"dewpoint/internal/datafs"
	"dewpoint/internal/fetch"
	"dewpoint/internal/layer"
	"dewpoint/internal/mount"
	"dewpoint/internal/node"
	"dewpoint/internal/pack"

	"github.com/opencontainers/go-digest"
)

// openDatafs starts or takes over the process that serves partial layers. A
// node on which it does not work pulls every image whole.
func (d *Daemon) openDatafs(ctx context.Context) error {
	if d.cfg.File.Lazy.Never {
		d.lazyWhy = "lazy.never is set"
		return nil
	}
	exe, err := os.Executable()
	if err == nil {
		d.datafs, err = datafs.Start(ctx, datafs.Config{State: d.cfg.State, Exec: []string{exe, "datafs"}, Log: d.log,
			Want: d.want, Released: d.released})
	}
	if err != nil {
		d.lazyWhy = err.Error()
		d.log.Warn("images are pulled whole: layers cannot be served before they are", "err", err)
	}
	return nil
}

// lazyTree reports whether partial layers are shown as trees: EROFS reads them
// from a file only with the file-backed mount.
func (d *Daemon) lazyTree() bool { return d.backend.Name() != mount.EROFS }

// server is datafs as the layer store wants it; nil without it.
func (d *Daemon) server() layer.Server {
	if d.datafs == nil {
		return nil
	}
	return d.datafs
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
	d.onceOpen(func() { d.layers.Release(id) })
}

// packConfig is where packs come from.
func (d *Daemon) packConfig() (fetch.PackConfig, error) {
	c := fetch.PackConfig{Dir: filepath.Join(d.cfg.Root, "packs"), Trust: d.cfg.File.Pack.Trust}
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
	c := fetch.LazyConfig{Never: d.datafs == nil, Wait: time.Duration(l.Wait), Delay: time.Duration(l.Delay), Off: l.Off,
		Whole: d.whole, Room: d.room}
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
	if err != nil || freed.Bytes < bytes {
		d.log.Error("the disk is full: containers that run before their image is whole may get I/O errors; free some space",
			"freed", freed.Bytes, "wanted", bytes, "err", err)
	}
}

// lied is called when bytes that a container may have read turn out not to be
// the layer's.
func (d *Daemon) lied(p *layer.Partial, why error) {
	id := p.Layer.DiffID
	d.lies.Add(1)
	for _, img := range d.catalog.WithLayer(id) {
		d.log.Error("a startup pack lied, or the layer changed: it is quarantined", "image", img.Ref, "layer", id, "err", why)
		if err := d.puller.Quarantine(img.Desc.Digest, why); err != nil {
			d.log.Error("record a quarantine", "err", err)
		}
		d.events.add(node.Event{Kind: node.EventLied, Image: img.Ref.String(), Error: why.Error()})
		if d.cfg.File.Pack.Lied == "stop" {
			go d.stopAll(img.Desc.Digest.String(), img.Target.Digest.String())
		}
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
