package api

import (
	"context"
	"fmt"
	"strings"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	pb "dewpoint/internal/api/gen/dewpoint/v1"
)

// may refuses a request that sets a field which the caller may not.
func may(ctx context.Context, msg any) error {
	m, ok := msg.(proto.Message)
	role := callerOf(ctx).role
	if !ok || role == Admin {
		return nil
	}
	name := beyond(m.ProtoReflect(), role)
	if name == "" {
		return nil
	}
	_, short, _ := strings.Cut(name, ".")
	return advised(Permission, fmt.Sprintf("the field %s of a request is for the role admin, and the caller has %s",
		name, role), "leave "+short+" out, or ask an administrator of the node").wire()
}

// ours reports whether a field holds messages whose fields say which role may set them.
func ours(f protoreflect.FieldDescriptor) bool {
	return f.Message() != nil && !f.IsMap() && f.Message().ParentFile() == pb.File_dewpoint_v1_node_proto
}

// beyond is the first field that m sets and the role may not; "" is none.
func beyond(m protoreflect.Message, role Role) (name string) {
	m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case leastRole(f, pb.E_MaySet) > role:
			name = strings.TrimPrefix(string(f.FullName()), "dewpoint.v1.")
		case !ours(f):
		case f.IsList():
			for i := 0; i < v.List().Len() && name == ""; i++ {
				name = beyond(v.List().Get(i).Message(), role)
			}
		default:
			name = beyond(v.Message(), role)
		}
		return name == ""
	})
	return name
}

// fielder is an interceptor that lets callers set what they may.
type fielder struct{}

// WrapUnary implements connect.Interceptor.
func (fielder) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		if err := may(ctx, req.Any()); err != nil {
			return nil, err
		}
		return next(ctx, req)
	}
}

// WrapStreamingClient implements connect.Interceptor.
func (fielder) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

// WrapStreamingHandler implements connect.Interceptor.
func (fielder) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) error {
		return next(ctx, &fieldConn{conn, ctx})
	}
}

type fieldConn struct {
	connect.StreamingHandlerConn
	ctx context.Context
}

func (c *fieldConn) Receive(msg any) error {
	if err := c.StreamingHandlerConn.Receive(msg); err != nil {
		return err
	}
	return may(c.ctx, msg)
}
