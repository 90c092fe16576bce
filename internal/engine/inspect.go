package engine

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	containersapi "github.com/containerd/containerd/api/services/containers/v1"
)

// OCI is the OCI runtime specification that a container was made with, JSON. While there
// is a task, containerd keeps it as a file beside that.
func (e *containers) OCI(ctx context.Context, id string) ([]byte, error) {
	name := Name(id)
	if ValidName(name) == nil {
		if b, err := os.ReadFile(filepath.Join(e.cfg.bundle(name), "config.json")); err == nil {
			return b, nil
		}
	}
	r, err := e.c.Containers.Get(ctx, &containersapi.GetContainerRequest{ID: name})
	if err != nil {
		return nil, fmt.Errorf("inspect container %s: %w", name, notFound(err))
	}
	return r.Container.GetSpec().GetValue(), nil
}

// TaskMade is when a container's present task was made, just before its processes were: by the clock that
// files have their times of. The zero time is that it is not known.
func (e *containers) TaskMade(name string) time.Time {
	fi, err := os.Stat(filepath.Join(e.cfg.bundle(name), "config.json"))
	if err != nil {
		return time.Time{}
	}
	return fi.ModTime()
}
