package server

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"dewpoint/internal/fetch"
	"dewpoint/internal/image"
	"dewpoint/internal/spec"

	"github.com/opencontainers/go-digest"
)

// failedLately is how long a read that failed is shown.
const failedLately = time.Minute

// reads are those of layers that are not whole, and fail when nothing comes.
type reads struct {
	puller  *fetch.Puller
	catalog *fetch.Catalog
	never   bool // layers are always whole
}

// mark says of those containers that run why reads of their images'
// layers have failed lately.
func (r *reads) mark(all []spec.Container) {
	failed := r.puller.FailedReads(time.Now().Add(-failedLately))
	if len(failed) == 0 {
		return
	}
	for i := range all {
		c := &all[i]
		if img := r.imageOf(c); img != nil && c.Status == spec.StatusRunning {
			ofImage := func(f fetch.FailedReads) bool { return img.HasLayer(f.Layer) }
			if at := slices.IndexFunc(failed, ofImage); at >= 0 {
				c.ReadError = cause(failed[at])
			}
		}
	}
}

// imageOf finds the documents of the image that a container was made of.
func (r *reads) imageOf(c *spec.Container) *image.Image {
	ref, err := image.ParseReference(c.Image)
	if err != nil {
		return nil
	}
	return r.catalog.Manifest(ref, digest.Digest(c.Digest))
}

func cause(f fetch.FailedReads) string {
	if f.Err == nil {
		return "nothing has come in time"
	}
	return f.Err.Error()
}

// findings says whether what containers read of images that are not whole comes.
func (r *reads) findings(context.Context) []spec.Finding {
	if r.never {
		return nil
	}
	failed := r.puller.FailedReads(time.Now().Add(-failedLately))
	if len(failed) == 0 {
		return []spec.Finding{{What: "lazy reads", Level: spec.LevelOK,
			Detail: "none has failed in the last minute"}}
	}
	var out []spec.Finding
	for _, f := range failed {
		what, hosts := r.readers(f.Layer)
		out = append(out, spec.Finding{What: "lazy reads", Level: spec.LevelBad,
			Detail: fmt.Sprintf("containers got I/O errors, for bytes of %s did not come, the last time %s ago: %s",
				what, time.Since(f.Last).Round(time.Second), cause(f)),
			Remedy: fmt.Sprintf("see that %s can be reached and lets this node read (\"dew pull\" of the image tells); what is read then comes, and a container that did not live with the error has to be started again", hosts)})
	}
	return out
}

// readers names the images that have a layer, and their registries.
func (r *reads) readers(id digest.Digest) (images, hosts string) {
	var names, from []string
	for _, img := range r.catalog.WithLayer(id) {
		names, from = append(names, img.Ref.String()), append(from, img.Ref.Host)
	}
	slices.Sort(from)
	from = slices.Compact(from)
	if len(names) == 0 {
		return "layer " + id.String(), "its registry"
	}
	return strings.Join(names, ", "), "the registry " + strings.Join(from, ", ")
}
