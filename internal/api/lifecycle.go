package api

import (
	"context"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "dewpoint/internal/api/gen/dewpoint/v1"
	"dewpoint/internal/spec"
)

// act does something to the container that has a name now, and is the caller's.
func act[A any](ctx context.Context, h *handler, limit time.Duration, name string,
	f func(ctx context.Context, id string) error) (*connect.Response[A], error) {
	if err := named("container", name); err != nil {
		return nil, err
	}
	return answer(ctx, h, limit, func(ctx context.Context) (*A, error) {
		id, err := h.own(ctx, name)
		if err != nil {
			return nil, err
		}
		return new(A), f(ctx, id)
	})
}

// patience is how long a container may take to end; unset is DefaultTimeout.
func patience(d *durationpb.Duration) time.Duration {
	if d == nil {
		return DefaultTimeout
	}
	return max(0, d.AsDuration())
}

// patienceOf is the other way.
func patienceOf(d time.Duration) *durationpb.Duration {
	if d < 0 {
		return nil
	}
	return durationpb.New(d)
}

func (h *handler) Stop(ctx context.Context,
	req *connect.Request[pb.StopRequest]) (*connect.Response[pb.StopResponse], error) {
	timeout := patience(req.Msg.Timeout)
	return act[pb.StopResponse](ctx, h, longCall+max(0, timeout), req.Msg.Name,
		func(ctx context.Context, id string) error { return h.node.Stop(ctx, id, timeout) })
}

func (h *handler) Start(ctx context.Context,
	req *connect.Request[pb.StartRequest]) (*connect.Response[pb.StartResponse], error) {
	return act[pb.StartResponse](ctx, h, longCall, req.Msg.Name, h.node.Start)
}

func (h *handler) Restart(ctx context.Context,
	req *connect.Request[pb.RestartRequest]) (*connect.Response[pb.RestartResponse], error) {
	timeout := patience(req.Msg.Timeout)
	return act[pb.RestartResponse](ctx, h, longCall+max(0, timeout), req.Msg.Name,
		func(ctx context.Context, id string) error { return h.node.Restart(ctx, id, timeout) })
}

func (h *handler) Kill(ctx context.Context,
	req *connect.Request[pb.KillRequest]) (*connect.Response[pb.KillResponse], error) {
	return act[pb.KillResponse](ctx, h, longCall, req.Msg.Name,
		func(ctx context.Context, id string) error { return h.node.Kill(ctx, id, req.Msg.Signal) })
}

func (h *handler) Update(ctx context.Context,
	req *connect.Request[pb.UpdateRequest]) (*connect.Response[pb.UpdateResponse], error) {
	m := req.Msg
	return act[pb.UpdateResponse](ctx, h, longCall, m.Name, func(ctx context.Context, id string) error {
		return h.node.Update(ctx, id,
			spec.Update{Memory: m.Memory, CPUs: m.Cpus, Pids: m.PidsLimit, Restart: m.Restart})
	})
}

func (h *handler) Remove(ctx context.Context,
	req *connect.Request[pb.RemoveRequest]) (*connect.Response[pb.RemoveResponse], error) {
	return act[pb.RemoveResponse](ctx, h, longCall, req.Msg.Name,
		func(ctx context.Context, id string) error { return h.node.Remove(ctx, id, req.Msg.Force) })
}

// Stop implements Containers.
func (c lifecycle) Stop(ctx context.Context, name string, timeout time.Duration) error {
	_, err := c.rpc.Stop(ctx, connect.NewRequest(&pb.StopRequest{Name: name, Timeout: patienceOf(timeout)}))
	return c.problem(ctx, err)
}

// Start implements Containers.
func (c lifecycle) Start(ctx context.Context, name string) error {
	_, err := c.rpc.Start(ctx, connect.NewRequest(&pb.StartRequest{Name: name}))
	return c.problem(ctx, err)
}

// Restart implements Containers.
func (c lifecycle) Restart(ctx context.Context, name string, timeout time.Duration) error {
	_, err := c.rpc.Restart(ctx,
		connect.NewRequest(&pb.RestartRequest{Name: name, Timeout: patienceOf(timeout)}))
	return c.problem(ctx, err)
}

// Kill implements Containers.
func (c lifecycle) Kill(ctx context.Context, name, signal string) error {
	_, err := c.rpc.Kill(ctx, connect.NewRequest(&pb.KillRequest{Name: name, Signal: signal}))
	return c.problem(ctx, err)
}

// Update implements Containers.
func (c lifecycle) Update(ctx context.Context, name string, u spec.Update) error {
	_, err := c.rpc.Update(ctx, connect.NewRequest(
		&pb.UpdateRequest{Name: name, Memory: u.Memory, Cpus: u.CPUs, PidsLimit: u.Pids, Restart: u.Restart}))
	return c.problem(ctx, err)
}

// Remove implements Containers.
func (c lifecycle) Remove(ctx context.Context, name string, force bool) error {
	_, err := c.rpc.Remove(ctx, connect.NewRequest(&pb.RemoveRequest{Name: name, Force: force}))
	return c.problem(ctx, err)
}
