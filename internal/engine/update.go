package engine

import (
	"context"
	"errors"
	"fmt"

	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	tasksapi "github.com/containerd/containerd/api/services/tasks/v1"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/types/known/anypb"

	"dewpoint/internal/engine/limits"
)

// Limit changes the limits of a container for good, and at once if it runs. On an error they are as before.
// What it takes above a limit may end it.
func (e *containers) Limit(ctx context.Context, id string, change func(*limits.Limits)) error {
	defer e.change(Name(id))()
	running := e.ended(ctx, id)
	if running != nil && !errors.Is(running, ErrRunning) {
		return running
	}
	o, err := e.SpecOf(ctx, Name(id))
	if err != nil {
		return err
	}
	to, back := limits.Change(o.Linux.Resources, change)
	apply := func(r *specs.LinuxResources) error {
		a, err := jsonAny("LinuxResources", r)
		if err == nil && running != nil {
			_, err = e.c.Tasks.Update(ctx, &tasksapi.UpdateTaskRequest{ContainerID: Name(id), Resources: a})
		}
		return err
	}
	if err = apply(to); err == nil {
		var s *anypb.Any
		if s, err = jsonAny("Spec", o); err == nil {
			_, err = e.c.Containers.Update(ctx, &containersapi.UpdateContainerRequest{UpdateMask: fieldMask([]string{"spec"}),
				Container: &containersapi.Container{ID: Name(id), Spec: s}})
		}
	}
	if err != nil {
		ctx = context.WithoutCancel(ctx)
		err = fmt.Errorf("change the limits of container %s: %w", Name(id), errors.Join(err, apply(back)))
	}
	return err
}
