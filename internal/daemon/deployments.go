package daemon

import (
	"context"

	"dewpoint/internal/api"
	"dewpoint/internal/node"
)

var errNotYet = api.New(api.Unsupported, "this dewd keeps no account of deployments")

// DeployMany implements api.Deployments.
func (d *Daemon) DeployMany(context.Context, node.Many, node.ManyWatch) error { return errNotYet }

// ListDeployments implements api.Deployments.
func (d *Daemon) ListDeployments(context.Context, node.DeploymentQuery) ([]node.Deployment, error) {
	return nil, errNotYet
}

// WatchDeployment implements api.Deployments.
func (d *Daemon) WatchDeployment(context.Context, node.DeploymentRef, node.Watch) (node.Record, error) {
	return node.Record{}, errNotYet
}

// CancelDeployment implements api.Deployments.
func (d *Daemon) CancelDeployment(context.Context, node.DeploymentRef) (node.Deployment, error) {
	return node.Deployment{}, errNotYet
}

// Inspect implements api.Containers.
func (d *Daemon) Inspect(ctx context.Context, name string) (node.Inspection, error) {
	i, err := d.engine.Inspect(ctx, name)
	if err != nil {
		return node.Inspection{}, err
	}
	list := []node.Container{d.container(i)}
	d.markFailedReads(list)
	out := node.Inspection{Container: list[0]}
	oci, err := d.engine.OCI(ctx, name)
	out.OCI = string(oci)
	return out, err
}
