package server

import (
	"context"
	"slices"
	"sync"
	"time"

	"dewpoint/internal/engine"
	"dewpoint/internal/fetch"
	"dewpoint/internal/image"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sync/singleflight"
)

const (
	documentsWait  = time.Second      // for all that a list of images has to ask containerd for
	documentsAsk   = 10 * time.Second // bounds one question
	documentsAgain = 10 * time.Second // until what was not there is asked for again
)

// documents finds the manifests and configurations of images that containerd lists: in the catalog or, of
// images that other clients have brought, in containerd. There it takes several calls to find the layers, so
// these are remembered: an image's are asked for once; the question goes on though the one who asked first
// has gone. It is safe for concurrent use.
type documents struct {
	catalog *fetch.Catalog
	local   localImages

	once singleflight.Group
	mu   sync.Mutex
	have map[document]layersOf // guarded by mu
}

// localImages finds what containerd has of an image, *engine.Engine.
type localImages interface {
	LocalImage(ctx context.Context, ref image.Reference) (*image.Image, error)
}

// document is an image as containerd lists it.
type document struct{ name, digest string }

type layersOf struct {
	layers []image.Layer // nil: its documents are not there
	at     time.Time
}

// layers are those of an image, nil if they are not known, or not yet.
func (d *documents) layers(ctx context.Context, i engine.ImageInfo) []image.Layer {
	ref, err := image.ParseReference(i.Name)
	if img := d.catalog.Manifest(ref, i.Digest); img != nil {
		return img.Layers
	}
	if err != nil {
		return nil
	}
	return d.others(ctx, ref, i)
}

// Image implements checkpoint.Images.
func (d *documents) Image(ctx context.Context, ref string, target digest.Digest) *image.Image {
	return d.known(ctx, engine.ImageInfo{Name: ref, Digest: target})
}

// known is all that is known of an image, nil if its documents are not here.
func (d *documents) known(ctx context.Context, i engine.ImageInfo) *image.Image {
	ref, err := image.ParseReference(i.Name)
	if img := d.catalog.Manifest(ref, i.Digest); img != nil {
		return img
	}
	if err != nil {
		return nil
	}
	img, err := d.local.LocalImage(ctx, ref)
	if err != nil {
		return nil
	}
	return img
}

// others are the layers of an image that another client has brought.
func (d *documents) others(ctx context.Context, ref image.Reference, i engine.ImageInfo) []image.Layer {
	key := document{i.Name, i.Digest.String()}
	d.mu.Lock()
	l, ok := d.have[key]
	d.mu.Unlock()
	if ok && (l.layers != nil || time.Since(l.at) < documentsAgain) {
		return l.layers
	}
	answer := d.once.DoChan(key.name+"@"+key.digest, func() (any, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), documentsAsk)
		defer cancel()
		img, err := d.local.LocalImage(ctx, ref)
		if err != nil {
			img = new(image.Image)
		}
		d.mu.Lock()
		defer d.mu.Unlock()
		if d.have == nil {
			d.have = map[document]layersOf{}
		}
		d.have[key] = layersOf{img.Layers, time.Now()}
		return img.Layers, nil
	})
	select {
	case a := <-answer:
		return a.Val.([]image.Layer)
	case <-ctx.Done():
		return l.layers
	}
}

// keep forgets what is of no image that is listed.
func (d *documents) keep(listed []engine.ImageInfo) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for key := range d.have {
		if !slices.ContainsFunc(listed, func(i engine.ImageInfo) bool {
			return key == document{i.Name, i.Digest.String()}
		}) {
			delete(d.have, key)
		}
	}
}
