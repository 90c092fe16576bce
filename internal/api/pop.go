package api

import (
	"context"

	"connectrpc.com/connect"

	pb "dewpoint/internal/api/gen/dewpoint/v1"
	"dewpoint/internal/spec"
)

func (h *handler) PoPStatus(ctx context.Context,
	_ *connect.Request[pb.PoPStatusRequest]) (*connect.Response[pb.PoPStatusResponse], error) {
	return answer(ctx, h, shortCall, func(ctx context.Context) (*pb.PoPStatusResponse, error) {
		p, err := h.node.PoPStatus(ctx)
		return &pb.PoPStatusResponse{Pop: popOf(p)}, err
	})
}

func (h *handler) PoPVerify(ctx context.Context, req *connect.Request[pb.PoPVerifyRequest],
	stream *connect.ServerStream[pb.PoPVerifyResponse]) error {
	if err := stream.Send(nil); err != nil { // a layer may take long
		return err
	}
	return h.fail(ctx, h.node.PoPVerify(ctx, req.Msg.Layers, func(v spec.PoPVerified) error {
		return stream.Send(popVerifiedOf(v))
	}))
}

func (h *handler) PoPForget(ctx context.Context,
	req *connect.Request[pb.PoPForgetRequest]) (*connect.Response[pb.PoPForgetResponse], error) {
	if err := named("node", req.Msg.Node); err != nil {
		return nil, err
	}
	return answer(ctx, h, longCall, func(ctx context.Context) (*pb.PoPForgetResponse, error) {
		return &pb.PoPForgetResponse{}, h.node.PoPForget(ctx, req.Msg.Node)
	})
}

// PoPStatus implements PoPs.
func (c *Client) PoPStatus(ctx context.Context) (spec.PoP, error) {
	r, err := call(ctx, c.conn, c.rpc.PoPStatus, &pb.PoPStatusRequest{})
	return popFrom(r.Pop), err
}

// PoPVerify implements PoPs.
func (c *Client) PoPVerify(ctx context.Context, layers []string, emit func(spec.PoPVerified) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.rpc.PoPVerify(ctx, connect.NewRequest(&pb.PoPVerifyRequest{Layers: layers}))
	if err != nil {
		return c.problem(ctx, err)
	}
	defer stream.Close()
	for stream.Receive() {
		if err := emit(popVerifiedFrom(stream.Msg())); err != nil {
			return err
		}
	}
	return c.problem(ctx, stream.Err())
}

// PoPForget implements PoPs.
func (c *Client) PoPForget(ctx context.Context, name string) error {
	_, err := c.rpc.PoPForget(ctx, connect.NewRequest(&pb.PoPForgetRequest{Node: name}))
	return c.problem(ctx, err)
}

func popOf(p spec.PoP) *pb.PoP {
	s, c := p.Store, p.Coordinator
	return &pb.PoP{
		Name: p.Name, Node: p.Node, Nodes: each(p.Nodes, popNodeOf), Layers: each(p.Layers, popLayerOf),
		Store: &pb.PoP_Store{Path: s.Path, Id: s.ID, State: s.State, Why: s.Why, Total: s.Total, Free: s.Free,
			Bytes: s.Bytes, Trash: s.Trash, Capacity: s.Capacity, Quotas: each(s.Quotas, popQuotaOf)},
		Coordinator: &pb.PoP_Coordinator{Kind: c.Kind, State: c.State, Why: c.Why},
	}
}

func popFrom(p *pb.PoP) spec.PoP {
	s, c := p.GetStore(), p.GetCoordinator()
	return spec.PoP{
		Name: p.GetName(), Node: p.GetNode(), Nodes: array(each(p.GetNodes(), popNodeFrom)),
		Layers: array(each(p.GetLayers(), popLayerFrom)),
		Store: spec.PoPStore{Path: s.GetPath(), ID: s.GetId(), State: s.GetState(), Why: s.GetWhy(),
			Total: s.GetTotal(), Free: s.GetFree(), Bytes: s.GetBytes(), Trash: s.GetTrash(),
			Capacity: s.GetCapacity(), Quotas: each(s.GetQuotas(), popQuotaFrom)},
		Coordinator: spec.PoPCoordinator{Kind: c.GetKind(), State: c.GetState(), Why: c.GetWhy()},
	}
}

func popQuotaOf(q spec.PoPQuota) *pb.PoP_Quota {
	return &pb.PoP_Quota{Prefix: q.Prefix, Bytes: q.Bytes, Most: q.Most}
}

func popQuotaFrom(q *pb.PoP_Quota) spec.PoPQuota {
	return spec.PoPQuota{Prefix: q.GetPrefix(), Bytes: q.GetBytes(), Most: q.GetMost()}
}

// array is never nil, so that its JSON is an array.
func array[T any](in []T) []T {
	if in == nil {
		return []T{}
	}
	return in
}

func popNodeOf(n spec.PoPNode) *pb.PoP_Node {
	return &pb.PoP_Node{
		Name: n.Name, Address: n.Address, Cache: n.Cache, Local: popHitsOf(n.Local), Store: popHitsOf(n.Store),
		Capacity: n.Capacity, Peer: popHitsOf(n.Peer), Registry: popHitsOf(n.Registry),
		Fetching: each(n.Fetching, popFetchOf),
	}
}

func popNodeFrom(n *pb.PoP_Node) spec.PoPNode {
	return spec.PoPNode{
		Name: n.GetName(), Address: n.GetAddress(), Cache: n.GetCache(), Local: popHitsFrom(n.GetLocal()),
		Store:    popHitsFrom(n.GetStore()),
		Capacity: n.GetCapacity(), Peer: popHitsFrom(n.GetPeer()), Registry: popHitsFrom(n.GetRegistry()),
		Fetching: each(n.GetFetching(), popFetchFrom),
	}
}

func popHitsOf(h spec.PoPHits) *pb.PoP_Hits { return &pb.PoP_Hits{Layers: h.Layers, Bytes: h.Bytes} }

func popHitsFrom(h *pb.PoP_Hits) spec.PoPHits {
	return spec.PoPHits{Layers: h.GetLayers(), Bytes: h.GetBytes()}
}

func popFetchOf(f spec.PoPFetch) *pb.PoP_Fetch {
	return &pb.PoP_Fetch{Layer: f.Layer, Done: f.Done, Size: f.Size}
}

func popFetchFrom(f *pb.PoP_Fetch) spec.PoPFetch {
	return spec.PoPFetch{Layer: f.GetLayer(), Done: f.GetDone(), Size: f.GetSize()}
}

func popLayerOf(l spec.PoPLayer) *pb.PoP_Layer {
	return &pb.PoP_Layer{DiffId: l.DiffID, Size: l.Size, BlobSize: l.BlobSize, Image: l.Image, Node: l.Node,
		Users: l.Users}
}

func popLayerFrom(l *pb.PoP_Layer) spec.PoPLayer {
	return spec.PoPLayer{DiffID: l.GetDiffId(), Size: l.GetSize(), BlobSize: l.GetBlobSize(),
		Image: l.GetImage(), Node: l.GetNode(), Users: l.GetUsers()}
}

func popVerifiedOf(v spec.PoPVerified) *pb.PoPVerifyResponse {
	return &pb.PoPVerifyResponse{DiffId: v.DiffID, Image: v.Image, Size: v.Size, State: v.State, Error: v.Error}
}

func popVerifiedFrom(v *pb.PoPVerifyResponse) spec.PoPVerified {
	return spec.PoPVerified{DiffID: v.GetDiffId(), Image: v.GetImage(), Size: v.GetSize(), State: v.GetState(),
		Error: v.GetError()}
}

func pruneOf(o spec.PruneOptions) *pb.PruneRequest {
	return &pb.PruneRequest{Images: o.Images, Pop: o.PoP}
}

func pruneFrom(r *pb.PruneRequest) spec.PruneOptions {
	return spec.PruneOptions{Images: r.GetImages(), PoP: r.GetPop()}
}

func prunedOf(r spec.PruneReport) *pb.PruneResponse {
	return &pb.PruneResponse{Images: r.Images, Layers: r.Layers, Bytes: r.Bytes, PopLayers: r.PoPLayers,
		PopBytes: r.PoPBytes, PopWhy: r.PoPWhy, Checkpoints: r.Checkpoints}
}

func prunedFrom(r *pb.PruneResponse) spec.PruneReport {
	return spec.PruneReport{Images: r.GetImages(), Layers: r.GetLayers(), Bytes: r.GetBytes(),
		PoPLayers: r.GetPopLayers(), PoPBytes: r.GetPopBytes(), PoPWhy: r.GetPopWhy(),
		Checkpoints: r.GetCheckpoints()}
}
