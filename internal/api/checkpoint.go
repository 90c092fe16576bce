package api

import (
	"context"

	"connectrpc.com/connect"

	pb "dewpoint/internal/api/gen/dewpoint/v1"
	"dewpoint/internal/spec"
)

func (h *handler) Checkpoint(ctx context.Context,
	req *connect.Request[pb.CheckpointRequest]) (*connect.Response[pb.CheckpointResponse], error) {
	r := spec.CheckpointRequest{Name: req.Msg.Name, Share: req.Msg.Share, Stateful: req.Msg.Stateful,
		TCP: req.Msg.Tcp}
	if err := r.Validate(); err != nil {
		return nil, bad(err)
	}
	return answer(ctx, h, longCall, func(ctx context.Context) (*pb.CheckpointResponse, error) {
		c, err := h.node.Checkpoint(ctx, r)
		return &pb.CheckpointResponse{Checkpoint: checkpointOf(c)}, err
	})
}

func (h *handler) ListCheckpoints(ctx context.Context,
	req *connect.Request[pb.ListCheckpointsRequest]) (*connect.Response[pb.ListCheckpointsResponse], error) {
	return answer(ctx, h, shortCall, func(ctx context.Context) (*pb.ListCheckpointsResponse, error) {
		list, err := h.node.ListCheckpoints(ctx, req.Msg.Image)
		return &pb.ListCheckpointsResponse{Checkpoints: each(list, checkpointOf)}, err
	})
}

func (h *handler) RemoveCheckpoint(ctx context.Context,
	req *connect.Request[pb.RemoveCheckpointRequest]) (*connect.Response[pb.RemoveCheckpointResponse], error) {
	if err := named("checkpoint", req.Msg.Id); err != nil {
		return nil, err
	}
	return answer(ctx, h, longCall, func(ctx context.Context) (*pb.RemoveCheckpointResponse, error) {
		return &pb.RemoveCheckpointResponse{}, h.node.RemoveCheckpoint(ctx, req.Msg.Id)
	})
}

// Checkpoint implements Checkpoints.
func (c *Client) Checkpoint(ctx context.Context, r spec.CheckpointRequest) (spec.Checkpoint, error) {
	a, err := call(ctx, c.conn, c.rpc.Checkpoint,
		&pb.CheckpointRequest{Name: r.Name, Share: r.Share, Stateful: r.Stateful, Tcp: r.TCP})
	return checkpointFrom(a.Checkpoint), err
}

// ListCheckpoints implements Checkpoints.
func (c *Client) ListCheckpoints(ctx context.Context, image string) ([]spec.Checkpoint, error) {
	a, err := call(ctx, c.conn, c.rpc.ListCheckpoints, &pb.ListCheckpointsRequest{Image: image})
	return array(each(a.Checkpoints, checkpointFrom)), err
}

// RemoveCheckpoint implements Checkpoints.
func (c *Client) RemoveCheckpoint(ctx context.Context, id string) error {
	_, err := c.rpc.RemoveCheckpoint(ctx, connect.NewRequest(&pb.RemoveCheckpointRequest{Id: id}))
	return c.problem(ctx, err)
}

func checkpointOf(c spec.Checkpoint) *pb.Checkpoint {
	return &pb.Checkpoint{
		Id: c.ID, Image: c.Image, Digest: c.Digest, Args: c.Args, Created: timeOf(c.Created), Node: c.Node,
		Engine: c.Engine,
		Size:   c.Size, Pages: c.Pages, Upper: c.Upper, Boot: c.Boot, Restore: c.Restore, Paused: c.Paused,
		Stateful: c.Stateful, Owner: c.Owner, Where: c.Where, Unfit: c.Unfit, Differs: c.Differs,
	}
}

func checkpointFrom(c *pb.Checkpoint) spec.Checkpoint {
	return spec.Checkpoint{
		ID: c.GetId(), Image: c.GetImage(), Digest: c.GetDigest(), Args: c.GetArgs(),
		Created: timeFrom(c.GetCreated()), Node: c.GetNode(), Engine: c.GetEngine(),
		Size: c.GetSize(), Pages: c.GetPages(), Upper: c.GetUpper(), Boot: c.GetBoot(), Restore: c.GetRestore(),
		Paused:   c.GetPaused(),
		Stateful: c.GetStateful(), Owner: c.GetOwner(), Where: c.GetWhere(), Unfit: c.GetUnfit(),
		Differs: c.GetDiffers(),
	}
}
