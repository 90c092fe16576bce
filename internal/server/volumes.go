package server

import (
	"context"
	"fmt"

	"dewpoint/internal/deploy"
	"dewpoint/internal/engine"
	"dewpoint/internal/spec"
)

// volumes implements api.Volumes.
type volumes struct{ engine *engine.Engine }

// Volumes implements api.Volumes.
func (v *volumes) Volumes(ctx context.Context) ([]spec.VolumeInfo, error) {
	return v.engine.Volumes(ctx)
}

// MakeVolume implements api.Volumes.
func (v *volumes) MakeVolume(_ context.Context, name string) error {
	if !spec.ValidVolume(name) {
		return fmt.Errorf("%w: %q is not the name of a volume: want letters, digits, _, . and -",
			deploy.ErrRequest, name)
	}
	return v.engine.MakeVolume(name)
}

// RemoveVolume implements api.Volumes.
func (v *volumes) RemoveVolume(ctx context.Context, name string) error {
	return v.engine.RemoveVolume(ctx, name)
}
