// Package member is a node's side of its PoP.
//
// fetch brings images and asks, where it has a PoP, for what need not cross the link: a Member implements
// fetch.Source, fetch.Neighbours and fetch.Attached. What a reference means, the others may know (names). A
// layer that the store has is made known here (attacher), or it comes from the node that fetches it; else
// this node takes the layer's lease, fetches it for all (routes) and gives it to the store (uploads).
// Startup packs cross the link once (packs). Behind deployments a node tells the others that it lives, lets
// go of what it does not use, and makes room in the store if it is the one that does so for all (upkeep);
// it prewarms images that others deploy (prewarmer), has copies of what it uses often (copies), and
// verifies the store (verifier).
//
// Each part has its own state and lock; what they share is common. No part calls another with its mu held.
// The lock of a layer (common.lock) is taken before those of the parts.
package member

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"dewpoint/internal/fetch"
	"dewpoint/internal/fetch/link"
	"dewpoint/internal/layer"
	"dewpoint/internal/pop"
	"dewpoint/internal/pop/peer"

	"github.com/opencontainers/go-digest"
)

// Config names what a Member works with. Node, Coord, Layers, Catalog and Link are required.
type Config struct {
	Node  string
	Coord pop.Coordinator
	Store Opener   // opens the shared store. nil: there is none, nodes ask each other
	Dir   *pop.Dir // the store's; nil without one
	// Peers asks other nodes; nil: they are not asked.
	Peers    *peer.Client
	Address  string // host:port where this node is asked; "" if it is not
	PackDir  string // where this node has its startup packs; "" is nowhere
	Capacity int64  // bytes that this node's own layers may take
	Layers   *layer.Store
	Catalog  *fetch.Catalog
	Link     *link.Link
	Log      *slog.Logger // nil discards
	Saved    Checkpoints  // may be nil
	Cache    Cache        // asked before a layer of the store is copied to this node; nil: none is
	Audience Audience     // nil: nobody wants to know
	// Prewarm is how this node prewarms images that others have deployed.
	Prewarm PrewarmConfig
	// Pending is the path of a file that remembers which uploads are pending; "" remembers none.
	Pending string
	// CollectEvery is the time between two looks for what may go; 0 is 20 s.
	CollectEvery time.Duration
	// Verify is the time in which every layer of the store is read and compared
	// once, in the background. 0 does not.
	Verify time.Duration
}

// Member is a node's side of its PoP, put together of its parts. It is safe for concurrent use. A nil Member
// is that of a node by itself: it has nothing, and says so.
type Member struct {
	*common
	*attacher
	*routes
	*uploads
	*packs
	*verifier
	*prewarmer
	*names
	*copies
	*upkeep
}

// common is what the parts share: what they work with, the store as this node sees it, and each other.
type common struct {
	cfg     Config
	node    *fetch.Puller
	layers  *layer.Store
	catalog *fetch.Catalog
	link    *link.Link
	holds   *fetch.Holds
	log     *slog.Logger
	life    context.Context // of what goes on behind deployments
	end     context.CancelFunc
	work    sync.WaitGroup
	stats   counters

	attacher  *attacher
	routes    *routes
	uploads   *uploads
	packs     *packs
	verifier  *verifier
	prewarmer *prewarmer
	names     *names
	copies    *copies
	upkeep    *upkeep

	store atomic.Pointer[pop.Store] // nil while it cannot be opened
	tried chan struct{}             // closed once it was tried to open the store
	// unmounted is why the store is not in its directory; nil while it is.
	unmounted atomic.Pointer[error]
	// pressed is when the store last needed room and found none, ns since 1970.
	pressed atomic.Int64

	mu      sync.Mutex                    // of what follows
	changed chan struct{}                 // closed, and replaced, when waiting may be over
	locks   map[digest.Digest]*sync.Mutex // held while a layer is attached or let go of
	hits    pop.Hits
	lastErr error // why the store could not be opened
	away    error // why the coordinator did not answer last; nil if it did
}

// New returns the Member that a node's puller is to join. Close ends what it does in the background.
func New(cfg Config, p *fetch.Puller) *Member {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Audience == nil {
		cfg.Audience = deaf{}
	}
	c := &common{cfg: cfg, node: p, layers: cfg.Layers, catalog: cfg.Catalog, link: cfg.Link, holds: p.Holds(),
		log: cfg.Log, tried: make(chan struct{}), changed: make(chan struct{}),
		locks: map[digest.Digest]*sync.Mutex{}}
	c.life, c.end = context.WithCancel(context.Background())
	c.attacher = &attacher{common: c, proved: map[digest.Digest]proof{}}
	c.routes = &routes{common: c, leading: map[digest.Digest]pop.Lease{}, claims: map[digest.Digest]pop.Lease{}}
	c.uploads = &uploads{common: c, refused: map[digest.Digest]bool{}, pending: loadPending(cfg.Pending)}
	c.packs = &packs{common: c, relays: map[digest.Digest]*packRelay{}, brought: map[digest.Digest]int64{}}
	c.verifier = &verifier{common: c, mending: map[digest.Digest]bool{}, noted: map[digest.Digest]sighting{}}
	c.prewarmer = &prewarmer{common: c}
	c.names = &names{common: c, untold: map[string]*resolution{}}
	c.copies = &copies{common: c, uses: map[digest.Digest]int{}}
	c.upkeep = &upkeep{common: c, said: map[string]bool{}}
	if cfg.Prewarm.Engine != nil && cfg.Store != nil {
		c.prewarmer.prewarmed = newPrewarmed(cfg.Prewarm)
	}
	return &Member{c, c.attacher, c.routes, c.uploads, c.packs, c.verifier, c.prewarmer, c.names, c.copies,
		c.upkeep}
}

// Close ends what goes on in the background. It comes after that of the node's puller.
func (s *Member) Close() {
	if s == nil {
		return
	}
	s.end()
	s.work.Wait()
}

const (
	// storePatience is how long a deployment waits for an answer of the store: after
	// that it goes on without.
	storePatience = 3 * time.Second
	// peerFailures is how often a node is asked that does not answer well.
	peerFailures = 3
	storeName    = "the PoP's store" // among those that fail
	// holderPatience is how long is waited for a layer that a node is fetching
	// which cannot be asked itself.
	holderPatience = 30 * time.Second
)

// usable is the store, if it answers.
func (s *common) usable() *pop.Store {
	st := s.store.Load()
	if st == nil || s.cfg.Dir.Away() != nil || s.unmounted.Load() != nil {
		return nil
	}
	return st
}

// opening waits for the first try to open the store, as long as for an answer of it: what a node that has
// just booted is to deploy, or goes on with, need not be fetched because it came a moment before.
func (s *common) opening(ctx context.Context) {
	if s.cfg.Store == nil {
		return
	}
	select {
	case <-s.tried:
	case <-time.After(storePatience):
	case <-ctx.Done():
	}
}

// lock excludes others from attaching a layer or letting go of it.
func (s *common) lock(id digest.Digest) (unlock func()) {
	s.mu.Lock()
	l := s.locks[id]
	if l == nil {
		l = new(sync.Mutex)
		s.locks[id] = l
	}
	s.mu.Unlock()
	l.Lock()
	return l.Unlock
}

// lockAll is lock of several layers.
func (s *common) lockAll(ids []digest.Digest) (unlock func()) {
	var undo []func()
	for _, id := range slices.Sorted(slices.Values(ids)) { // in one order, so that nobody waits in a circle
		undo = append(undo, s.lock(id))
	}
	return func() {
		for _, unlock := range undo {
			unlock()
		}
	}
}

// count adds to the hit counters.
func (s *common) count(fn func(*pop.Hits)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	fn(&s.hits)
}

// wake has those look again who wait for another node.
func (s *common) wake() {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.changed)
	s.changed = make(chan struct{})
}

// awaitChange blocks until something has changed, or for d.
func (s *common) awaitChange(ctx context.Context, d time.Duration) error {
	s.mu.Lock()
	changed := s.changed
	s.mu.Unlock()
	select {
	case <-changed:
	case <-time.After(d):
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	return nil
}
