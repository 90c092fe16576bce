package api

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"runtime/debug"
	"time"

	"connectrpc.com/connect"

	"dewpoint/api/openapi"
	pb "dewpoint/internal/api/gen/dewpoint/v1"
	"dewpoint/internal/api/gen/dewpoint/v1/dewpointv1connect"
	"dewpoint/internal/spec"
)

// Config of the handler. The zero value is a working one.
type Config struct {
	Log          *slog.Logger          // of panics; default none
	Classify     func(error) *Error    // default Classify
	Interceptors []connect.Interceptor // outermost first
	// Observe is told of every call that was answered: its procedure, the Code of its
	// error or "ok", and the time it took. May be nil; must not block.
	Observe func(procedure, code string, took time.Duration)
}

const (
	maxMessage = 1 << 20 // bytes of one message from a client

	shortCall = 30 * time.Second // deadline of a call that asks
	longCall  = 10 * time.Minute // deadline of a call that changes something
)

// handler implements dewpointv1connect.NodeHandler.
type handler struct{ edge }

// edge is what all calls need beside their messages.
type edge struct {
	node     Node
	log      *slog.Logger
	classify func(error) *Error
}

// NewHandler serves a Node. What the Node panics with is logged and becomes
// the error of the call.
func NewHandler(n Node, cfg Config) http.Handler {
	h := &handler{edge{node: n, log: cfg.Log, classify: cfg.Classify}}
	if h.log == nil {
		h.log = slog.New(slog.DiscardHandler)
	}
	if h.classify == nil {
		h.classify = Classify
	}
	mux := http.NewServeMux()
	mux.Handle(dewpointv1connect.NewNodeHandler(h,
		connect.WithInterceptors(append([]connect.Interceptor{observer(cfg.Observe), detailer{}, fielder{}},
			cfg.Interceptors...)...),
		connect.WithReadMaxBytes(maxMessage),
		connect.WithCodec(strict{"json"}), connect.WithCodec(strict{"json; charset=utf-8"}),
		connect.WithRecover(func(_ context.Context, s connect.Spec, _ http.Header, v any) error {
			return h.panicked(s.Procedure, v).wire()
		}),
	))
	mux.HandleFunc(openapi.Path, openapi.ServeHTTP)
	return gated(detailed(lines(mux)))
}

func (h *edge) panicked(where string, v any) *Error {
	h.log.Error("panic", "in", where, "value", v, "stack", string(debug.Stack()))
	return New(Internal, fmt.Sprintf("dewd has a defect: panic in %s; its log has the details", where))
}

// guard runs f in a goroutine that is not net/http's.
func (h *edge) guard(where string, f func() error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = h.panicked(where, v)
		}
	}()
	return f()
}

// fail makes what a handler returns of what the Node returned. When the daemon
// stops, or the call's time is over, that is the reason of whatever failed then.
func (h *edge) fail(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	var stop *Error
	if errors.As(context.Cause(ctx), &stop) {
		return stop.wire()
	}
	e := h.classify(err)
	if errors.Is(ctx.Err(), context.DeadlineExceeded) &&
		(e.Code == Deadline || e.Code == Canceled || e.Code == Internal) {
		e = errLate
	}
	return e.wire()
}

func bad(err error) error { return Of(BadRequest, err).wire() }

// named refuses a request that does not say which one is meant.
func named(what, name string) error {
	if name != "" {
		return nil
	}
	return New(BadRequest, "no "+what+" is named").wire()
}

// answer runs one short call.
func answer[A any](ctx context.Context, h *handler, limit time.Duration,
	f func(context.Context) (*A, error)) (*connect.Response[A], error) {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, slow(limit))
	defer cancel()
	a, err := f(ctx)
	if err != nil {
		return nil, h.fail(ctx, err)
	}
	return connect.NewResponse(a), nil
}

func (h *handler) List(ctx context.Context,
	req *connect.Request[pb.ListRequest]) (*connect.Response[pb.ListResponse], error) {
	return answer(ctx, h, shortCall, func(ctx context.Context) (*pb.ListResponse, error) {
		list, err := h.node.List(ctx, req.Msg.All)
		return &pb.ListResponse{Containers: each(list, containerOf)}, err
	})
}

func (h *handler) Wait(ctx context.Context,
	req *connect.Request[pb.WaitRequest]) (*connect.Response[pb.WaitResponse], error) {
	if err := named("container", req.Msg.Name); err != nil {
		return nil, err
	}
	status, err := h.node.Wait(ctx, req.Msg.Name)
	if err != nil {
		return nil, h.fail(ctx, err)
	}
	return connect.NewResponse(&pb.WaitResponse{Status: int32(status)}), nil
}

func (h *handler) Images(ctx context.Context,
	_ *connect.Request[pb.ImagesRequest]) (*connect.Response[pb.ImagesResponse], error) {
	return answer(ctx, h, shortCall, func(ctx context.Context) (*pb.ImagesResponse, error) {
		list, err := h.node.Images(ctx)
		return &pb.ImagesResponse{Images: each(list, imageOf)}, err
	})
}

func (h *handler) RemoveImage(ctx context.Context,
	req *connect.Request[pb.RemoveImageRequest]) (*connect.Response[pb.RemoveImageResponse], error) {
	if err := named("image", req.Msg.Name); err != nil {
		return nil, err
	}
	return answer(ctx, h, longCall, func(ctx context.Context) (*pb.RemoveImageResponse, error) {
		return &pb.RemoveImageResponse{}, h.node.RemoveImage(ctx, req.Msg.Name)
	})
}

func (h *handler) Prune(ctx context.Context,
	req *connect.Request[pb.PruneRequest]) (*connect.Response[pb.PruneResponse], error) {
	return answer(ctx, h, longCall, func(ctx context.Context) (*pb.PruneResponse, error) {
		r, err := h.node.Prune(ctx, pruneFrom(req.Msg))
		return prunedOf(r), err
	})
}

func (h *handler) Doctor(ctx context.Context,
	_ *connect.Request[pb.DoctorRequest]) (*connect.Response[pb.DoctorResponse], error) {
	return answer(ctx, h, 2*shortCall, func(ctx context.Context) (*pb.DoctorResponse, error) {
		list, err := h.node.Doctor(ctx)
		return &pb.DoctorResponse{Findings: each(list, findingOf)}, err
	})
}

func (h *handler) Version(ctx context.Context,
	_ *connect.Request[pb.VersionRequest]) (*connect.Response[pb.VersionResponse], error) {
	return answer(ctx, h, shortCall, func(ctx context.Context) (*pb.VersionResponse, error) {
		v, err := h.node.Version(ctx)
		return versionOf(v), err
	})
}

func (h *handler) Logs(ctx context.Context, req *connect.Request[pb.LogsRequest],
	stream *connect.ServerStream[pb.LogsResponse]) error {
	if err := named("container", req.Msg.Name); err != nil {
		return err
	}
	opt := spec.LogOptions{Follow: req.Msg.Follow, Tail: int(req.Msg.Tail)}
	return h.fail(ctx, h.node.Logs(ctx, req.Msg.Name, opt, func(c spec.LogChunk) error {
		return stream.Send(&pb.LogsResponse{Output: outputOf(c)})
	}))
}

func (h *handler) Events(ctx context.Context, req *connect.Request[pb.EventsRequest],
	stream *connect.ServerStream[pb.EventsResponse]) error {
	var after *spec.Mark
	if req.Msg.After != nil || req.Msg.Epoch != "" {
		after = &spec.Mark{Epoch: req.Msg.Epoch, Seq: req.Msg.GetAfter()}
	}
	// The headers tell the client that it is listening.
	begun := func() error { return stream.Send(nil) }
	return h.fail(ctx, h.node.Events(ctx, after, begun, func(e spec.Event) error {
		return stream.Send(&pb.EventsResponse{Event: eventOf(e)})
	}))
}
