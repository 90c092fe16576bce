package server

import (
	"context"
	"slices"
	"sync"
	"time"

	"dewpoint/internal/engine"
	"dewpoint/internal/image"

	"golang.org/x/sync/singleflight"
)

const (
	documentsWait  = time.Second      // for all that a list of images has to ask containerd for
	documentsAsk   = 10 * time.Second // bounds one question
	documentsAgain = 10 * time.Second // until what was not there is asked for again
)

// foreignImages remembers the layers of images that other clients have brought to containerd, whose manifests
// take it several calls to find. An image's are asked for once; who asks meanwhile waits as long as he likes,
// the question goes on. It is safe for concurrent use.
type foreignImages struct {
	ask func(ctx context.Context, ref image.Reference) (*image.Image, error)

	once singleflight.Group
	mu   sync.Mutex
	have map[document]layersOf // guarded by mu
}

// document is an image as containerd lists it.
type document struct{ name, digest string }

type layersOf struct {
	layers []image.Layer // nil: its documents are not there
	at     time.Time
}

// layers are those of an image, nil if they are not known, or not yet.
func (d *foreignImages) layers(ctx context.Context, ref image.Reference, i engine.ImageInfo) []image.Layer {
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
		img, err := d.ask(ctx, ref)
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
func (d *foreignImages) keep(listed []engine.ImageInfo) {
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
