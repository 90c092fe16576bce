package api

import (
	"context"
	"strings"
	"time"

	"connectrpc.com/connect"

	pb "dewpoint/internal/api/gen/dewpoint/v1"
	"dewpoint/internal/spec"
)

// packCall is the deadline of what builds or sends a pack.
const packCall = time.Hour

func (h *handler) ProfileEnd(ctx context.Context,
	req *connect.Request[pb.ProfileEndRequest]) (*connect.Response[pb.ProfileEndResponse], error) {
	if err := named("container", req.Msg.Name); err != nil {
		return nil, err
	}
	return answer(ctx, h, longCall, func(ctx context.Context) (*pb.ProfileEndResponse, error) {
		p, err := h.node.ProfileEnd(ctx, profileEndFrom(req.Msg))
		return &pb.ProfileEndResponse{Profile: profileOf(p)}, err
	})
}

func (h *handler) PackBuild(ctx context.Context,
	req *connect.Request[pb.PackBuildRequest]) (*connect.Response[pb.PackBuildResponse], error) {
	if err := named("image", req.Msg.Image); err != nil {
		return nil, err
	}
	return answer(ctx, h, packCall, func(ctx context.Context) (*pb.PackBuildResponse, error) {
		p, err := h.node.PackBuild(ctx, req.Msg.Image)
		return &pb.PackBuildResponse{Pack: packOf(p)}, err
	})
}

func (h *handler) PackPush(ctx context.Context,
	req *connect.Request[pb.PackPushRequest]) (*connect.Response[pb.PackPushResponse], error) {
	if err := named("image", req.Msg.Image); err != nil {
		return nil, err
	}
	return answer(ctx, h, packCall, func(ctx context.Context) (*pb.PackPushResponse, error) {
		p, err := h.node.PackPush(ctx, packPushFrom(req.Msg))
		return packPushedOf(p), err
	})
}

func (h *handler) PackInspect(ctx context.Context,
	req *connect.Request[pb.PackInspectRequest]) (*connect.Response[pb.PackInspectResponse], error) {
	if err := named("image", req.Msg.Image); err != nil {
		return nil, err
	}
	return answer(ctx, h, longCall, func(ctx context.Context) (*pb.PackInspectResponse, error) {
		p, err := h.node.PackInspect(ctx, req.Msg.Image)
		return &pb.PackInspectResponse{Pack: packOf(p)}, err
	})
}

// ProfileEnd implements Packs.
func (c *Client) ProfileEnd(ctx context.Context, e spec.ProfileEnd) (spec.Profile, error) {
	r, err := call(ctx, c.conn, c.rpc.ProfileEnd, profileEndOf(e))
	return profileFrom(r.Profile), err
}

// PackBuild implements Packs.
func (c *Client) PackBuild(ctx context.Context, image string) (spec.Pack, error) {
	r, err := call(ctx, c.conn, c.rpc.PackBuild, &pb.PackBuildRequest{Image: image})
	return packFrom(r.Pack), err
}

// PackPush implements Packs.
func (c *Client) PackPush(ctx context.Context, p spec.PackPush) (spec.PackPushed, error) {
	r, err := call(ctx, c.conn, c.rpc.PackPush, packPushOf(p))
	return packPushedFrom(r), err
}

// PackInspect implements Packs.
func (c *Client) PackInspect(ctx context.Context, image string) (spec.Pack, error) {
	r, err := call(ctx, c.conn, c.rpc.PackInspect, &pb.PackInspectRequest{Image: image})
	return packFrom(r.Pack), err
}

func profileEndOf(e spec.ProfileEnd) *pb.ProfileEndRequest {
	return &pb.ProfileEndRequest{Name: e.Name, Discard: e.Discard, Merge: e.Merge, Exercised: e.Exercised}
}

func profileEndFrom(e *pb.ProfileEndRequest) spec.ProfileEnd {
	return spec.ProfileEnd{Name: e.GetName(), Discard: e.GetDiscard(), Merge: e.GetMerge(),
		Exercised: e.GetExercised()}
}

func profileOf(p spec.Profile) *pb.Profile {
	return &pb.Profile{
		Name: p.Name, Image: p.Image, Digest: p.Digest, Read: p.Read, Files: int32(p.Files), Total: p.Total,
		Lost:    p.Lost,
		Largest: each(p.Largest, fileReadOf),
	}
}

func profileFrom(p *pb.Profile) spec.Profile {
	return spec.Profile{
		Name: p.GetName(), Image: p.GetImage(), Digest: p.GetDigest(), Read: p.GetRead(), Files: int(p.GetFiles()),
		Total: p.GetTotal(), Lost: p.GetLost(),
		Largest: reads(p.GetLargest()),
	}
}

func fileReadOf(f spec.FileRead) *pb.FileRead {
	return &pb.FileRead{Path: strings.ToValidUTF8(f.Path, "?"), Layer: f.Layer, Read: f.Read, Size: f.Size}
}

func fileReadFrom(f *pb.FileRead) spec.FileRead {
	return spec.FileRead{Path: f.GetPath(), Layer: f.GetLayer(), Read: f.GetRead(), Size: f.GetSize()}
}

// reads is never nil, so that its JSON is an array.
func reads(in []*pb.FileRead) []spec.FileRead {
	if out := each(in, fileReadFrom); out != nil {
		return out
	}
	return []spec.FileRead{}
}

func packOf(p spec.Pack) *pb.Pack {
	return &pb.Pack{
		Image: p.Image, Digest: p.Digest, Pack: p.Pack, Size: p.Size, Chunks: int32(p.Chunks), Needed: p.Needed,
		Total: p.Total,
		Parts: &pb.Pack_Parts{Header: p.Parts.Header, Tables: p.Parts.Tables, Chunks: p.Parts.Chunks,
			Points: p.Parts.Points, Windows: p.Parts.Windows, Files: p.Parts.Files},
		ImageSize: p.ImageSize, Start: p.Start, Share: p.Share, Runs: int32(p.Runs), Exercised: p.Exercised,
		Created: timeOf(p.Created),
		Node:    p.Node, From: p.From, Trust: p.Trust, Unlazy: p.Unlazy, Files: int32(p.Files),
		Largest: each(p.Largest, fileReadOf),
	}
}

func packFrom(p *pb.Pack) spec.Pack {
	q := p.GetParts()
	return spec.Pack{
		Image: p.GetImage(), Digest: p.GetDigest(), Pack: p.GetPack(), Size: p.GetSize(),
		Chunks: int(p.GetChunks()), Needed: p.GetNeeded(), Total: p.GetTotal(),
		Parts: spec.PackParts{Header: q.GetHeader(), Tables: q.GetTables(), Chunks: q.GetChunks(),
			Points: q.GetPoints(), Windows: q.GetWindows(), Files: q.GetFiles()},
		ImageSize: p.GetImageSize(), Start: p.GetStart(), Share: p.GetShare(), Runs: int(p.GetRuns()),
		Exercised: p.GetExercised(), Created: timeFrom(p.GetCreated()),
		Node: p.GetNode(), From: p.GetFrom(), Trust: p.GetTrust(), Unlazy: p.GetUnlazy(), Files: int(p.GetFiles()),
		Largest: reads(p.GetLargest()),
	}
}

func packPushOf(p spec.PackPush) *pb.PackPushRequest {
	return &pb.PackPushRequest{Image: p.Image, Key: p.Key}
}

func packPushFrom(p *pb.PackPushRequest) spec.PackPush {
	return spec.PackPush{Image: p.GetImage(), Key: p.GetKey()}
}

func packPushedOf(p spec.PackPushed) *pb.PackPushResponse {
	return &pb.PackPushResponse{Image: p.Image, Manifest: p.Manifest, Pack: p.Pack, Size: p.Size,
		Signed: p.Signed}
}

func packPushedFrom(p *pb.PackPushResponse) spec.PackPushed {
	return spec.PackPushed{Image: p.GetImage(), Manifest: p.GetManifest(), Pack: p.GetPack(), Size: p.GetSize(),
		Signed: p.GetSigned()}
}
