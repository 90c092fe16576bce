package member

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"os"
	"slices"
	"sync"

	"dewpoint/internal/pop"

	"github.com/opencontainers/go-digest"
)

// Pending uploads are what a node is to give its PoP's store: layers that it has brought from a registry and
// that the store has not taken yet. A file remembers them, so that a node that has ended gives them later,
// and nothing else: what the store had and was evicted does not come back. The file is not made durable; a
// layer that it forgot is published by who fetches it next.

// uploads gives layers of this node to the store.
type uploads struct {
	*common

	mu      sync.Mutex
	refused map[digest.Digest]bool // layers that the store did not take
	pending map[digest.Digest]bool // these, and those that are to be published
	saving  sync.Mutex             // held while these are written down
}

// loadPending is what was pending when an earlier process ended.
func loadPending(path string) map[digest.Digest]bool {
	pending := map[digest.Digest]bool{}
	b, err := os.ReadFile(path)
	var ids []digest.Digest
	if err != nil || json.Unmarshal(b, &ids) != nil {
		return pending
	}
	for _, id := range ids {
		if id.Validate() == nil {
			pending[id] = true
		}
	}
	return pending
}

// expects notes that this node is to give the store a layer, when it has it.
func (s *uploads) expects(id digest.Digest) {
	if s.cfg.Store == nil {
		return // there is no store
	}
	s.mu.Lock()
	known := s.pending[id]
	s.pending[id] = true
	s.mu.Unlock()
	if !known {
		s.savePending()
	}
}

// settled notes that the store has a layer, or that it is not this node that gives it.
func (s *uploads) settled(id digest.Digest) {
	s.mu.Lock()
	known := s.pending[id]
	delete(s.pending, id)
	delete(s.refused, id)
	s.mu.Unlock()
	if known {
		s.savePending()
	}
}

// Pending implements fetch.Attached.
func (s *uploads) Pending(id digest.Digest, refused bool) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.pending[id] && !(refused && s.refused[id])
}

func (s *uploads) savePending() {
	if s.cfg.Pending == "" {
		return
	}
	s.saving.Lock()
	defer s.saving.Unlock()
	s.mu.Lock()
	ids := slices.Sorted(maps.Keys(s.pending))
	s.mu.Unlock()
	b, err := json.Marshal(ids)
	if err == nil {
		err = os.WriteFile(s.cfg.Pending+".tmp", b, 0o600)
	}
	if err == nil {
		err = os.Rename(s.cfg.Pending+".tmp", s.cfg.Pending)
	}
	if err != nil {
		s.log.Warn("what is pending for the PoP's store is not remembered", "err", err)
	}
}

// later has a layer given to the store that it did not take, or when it is back.
func (s *uploads) later(id digest.Digest) {
	if s.cfg.Store == nil {
		return
	}
	s.expects(id)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.refused[id] = true
}

// recall has those layers given to the store that were pending when an earlier process of this node ended:
// what is whole here, of images that are known, and has room there.
func (s *uploads) recall(ctx context.Context, st *pop.Store) {
	s.mu.Lock()
	pending := slices.Sorted(maps.Keys(s.pending))
	s.mu.Unlock()
	if len(pending) == 0 {
		return
	}
	spare, err := st.Spare(ctx)
	if err != nil {
		s.log.Debug("what has room in the PoP's store is not known", "err", err)
		return
	}
	for _, id := range pending {
		if s.routes.leads(id) {
			continue // by now
		}
		l, err := s.layers.Peek(id)
		switch {
		case err != nil || l.At != "" || l.Tree || len(s.catalog.WithLayer(id)) == 0 || st.HasLayer(ctx, id):
			s.settled(id)
		case l.Size <= spare:
			spare -= l.Size
			s.later(id)
		}
	}
}

// giveRefused gives the store what it did not take, unless it is so full that what comes would go at once,
// and be pending no more.
func (s *uploads) giveRefused(ctx context.Context) {
	s.mu.Lock()
	refused := slices.Collect(maps.Keys(s.refused))
	s.mu.Unlock()
	if len(refused) == 0 || s.crowded(ctx) {
		return
	}
	for _, id := range refused {
		have, err := s.layers.Peek(id)
		if err == nil && have.At == "" && !have.Tree {
			err = s.republish(ctx, have)
			if errors.Is(err, pop.ErrFull) {
				s.log.Debug("a layer is not published to the PoP yet", "layer", id, "err", err)
				continue
			}
			if err != nil {
				s.log.Warn("a layer is not published to the PoP yet", "layer", id, "err", err)
				return
			}
		}
		s.settled(id)
	}
}

// crowded reports whether the store is above its high watermark: either room is about to be made, or there is
// nothing to evict.
func (s *uploads) crowded(ctx context.Context) bool {
	st := s.usable()
	if st == nil {
		return false
	}
	spare, err := st.Spare(ctx)
	return err == nil && spare < 0
}
