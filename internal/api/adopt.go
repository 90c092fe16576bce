package api

import (
	"context"

	"connectrpc.com/connect"

	pb "dewpoint/internal/api/gen/dewpoint/v1"
	"dewpoint/internal/spec"
)

func (h *handler) Adopt(ctx context.Context, req *connect.Request[pb.AdoptRequest],
	stream *connect.ServerStream[pb.AdoptResponse]) error {
	if err := stream.Send(nil); err != nil { // an image may take long
		return err
	}
	return h.fail(ctx, h.node.Adopt(ctx, req.Msg.Images, req.Msg.Dry, func(a spec.Adoption) error {
		return stream.Send(&pb.AdoptResponse{Image: a.Image, Digest: a.Digest, Namespaces: a.Namespaces,
			State: a.State, Here: a.Here, Store: a.Store, Link: a.Link, Disk: a.Disk, Done: a.Done, Error: a.Error})
	}))
}

// Adopt implements Images.
func (c *Client) Adopt(ctx context.Context, images []string, dry bool, emit func(spec.Adoption) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.rpc.Adopt(ctx, connect.NewRequest(&pb.AdoptRequest{Images: images, Dry: dry}))
	if err != nil {
		return c.problem(ctx, err)
	}
	defer stream.Close()
	for stream.Receive() {
		a := stream.Msg()
		err := emit(spec.Adoption{Image: a.Image, Digest: a.Digest, Namespaces: a.Namespaces, State: a.State,
			Here: a.Here, Store: a.Store, Link: a.Link, Disk: a.Disk, Done: a.Done, Error: a.Error})
		if err != nil {
			return err
		}
	}
	return c.problem(ctx, stream.Err())
}
