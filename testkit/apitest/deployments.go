package apitest

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"dewpoint/internal/api"
	"dewpoint/internal/spec"
)

// deployment is one that was accepted.
type deployment struct {
	spec.Deployment
	cancel context.CancelCauseFunc
}

// accept enters a deployment into the book. It is called with mu held.
func (n *Node) accept(req spec.Request, cancel context.CancelCauseFunc) *deployment {
	n.made++
	d := &deployment{cancel: cancel,
		Deployment: spec.Deployment{ID: fmt.Sprintf("d%04d", n.made),
			Name:  cmp.Or(req.Name, fmt.Sprintf("dew-%d", n.made)),
			Image: req.Image, Caller: req.Terms.Caller, Key: req.Terms.Key, State: spec.StateQueued,
			Waits: spec.WaitsTurn, Asked: time.Now(), Detached: req.Terms.Detach}}
	n.deployments = append(n.deployments, d)
	return d
}

// DeployMany implements api.Deployments. Parallel bounds it, 4 if it is 0.
func (n *Node) DeployMany(ctx context.Context, m spec.Many, w spec.ManyWatch) error {
	now, after := n.fault("DeployMany")
	if now != nil {
		return now
	}
	all, err := m.All()
	if err != nil {
		return err
	}
	life := ctx
	if m.Terms.Detach {
		life = context.WithoutCancel(ctx)
	}
	turns := make(chan struct{}, cmp.Or(m.Parallel, 4))
	var g sync.WaitGroup
	for i, req := range all {
		watch := w.Watch(i)
		one, cancel := context.WithCancelCause(life)
		unlock := n.lock()
		d := n.accept(req, cancel)
		d.Position = i + 1
		unlock()
		watch.Deployment(n.stand(d))
		run := func() {
			r, f := n.carry(one, turns, d, req, watch)
			w.Ended(i, r, f)
			cancel(nil)
		}
		if m.Terms.Detach {
			n.processes.Go(run)
		} else {
			g.Go(run)
		}
	}
	g.Wait()
	return after
}

// carry deploys when it is a deployment's turn.
func (n *Node) carry(ctx context.Context, turns chan struct{}, d *deployment, req spec.Request,
	w spec.Watch) (r spec.Record, f *spec.Failure) {
	defer func() { n.over(ctx, d, r, f); w.Deployment(n.stand(d)) }()
	select {
	case turns <- struct{}{}:
		defer func() { <-turns }()
	case <-ctx.Done():
		return r, api.Classify(context.Cause(ctx)).Failure()
	}
	unlock := n.lock()
	d.State, d.Position, d.Waits = spec.StateDeploying, 0, ""
	unlock()
	w.Deployment(n.stand(d))
	req.Name = d.Name
	r, err := n.deploy(ctx, req, w)
	if r.ID = d.ID; err != nil {
		f = api.Classify(err).Failure()
	}
	return r, f
}

func (n *Node) stand(d *deployment) spec.Deployment {
	defer n.lock()()
	return d.Deployment
}

func (n *Node) over(ctx context.Context, d *deployment, r spec.Record, f *spec.Failure) {
	defer n.lock()()
	d.State, d.Ended, d.Failure, d.Position, d.Waits = spec.StateDone, time.Now(), f, 0, ""
	if f != nil {
		d.State = spec.StateFailed
		if ctx.Err() != nil {
			d.State = spec.StateCanceled
		}
	}
	if r.Image != "" {
		d.Record = &r
	}
}

// ListDeployments implements api.Deployments.
func (n *Node) ListDeployments(_ context.Context, q spec.DeploymentQuery) ([]spec.Deployment, error) {
	if now, _ := n.fault("ListDeployments"); now != nil {
		return nil, now
	}
	defer n.lock()()
	var out []spec.Deployment
	left := cmp.Or(q.Limit, 100)
	for _, d := range slices.Backward(n.deployments) {
		if d.Over() {
			if left--; !q.All || left < 0 {
				continue
			}
		}
		out = append(out, d.Deployment)
	}
	slices.Reverse(out)
	return out, nil
}

// named is called with mu held.
func (n *Node) named(ref spec.DeploymentRef) (*deployment, error) {
	for _, d := range slices.Backward(n.deployments) {
		if d.ID == ref.ID || ref.ID == "" && d.Key == ref.Key && d.Caller == ref.Caller {
			return d, nil
		}
	}
	return nil, api.New(api.NotFound, fmt.Sprintf("there is no deployment %s", cmp.Or(ref.ID, ref.Key)))
}

// WatchDeployment implements api.Deployments. It tells of no stages.
func (n *Node) WatchDeployment(ctx context.Context, ref spec.DeploymentRef, w spec.Watch) (spec.Record,
	error) {
	if now, _ := n.fault("WatchDeployment"); now != nil {
		return spec.Record{}, now
	}
	unlock := n.lock()
	d, err := n.named(ref)
	unlock()
	if err != nil {
		return spec.Record{}, err
	}
	w.Deployment(n.stand(d))
	if err := n.await(ctx, func() bool { return d.Over() }); err != nil {
		return spec.Record{}, err
	}
	last := n.stand(d)
	w.Deployment(last)
	var r spec.Record
	if last.Record != nil {
		r = *last.Record
	}
	if last.Failure != nil {
		return r, last.Failure
	}
	return r, nil
}

// CancelDeployment implements api.Deployments.
func (n *Node) CancelDeployment(ctx context.Context, ref spec.DeploymentRef) (spec.Deployment, error) {
	now, after := n.fault("CancelDeployment")
	if now != nil {
		return spec.Deployment{}, now
	}
	unlock := n.lock()
	d, err := n.named(ref)
	unlock()
	if err != nil {
		return spec.Deployment{}, err
	}
	if ref.Caller != "" && d.Caller != ref.Caller {
		return spec.Deployment{}, api.New(api.Permission, "the deployment is another's")
	}
	d.cancel(api.New(api.Canceled, "the deployment was canceled"))
	if err := n.await(ctx, func() bool { return d.Over() }); err != nil {
		return spec.Deployment{}, err
	}
	return n.stand(d), after
}

// Inspect implements api.Containers.
func (n *Node) Inspect(_ context.Context, name string) (spec.Inspection, error) {
	if now, _ := n.fault("Inspect"); now != nil {
		return spec.Inspection{}, now
	}
	defer n.lock()()
	c, err := n.find(name)
	if err != nil {
		return spec.Inspection{}, err
	}
	req := c.req
	i := spec.Inspection{Container: c.Container, Request: &req, OCI: `{"ociVersion":"1.2.0"}`}
	for _, d := range n.deployments {
		if d.Name == name && d.Record != nil {
			r := *d.Record
			r.Stages = maps.Clone(r.Stages)
			i.Record = &r
		}
	}
	return i, nil
}
