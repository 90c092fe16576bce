package engine

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containerd/containerd/api/types"

	"dewpoint/internal/engine/account"
	"dewpoint/internal/engine/volumes"
	"dewpoint/internal/spec"
)

// Errors about named volumes.
var (
	ErrNoVolume   = volumes.ErrNotFound
	ErrVolumeUsed = volumes.ErrInUse
)

func (c *Config) volumesDir() string { return filepath.Join(c.Root, "volumes") }

// named are the names of the volumes that have one.
func (s *Spec) named() (names []string) {
	for _, v := range s.Volumes {
		if v.Named() && !slices.Contains(names, v.Source) {
			names = append(names, v.Source)
		}
	}
	return names
}

// makeSources makes the sources of volumes that are not there. Named ones begin with what the image has, and
// stay until release is called.
func (e *containers) makeSources(s *Spec, mounts []*types.Mount) (release func(), err error) {
	var held []func()
	release = func() {
		for _, r := range held {
			r()
		}
	}
	for _, v := range s.Volumes {
		var r func()
		if v.Named() {
			r, err = e.volumes.Use(v.Source, func(dir string) error {
				return account.Root(e.cfg.execDir(), mounts, func(root string) error {
					return volumes.FromImage(dir, root, v.Target)
				})
			})
		} else if _, serr := os.Stat(v.Source); errors.Is(serr, os.ErrNotExist) {
			err = os.MkdirAll(v.Source, 0o755)
		}
		if r != nil {
			held = append(held, r)
		}
		if err != nil {
			release()
			return nil, fmt.Errorf("volume: %w", err)
		}
	}
	return release, nil
}

// Volumes gives the named volumes.
func (e *containers) Volumes(ctx context.Context) ([]spec.VolumeInfo, error) {
	used, err := e.usedVolumes(ctx)
	if err != nil {
		return nil, err
	}
	return e.volumes.List(used)
}

// MakeVolume makes a named volume unless it is there.
func (e *containers) MakeVolume(name string) error { return e.volumes.Make(name) }

// RemoveVolume removes a volume that no container has, with what is in it. ErrNoVolume, ErrVolumeUsed.
func (e *containers) RemoveVolume(ctx context.Context, name string) error {
	return e.volumes.Remove(name, func() (map[string][]string, error) { return e.usedVolumes(ctx) })
}

// usedVolumes are the containers that have each volume, by its name.
func (e *containers) usedVolumes(ctx context.Context) (map[string][]string, error) {
	all, err := e.state.List(ctx)
	used := map[string][]string{}
	for _, i := range all {
		for _, name := range strings.Fields(i.Labels[labelVolumes]) {
			used[name] = append(used[name], i.Name)
		}
	}
	return used, err
}
