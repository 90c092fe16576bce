package member

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"dewpoint/internal/image"
	"dewpoint/internal/layer"
	"dewpoint/internal/pop"
	"dewpoint/internal/pop/peer"

	"github.com/opencontainers/go-digest"
)

// routes finds the ways of layers into this node, which may be to fetch one for all.
type routes struct {
	*common

	mu      sync.Mutex
	leading map[digest.Digest]pop.Lease // of layers that this node fetches for all
	claims  map[digest.Digest]pop.Lease // of layers whose fill has not begun
}

// Fill implements fetch.Source.
func (s *routes) Fill(img *image.Image, l image.Layer) layer.Preparer {
	return &route{s: s, image: img.Ref.String(), l: l}
}

// way finds the way of a layer into this node (docs/operate/pop.md): out of the store, from
// the node that is fetching it, or, with its lease, from the registry.
func (s *routes) way(ctx context.Context, b *route, f *layer.Fill) (layer.Way, error) {
	id := b.l.DiffID
	since := b.waitsSince() // for a node that cannot be asked, or does not begin
	for {
		above := make(chan uint64, 1)
		go func() { above <- s.above(ctx, id) }()
		if w, ok := s.fromStore(ctx, b, id); ok {
			return w, nil
		}
		if s.leads(id) {
			return layer.Way{}, nil
		}
		lease, err := s.takeClaim(id), error(nil)
		if lease == nil {
			lease, err = s.cfg.Coord.Acquire(ctx, pop.LayerLease(id), <-above)
		}
		if err == nil {
			return s.lead(ctx, b, f, lease)
		}
		var held *pop.HeldError
		if !errors.As(err, &held) {
			s.log.Debug("no lease", "layer", id, "err", err)
			s.alone(f)
			return layer.Way{}, context.Cause(ctx)
		}
		if s.dead(ctx, b, held) {
			continue
		}
		late := !since.IsZero() && time.Since(since) > holderPatience
		if w, ok := s.fromPeer(b, held.Holder, false); ok && !late {
			return w, nil
		}
		if since.IsZero() {
			since = time.Now()
		}
		if s.cfg.Peers != nil && late {
			s.log.Warn("the node that fetches a layer cannot be asked; it is fetched twice", "layer", id, "node",
				held.Holder.Node)
			s.alone(f)
			return layer.Way{}, nil
		}
		if err := s.awaitChange(ctx, 250*time.Millisecond); err != nil {
			return layer.Way{}, err
		}
	}
}

// refusedFor is the time between two refusals that show that a node is dead.
const refusedFor = 300 * time.Millisecond

// dead ends the lease of a node that did not give the layer, and on whose machine nobody listens any more. If
// a firewall refuses for a node that lives, the layer is fetched twice.
func (s *routes) dead(ctx context.Context, b *route, held *pop.HeldError) bool {
	m := held.Holder
	if s.cfg.Peers == nil || m.Address == "" || m.Node == s.cfg.Node || b.failures(m.Address) == 0 {
		return false
	}
	bounded, cancel := context.WithTimeout(ctx, time.Second) // a machine that is there refuses at once
	defer cancel()
	if !s.cfg.Peers.Refuses(bounded, m.Address) {
		return false
	}
	select {
	case <-time.After(refusedFor):
	case <-bounded.Done():
		return false
	}
	if !s.cfg.Peers.Refuses(bounded, m.Address) {
		return false
	}
	err := s.cfg.Coord.Break(ctx, held.Key, held.Token)
	if err != nil {
		s.log.Debug("the lease of a dead node stays", "layer", b.l.DiffID, "node", m.Node, "err", err)
		return false
	}
	s.log.Warn("a node that fetches a layer is dead: this one goes on", "layer", b.l.DiffID, "node", m.Node)
	return true
}

func (s *routes) leads(id digest.Digest) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.leading[id] != nil
}

func (s *routes) acquire(ctx context.Context, id digest.Digest) (pop.Lease, error) {
	return s.cfg.Coord.Acquire(ctx, pop.LayerLease(id), s.above(ctx, id))
}

// above is what the token of a lease of the layer has to exceed.
func (s *routes) above(ctx context.Context, id digest.Digest) uint64 {
	if st := s.usable(); st != nil {
		return st.Above(ctx, id)
	}
	return 0
}

// fromStore is the way out of the store, if the layer is there. A layer that is
// mounted already before it is whole is copied.
func (s *routes) fromStore(ctx context.Context, b *route, id digest.Digest) (layer.Way, bool) {
	st := s.usable()
	if st == nil {
		return layer.Way{}, false
	}
	if b.failures(storeName) >= peerFailures {
		return layer.Way{}, false
	}
	defer s.lock(id)()
	rec, e, err := s.attacher.elsewhere(ctx, st, b.l)
	if err != nil {
		return layer.Way{}, false
	}
	s.count(func(h *pop.Hits) { h.Store++; h.StoreBytes += b.l.Size })
	if s.layers.Partial(id) == nil && !s.layers.Unpacks() {
		return layer.Way{Elsewhere: e}, true
	}
	w := b.useSource(storeName, func(_ context.Context, off int64) (io.ReadCloser, error) {
		return s.openStored(rec, off)
	})
	wrong := w.Wrong
	w.Wrong = func(err error) {
		wrong(err)
		s.count(func(h *pop.Hits) { h.Store--; h.StoreBytes -= b.l.Size })
		// else it is this node that cannot take it
		if err := st.Verify(s.life, rec, 0); errors.Is(err, pop.ErrDamaged) {
			s.verifier.quarantine(s.life, st, rec, err)
		}
	}
	return w, true
}

// openStored gives a layer's tar as it lies in the store.
func (s *routes) openStored(rec *pop.Layer, off int64) (io.ReadCloser, error) {
	st := s.usable()
	if st == nil {
		return nil, pop.ErrStoreAway
	}
	f, err := st.Open(s.life, rec)
	if err != nil {
		return nil, err
	}
	return struct {
		io.Reader
		io.Closer
	}{io.NewSectionReader(f, off, rec.Size-off), f}, nil
}

// fromPeer is the way from a node that fetches the layer, or is said to have it whole.
func (s *routes) fromPeer(b *route, m pop.Member, whole bool) (layer.Way, bool) {
	who := m.Address
	if whole {
		who = wholeAt(m)
	}
	if s.cfg.Peers == nil || m.Address == "" || m.Node == s.cfg.Node || b.failures(who) >= peerFailures {
		return layer.Way{}, false
	}
	var counted atomic.Bool
	ended := func() {
		if counted.CompareAndSwap(false, true) {
			s.count(func(h *pop.Hits) { h.Peer++; h.PeerBytes += b.l.Size })
		}
	}
	w := b.useSource(who, func(ctx context.Context, off int64) (io.ReadCloser, error) {
		return s.follow(ctx, m, b, whole, off, ended)
	})
	wrong := w.Wrong
	w.Wrong = func(err error) {
		wrong(err)
		if counted.CompareAndSwap(true, false) {
			s.count(func(h *pop.Hits) { h.Peer--; h.PeerBytes -= b.l.Size })
		}
	}
	return w, true
}

// wholeAt is a node in what it is said to have whole, among those that fail: it may yet fetch the layer.
func wholeAt(m pop.Member) string { return m.Address + ", which is said to have it" }

// errNotWhole says that a node does not have what it was said to have.
var errNotWhole = errors.New("it has let go of it")

// follow gives the layer's tar as m has it, and as it grows there. It ends with an error when the node is
// seen to have let go of the layer, or is dead. ended is called when the layer has come to its end.
func (s *routes) follow(ctx context.Context, m pop.Member, b *route, whole bool, off int64,
	ended func()) (io.ReadCloser, error) {
	id := b.l.DiffID
	ctx, cancel := context.WithCancelCause(ctx)
	r, _, err := s.cfg.Peers.Follow(ctx, m.Address, id, off)
	if err != nil {
		switch {
		case !errors.Is(err, peer.ErrUnknown):
		case whole:
			err = fmt.Errorf("%w: %w", err, errNotWhole)
		default: // it holds the lease and has not begun
			err = errors.Join(err, s.awaitChange(ctx, 50*time.Millisecond))
		}
		cancel(nil)
		return nil, err
	}
	f := &followed{ReadCloser: r, cancel: cancel, ended: ended}
	s.work.Go(func() { s.watch(ctx, f, m, b) })
	return f, nil
}

// followed is a stream from a node that may die without a word.
type followed struct {
	io.ReadCloser
	cancel context.CancelCauseFunc
	ended  func() // the layer's end has come
	got    atomic.Int64
}

func (f *followed) Read(b []byte) (int, error) {
	n, err := f.ReadCloser.Read(b)
	f.got.Add(int64(n))
	if err == io.EOF {
		f.ended()
	}
	return n, err
}

func (f *followed) Close() error {
	f.cancel(nil)
	return f.ReadCloser.Close()
}

// watchEvery is how long a stream may stand still until the coordinator is asked
// whether the other node lives.
const watchEvery = 2 * time.Second

var errDeparted = errors.New("the node does not bring the layer any more")

// watch cuts a stream that stands still when its node has lost the layer's lease,
// and does not have it whole. It remembers how far the node has come.
func (s *routes) watch(ctx context.Context, f *followed, m pop.Member, b *route) {
	id := b.l.DiffID
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	for seen := int64(-1); ; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if n := f.got.Load(); n != seen {
			seen = n
			if record, err := s.cfg.Peers.Progress(ctx, m.Address, id); err == nil {
				b.remember(record)
			}
			continue
		}
		h, held, err := s.cfg.Coord.Holder(ctx, pop.LayerLease(id))
		if err != nil || held && h.Holder.Node == m.Node {
			continue
		}
		if users, err := s.cfg.Coord.Users(ctx, hasKey(id)); err != nil ||
			slices.Contains(users[hasKey(id)], m.Node) {
			continue
		}
		f.cancel(errDeparted)
		return
	}
}

// fetching is how far the layers have come that this node fetches for all.
func (s *routes) fetching() (all []pop.Fetch) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id := range s.leading {
		f := pop.Fetch{Key: id.String()}
		if fill := s.layers.Filling(id); fill != nil {
			f.Done, f.Size = fill.Progress().Fetched, fill.Layer.Size
		}
		all = append(all, f)
	}
	return all
}
