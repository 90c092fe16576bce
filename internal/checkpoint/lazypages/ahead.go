package lazypages

import (
	"context"
	"sync"
)

// maxAhead is how many chunks of the order are fetched while CRIU still works,
// and kept: 16 MiB.
const maxAhead = 64

// ahead is what was fetched before anybody could take it. Each chunk can be taken
// once.
type ahead struct {
	mu     sync.Mutex
	chunks map[key]*early
}

// early is a chunk on its way: data is there once done is closed, nil if it could
// not be had.
type early struct {
	key
	done chan struct{}
	data []byte
}

// fetchAhead fetches the beginning of the order until CRIU has finished: from
// then on the plan has its turns.
func (s *Server) fetchAhead(order []key) {
	todo := make(chan *early)
	s.ahead.chunks = map[key]*early{}
	for range s.cfg.Fetches {
		s.goDo(func() error {
			for e := range todo {
				e.data, _, _ = s.fetch(e.key) // who takes it tries again
				close(e.done)
			}
			return nil
		})
	}
	s.goDo(func() error {
		defer close(todo)
		for _, k := range order[:min(len(order), maxAhead)] {
			select {
			case <-s.live:
				return nil
			case <-s.ctx.Done():
				return nil
			default:
			}
			todo <- s.ahead.announce(k)
		}
		return nil
	})
}

func (a *ahead) announce(k key) *early {
	e := &early{key: k, done: make(chan struct{})}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.chunks[k] = e
	return e
}

// awaitChunk waits for a chunk that is fetched ahead; nil if it is not, or in vain.
func (a *ahead) awaitChunk(ctx context.Context, k key) []byte {
	a.mu.Lock()
	e := a.chunks[k]
	delete(a.chunks, k)
	a.mu.Unlock()
	if e == nil {
		return nil
	}
	select {
	case <-e.done:
		return e.data
	case <-ctx.Done():
		return nil
	}
}
