package engine

import (
	"context"
	"fmt"

	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	leasesapi "github.com/containerd/containerd/api/services/leases/v1"
	"github.com/opencontainers/go-digest"
	specs "github.com/opencontainers/runtime-spec/specs-go"

	"dewpoint/internal/engine/account"
	"dewpoint/internal/image"
)

// labelDiffID tells a snapshotter which layer a chain ends in that no image has.
const labelDiffID = "containerd.io/snapshot/diff-id"

// Plan is the specification that Create would give a container, but for its user.
func (e *containers) Plan(s Spec) (*specs.Spec, error) {
	if err := s.validate(); err != nil {
		return nil, err
	}
	return e.cfg.ociSpec(&s, account.User{})
}

// SpecOf is the specification of a container that is there.
func (e *containers) SpecOf(ctx context.Context, name string) (*specs.Spec, error) {
	r, err := e.c.Containers.Get(ctx, &containersapi.GetContainerRequest{ID: name})
	if err != nil {
		return nil, fmt.Errorf("container %s: %w", name, notFound(err))
	}
	return parseSpec(r.Container.Spec)
}

// Extend has the snapshotter show a registered image with one more layer on
// top, which it must have, and keeps that until release is called: a container
// that is made meanwhile keeps it from then on.
func (e *images) Extend(ctx context.Context, img *image.Image, layer digest.Digest) (release func(),
	err error) {
	id, ctx, release, err := e.lease(ctx)
	if err != nil {
		return nil, err
	}
	top := &Spec{Image: img, Restore: &Restore{Upper: layer}}
	chain := top.parent()
	// What is there already may be about to be collected: from here on it is not.
	_, err = e.c.Leases.AddResource(ctx, &leasesapi.AddResourceRequest{ID: id,
		Resource: &leasesapi.Resource{ID: chain, Type: "snapshots/" + e.cfg.Snapshotter}})
	if err != nil {
		release()
		return nil, fmt.Errorf("keep the layer %s: %w", layer, err)
	}
	if e.hasSnapshot(ctx, chain) {
		return release, nil
	}
	labels := map[string]string{labelRef: chain, labelDiffID: layer.String()}
	if err := e.prepareLayer(ctx, chain, ChainID(img), labels); err != nil {
		release()
		return nil, fmt.Errorf("layer %s on image %s: %w", layer, img.Ref, err)
	}
	return release, nil
}
