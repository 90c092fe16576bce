package api

import (
	"context"

	"connectrpc.com/connect"

	pb "dewpoint/internal/api/gen/dewpoint/v1"
	"dewpoint/internal/spec"
)

func (h *handler) ListVolumes(ctx context.Context,
	_ *connect.Request[pb.ListVolumesRequest]) (*connect.Response[pb.ListVolumesResponse], error) {
	return answer(ctx, h, shortCall, func(ctx context.Context) (*pb.ListVolumesResponse, error) {
		list, err := h.node.Volumes(ctx)
		return &pb.ListVolumesResponse{Volumes: each(list, volumeInfoOf)}, err
	})
}

func (h *handler) MakeVolume(ctx context.Context,
	req *connect.Request[pb.MakeVolumeRequest]) (*connect.Response[pb.MakeVolumeResponse], error) {
	if err := named("volume", req.Msg.Name); err != nil {
		return nil, err
	}
	return answer(ctx, h, longCall, func(ctx context.Context) (*pb.MakeVolumeResponse, error) {
		return &pb.MakeVolumeResponse{}, h.node.MakeVolume(ctx, req.Msg.Name)
	})
}

func (h *handler) RemoveVolume(ctx context.Context,
	req *connect.Request[pb.RemoveVolumeRequest]) (*connect.Response[pb.RemoveVolumeResponse], error) {
	if err := named("volume", req.Msg.Name); err != nil {
		return nil, err
	}
	return answer(ctx, h, longCall, func(ctx context.Context) (*pb.RemoveVolumeResponse, error) {
		return &pb.RemoveVolumeResponse{}, h.node.RemoveVolume(ctx, req.Msg.Name)
	})
}

// Volumes implements Volumes.
func (c volumes) Volumes(ctx context.Context) ([]spec.VolumeInfo, error) {
	r, err := call(ctx, c.conn, c.rpc.ListVolumes, &pb.ListVolumesRequest{})
	return each(r.Volumes, volumeInfoFrom), err
}

// MakeVolume implements Volumes.
func (c volumes) MakeVolume(ctx context.Context, name string) error {
	_, err := c.rpc.MakeVolume(ctx, connect.NewRequest(&pb.MakeVolumeRequest{Name: name}))
	return c.problem(ctx, err)
}

// RemoveVolume implements Volumes.
func (c volumes) RemoveVolume(ctx context.Context, name string) error {
	_, err := c.rpc.RemoveVolume(ctx, connect.NewRequest(&pb.RemoveVolumeRequest{Name: name}))
	return c.problem(ctx, err)
}

func volumeInfoOf(v spec.VolumeInfo) *pb.VolumeInfo {
	return &pb.VolumeInfo{Name: v.Name, Path: v.Path, Changed: timeOf(v.Changed), Containers: v.Containers}
}

func volumeInfoFrom(v *pb.VolumeInfo) spec.VolumeInfo {
	return spec.VolumeInfo{Name: v.GetName(), Path: v.GetPath(), Changed: timeFrom(v.GetChanged()),
		Containers: v.GetContainers()}
}
