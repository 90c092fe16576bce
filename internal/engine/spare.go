package engine

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os/exec"
	"path/filepath"
	"time"

	"dewpoint/internal/engine/shimgroup"
	"dewpoint/internal/sched"
)

// spareShims starts a shim ahead, when there is none that the next container
// could join: starting one is a third of what it takes to start the first
// container of a group (docs/design/creation.md). It does what containerd did for an
// earlier group, as the program of package shimgroup has noted; so there is no
// spare before the first container of this process's life, nor where the
// containerd is the system's, whose shims belong into its own cgroup.
type spareShims struct {
	s    *shims
	done chan struct{}
	stop context.CancelFunc
	log  *slog.Logger
}

// spareRest is how long no container is made before a spare is started: in the
// middle of a burst the processors have better to do.
const spareRest = 250 * time.Millisecond

const spareStartTimeout = 10 * time.Second

// keepSpare starts and ends spare shims until close.
func keepSpare(s *shims, log *slog.Logger) *spareShims {
	ctx, cancel := context.WithCancel(context.Background())
	k := &spareShims{s: s, done: make(chan struct{}), stop: cancel, log: log}
	go k.run(ctx)
	return k
}

// close ends the spare shim that is there. Nothing may take one any more.
func (k *spareShims) close() {
	k.stop()
	<-k.done
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	for name, g := range k.s.groups {
		if g.spare() {
			delete(k.s.groups, name)
			if err := shimgroup.End(filepath.Join(k.s.dir, name)); err != nil {
				k.log.Warn("what a shim had stays until the next start", "err", err)
			}
		}
	}
}

func (k *spareShims) run(ctx context.Context) {
	defer close(k.done)
	var how *shimgroup.Asked
	for {
		k.s.mu.Lock()
		changed, busy, short, last := k.s.changed, len(k.s.being) > 0, k.s.short(), k.s.anyStanding()
		k.s.mu.Unlock()
		if how == nil && last != "" {
			how = shimgroup.ReadAsked(filepath.Join(k.s.dir, last)) // nil if that has ended meanwhile
		}
		var rest <-chan time.Time
		if how != nil && short && !busy {
			rest = time.After(spareRest)
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
			continue
		case <-rest:
		}
		if err := k.start(how); err != nil {
			k.log.Warn("no shim could be started ahead", "err", err)
			return
		}
	}
}

// start founds a group whose shim runs and has no task.
func (k *spareShims) start(how *shimgroup.Asked) error {
	k.s.mu.Lock()
	g, err := k.s.newGroup()
	k.s.mu.Unlock()
	if err != nil {
		return err
	}
	dir := filepath.Join(k.s.dir, g.name)
	// It is not cut short when k is closed: a shim may be on its way.
	ctx, cancel := context.WithTimeout(context.Background(), spareStartTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, shimgroup.Path(dir), how.Args...)
	cmd.Env, cmd.Stdin, cmd.Dir = how.Env, bytes.NewReader(how.Input), dir
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err = sched.Start(cmd)
	if err == nil {
		err = cmd.Wait()
	}
	if err != nil {
		return errors.Join(err, errors.New(out.String()), shimgroup.End(dir))
	}
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	g.ready = true
	k.s.groups[g.name] = g
	k.s.wake()
	return nil
}
