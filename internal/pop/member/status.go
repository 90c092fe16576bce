package member

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"dewpoint/internal/pop"

	"github.com/opencontainers/go-digest"
)

// Status is what a node knows of its PoP.
type Status struct {
	Node    string
	Shared  bool   // there is to be a store
	Store   string // its ID; "" if there is none, or it cannot be used
	Path    string
	Away    error // why the store does not answer; nil if it does
	Lost    error // why the coordinator does not answer; nil if it does
	Settled bool  // the coordinator remembers
	Members []pop.Member
	Users   map[string][]string // which nodes use a layer of the store, by diffID
	Total   int64               // bytes of the store's file system
	Free    int64
	Most    int64 // bytes of layers that it is to hold
	Trash   int64 // bytes that were evicted and not deleted yet
	Layers  []*pop.Layer
	Quotas  []pop.Quota
	Silent  []pop.Silent
	Hits    pop.Hits // of this node
}

// ErrNoPoP says that this node is in none, or has no store in common with others.
var ErrNoPoP = errors.New("this node has no PoP")

// Status asks what the nodes of the PoP do. It returns nil if this node has none. What
// could not be found out is in the error, beside the rest.
func (s *Member) Status(ctx context.Context) (*Status, error) {
	if s == nil {
		return nil, nil
	}
	out := &Status{Node: s.cfg.Node, Shared: s.cfg.Dir != nil, Hits: s.hitsNow()}
	out.Settled, out.Lost = s.cfg.Coord.Settled(ctx)
	out.Away = s.storeAway()
	if s.cfg.Dir != nil {
		out.Path = s.cfg.Dir.Path("")
	}
	var errs [6]error
	if out.Lost == nil {
		out.Members, errs[0] = s.cfg.Coord.Members(ctx)
	}
	for i := range out.Members {
		if m := &out.Members[i]; m.Node == s.cfg.Node && m.Twin == "" { // what it said is a moment old
			m.Hits = out.Hits
		}
	}
	st := s.usable()
	if st == nil {
		return out, errs[0]
	}
	out.Store, out.Trash = st.ID(), st.Trashed(ctx)
	out.Layers, errs[1] = st.Layers(ctx)
	out.Quotas = st.Quotas(out.Layers)
	if out.Total, out.Free, errs[2] = st.Space(ctx); errs[2] == nil {
		out.Most = st.Capacity(out.Total)
	}
	out.Silent, errs[3] = st.Silent(ctx)
	if out.Lost == nil {
		out.Users, errs[4] = s.users(ctx, out.Layers)
	}
	out.Away = s.storeAway()
	return out, errors.Join(errs[:]...)
}

func (s *Member) users(ctx context.Context, layers []*pop.Layer) (map[string][]string, error) {
	keys := make([]string, 0, len(layers))
	for _, l := range layers {
		keys = append(keys, l.DiffID.String())
	}
	if len(keys) == 0 {
		return nil, nil
	}
	return s.cfg.Coord.Users(ctx, keys...)
}

// storeAway says why there is no store though there should be one, or nil.
func (s *common) storeAway() error {
	switch {
	case s.cfg.Dir == nil:
		return nil
	case s.cfg.Dir.Away() != nil:
		return s.cfg.Dir.Away()
	case s.unmounted.Load() != nil:
		return fmt.Errorf("%w: %w", pop.ErrStoreAway, *s.unmounted.Load())
	case s.store.Load() != nil:
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lastErr == nil {
		return pop.ErrStoreAway
	}
	return fmt.Errorf("%w: %w", pop.ErrStoreAway, s.lastErr)
}

// fails notes why the store cannot be opened, and reports whether that was so before.
func (s *common) fails(err error) (known bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	known = s.lastErr != nil && s.lastErr.Error() == err.Error()
	s.lastErr = err
	return known
}

func (s *common) hitsNow() pop.Hits {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.hits
}

// reached notes whether the coordinator has answered.
func (s *common) reached(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.away = nil
	if errors.Is(err, pop.ErrAway) {
		s.away = err
	}
}

// coordAway says why the coordinator did not answer last; nil if it did.
func (s *common) coordAway() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.away
}

// Hears reports whether Config.Heard is told of what happens in the PoP: the coordinator answered when it
// was asked last, a moment ago. What was missed before is made up for by a Resync.
func (s *Member) Hears() bool {
	return s != nil && s.coordAway() == nil
}

// State is what this node saw last, without asking anybody.
type State struct {
	Shared    bool // there is to be a store
	StoreAway bool
	CoordAway bool
	Hits      pop.Hits
}

// State returns it.
func (s *Member) State() State {
	if s == nil {
		return State{}
	}
	return State{Shared: s.cfg.Dir != nil, StoreAway: s.storeAway() != nil, CoordAway: s.coordAway() != nil,
		Hits: s.hitsNow()}
}

// needStore is the store for what an operator asks for.
func (s *Member) needStore() (*pop.Store, error) {
	if s == nil || s.cfg.Dir == nil {
		return nil, ErrNoPoP
	}
	if st := s.usable(); st != nil {
		return st, nil
	}
	return nil, s.storeAway()
}

// Forget removes from the store what a node says it uses that is gone for
// good. See pop.Store.Forget.
func (s *Member) Forget(ctx context.Context, node string) error {
	st, err := s.needStore()
	if err != nil {
		return err
	}
	return st.Forget(ctx, node)
}

// giveTime is for how long Prune waits for the nodes to let go of what they only have prewarmed.
const giveTime = time.Second

// Prune evicts from the store what no node uses: first it has the nodes let go of what they have no more
// than prewarmed. What it evicts can come back for the time of grace.
func (s *Member) Prune(ctx context.Context, inUse func(digest.Digest) bool) (pop.Eviction, error) {
	st, err := s.needStore()
	if err != nil {
		return pop.Eviction{}, err
	}
	s.press(ctx)
	s.unuseIdle(ctx, st, inUse)
	select {
	case <-time.After(giveTime):
	case <-ctx.Done():
		return pop.Eviction{}, ctx.Err()
	}
	total, _, err := st.Space(ctx)
	if err != nil {
		return pop.Eviction{}, err
	}
	done, err := s.evict(ctx, st, total)
	if done.Why == pop.AllInUse { // as it is to be
		done.Why = ""
	}
	return done, err
}

// press tells the nodes that the store needs room.
func (s *common) press(ctx context.Context) {
	s.pressed.Store(time.Now().UnixNano())
	if err := s.cfg.Coord.Publish(ctx, pop.Event{Kind: pop.Pressed}); err != nil {
		s.log.Debug("nodes are not told that the store needs room", "err", err)
	}
}

func (s *upkeep) evict(ctx context.Context, st *pop.Store, want int64) (pop.Eviction, error) {
	done, err := st.Evict(ctx, want)
	if done.Why == pop.AllInUse {
		s.press(ctx)
	}
	s.stats.evicted.Add(int64(len(done.Layers)))
	s.stats.evictedBytes.Add(done.Bytes)
	return done, err
}

// Stats counts what this node has done for the store since the Member was made.
type Stats struct {
	Damaged     int64 // layers that were not what was published
	Replaced    int64 // of them, those that are there again
	Verified    int64 // layers that were read and compared
	Evicted     int64 // layers that were taken out
	EvictedSize int64 // bytes of them
}

type counters struct{ damaged, replaced, verified, evicted, evictedBytes atomic.Int64 }

// Stats returns the counters.
func (s *Member) Stats() Stats {
	if s == nil {
		return Stats{}
	}
	n := &s.stats
	return Stats{Damaged: n.damaged.Load(), Replaced: n.replaced.Load(), Verified: n.verified.Load(),
		Evicted: n.evicted.Load(), EvictedSize: n.evictedBytes.Load()}
}

// sighting is something as it was when this node saw it first.
type sighting struct {
	what pop.Verification
	at   time.Time
}
