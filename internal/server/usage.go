package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"dewpoint/internal/checkpoint"
	"dewpoint/internal/engine"
	"dewpoint/internal/fetch"
	"dewpoint/internal/image"
	"dewpoint/internal/snapshot"
	"dewpoint/internal/spec"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
)

// usage knows what of images and layers this node uses, and lets go of what it does not. The puller asks it
// before it removes anything. As long as a part is not there, all is in use. It is safe for concurrent use.
type usage struct {
	engine      *late[*engine.Engine]
	snaps       *late[*snapshot.Snapshotter]
	checkpoints *late[*checkpoint.Manager] // of nil if there are to be none
	catalog     *fetch.Catalog
	events      *events
	log         *slog.Logger
}

var errImageInUse = errors.New("containers use it")

// inUse reports whether a snapshot or a checkpoint stands on a layer.
func (u *usage) inUse(id digest.Digest) bool {
	snaps, ok := u.snaps.get()
	return !ok || snaps.InUse()[id] || u.saved(id)
}

// saved reports whether a checkpoint stands on a layer.
func (u *usage) saved(id digest.Digest) bool {
	checkpoints, ok := u.checkpoints.get()
	return !ok || checkpoints != nil && checkpoints.Holds(id)
}

// users names the containers of an image.
func users(ctx context.Context, e *engine.Engine, ref string) ([]string, error) {
	all, err := e.List(ctx)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, c := range all {
		if c.Image == ref {
			names = append(names, c.Name)
		}
	}
	return names, nil
}

// unused is an error if containers use an image.
func unused(ctx context.Context, e *engine.Engine, ref image.Reference) error {
	names, err := users(ctx, e, ref.String())
	if err == nil && len(names) > 0 {
		err = fmt.Errorf("image %s: %w: %v", ref, errImageInUse, names)
	}
	return err
}

// containerdImages are fetch's Images.
type containerdImages struct{ *usage }

// Idle has the images of containerd, and whether they may go when the disk needs room: dewd has
// registered them, and no container has them.
func (u containerdImages) Idle() (map[string]bool, error) {
	e, ok := u.engine.get()
	if !ok {
		return nil, nil
	}
	ctx := context.Background() // both answer from memory
	images, err := e.Images(ctx)
	if err != nil {
		return nil, err
	}
	containers, err := e.List(ctx)
	if err != nil {
		return nil, err
	}
	idle := make(map[string]bool, len(images))
	for _, i := range images {
		idle[i.Name] = i.Own()
	}
	for _, c := range containers {
		if idle[c.Image] {
			idle[c.Image] = false
		}
	}
	return idle, nil
}

// Remove has containerd forget images that no container has, and collect what only they needed.
func (u containerdImages) Remove(ctx context.Context, refs []image.Reference) error {
	e, err := u.engine.wait(ctx)
	if err != nil {
		return err
	}
	var errs error
	gone := false
	for _, ref := range refs {
		err := unused(ctx, e, ref)
		if err == nil {
			err = e.RemoveImage(ctx, ref.String(), false)
		}
		if errors.Is(err, errImageInUse) || errdefs.IsNotFound(err) { // by now; somebody else has
			continue
		}
		if errs = errors.Join(errs, err); err == nil {
			gone = true
			u.log.Info("image removed: nothing uses it, and the cache is full", "image", ref)
			u.events.add(spec.Event{Kind: spec.EventDeleted, Image: ref.String()})
		}
	}
	if gone {
		errs = errors.Join(errs, e.Collect(ctx))
	}
	return errs
}

// Register makes an image known to containerd, whose layers are attached.
func (u *usage) Register(ctx context.Context, img *image.Image) error {
	e, err := u.engine.wait(ctx)
	if err != nil {
		return err
	}
	return e.Register(ctx, img, nil)
}

// Forget forgets an image, unless a container uses it.
func (u *usage) Forget(ctx context.Context, ref image.Reference) error {
	e, err := u.engine.wait(ctx)
	if err != nil {
		return err
	}
	if err := unused(ctx, e, ref); err != nil {
		return err
	}
	err = e.RemoveImage(ctx, ref.String(), false)
	if errdefs.IsNotFound(err) { // it was being prewarmed, or somebody removed it
		err = nil
	}
	return errors.Join(err, u.catalog.Forget(ref))
}

// Unmount unmounts layers that nothing needs mounted, and returns the others.
func (u *usage) Unmount(ctx context.Context, ids ...digest.Digest) (busy []digest.Digest, err error) {
	snaps, err := u.snaps.wait(ctx)
	if err != nil {
		return ids, err
	}
	var free []digest.Digest
	for _, id := range ids {
		if u.saved(id) {
			busy = append(busy, id)
		} else {
			free = append(free, id)
		}
	}
	mounted, err := snaps.Deactivate(ctx, free...)
	return append(busy, mounted...), err
}
