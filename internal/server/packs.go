package server

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"dewpoint/internal/api"
	"dewpoint/internal/config"
	"dewpoint/internal/deploy"
	"dewpoint/internal/fetch"
	"dewpoint/internal/image"
	"dewpoint/internal/layer/mount"
	"dewpoint/internal/pack"
	"dewpoint/internal/pack/learn"
	"dewpoint/internal/pack/profile"
	"dewpoint/internal/spec"
)

// PackBuilder is dewd's first argument in the process that builds a pack.
const PackBuilder = "pack-builder"

// packs implements api.Packs.
type packs struct {
	learner    *learn.Learner
	catalog    *fetch.Catalog
	recordings string // directory of their state
	mount      string // the mount backend
}

// findings says whether starts can be recorded here.
func (p *packs) findings(context.Context) []spec.Finding {
	f := spec.Finding{What: "recording of starts", Level: spec.LevelOK, Detail: "works"}
	err := profile.Available(p.recordings)
	if err == nil && p.mount == mount.Tree {
		err = errors.New("layers are unpacked directories here (mount backend tree)")
	}
	if err != nil {
		f.Level, f.Detail = spec.LevelNote, err.Error()
		f.Remedy = "images start lazily with packs that were learned elsewhere: \"dew profile\" and \"dew pack push\" on a node that can"
	}
	return []spec.Finding{f}
}

// here finds an image that this node has.
func (p *packs) here(name string) (*image.Image, error) {
	ref, err := image.ParseReference(name)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", deploy.ErrRequest, err)
	}
	if img := p.catalog.Get(ref); img != nil {
		return img, nil
	}
	e := api.New(api.NotFound, fmt.Sprintf("image %s is not here", ref))
	e.Remedy = "\"dew pull\" it first"
	return nil, e
}

// ProfileEnd implements api.Packs.
func (p *packs) ProfileEnd(_ context.Context, e spec.ProfileEnd) (spec.Profile, error) {
	return p.learner.End(e)
}

// PackBuild implements api.Packs.
func (p *packs) PackBuild(ctx context.Context, name string) (spec.Pack, error) {
	img, err := p.here(name)
	if err != nil {
		return spec.Pack{}, err
	}
	if _, err := p.learner.Build(ctx, img); err != nil {
		return spec.Pack{}, err
	}
	return p.learner.Inspect(ctx, img)
}

// PackPush implements api.Packs.
func (p *packs) PackPush(ctx context.Context, push spec.PackPush) (spec.PackPushed, error) {
	img, err := p.here(push.Image)
	if err != nil {
		return spec.PackPushed{}, err
	}
	return p.learner.Push(ctx, img, push)
}

// PackInspect implements api.Packs.
func (p *packs) PackInspect(ctx context.Context, name string) (spec.Pack, error) {
	img, err := p.here(name)
	if err != nil {
		return spec.Pack{}, err
	}
	return p.learner.Inspect(ctx, img)
}

// packConfig is where packs come from.
func packConfig(root string, f config.Pack) (fetch.PackConfig, error) {
	c := fetch.PackConfig{Dir: filepath.Join(root, "packs"), Trust: f.Trust}
	if err := os.MkdirAll(c.Dir, 0o700); err != nil {
		return c, err
	}
	key, err := readKey(f.Key)
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
