package member

import (
	"context"
	"errors"
	"sync"
	"time"

	"dewpoint/internal/layer"
	"dewpoint/internal/pop"

	"github.com/opencontainers/go-digest"
)

// copies makes this node's own copies of layers of the store that are deployed here again and again.
type copies struct {
	*common

	mu      sync.Mutex
	uses    map[digest.Digest]int // deployments of layers of the store, here
	copying sync.Mutex            // held while a layer is copied
}

// hotUses is how many deployments of an attached layer, the first one not counted, make it worth a copy
// of this node's own: it is read near from then on, also while the store is away.
const hotUses = 2

// copyWait is how long a copy waits at most until nothing is deployed here.
const copyWait = time.Minute

// reused notes that a layer of the store was deployed here once more, and has it
// copied when it is hot and there is room. Copies are made one after the other, behind deployments:
// looking whether there is room costs a look at all that is here.
func (s *copies) reused(id digest.Digest) {
	l, err := s.layers.Peek(id)
	if err != nil || l.At == "" {
		return
	}
	s.mu.Lock()
	s.uses[l.DiffID]++
	hot := s.uses[l.DiffID] == hotUses
	s.mu.Unlock()
	if !hot || s.cfg.Cache == nil || s.layers.Unpacks() {
		return
	}
	s.work.Go(func() {
		s.copying.Lock()
		defer s.copying.Unlock()
		ctx, cancel := context.WithTimeout(s.life, copyWait)
		s.prewarmer.quiet(ctx)
		cancel()
		if have, err := s.layers.Peek(l.DiffID); s.life.Err() != nil || err != nil || have != l ||
			!s.cfg.Cache.Fits(l.Size) {
			s.forgetUses(l.DiffID) // perhaps later
			return
		}
		start := time.Now()
		if err := s.localize(s.life, l); err != nil {
			s.log.Warn("a layer of the PoP's store is not copied", "layer", l.DiffID, "err", err)
			s.forgetUses(l.DiffID)
			return
		}
		s.log.Info("a layer of the PoP's store is used often: this node has a copy now", "layer", l.DiffID, "bytes",
			l.Size, "took", time.Since(start))
	})
}

func (s *copies) forgetUses(id digest.Digest) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.uses, id)
}

// localize copies an attached layer. What is mounted of it goes on; the next mounts
// are of the copy.
func (s *copies) localize(ctx context.Context, l *layer.Layer) error {
	st := s.usable()
	if st == nil {
		return pop.ErrStoreAway
	}
	rec, err := st.Record(ctx, l.DiffID)
	if err != nil {
		return err
	}
	body, err := s.routes.openStored(rec, 0)
	if err != nil {
		return err
	}
	defer body.Close()
	err = s.layers.Localize(l, &during{ctx, body})
	if errors.Is(err, layer.ErrMismatch) {
		s.verifier.damaged(ctx, st, rec, err)
	}
	if err == nil {
		s.node.Remount(l.DiffID)
	}
	return err
}

// during ends reading with its context.
type during struct {
	ctx context.Context
	r   interface{ Read([]byte) (int, error) }
}

func (d *during) Read(b []byte) (int, error) {
	if err := d.ctx.Err(); err != nil {
		return 0, err
	}
	return d.r.Read(b)
}
