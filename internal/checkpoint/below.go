package checkpoint

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"dewpoint/internal/checkpoint/upper"
	"dewpoint/internal/pop"
)

// lower is the layer that a restored container stands on besides its image's. Open, it is read to its end
// whatever becomes of the container. It may lie in the PoP's store: who reads it while that hangs cannot be
// called off, and keeps what it works with until the store is back.
type lower struct {
	dir   *os.File // nil: there is none
	users sync.WaitGroup
	stuck atomic.Bool // nobody waits for them
	after []func()
}

// below opens it.
func (m *Manager) below(ctx context.Context, c *subject) (*lower, error) {
	if c.standsOn() == "" {
		return &lower{}, nil
	}
	dir, err := m.cfg.Containers.Below(ctx, c.info.Name, c.img)
	if err != nil || dir == "" {
		return &lower{}, err
	}
	f, err := os.Open(dir)
	return &lower{dir: f}, err
}

// then has f called when nobody reads any more.
func (l *lower) then(f func()) { l.after = append(l.after, f) }

// close lets go of it, at once or when the last reader has ended.
func (l *lower) close() {
	gone := func() {
		l.users.Wait()
		for _, f := range l.after {
			f()
		}
		if l.dir != nil {
			_ = l.dir.Close()
		}
	}
	if l.stuck.Load() {
		go gone()
		return
	}
	gone()
}

// standstill is how long a layer is read from which nothing comes.
const standstill = 10 * time.Second

// read runs a reader that counts what it has done, and gives up waiting for it when it stands still.
func (l *lower) read(ctx context.Context, done *atomic.Int64, reader func() error) error {
	end := make(chan error, 1)
	l.users.Go(func() { end <- reader() })
	look := time.NewTicker(standstill)
	defer look.Stop()
	for seen := int64(-1); ; {
		select {
		case err := <-end:
			return err
		case <-ctx.Done():
			l.stuck.Store(true)
			return context.Cause(ctx)
		case <-look.C:
			n := done.Load()
			if n == seen {
				l.stuck.Store(true)
				return fmt.Errorf("%w: nothing has come for %v of what the container was restored with; try again when it is back", pop.ErrStoreAway, standstill)
			}
			seen = n
		}
	}
}

// merge makes one layer of what a restored container has written and of what it was restored
// with: the checkpoint needs no other one.
func (s *saved) merge(ctx context.Context, work string, below *lower) error {
	if below.dir == nil {
		return nil
	}
	merged, wrote := *s, &atomic.Int64{}
	err := below.read(ctx, wrote, func() error {
		top, err := os.Open(merged.tar)
		if err != nil {
			return err
		}
		defer top.Close()
		dir := fmt.Sprintf("/proc/self/fd/%d/.", below.dir.Fd())
		return merged.write(filepath.Join(work, "merged.tar"), func(w io.Writer) (upper.Info, error) {
			return upper.Merge(ctx, io.MultiWriter(w, count{wrote}), dir, top)
		})
	})
	if err != nil {
		return err
	}
	*s = merged
	return nil
}

// count adds up what is written.
type count struct{ n *atomic.Int64 }

func (c count) Write(p []byte) (int, error) {
	c.n.Add(int64(len(p)))
	return len(p), nil
}
