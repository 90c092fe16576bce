package fetch

import (
	"context"
	"errors"
	"fmt"
	"time"

	"dewpoint/internal/pop"

	"github.com/opencontainers/go-digest"
)

// PoP is what a node knows of its PoP.
type PoP struct {
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

// PoP asks what the nodes of the PoP do. It returns nil if this node has none. What
// could not be found out is in the error, beside the rest.
func (p *Puller) PoP(ctx context.Context) (*PoP, error) {
	s := p.site
	if s == nil {
		return nil, nil
	}
	out := &PoP{Node: s.cfg.Node, Shared: s.cfg.Dir != nil, Hits: s.hitsNow()}
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

func (s *site) users(ctx context.Context, layers []*pop.Layer) (map[string][]string, error) {
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
func (s *site) storeAway() error {
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

func (s *site) hitsNow() pop.Hits {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.hits
}

// reached notes whether the coordinator has answered.
func (s *site) reached(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.away = nil
	if errors.Is(err, pop.ErrAway) {
		s.away = err
	}
}

// Hears reports whether Config.PoP.Heard is told of what happens in the PoP: the coordinator answered when it
// was asked last, a moment ago. What was missed before is made up for by a Resync.
func (p *Puller) Hears() bool {
	s := p.site
	if s == nil {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.away == nil
}

// PoPState is what this node saw last, without asking anybody.
type PoPState struct {
	Shared    bool // there is to be a store
	StoreAway bool
	CoordAway bool
	Hits      pop.Hits
}

// PoPState returns it, and false if this node has no PoP.
func (p *Puller) PoPState() (PoPState, bool) {
	s := p.site
	if s == nil {
		return PoPState{}, false
	}
	out := PoPState{Shared: s.cfg.Dir != nil, StoreAway: s.storeAway() != nil, Hits: s.hitsNow()}
	s.mu.Lock()
	defer s.mu.Unlock()
	out.CoordAway = s.away != nil
	return out, true
}

// needStore is the store for what an operator asks for.
func (p *Puller) needStore() (*site, *pop.Store, error) {
	s := p.site
	if s == nil || s.cfg.Dir == nil {
		return nil, nil, ErrNoPoP
	}
	if st := s.usable(); st != nil {
		return s, st, nil
	}
	return nil, nil, s.storeAway()
}

// ForgetNode removes from the store what a node says it uses that is gone for
// good. See pop.Store.Forget.
func (p *Puller) ForgetNode(ctx context.Context, node string) error {
	_, st, err := p.needStore()
	if err != nil {
		return err
	}
	return st.Forget(ctx, node)
}

// giveTime is for how long PrunePoP waits for the nodes to let go of what they only have ready.
const giveTime = time.Second

// PrunePoP evicts from the store what no node uses: first it has the nodes let go of what they have no more
// than ready. What it evicts can come back for the time of grace.
func (p *Puller) PrunePoP(ctx context.Context, inUse func(digest.Digest) bool) (pop.Eviction, error) {
	s, st, err := p.needStore()
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
func (s *site) press(ctx context.Context) {
	s.pressed.Store(time.Now().UnixNano())
	if err := s.cfg.Coord.Publish(ctx, pop.Event{Kind: pop.Pressed}); err != nil {
		s.log.Debug("nodes are not told that the store needs room", "err", err)
	}
}

func (s *site) evict(ctx context.Context, st *pop.Store, want int64) (pop.Eviction, error) {
	done, err := st.Evict(ctx, want)
	if done.Why == pop.AllInUse {
		s.press(ctx)
	}
	s.p.stats.evicted.Add(int64(len(done.Layers)))
	s.p.stats.evictedBytes.Add(done.Bytes)
	return done, err
}

// sighting is something as it was when this node saw it first.
type sighting struct {
	what pop.Verification
	at   time.Time
}
