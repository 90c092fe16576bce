package deploy

import (
	"context"
	"sync"

	"dewpoint/internal/engine"
)

// runner runs a health check in the container.
type runner struct {
	e  *engine.Engine
	id string
}

// maxOutput bounds what is kept of a health check's output.
const maxOutput = 4 << 10

func (r runner) Run(ctx context.Context, args []string) (int, []byte, error) {
	out := &tail{}
	status, err := r.e.Exec(ctx, r.id, engine.ExecSpec{Args: args, Stdout: out, Stderr: out})
	return status, out.b, err
}

// tail keeps the end of what is written to it. Safe for concurrent use.
type tail struct {
	mu sync.Mutex
	b  []byte
}

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.b = append(t.b, p...)
	if n := len(t.b) - maxOutput; n > 0 {
		t.b = append(t.b[:0], t.b[n:]...)
	}
	return len(p), nil
}
