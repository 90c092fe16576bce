package api

import (
	"context"
	"errors"
	"io"
	"sync"
	"time"

	"connectrpc.com/connect"

	pb "dewpoint/internal/api/gen/dewpoint/v1"
	"dewpoint/internal/spec"
)

type execStream = connect.BidiStream[pb.ExecRequest, pb.ExecResponse]

// goodbye is how long a client may take to close its end after the exit status
// was sent.
const goodbye = time.Second

func (h *handler) Exec(ctx context.Context, stream *execStream) error {
	return h.interact(ctx, stream, func(ctx context.Context, start *pb.ExecRequest_Start, std spec.ExecIO) (int,
		error) {
		if len(start.Args) == 0 {
			return 0, Of(BadRequest, errors.New("no command is named"))
		}
		return h.node.Exec(ctx, start.Name, execFrom(start), std)
	})
}

func (h *handler) Attach(ctx context.Context, stream *execStream) error {
	return h.interact(ctx, stream, func(ctx context.Context, start *pb.ExecRequest_Start, std spec.ExecIO) (int,
		error) {
		id, err := h.own(ctx, start.Name)
		if err != nil {
			return 0, err
		}
		if start.InputOnly {
			std.Stdout, std.Stderr = nil, nil
		}
		return h.node.Attach(ctx, id, sizeFrom(start.Size), std)
	})
}

// interact passes input and output between the client and a process, and sends how that has ended.
func (h *handler) interact(ctx context.Context, stream *execStream,
	run func(context.Context, *pb.ExecRequest_Start, spec.ExecIO) (int, error)) error {
	first, err := stream.Receive()
	if err != nil {
		return bad(errors.New("the call ended before it said what to run"))
	}
	start := first.GetStart()
	if start == nil {
		return bad(errors.New("no command is named"))
	}
	if err := named("container", start.Name); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()

	in := newInput(ctx, stream, start.Stdin)
	out := &output{stream: stream}
	io := spec.ExecIO{Stdout: out.writer(pb.Output_STREAM_STDOUT), Stderr: out.writer(pb.Output_STREAM_STDERR),
		Resize: in.resize}
	if start.Stdin {
		io.Stdin = in.r
	}
	status, err := run(ctx, start, io)
	in.r.CloseWithError(errExecOver)
	if err != nil {
		return h.fail(ctx, err)
	}
	exit := &pb.ExecResponse_Exit{Exit: &pb.Exit{Status: int32(status)}}
	if err := out.send(&pb.ExecResponse{Message: exit}); err != nil {
		return err
	}
	select {
	case <-in.done:
	case <-time.After(goodbye):
	}
	return nil
}

var (
	errExecOver = errors.New("the process has ended")
	errAway     = errors.New("the client sends no more")
)

// input carries what the client sends to the process.
type input struct {
	r      *io.PipeReader
	resize chan spec.Size
	done   chan struct{} // closed when the client has closed its end
}

func newInput(ctx context.Context, stream *execStream, wanted bool) *input {
	r, w := io.Pipe()
	in := &input{r: r, resize: make(chan spec.Size, 1), done: make(chan struct{})}
	if !wanted {
		w.Close()
	}
	// The stream's end may come late when it is the daemon that ends the call.
	context.AfterFunc(ctx, func() { _ = w.CloseWithError(context.Cause(ctx)) })
	go in.receive(ctx, stream, w)
	return in
}

func (in *input) receive(ctx context.Context, stream *execStream, w *io.PipeWriter) {
	defer close(in.done)
	for {
		m, err := stream.Receive()
		if err != nil {
			_ = w.CloseWithError(errAway)
			return
		}
		switch m := m.Message.(type) {
		case *pb.ExecRequest_Stdin:
			_, _ = w.Write(m.Stdin) // fails once the process has ended; the rest is read and dropped
		case *pb.ExecRequest_EndOfInput_:
			w.Close()
		case *pb.ExecRequest_Resize:
			in.resized(sizeFrom(m.Resize))
		}
		if ctx.Err() != nil {
			return
		}
	}
}

// resized keeps the newest size for a reader that is not there yet.
func (in *input) resized(s spec.Size) {
	for {
		select {
		case in.resize <- s:
			return
		default:
		}
		select {
		case <-in.resize:
		default:
		}
	}
}

// output sends what the process writes.
type output struct {
	mu     sync.Mutex
	stream *execStream // Send is guarded by mu
}

func (o *output) send(m *pb.ExecResponse) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.stream.Send(m)
}

func (o *output) writer(s pb.Output_Stream) io.Writer {
	return writerFunc(func(b []byte) (int, error) {
		for sent := 0; sent < len(b); {
			n := min(len(b)-sent, maxChunk)
			m := &pb.ExecResponse{Message: &pb.ExecResponse_Output{Output: &pb.Output{Stream: s,
				Data: b[sent : sent+n]}}}
			if err := o.send(m); err != nil {
				return sent, err
			}
			sent += n
		}
		return len(b), nil
	})
}

// maxChunk is the most output of one message.
const maxChunk = 256 << 10

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(b []byte) (int, error) { return f(b) }
