package ready

import (
	"bytes"
	"context"
	"sync"

	"dewpoint/internal/engine"
)

// maxOutput is how much of a command's output is kept, in bytes.
const maxOutput = 4 << 10

// Of is the target for a container of the engine.
func Of(e *engine.Engine, i *engine.Info) Target {
	return Target{
		Host: i.Net == engine.NetHost, Addr: i.Addr, NetNS: i.NetNS, Pid: int(i.Pid),
		Logs:   []string{i.Stdout, i.Stderr},
		Runner: execRunner{e, i.Name},
		Exited: func(ctx context.Context) (int, error) {
			x, err := e.Wait(ctx, i.Name)
			return x.Status, err
		},
	}
}

type execRunner struct {
	e    *engine.Engine
	name string
}

func (r execRunner) Run(ctx context.Context, args []string) (int, []byte, error) {
	var out lastBytes
	status, err := r.e.Exec(ctx, r.name, engine.ExecSpec{Args: args, Stdout: &out, Stderr: &out})
	return status, out.bytes(), err
}

// lastBytes keeps the end of what is written to it, by two goroutines.
type lastBytes struct {
	mu sync.Mutex
	b  bytes.Buffer // guarded by mu
}

func (l *lastBytes) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.b.Write(p)
	l.b.Next(max(0, l.b.Len()-maxOutput))
	return len(p), nil
}

func (l *lastBytes) bytes() []byte {
	l.mu.Lock()
	defer l.mu.Unlock()
	return bytes.Clone(l.b.Bytes())
}
