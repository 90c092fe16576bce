package server

import (
	"context"
	"fmt"
	"path/filepath"

	"dewpoint/internal/deploy"
	"dewpoint/internal/spec"
)

// openDesk takes up what an earlier daemon had accepted.
func (d *Daemon) openDesk(ctx context.Context) error {
	var err error
	d.desk, err = deploy.NewDesk(deploy.DeskConfig{Deployer: d.deployer,
		Path: filepath.Join(d.cfg.Root, "deployments"), Log: d.log,
		Failure: func(err error) *spec.Failure { return classify(err).Failure() },
		Reached: func(p spec.Deployment, stage string, at float64) {
			d.events.add(spec.Event{Kind: spec.EventStage, Name: p.Name, Image: p.Image, Stage: stage, At: at})
		}})
	if err != nil {
		return err
	}
	d.startAbandoned(ctx, d.desk.Unended())
	return d.desk.Recover(ctx)
}

// fits refuses what this dewd was not started for.
func (d *Daemon) fits(req spec.Request) error {
	if req.Mount != "" && req.Mount != d.backend.Name() {
		return fmt.Errorf("%w: --mount %s: this dewd mounts by %s; start it with node.mount = %q",
			deploy.ErrRequest, req.Mount, d.backend.Name(), req.Mount)
	}
	return nil
}

// Deploy implements api.Deployer.
func (d *Daemon) Deploy(ctx context.Context, req spec.Request, w spec.Watch) (spec.Record, error) {
	if err := d.fits(req); err != nil {
		return spec.Record{}, err
	}
	return d.desk.Deploy(ctx, req, w)
}

// DeployMany implements api.Deployments.
func (d *Daemon) DeployMany(ctx context.Context, m spec.Many, w spec.ManyWatch) error {
	for _, r := range m.Requests {
		if err := d.fits(r); err != nil {
			return err
		}
	}
	return d.desk.Many(ctx, m, w)
}

// ListDeployments implements api.Deployments.
func (d *Daemon) ListDeployments(_ context.Context, q spec.DeploymentQuery) ([]spec.Deployment, error) {
	return d.desk.List(q), nil
}

// WatchDeployment implements api.Deployments.
func (d *Daemon) WatchDeployment(ctx context.Context, ref spec.DeploymentRef, w spec.Watch) (spec.Record,
	error) {
	return d.desk.Watch(ctx, ref, w)
}

// CancelDeployment implements api.Deployments.
func (d *Daemon) CancelDeployment(ctx context.Context, ref spec.DeploymentRef) (spec.Deployment, error) {
	return d.desk.Cancel(ctx, ref)
}

// Inspect implements api.Containers.
func (d *Daemon) Inspect(ctx context.Context, name string) (spec.Inspection, error) {
	i, err := d.engine.Inspect(ctx, name)
	if err != nil {
		return spec.Inspection{}, err
	}
	list := []spec.Container{d.container(i)}
	d.markFailedReads(list)
	out := spec.Inspection{Container: list[0]}
	out.Request, out.Record = d.desk.Of(i.Labels)
	oci, err := d.engine.OCI(ctx, name)
	out.OCI = string(oci)
	return out, err
}
