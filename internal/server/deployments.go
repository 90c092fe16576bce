package server

import (
	"context"
	"fmt"

	"dewpoint/internal/deploy"
	"dewpoint/internal/spec"
)

// deployments implements api.Deployer and api.Deployments.
type deployments struct {
	deployer *deploy.Deployer
	queue    *deploy.Queue
	news     *news
	mount    string // the mount backend
}

// fits refuses what this dewd was not started for.
func (d *deployments) fits(req spec.Request) error {
	if req.Mount != "" && req.Mount != d.mount {
		return fmt.Errorf("%w: mount %s: this dewd mounts by %s; start it with node.mount = %q",
			deploy.ErrRequest, req.Mount, d.mount, req.Mount)
	}
	return nil
}

// Deploy implements api.Deployer.
func (d *deployments) Deploy(ctx context.Context, req spec.Request, w spec.Watch) (spec.Record, error) {
	if err := d.fits(req); err != nil {
		return spec.Record{}, err
	}
	return d.queue.Deploy(ctx, req, w)
}

// DeployMany implements api.Deployments.
func (d *deployments) DeployMany(ctx context.Context, m spec.Many, w spec.ManyWatch) error {
	for _, r := range m.Requests {
		if err := d.fits(r); err != nil {
			return err
		}
	}
	return d.queue.Many(ctx, m, w)
}

// ListDeployments implements api.Deployments.
func (d *deployments) ListDeployments(_ context.Context, q spec.DeploymentQuery) ([]spec.Deployment, error) {
	return d.queue.List(q), nil
}

// WatchDeployment implements api.Deployments.
func (d *deployments) WatchDeployment(ctx context.Context, ref spec.DeploymentRef, w spec.Watch) (spec.Record,
	error) {
	return d.queue.Watch(ctx, ref, w)
}

// CancelDeployment implements api.Deployments.
func (d *deployments) CancelDeployment(ctx context.Context, ref spec.DeploymentRef) (spec.Deployment, error) {
	return d.queue.Cancel(ctx, ref)
}

// Pull implements api.Deployer.
func (d *deployments) Pull(ctx context.Context, req spec.PullRequest, w spec.Watch) (spec.Record, error) {
	return d.deployer.Pull(ctx, req, d.news.watched(req.Image, w))
}
