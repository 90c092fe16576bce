package member

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"slices"
	"sync"
	"time"

	"dewpoint/internal/image"
	"dewpoint/internal/layer"
	"dewpoint/internal/pop"

	"github.com/opencontainers/go-digest"
)

// upkeep is what this node does for the PoP all the time.
type upkeep struct {
	*common
	leader pop.Lease // of the GC leader; of Run alone
	// listened is when other nodes' signs of life were looked at last; of Run alone.
	listened time.Time

	mu   sync.Mutex
	said map[string]bool // what this node was last said to have
	disk int64           // bytes that the layers here take, as of a moment ago
}

const (
	beatEvery    = 3 * time.Second  // between two signs of life
	collectEvery = 20 * time.Second // between two looks for what may go, if Config has nothing else
	// idleAttached is how long a layer of the store stays known here that nothing uses; when the store needs
	// room and finds none, the older half of those go that were idle for idlePressed, and those that images have
	// here which no container uses are deactivated.
	idleAttached = 5 * time.Minute
	idlePressed  = 5 * time.Second
)

// rounds is the time between two looks for what may go.
func (s *common) rounds() time.Duration { return cmp.Or(s.cfg.CollectEvery, collectEvery) }

// Run shows the PoP that this node lives, what it has and what it uses, and keeps the store within its
// bounds, until ctx ends. inUse says which layers containers stand on. It is called once.
func (s *upkeep) Run(ctx context.Context, inUse func(digest.Digest) bool) error {
	events, err := s.cfg.Coord.Subscribe(ctx)
	if err != nil {
		return err
	}
	beat, collect := time.NewTicker(beatEvery), time.NewTicker(s.rounds())
	defer beat.Stop()
	defer collect.Stop()
	s.beat(ctx)
	close(s.tried)
	var upkeep sync.WaitGroup
	if s.prewarmer.prewarmed != nil && s.cfg.Prewarm.Images > 0 {
		upkeep.Go(func() { s.prewarmer.prewarmAll(ctx) })
	}
	defer func() {
		upkeep.Wait()
		s.resign(context.WithoutCancel(ctx))
	}()
	busy := make(chan struct{}, 1)
	for {
		select {
		case <-ctx.Done():
			return nil
		case e, ok := <-events:
			if !ok {
				return nil
			}
			s.heard(ctx, e)
			s.cfg.Audience.Heard(e)
		case <-beat.C:
			s.beat(ctx)
		case <-collect.C:
			select {
			case busy <- struct{}{}: // beats go on beside it
				upkeep.Go(func() {
					s.names.tellAll(ctx)
					s.uploads.giveRefused(ctx)
					s.reconcile(ctx, inUse)
					s.makeRoom(ctx)
					<-busy
				})
			default:
			}
		}
	}
}

// heard acts on what another node has done.
func (s *upkeep) heard(ctx context.Context, e pop.Event) {
	switch e.Kind {
	case pop.Deployed:
		s.prewarmer.demanded(e)
		return // nobody waits for it
	case pop.Pressed:
		s.pressed.Store(time.Now().UnixNano())
		if st := s.usable(); st != nil {
			s.work.Go(func() { s.prewarmer.deactivatePrewarmed(s.life, st) })
		}
	case pop.Evicted, pop.Damaged:
		if st := s.store.Load(); st != nil && e.Name != "" {
			st.Deny(e.Name)
		}
		if id := digest.Digest(e.Key); s.prewarmer.prewarmed.isInactive(id) {
			s.work.Go(func() { s.prewarmer.takeBack(s.life, id) })
			break
		}
		if e.Node != s.cfg.Node { // whoever took it out here does what follows
			s.verifier.taken(digest.Digest(e.Key), e.Kind == pop.Damaged)
			if e.Kind == pop.Damaged {
				s.verifier.lost(digest.Digest(e.Key))
			}
		}
	case pop.Resync:
		if st := s.usable(); st != nil {
			s.revalidate(ctx, st)
		}
		for _, img := range s.catalog.All() {
			s.names.refresh(ctx, img)
		}
	case pop.Resolved:
		for _, img := range s.catalog.All() {
			if img.Ref.String() == e.Key && e.Node != s.cfg.Node {
				s.names.refresh(ctx, img)
			}
		}
	}
	s.prewarmer.prewarmed.heard(e, s.cfg.Node)
	s.wake()
}

// refresh takes over what a reference means now to the PoP.
func (s *names) refresh(ctx context.Context, have *image.Image) {
	st := s.usable()
	if st == nil || have.Ref.Dgst != "" || !s.isTold(have.Ref) {
		return
	}
	b, err := st.Image(ctx, have.Ref.String())
	img := new(image.Image)
	if err != nil || json.Unmarshal(b, img) != nil || img.Ref.String() != have.Ref.String() ||
		img.Desc.Digest == have.Desc.Digest {
		return
	}
	if err := s.catalog.Put(img); err != nil {
		s.log.Warn("what a reference means now is not recorded", "image", img.Ref, "err", err)
	}
}

// beat opens the store if that failed before, and shows that the node lives.
func (s *upkeep) beat(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, 2*beatEvery)
	defer cancel()
	if s.cfg.Store != nil && s.store.Load() == nil {
		s.openStore(ctx)
	}
	if st := s.store.Load(); st != nil {
		was := s.cfg.Dir.Away()
		err := s.present(ctx, st)
		if err == nil {
			err = st.Beat(ctx)
		}
		switch is := s.cfg.Dir.Away(); {
		case was == nil && is != nil:
			s.log.Error("the PoP's store is away: this node goes on with what is here and the registry", "err", err)
		case was != nil && is == nil:
			s.log.Info("the PoP's store is back")
		case err != nil && is == nil && !errors.Is(err, pop.ErrNotMounted):
			s.log.Warn("the PoP's store does not take this node's sign of life", "err", err)
		}
	}
	s.announce(ctx)
}

func (s *upkeep) openStore(ctx context.Context) {
	st, err := s.cfg.Store.OpenStore(ctx)
	if err == nil {
		s.store.Store(st)
		s.log.Info("the PoP's store is open", "id", st.ID())
		s.revalidate(ctx, st)
		s.uploads.recall(ctx, st)
		s.cfg.Audience.Heard(pop.Event{Kind: pop.Resync})
		return
	}
	if !s.fails(err) {
		s.log.Error("the PoP's store cannot be used: this node goes on without", "err", err)
	}
}

// revalidate references again what an earlier process of this node has used of the
// store, and forgets what is not there any more.
func (s *upkeep) revalidate(ctx context.Context, st *pop.Store) {
	for _, l := range s.layers.Layers() {
		if l.At == "" {
			continue
		}
		unlock := s.lock(l.DiffID)
		use := st.Use
		if s.prewarmer.prewarmed.isInactive(l.DiffID) {
			use = st.Record // it is referenced before it is mounted
		}
		rec, err := use(ctx, l.DiffID)
		if errors.Is(err, pop.ErrUnknown) || err == nil && s.cfg.Dir.Path(rec.Data()) != l.At {
			s.log.Warn("a layer has left the PoP's store while this node was away", "layer", l.DiffID)
			err = s.attacher.Detach(l.DiffID)
		}
		if err != nil {
			s.log.Warn("layer of the PoP's store", "layer", l.DiffID, "err", err)
		}
		unlock()
	}
}

// announce tells the other nodes what this one has and does.
func (s *upkeep) announce(ctx context.Context) {
	m := pop.Member{Node: s.cfg.Node, Address: s.cfg.Address, Capacity: s.cfg.Capacity}
	if st := s.store.Load(); st != nil {
		m.Store = st.ID()
	}
	now := map[string]bool{}
	s.mu.Lock() // also while it is looked what there is: has may add to it
	for _, l := range s.layers.Layers() {
		if l.At == "" && !l.Tree && l.Complete() {
			now[hasKey(l.DiffID)] = true
		}
	}
	if s.cfg.Saved != nil && s.cfg.Address != "" {
		for _, id := range s.cfg.Saved.Manifests() {
			now[savedKey(id)] = true
		}
	}
	m.Used = s.disk
	before := s.said
	s.said = now
	var use, drop []string
	for key := range now {
		if !before[key] {
			use = append(use, key)
		}
	}
	for key := range before {
		if !now[key] {
			drop = append(drop, key)
		}
	}
	s.mu.Unlock()
	m.Hits, m.Fetching = s.hitsNow(), s.routes.fetching()
	// What does not reach the coordinator now, it is told when it is back.
	err := s.cfg.Coord.Announce(ctx, m)
	s.reached(err)
	if len(use) > 0 {
		err = errors.Join(err, s.cfg.Coord.Use(ctx, use...))
	}
	if len(drop) > 0 {
		err = errors.Join(err, s.cfg.Coord.Drop(ctx, drop...))
	}
	if err != nil {
		s.log.Debug("announce", "err", err)
	}
}

// announceLayer tells the other nodes at once that this one has a layer whole.
func (s *upkeep) announceLayer(ctx context.Context, id digest.Digest) {
	s.mu.Lock()
	s.said[hasKey(id)] = true
	s.mu.Unlock()
	if err := s.cfg.Coord.Use(ctx, hasKey(id)); err != nil {
		s.log.Debug("announce", "layer", id, "err", err) // it is told when it is back
	}
}

// reconcile lets go of what of the store nothing here uses any more, and listens for other nodes' signs of
// life. Only Run calls it.
func (s *upkeep) reconcile(ctx context.Context, inUse func(digest.Digest) bool) {
	var disk int64
	for _, l := range s.layers.Layers() {
		disk += l.DiskUse()
	}
	s.mu.Lock()
	s.disk = disk
	s.mu.Unlock()
	st := s.usable()
	if st == nil {
		return
	}
	s.unuseIdle(ctx, st, inUse)
	if s.leader != nil || time.Since(s.listened) >= collectEvery { // who evicts has to know it well
		s.listened = time.Now()
		if err := st.Listen(ctx); err != nil {
			s.log.Debug("other nodes' signs of life", "err", err)
		}
	}
}

// unuseIdle detaches what of the store nothing here has used for long, or less long when the store needs
// room, and takes this node's references from what nothing uses.
func (s *upkeep) unuseIdle(ctx context.Context, st *pop.Store, inUse func(digest.Digest) bool) {
	claimed := s.holds.Claimed(inUse)
	layers := s.layers.Layers()
	idle := idleAttached
	if s.isPressed() {
		s.prewarmer.deactivatePrewarmed(ctx, st)
		idle = min(idle, olderHalf(layers))
		if err := s.prewarmer.deactivateIdle(ctx, st, idlePressed); err != nil {
			s.log.Debug("layers that no container uses stay in use", "err", err)
		}
	}
	for _, l := range layers {
		if l.At == "" {
			continue
		}
		if _, err := s.layers.Remove(l.DiffID, func(l *layer.Layer) bool {
			return time.Since(l.Used()) > idle && !claimed(l.DiffID)
		}); err != nil {
			s.log.Warn("detach layer", "layer", l.DiffID, "err", err)
		}
	}
	for _, ids := range st.Used() {
		if err := s.unuse(ctx, st, ids, claimed); err != nil {
			s.log.Debug("references stay", "layers", ids, "err", err)
		}
	}
}

// Unuse implements fetch.Attached.
func (s *upkeep) Unuse(ctx context.Context, inUse func(digest.Digest) bool) {
	if st := s.usable(); st != nil {
		s.unuseIdle(ctx, st, inUse)
	}
}

// isPressed reports whether the store needed room a moment ago, and found none.
func (s *common) isPressed() bool {
	return time.Since(time.Unix(0, s.pressed.Load())) < 2*s.rounds()
}

// olderHalf is for how long half of the store's layers here have not been used that have been idle for
// idlePressed: those that are let go of when the store needs room. Attaching one again costs a start
// some tenths of a second, so the others stay for as long as that is enough.
func olderHalf(layers []*layer.Layer) time.Duration {
	var idle []time.Duration
	for _, l := range layers {
		if d := time.Since(l.Used()); l.At != "" && d > idlePressed {
			idle = append(idle, d)
		}
	}
	if len(idle) == 0 {
		return idlePressed
	}
	slices.Sort(idle)
	return idle[len(idle)/2] - time.Millisecond
}

// unuse takes this node's references from those of the layers that are neither attached, nor on their
// way, nor stood on: a container's mount may be older than what is known of the layer.
func (s *upkeep) unuse(ctx context.Context, st *pop.Store, ids []digest.Digest,
	claimed func(digest.Digest) bool) error {
	defer s.lockAll(ids)()
	ids = slices.DeleteFunc(ids, func(id digest.Digest) bool {
		if s.prewarmer.prewarmed.isInactive(id) { // what a failure has left
			return false
		}
		l, err := s.layers.Peek(id)
		return err == nil && l.At != "" || s.layers.Filling(id) != nil || claimed(id)
	})
	if len(ids) == 0 {
		return nil
	}
	return st.Unuse(ctx, ids...)
}

// leaderLease is that of the GC leader, which collects garbage in the store for all: each look goes through
// the whole directory, which on a distributed file system costs every node.
const leaderLease = "keeper"

// isLeader says whether this node is the GC leader, which it is until it is gone.
func (s *upkeep) isLeader(ctx context.Context) bool {
	if s.leader != nil {
		select {
		case <-s.leader.Lost():
		default:
			return true
		}
	}
	var err error
	if s.leader, err = s.cfg.Coord.Acquire(ctx, leaderLease, 0); err != nil {
		s.leader = nil
	}
	return s.leader != nil
}

// resign lets another node be the GC leader.
func (s *upkeep) resign(ctx context.Context) {
	if s.leader != nil {
		if err := s.leader.Release(ctx); err != nil {
			s.log.Debug("the lease of the GC leader ends by expiry", "err", err)
		}
		s.leader = nil
	}
}

// makeRoom evicts and deletes in the shared store what its bounds demand, if
// this node is the GC leader.
func (s *upkeep) makeRoom(ctx context.Context) {
	st := s.usable()
	if st == nil {
		s.resign(ctx)
		return
	}
	if !s.isLeader(ctx) {
		return
	}
	done, err := s.evict(ctx, st, 0)
	if err != nil || len(done.Layers) > 0 || done.Why != "" {
		s.log.Info("evicted from the PoP's store", "layers", len(done.Layers), "bytes", done.Bytes, "why", done.Why,
			"err", err)
	}
	n, serr := st.Sweep(ctx)
	if serr != nil || n > 0 {
		s.log.Info("deleted from the PoP's store", "bytes", n, "err", serr)
	}
	if err != nil || serr != nil {
		s.resign(ctx) // another may see more of the store
	}
}
