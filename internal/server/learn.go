package server

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"dewpoint/internal/api"
	"dewpoint/internal/deploy"
	"dewpoint/internal/image"
	"dewpoint/internal/pack"
	"dewpoint/internal/pack/learn"
	"dewpoint/internal/pack/profile"
	"dewpoint/internal/spec"

	"github.com/opencontainers/go-digest"
)

// openLearner makes the part that records starts and builds packs of them.
func (d *Daemon) openLearner(context.Context) error {
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	p := d.cfg.File.Pack
	d.learner = learn.New(learn.Config{Mounts: d.snaps, Layers: d.layers, Packs: d.puller, Registry: d.registry,
		Published: d.puller, Images: d.catalog.WithLayer,
		Exec: []string{exe, PackBuilder}, Dir: d.recordings(), Node: d.name,
		Never: p.Learn == "never", After: time.Duration(p.After), Built: d.packBuilt, Log: d.log})
	return nil
}

// packBuilt shares a pack with the PoP.
func (d *Daemon) packBuilt(img *image.Image, _ pack.Stats, err error) {
	if err == nil {
		d.puller.SharePack(img.Desc.Digest)
	}
}

// PackBuilder is dewd's first argument in the process that builds a pack.
const PackBuilder = "pack-builder"

// recordings is the directory of the recordings' state.
func (d *Daemon) recordings() string { return filepath.Join(d.cfg.State, "profile") }

// prepared is told by the snapshotter of containers that anyone makes.
func (d *Daemon) prepared(layers []digest.Digest, gone <-chan struct{}) {
	if d.opened.Err() != nil { // all parts are there
		d.learner.Prepared(layers, gone)
	}
}

// recordFinding says whether starts can be recorded here.
func (d *Daemon) recordFinding() spec.Finding {
	f := spec.Finding{What: "recording of starts", Level: spec.LevelOK, Detail: "works"}
	err := profile.Available(d.recordings())
	if err == nil && d.backend.Name() == "tree" {
		err = errors.New("layers are unpacked directories here (mount backend tree)")
	}
	if err != nil {
		f.Level, f.Detail = spec.LevelNote, err.Error()
		f.Remedy = "images start lazily with packs that were learned elsewhere: \"dew profile\" and \"dew pack push\" on a node that can"
	}
	return f
}

// here finds an image that this node has.
func (d *Daemon) here(name string) (*image.Image, error) {
	ref, err := image.ParseReference(name)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", deploy.ErrRequest, err)
	}
	if img := d.catalog.Get(ref); img != nil {
		return img, nil
	}
	e := api.New(api.NotFound, fmt.Sprintf("image %s is not here", ref))
	e.Remedy = "\"dew pull\" it first"
	return nil, e
}

// ProfileEnd implements api.Packs.
func (d *Daemon) ProfileEnd(_ context.Context, e spec.ProfileEnd) (spec.Profile, error) {
	return d.learner.End(e)
}

// PackBuild implements api.Packs.
func (d *Daemon) PackBuild(ctx context.Context, name string) (spec.Pack, error) {
	img, err := d.here(name)
	if err != nil {
		return spec.Pack{}, err
	}
	if _, err := d.learner.Build(ctx, img); err != nil {
		return spec.Pack{}, err
	}
	return d.learner.Inspect(ctx, img)
}

// PackPush implements api.Packs.
func (d *Daemon) PackPush(ctx context.Context, p spec.PackPush) (spec.PackPushed, error) {
	img, err := d.here(p.Image)
	if err != nil {
		return spec.PackPushed{}, err
	}
	return d.learner.Push(ctx, img, p)
}

// PackInspect implements api.Packs.
func (d *Daemon) PackInspect(ctx context.Context, name string) (spec.Pack, error) {
	img, err := d.here(name)
	if err != nil {
		return spec.Pack{}, err
	}
	return d.learner.Inspect(ctx, img)
}
