package member

import (
	"context"
	"errors"
	"io"
	"os"
	"sync"
	"time"

	"dewpoint/internal/layer"
	"dewpoint/internal/pack"
	"dewpoint/internal/pop"

	"github.com/opencontainers/go-digest"
)

// copyEvery is the time between two looks how far a layer has come that is
// copied into the store, and so about how much work a dead node costs.
const copyEvery = 2 * time.Second

const (
	giveWayLook = 10 * time.Millisecond
	giveWayMost = time.Second
)

// lead begins the fetching of a layer for the whole PoP, where another node has
// left it. The lease ends with the fill, and after the layer was published.
func (s *routes) lead(ctx context.Context, b *route, f *layer.Fill, lease pop.Lease) (layer.Way, error) {
	id := b.l.DiffID
	var looks sync.WaitGroup
	var whole pop.Member // that has it
	var has bool
	var left *pop.Checkpoint
	looks.Go(func() { whole, has = s.holder(ctx, b) })
	looks.Go(func() { left = s.leftOf(ctx, id) })
	// Between the look into the store and the lease somebody may have published; and what was evicted a moment
	// ago is there.
	s.revive(ctx, id)
	w, ok := s.fromStore(ctx, b, id)
	looks.Wait()
	if left != nil {
		defer left.Close()
	}
	if !ok && has {
		w, ok = s.fromPeer(b, whole, true)
	}
	if ok {
		s.release(ctx, lease)
		return w, nil
	}
	s.mu.Lock()
	s.leading[id] = lease
	s.mu.Unlock()
	s.seed(f, id, left)
	b.goOn(f)
	s.count(func(h *pop.Hits) { h.Registry++; h.RegistryBytes += b.l.Size })
	s.holds.PinLayer(id, 1)
	s.work.Go(func() {
		defer s.holds.PinLayer(id, -1)
		s.uploads.expects(id)
		l := &leader{copier: copier{s: s.uploads, id: id, image: b.image, lease: lease}, f: f, began: time.Now()}
		l.run(s.life)
		s.mu.Lock()
		delete(s.leading, id)
		s.mu.Unlock()
		s.release(s.life, lease)
	})
	return layer.Way{}, nil
}

// revive has the store show a layer again that was evicted and whose files are there. This node holds its
// lease.
func (s *routes) revive(ctx context.Context, id digest.Digest) {
	st := s.usable()
	if st == nil {
		return
	}
	if err := st.Revive(ctx, id); err != nil {
		s.log.Debug("an evicted layer does not come back", "layer", id, "err", err)
	}
}

// release gives a lease back; one that cannot be given back ends by itself.
func (s *common) release(ctx context.Context, lease pop.Lease) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), storePatience)
	defer cancel()
	if err := lease.Release(ctx); err != nil {
		s.log.Debug("a lease ends by itself", "err", err)
	}
}

// Claim implements fetch.Neighbours.
func (s *routes) Claim(ctx context.Context, id digest.Digest) (release func()) {
	s.claim(ctx, id)
	return func() { s.unclaim(context.WithoutCancel(ctx), id) }
}

// claim takes the lease of a layer whose image starts lazily, if it is free: from
// then on the other nodes ask this one for what they miss, and it is fetched once. The
// layer's fill goes on with it.
func (s *routes) claim(ctx context.Context, id digest.Digest) {
	if s.cfg.Peers == nil {
		return // nobody could ask for what is missing
	}
	lease, err := s.acquire(ctx, id)
	if err != nil {
		return
	}
	s.mu.Lock()
	s.claims[id] = lease
	s.mu.Unlock()
}

// takeClaim is the lease that claim has taken, which the caller has from then on;
// nil is none.
func (s *routes) takeClaim(id digest.Digest) pop.Lease {
	s.mu.Lock()
	defer s.mu.Unlock()
	lease := s.claims[id]
	delete(s.claims, id)
	return lease
}

// unclaim gives up a claim that no fill went on with.
func (s *routes) unclaim(ctx context.Context, id digest.Digest) {
	if lease := s.takeClaim(id); lease != nil {
		_ = lease.Release(ctx) // else it expires
	}
}

// leftOf is what a dead node had copied of a layer; nil if nothing is known.
func (s *routes) leftOf(ctx context.Context, id digest.Digest) *pop.Checkpoint {
	st := s.usable()
	if st == nil {
		return nil
	}
	c, err := st.Checkpoint(ctx, id)
	if err != nil {
		return nil
	}
	return c
}

// seed takes over what a dead node had copied, unless that is nil.
func (s *routes) seed(f *layer.Fill, id digest.Digest, c *pop.Checkpoint) {
	if c == nil {
		return
	}
	err := f.Seed(layer.Seed{Record: c.Record, Data: c.Data})
	s.log.Info("a layer goes on from where another node of the PoP had come", "layer", id, "bytes", c.Size, "err",
		err)
}

// holder is a node that has the whole layer, though the store does not.
func (s *routes) holder(ctx context.Context, b *route) (pop.Member, bool) {
	if s.cfg.Peers == nil {
		return pop.Member{}, false
	}
	key := hasKey(b.l.DiffID)
	users, err := s.cfg.Coord.Users(ctx, key)
	if err != nil || len(users[key]) == 0 {
		return pop.Member{}, false
	}
	members, err := s.cfg.Coord.Members(ctx)
	if err != nil {
		return pop.Member{}, false
	}
	for _, m := range members {
		for _, node := range users[key] {
			if m.Node == node && m.Node != s.cfg.Node && m.Address != "" && b.failures(wholeAt(m)) < peerFailures {
				return m, true
			}
		}
	}
	return pop.Member{}, false
}

// hasKey is what a node is said to use that has a whole layer of its own.
func hasKey(id digest.Digest) string { return "has/" + id.String() }

// copier copies a layer into the store, under a lease. One goroutine uses it.
type copier struct {
	s     *uploads
	id    digest.Digest
	image string        // that it was fetched for
	cost  time.Duration // of fetching it
	lease pop.Lease
	draft *pop.Draft // nil until something is to be copied
	runs  int64      // of the fill, when the draft was begun
}

// copy writes the tar in the file at path up to size into the store. What a fill
// has begun anew since is copied from the start.
func (c *copier) copy(ctx context.Context, st *pop.Store, path string, size, runs int64) error {
	if c.draft != nil && c.runs != runs {
		if err := c.drop(ctx); err != nil {
			return err
		}
	}
	if c.draft == nil {
		d, err := st.Draft(ctx, c.id, c.lease.Token())
		if err != nil {
			return err
		}
		c.draft, c.runs = d, runs
	}
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	from := c.draft.At()
	_, err = io.CopyBuffer(struct{ io.Writer }{c.draft},
		struct{ io.Reader }{io.NewSectionReader(f, from, size-from)}, make([]byte, 256<<10))
	return err
}

// drop gives up what was copied.
func (c *copier) drop(ctx context.Context) error {
	d := c.draft
	c.draft = nil
	if d == nil {
		return nil
	}
	return d.Abandon(ctx)
}

// publish copies the rest of a complete layer into the store and shows it there.
func (c *copier) publish(ctx context.Context, have *layer.Layer, runs int64) error {
	st := c.s.usable()
	if st == nil {
		return pop.ErrStoreAway
	}
	if st.HasLayer(ctx, c.id) {
		return c.drop(ctx)
	}
	if err := c.roomFor(ctx, st, have.Size); err != nil {
		return err
	}
	if err := c.copy(ctx, st, have.Files().Data, have.Size, runs); err != nil {
		return err
	}
	f, err := os.Open(have.Files().Data)
	if err != nil {
		return err
	}
	defer f.Close()
	table, err := tableOf(f, have.Size)
	if err != nil {
		return err
	}
	rec := pop.Layer{DiffID: c.id, Size: have.Size, Blob: have.Blob, BlobSize: have.BlobSz, Image: c.image,
		Cost: c.cost.Seconds()}
	return c.draft.Publish(ctx, rec, table)
}

// tableOf is the table of a tar of size bytes, as it is published.
func tableOf(tar io.ReaderAt, size int64) ([]byte, error) {
	table, err := pack.MakeTable(tar, size)
	if err != nil {
		return nil, err
	}
	return table.MarshalBinary()
}

// roomFor asks whether there is room for a whole layer of which nothing was copied.
func (c *copier) roomFor(ctx context.Context, st *pop.Store, size int64) error {
	if c.draft != nil && c.draft.At() > 0 {
		return nil
	}
	return st.Room(ctx, size)
}

// leader copies a layer into the store while it arrives. One goroutine uses it.
type leader struct {
	copier
	f     *layer.Fill
	began time.Time
	err   error // why nothing is copied any more
}

// giveWay waits while a deployment has all it needs and is about to start: what it takes to publish a layer
// would slow that down, and more on a small node than on others. It is over in a moment.
func (s *uploads) giveWay(ctx context.Context) {
	tick := time.NewTicker(giveWayLook)
	defer tick.Stop()
	for since := time.Now(); time.Since(since) < giveWayMost && s.holds.Busy() && s.link.Idle(); {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// run returns when the layer is published, or will not be by this node.
func (l *leader) run(ctx context.Context) {
	ended := make(chan error, 1)
	l.s.work.Go(func() {
		_, err := l.f.WaitComplete(ctx)
		ended <- err
	})
	tick := time.NewTicker(copyEvery)
	defer tick.Stop()
	for {
		select {
		case err := <-ended:
			l.end(ctx, err)
			return
		case <-tick.C:
			l.checkpoint(ctx)
		}
	}
}

// checkpoint copies what has arrived and says so. A store that does not take it
// is tried again when the layer is complete.
func (l *leader) checkpoint(ctx context.Context) {
	st := l.s.usable()
	if st == nil || l.err != nil {
		return
	}
	runs := l.f.Runs()
	c, err := l.f.Checkpoint()
	if err != nil || l.draft != nil && l.runs == runs && c.Size <= l.draft.At() {
		return // nothing new
	}
	if err = l.room(ctx, st, c); err == nil {
		err = l.copy(ctx, st, c.Data, c.Size, runs)
	}
	if err == nil && l.f.Runs() == runs {
		err = l.draft.Checkpoint(ctx, c.Record)
	}
	if errors.Is(err, pop.ErrFull) {
		l.err = err
		l.s.log.Debug("a layer is not copied into the PoP's store while it arrives", "layer", l.id, "err", err)
		return
	}
	if err != nil {
		l.err = err
		l.s.log.Warn("a layer is not copied into the PoP's store while it arrives", "layer", l.id, "err", err)
	}
}

// room asks whether the store has room for what a layer has inflated to so far, and for as much as what it
// arrives in: what it comes to in the end is not known yet.
func (l *leader) room(ctx context.Context, st *pop.Store, c layer.Checkpoint) error {
	var at int64
	if l.draft != nil {
		at = l.draft.At()
	}
	return st.Room(ctx, max(c.Size, l.f.Layer.Size)-at)
}

// end publishes the layer, or leaves what there is to another node.
func (l *leader) end(ctx context.Context, err error) {
	have, gerr := l.s.layers.Peek(l.id)
	if err != nil || gerr != nil || have.At != "" || have.Tree {
		l.checkpoint(ctx)
	} else {
		l.s.upkeep.announceLayer(ctx, l.id) // before the lease ends: who comes next finds it
		l.cost = time.Since(l.began)
		if l.err != nil {
			_ = l.drop(ctx) // a sweep does it else
		}
		l.s.giveWay(ctx)
		if err := l.publish(ctx, have, l.f.Runs()); err != nil {
			l.s.log.Warn("a layer is not published to the PoP yet", "layer", l.id, "err", err)
			l.s.later(l.id)
		} else {
			l.s.settled(l.id)
		}
	}
	if gerr != nil || have.At != "" || have.Tree { // nothing of it is here but its progress
		l.s.settled(l.id)
	}
	if l.draft == nil {
		return
	}
	if err := l.draft.Close(); err != nil {
		l.s.log.Debug("close", "layer", l.id, "err", err)
	}
}
