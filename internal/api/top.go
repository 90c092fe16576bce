package api

import (
	"context"

	"connectrpc.com/connect"

	pb "dewpoint/internal/api/gen/dewpoint/v1"
	"dewpoint/internal/spec"
)

func (h *handler) Top(ctx context.Context,
	req *connect.Request[pb.TopRequest]) (*connect.Response[pb.TopResponse], error) {
	if err := named("container", req.Msg.Name); err != nil {
		return nil, err
	}
	return answer(ctx, h, shortCall, func(ctx context.Context) (*pb.TopResponse, error) {
		id, err := h.own(ctx, req.Msg.Name)
		if err != nil {
			return nil, err
		}
		list, err := h.node.Top(ctx, id)
		return &pb.TopResponse{Processes: each(list, processOf)}, err
	})
}

// Top implements Containers.
func (c lifecycle) Top(ctx context.Context, name string) ([]spec.Process, error) {
	r, err := c.rpc.Top(ctx, connect.NewRequest(&pb.TopRequest{Name: name}))
	if err != nil {
		return nil, c.problem(ctx, err)
	}
	return each(r.Msg.Processes, processFrom), nil
}

func processOf(p spec.Process) *pb.Process {
	return &pb.Process{Pid: int32(p.PID), Parent: int32(p.Parent), Uid: uint32(p.UID),
		Started: timeOf(p.Started), Cpu: p.CPU, Memory: p.Memory, Command: p.Command}
}

func processFrom(p *pb.Process) spec.Process {
	return spec.Process{PID: int(p.GetPid()), Parent: int(p.GetParent()), UID: int(p.GetUid()),
		Started: p.GetStarted().AsTime(), CPU: p.GetCpu(), Memory: p.GetMemory(), Command: p.GetCommand()}
}
