package member

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"dewpoint/internal/fetch"
	"dewpoint/internal/image"
	"dewpoint/internal/layer"
	"dewpoint/internal/pop"
	"dewpoint/internal/pop/peer"
	"dewpoint/internal/trace"

	"github.com/opencontainers/go-digest"
)

// Config names what a Member works with. Node, Coord, Layers, Catalog and Link are required.
type Config struct {
	Node  string
	Coord pop.Coordinator
	// Open opens the shared store. nil: there is none, nodes ask each other.
	Open func(context.Context) (*pop.Store, error)
	Dir  *pop.Dir // the store's; nil without one
	// Peers asks other nodes; nil: they are not asked.
	Peers    *peer.Client
	Address  string // host:port where this node is asked; "" if it is not
	PackDir  string // where this node has its startup packs; "" is nowhere
	Capacity int64  // bytes that this node's own layers may take
	Layers   *layer.Store
	Catalog  *fetch.Catalog
	Link     *fetch.Link
	Log      *slog.Logger // nil discards
	// Saved are the images, by their manifests, that this node gives checkpoints of. May be nil.
	Saved func() []digest.Digest
	// Room reports whether the node's cache has room for a copy of so many bytes.
	// nil: none are made.
	Room func(bytes int64) bool
	// Damaged is told of layers in the store that are not what was published. May be nil.
	Damaged func(id digest.Digest, why error)
	// Lost is told of what has left the store since it was damaged, whichever node has found that: layers, and
	// what others keep there. May be nil; must not block for long.
	Lost func(id digest.Digest)
	// Replaced is told of damaged layers that are in the store again. May be nil.
	Replaced func(id digest.Digest)
	// Heard is told of every event of the PoP, one after the other, while Run does, and of a Resync when the
	// store has been opened. It must not block. May be nil.
	Heard func(e pop.Event)
	// Prepare is how this node gets images ready that others have deployed.
	Prepare PrewarmConfig
	// Owed is the path of a file that remembers which layers this node is to give the store; "" remembers none.
	Owed string
	// House is the time between two looks for what may go; 0 is 20 s.
	House time.Duration
	// Verify is the time in which every layer of the store is read and compared
	// once, in the background. 0 does not.
	Verify time.Duration
}

// Member is a node's side of its PoP. It is safe for concurrent use. A nil Member is that of a node by
// itself: it has nothing, and says so.
type Member struct {
	cfg     Config
	node    *fetch.Puller
	layers  *layer.Store
	catalog *fetch.Catalog
	link    *fetch.Link
	holds   *fetch.Holds
	log     *slog.Logger
	life    context.Context // of what goes on behind deployments
	end     context.CancelFunc
	work    sync.WaitGroup
	stats   counters

	store atomic.Pointer[pop.Store] // nil while it cannot be opened
	tried chan struct{}             // closed once it was tried to open the store
	// unmounted is why the store is not in its directory; nil while it is.
	unmounted atomic.Pointer[error]
	// pressed is when the store last needed room and found none, ns since 1970.
	pressed atomic.Int64
	keeper  pop.Lease // of who keeps house in the store; of the upkeep alone
	// listened is when other nodes' signs of life were looked at last; of the upkeep alone.
	listened time.Time

	mu      sync.Mutex
	changed chan struct{} // closed, and replaced, when waiting may be over
	leading map[digest.Digest]pop.Lease
	locks   map[digest.Digest]*sync.Mutex // held while a layer is attached or let go of
	claims  map[digest.Digest]pop.Lease   // of layers whose fill has not begun
	relays  map[digest.Digest]*packRelay  // by manifest
	// bytes of packs that came out of the store, by manifest, until a start asks
	brought map[digest.Digest]int64
	hits    pop.Hits
	said    map[string]bool        // what this node was last said to have
	owed    map[digest.Digest]bool // layers that the store did not take
	debts   map[digest.Digest]bool // these, and those that are to be published
	saving  sync.Mutex             // held while these are written down
	uses    map[digest.Digest]int  // deployments of layers of the store, here
	copying sync.Mutex             // held while a layer is copied
	lastErr error                  // why the store could not be opened
	away    error                  // why the coordinator did not answer last; nil if it did
	disk    int64                  // bytes that the layers here take, as of a moment ago
	mending map[digest.Digest]bool
	noted   map[digest.Digest]sighting // of what other nodes have verified
	untold  map[string]*resolution     // by reference, which the store does not have yet
	proved  map[digest.Digest]proof    // that the tars of layers can be opened
	device  uint64                     // of the store's mount; 0 before it was seen
	ready   *prepared                  // what rests, and why; nil: nothing does
}

// New returns the Member that a node's puller is to join. Close ends what it does in the background.
func New(cfg Config, p *fetch.Puller) *Member {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	s := &Member{cfg: cfg, node: p, layers: cfg.Layers, catalog: cfg.Catalog, link: cfg.Link, holds: p.Holds(),
		log: cfg.Log, tried: make(chan struct{}), changed: make(chan struct{}),
		leading: map[digest.Digest]pop.Lease{},
		locks:   map[digest.Digest]*sync.Mutex{}, said: map[string]bool{}, uses: map[digest.Digest]int{},
		owed: map[digest.Digest]bool{}, debts: loadDebts(cfg.Owed), relays: map[digest.Digest]*packRelay{},
		brought: map[digest.Digest]int64{}, claims: map[digest.Digest]pop.Lease{},
		mending: map[digest.Digest]bool{}, noted: map[digest.Digest]sighting{}, untold: map[string]*resolution{},
		proved: map[digest.Digest]proof{}}
	if cfg.Prepare.Rest != nil && cfg.Open != nil {
		s.ready = newPrepared(cfg.Prepare)
	}
	s.life, s.end = context.WithCancel(context.Background())
	return s
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
	// sitePatience is how long a deployment waits for an answer of the store: after
	// that it goes on without.
	sitePatience = 3 * time.Second
	// peerFailures is how often a node is asked that does not answer well.
	peerFailures = 3
	storeName    = "the PoP's store" // among those that fail
	// holderPatience is how long is waited for a layer that a node is fetching
	// which cannot be asked itself.
	holderPatience = 30 * time.Second
)

// usable is the store, if it answers.
func (s *Member) usable() *pop.Store {
	st := s.store.Load()
	if st == nil || s.cfg.Dir.Away() != nil || s.unmounted.Load() != nil {
		return nil
	}
	return st
}

// opening waits for the first try to open the store, as long as for an answer of it: what a node that has
// just booted is to deploy, or goes on with, need not be fetched because it came a moment before.
func (s *Member) opening(ctx context.Context) {
	if s.cfg.Open == nil {
		return
	}
	select {
	case <-s.tried:
	case <-time.After(sitePatience):
	case <-ctx.Done():
	}
}

// lock excludes others from attaching a layer or letting go of it.
func (s *Member) lock(id digest.Digest) (unlock func()) {
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
func (s *Member) lockAll(ids []digest.Digest) (unlock func()) {
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
func (s *Member) count(fn func(*pop.Hits)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	fn(&s.hits)
}

// wake has those look again who wait for another node.
func (s *Member) wake() {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.changed)
	s.changed = make(chan struct{})
}

// rest blocks until something has changed, or for d.
func (s *Member) rest(ctx context.Context, d time.Duration) error {
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

// Attach implements fetch.Source: it makes those layers of img known that the store has, before anything is
// decided about the others. Layers of a store that is away are let go of.
func (s *Member) Attach(ctx context.Context, img *image.Image, begun any) (lost []digest.Digest) {
	ctx, step := trace.Start(ctx, "attach")
	defer step.End()
	under, _ := begun.(*attaching)
	return s.attach(ctx, img, under)
}

// attach is Attach, part of which begun, unless nil, does already.
func (s *Member) attach(ctx context.Context, img *image.Image, begun *attaching) (lost []digest.Digest) {
	s.opening(ctx)
	ctx, cancel := context.WithTimeout(ctx, sitePatience)
	defer cancel()
	unused := s.unused(img)
	s.ready.adopt(img)
	st := s.usable()
	if st == nil {
		return s.disown(img)
	}
	s.work.Go(func() { // where it is needed at once, findPack waits for it
		if err := s.bringPack(s.life, img.Desc.Digest); err != nil {
			s.log.Warn("a startup pack of the PoP's store cannot be used", "image", img.Ref, "err", err)
		}
	})
	// the registry says that it is another image now
	if begun == nil || begun.img.Desc.Digest != img.Desc.Digest {
		begun = s.begin(st, img, false)
	}
	var used []*pop.Layer
	var mu sync.Mutex
	var group sync.WaitGroup
	group.Go(func() { s.remounted(ctx) })
	resting := s.ready.resting(idsOf(img))
	roused := make(chan struct{})
	var left map[digest.Digest]bool // of those; there once roused is closed
	group.Go(func() {
		defer close(roused)
		left = s.rouse(ctx, st, resting)
	})
	for _, l := range img.Unique() {
		if begun.has(l.DiffID) {
			continue
		}
		group.Go(func() {
			rested, isGone := slices.Contains(resting, l.DiffID), false
			if rested {
				<-roused
				isGone = left[l.DiffID]
			} else if isGone = s.gone(ctx, l.DiffID); isGone {
				s.detach(img, l.DiffID)
			}
			mu.Lock()
			defer mu.Unlock()
			if isGone {
				lost = append(lost, l.DiffID)
			} else if rec := s.found(l); rec != nil {
				used = append(used, rec)
				if !slices.Contains(unused, l.DiffID) {
					s.reused(l.DiffID)
				}
			}
		})
	}
	group.Wait()
	used = append(used, begun.wait(ctx)...)
	s.touch(img, used)
	if s.usable() == nil { // it went meanwhile
		return append(lost, s.disown(img)...)
	}
	return lost
}

// touch tells the PoP that an image is deployed and its layers are used, behind the deployment.
func (s *Member) touch(img *image.Image, used []*pop.Layer) {
	st := s.usable()
	if st == nil {
		return
	}
	s.work.Go(func() {
		ctx, cancel := context.WithTimeout(s.life, sitePatience)
		defer cancel()
		err := s.cfg.Coord.Publish(ctx, pop.Event{Kind: pop.Deployed, Key: img.Ref.String()})
		if len(used) > 0 {
			err = errors.Join(err, st.Touch(ctx, img.Ref.String(), img.Ref.Host, used...))
		}
		if err != nil {
			s.log.Debug("use is not noted", "image", img.Ref, "err", err)
		}
	})
}

// found counts a layer that is here already, and returns what the policy is told of it.
func (s *Member) found(l image.Layer) *pop.Layer {
	have, err := s.layers.Peek(l.DiffID)
	if err == nil && have.At != "" {
		s.count(func(h *pop.Hits) { h.Store++; h.StoreBytes += l.Size })
		return s.recordOf(have)
	}
	s.count(func(h *pop.Hits) { h.Local++; h.LocalBytes += l.Size })
	return s.recordOf(have)
}

// recordOf is what the policy is told of a layer that is here; nil of none.
func (s *Member) recordOf(l *layer.Layer) *pop.Layer {
	if l == nil {
		return nil
	}
	return &pop.Layer{DiffID: l.DiffID, Size: l.Size, Blob: l.Blob, BlobSize: l.BlobSz}
}

// way finds the way of a layer into this node (docs/operate/pop.md): out of the store, from
// the node that is fetching it, or, with its lease, from the registry.
func (s *Member) way(ctx context.Context, b *route, f *layer.Fill) (layer.Way, error) {
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
		if err := s.rest(ctx, 250*time.Millisecond); err != nil {
			return layer.Way{}, err
		}
	}
}

func (s *Member) leads(id digest.Digest) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.leading[id] != nil
}

func (s *Member) acquire(ctx context.Context, id digest.Digest) (pop.Lease, error) {
	return s.cfg.Coord.Acquire(ctx, pop.LayerLease(id), s.above(ctx, id))
}

// above is what the token of a lease of the layer has to exceed.
func (s *Member) above(ctx context.Context, id digest.Digest) uint64 {
	if st := s.usable(); st != nil {
		return st.Above(ctx, id)
	}
	return 0
}

// fromStore is the way out of the store, if the layer is there. A layer that is
// mounted already before it is whole is copied.
func (s *Member) fromStore(ctx context.Context, b *route, id digest.Digest) (layer.Way, bool) {
	st := s.usable()
	if st == nil {
		return layer.Way{}, false
	}
	if b.failures(storeName) >= peerFailures {
		return layer.Way{}, false
	}
	defer s.lock(id)()
	rec, e, err := s.elsewhere(ctx, st, b.l)
	if err != nil {
		return layer.Way{}, false
	}
	s.count(func(h *pop.Hits) { h.Store++; h.StoreBytes += b.l.Size })
	if s.layers.Partial(id) == nil && !s.layers.Unpacks() {
		return layer.Way{Elsewhere: e}, true
	}
	w := b.take(storeName, func(_ context.Context, off int64) (io.ReadCloser, error) {
		return s.openStored(rec, off)
	})
	wrong := w.Wrong
	w.Wrong = func(err error) {
		wrong(err)
		s.count(func(h *pop.Hits) { h.Store--; h.StoreBytes -= b.l.Size })
		// else it is this node that cannot take it
		if err := st.Verify(s.life, rec, 0); errors.Is(err, pop.ErrDamaged) {
			s.quarantine(s.life, st, rec, err)
		}
	}
	return w, true
}

// openStored gives a layer's tar as it lies in the store.
func (s *Member) openStored(rec *pop.Layer, off int64) (io.ReadCloser, error) {
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
func (s *Member) fromPeer(b *route, m pop.Member, whole bool) (layer.Way, bool) {
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
	w := b.take(who, func(ctx context.Context, off int64) (io.ReadCloser, error) {
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
func (s *Member) follow(ctx context.Context, m pop.Member, b *route, whole bool, off int64,
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
			err = errors.Join(err, s.rest(ctx, 50*time.Millisecond))
		}
		cancel(nil)
		return nil, err
	}
	f := &followed{ReadCloser: r, cancel: cancel, ended: ended}
	s.work.Go(func() { s.watch(ctx, f, m, id) })
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
// and does not have it whole.
func (s *Member) watch(ctx context.Context, f *followed, m pop.Member, id digest.Digest) {
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
