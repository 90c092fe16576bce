package server

import (
	"context"
	"errors"
	"fmt"

	"dewpoint/internal/adopt"
	"dewpoint/internal/deploy"
	"dewpoint/internal/engine"
	"dewpoint/internal/fetch"
	"dewpoint/internal/image"
	"dewpoint/internal/layer"
	"dewpoint/internal/spec"
)

// images implements api.Images.
type images struct {
	engine      *engine.Engine
	catalog     *fetch.Catalog
	layers      *layer.Store
	puller      *fetch.Puller
	documents   *documents
	usage       *usage
	reserve     reserve
	events      *events
	checkpoints *checkpoints
	pops        *pops
	adopter     *adopt.Adopter
}

// Images implements api.Images.
func (s *images) Images(ctx context.Context) ([]spec.Image, error) {
	infos, err := s.engine.Images(ctx)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, documentsWait)
	defer cancel()
	out := make([]spec.Image, 0, len(infos))
	for _, i := range infos {
		out = append(out, s.image(ctx, i))
	}
	s.documents.keep(infos)
	return out, nil
}

func (s *images) image(ctx context.Context, i engine.ImageInfo) spec.Image {
	out := spec.Image{Name: i.Name, Digest: i.Digest.String(), Created: i.Created, Layers: []spec.Layer{}}
	for _, l := range s.documents.layers(ctx, i) {
		n := spec.Layer{Digest: l.Digest.String(), DiffID: l.DiffID.String(), Size: l.Size, State: "absent"}
		if have, err := s.layers.Peek(l.DiffID); err == nil {
			n.Disk, n.State = have.DiskUse(), "verified"
			if have.Complete() {
				n.State = "complete"
			}
		}
		out.Size += n.Size
		out.Disk += n.Disk
		out.Layers = append(out.Layers, n)
	}
	return out
}

// RemoveImage implements api.Images.
func (s *images) RemoveImage(ctx context.Context, name string) error {
	ref, err := image.ParseReference(name)
	if err != nil {
		return fmt.Errorf("%w: %w", deploy.ErrRequest, err)
	}
	if err := unused(ctx, s.engine, ref); err != nil {
		return err
	}
	err = s.engine.RemoveImage(ctx, ref.String(), true)
	if err := errors.Join(err, s.catalog.Forget(ref)); err != nil {
		return err
	}
	s.events.add(spec.Event{Kind: spec.EventDeleted, Image: ref.String()})
	return nil
}

// Prune implements api.Images.
func (s *images) Prune(ctx context.Context, o spec.PruneOptions) (spec.PruneReport, error) {
	var r spec.PruneReport
	if err := s.reserve.use(); err != nil {
		return r, err
	}
	defer s.reserve.keep()
	if o.Images {
		infos, err := s.engine.Images(ctx)
		if err != nil {
			return r, err
		}
		for _, i := range infos {
			err := s.RemoveImage(ctx, i.Name)
			switch {
			case err == nil:
				r.Images = append(r.Images, i.Name)
			case !errors.Is(err, errImageInUse):
				return r, err
			}
		}
		if err := s.engine.Collect(ctx); err != nil {
			return r, err
		}
	}
	var err error
	if r.Checkpoints, err = s.checkpoints.prune(ctx); err != nil {
		return r, checkpointProblem(err)
	}
	freed, err := s.puller.Prune(ctx, s.usage.inUse)
	r.Layers, r.Bytes = freed.Layers, freed.Bytes
	if o.PoP && err == nil {
		err = s.pops.prune(ctx, s.usage, &r)
	}
	return r, err
}

// Adopt implements api.Images.
func (s *images) Adopt(ctx context.Context, names []string, dry bool, emit func(spec.Adoption) error) error {
	for _, n := range names {
		if _, err := image.ParseReference(n); err != nil {
			return fmt.Errorf("%w: %w", deploy.ErrRequest, err)
		}
	}
	return s.adopter.Adopt(ctx, names, dry, emit)
}

// Arriving implements web.Node.
func (s *images) Arriving(parts int) []spec.LayerMap { return s.puller.Arriving(parts) }
