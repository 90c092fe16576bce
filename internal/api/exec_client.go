package api

import (
	"context"
	"io"
	"sync"

	"connectrpc.com/connect"

	pb "dewpoint/internal/api/gen/dewpoint/v1"
	"dewpoint/internal/spec"
)

type execClientStream = connect.BidiStreamForClient[pb.ExecRequest, pb.ExecResponse]

// execSender is the client's sending half of Exec. A goroutine that reads
// standard input may outlive the call, as nothing can wake it; it sends
// nothing then.
type execSender struct {
	ctx context.Context // of the call

	mu     sync.Mutex
	stream *execClientStream // Send is guarded by mu
}

func (s *execSender) send(m *pb.ExecRequest) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.ctx.Err(); err != nil {
		return err
	}
	return s.stream.Send(m)
}

// copy sends r, and its end. An error of r ends the input of a process that ends with the call, own; another
// one keeps its input for who comes back.
func (s *execSender) copy(r io.Reader, own bool) {
	buf := make([]byte, 32<<10)
	for {
		n, err := r.Read(buf)
		if n > 0 {
			if s.send(&pb.ExecRequest{Message: &pb.ExecRequest_Stdin{Stdin: buf[:n]}}) != nil {
				return
			}
		}
		if err != nil {
			if err != io.EOF && !own {
				return
			}
			_ = s.send(&pb.ExecRequest{Message: &pb.ExecRequest_EndOfInput_{EndOfInput: &pb.ExecRequest_EndOfInput{}}})
			return
		}
	}
}

func (s *execSender) resize(sizes <-chan spec.Size) {
	for {
		select {
		case size, ok := <-sizes:
			if !ok || s.send(&pb.ExecRequest{Message: &pb.ExecRequest_Resize{Resize: sizeOf(size)}}) != nil {
				return
			}
		case <-s.ctx.Done():
			return
		}
	}
}
