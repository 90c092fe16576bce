// Package fetch brings images to the node: it resolves them, decides what
// crosses the link when (see Link), and fills the layers.
//
// A pull is: manifest and configuration, from the catalog or the registry; a
// fill for each layer that the store lacks, shared with every other pull that
// wants it; and two moments to wait for, when all layers are readable and when
// all are complete. The fills belong to the contexts of those who wait: when
// the last one is gone a fill ends, and its progress stays for the next.
package fetch

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

	"dewpoint/internal/image"
	"dewpoint/internal/layer"
	"dewpoint/internal/mount"
	"dewpoint/internal/registry"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/semaphore"
)

// Config names the parts that a Puller works with. Registry, Layers,
// Catalog and Link are required.
type Config struct {
	Registry *registry.Client
	Layers   *layer.Store
	Catalog  *Catalog
	Link     *Link
	Packs    PackConfig
	Lazy     LazyConfig
	PoP      PoPConfig
	Log      *slog.Logger // nil discards
}

// Puller pulls images. It is safe for concurrent use.
type Puller struct {
	cfg  Config
	site *site           // nil: this node is by itself
	life context.Context // of fills that no caller owns
	end  context.CancelFunc

	mu       sync.Mutex
	sessions map[digest.Digest]*session // by manifest, for clients that ask layer by layer
	origins  map[digest.Digest]*origin  // by layer: where partial ones get their bytes
	wants    map[want]bool              // being served

	work     sync.WaitGroup                 // what goes on behind starts that are over
	slots    map[string]*semaphore.Weighted // by registry, of fetches for readers who wait; guarded by mu
	bad      quarantine
	stats    lazyStats
	failures failures

	hoursEvery  time.Duration // how often it is looked whether the hours allow filling; constant
	sessionIdle time.Duration // how long fills go on after the last call that wanted them; constant
	// fresh is how long a layer that was just asked for is kept though nothing
	// refers to it yet: a client that was told of it is about to. It is constant.
	fresh time.Duration

	holdMu sync.Mutex            // nothing is locked while it is held
	holds  map[*Pull]bool        // pulls whose layers must stay
	given  map[digest.Digest]int // layers that are being copied into the PoP's store, and must stay
}

// NewPuller returns a Puller. Close ends what it does in the background.
func NewPuller(cfg Config) *Puller {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	p := &Puller{cfg: cfg, sessions: map[digest.Digest]*session{}, origins: map[digest.Digest]*origin{}, wants: map[want]bool{}, holds: map[*Pull]bool{}, given: map[digest.Digest]int{}, sessionIdle: time.Minute, fresh: 2 * time.Second}
	p.slots, p.hoursEvery = map[string]*semaphore.Weighted{}, time.Minute
	p.life, p.end = context.WithCancel(context.Background())
	if cfg.PoP.Coord != nil {
		p.site = newSite(p, cfg.PoP)
	}
	return p
}

// Options are what one pull may differ in.
type Options struct {
	PlainHTTP bool
	// Local takes what the reference was last resolved to, without asking the
	// registry, if all its layers are here.
	Local     bool
	Lazy      bool  // mount before the layers are whole, if that is faster
	Order     Order // for experiments
	Inflaters int   // for experiments; 0 is the node's own number
}

// Pull is one image on its way. It is safe for concurrent use.
type Pull struct {
	Image *image.Image
	Local bool // nothing had to be fetched
	// Resolved is when the image was known, before anything of it was here.
	Resolved time.Time

	// Lazy is set if the image can be mounted before it is whole. Why says what
	// that was decided by, if it was to be decided.
	Lazy *Start
	Why  string

	puller *Puller
	unhold context.CancelFunc // ends the hold on the layers
	lazy   bool               // partial layers will do
	layers []image.Layer      // each distinct one, bottom first
	blobs  []*blob            // by which those of fills fetch that others did not begin
	// fills are those of layers. One that another image began may know the
	// layer as another blob, with the same contents.
	fills []*layer.Fill
	// renew are layers that may be mounted from a PoP's store which is away.
	renew map[digest.Digest]*sync.Once
}

// Pull resolves ref and begins to fill its layers. They go on, and stay in
// the store, as long as ctx lives. With Options.Lazy it returns once the
// layers can be mounted, if there is a pack that makes that worthwhile, and the
// layers fill when Background has been called.
func (p *Puller) Pull(ctx context.Context, ref image.Reference, o Options) (*Pull, error) {
	look := p.newLookup(ctx, ref, o)
	img, err := p.resolve(ctx, ref, o, look)
	if err != nil {
		return nil, err
	}
	return p.fill(ctx, img, o, look), nil
}

// resolve finds out what ref is. look is told of the manifest before all of the
// image is known.
func (p *Puller) resolve(ctx context.Context, ref image.Reference, o Options, look *lookup) (*image.Image, error) {
	known := p.cfg.Catalog.Get(ref)
	if known != nil && (ref.Dgst != "" || o.Local && p.have(known)) {
		return known, nil
	}
	if p.site != nil {
		if img := p.site.resolve(ctx, ref, o); img != nil {
			return img, p.cfg.Catalog.Put(img)
		}
	}
	look.warm()
	img, err := p.cfg.Registry.Resolve(ctx, ref, registry.ResolveOptions{PlainHTTP: o.PlainHTTP, Manifest: look.begin})
	if err != nil {
		return nil, err
	}
	if p.site != nil {
		p.site.resolved(img)
	}
	return img, p.cfg.Catalog.Put(img)
}

// have reports whether every layer can be mounted without asking a registry first.
func (p *Puller) have(img *image.Image) bool {
	for _, l := range img.Layers {
		if !p.mountable(img, l.DiffID) {
			return false
		}
	}
	return true
}

// mountable reports whether the layer is readable, or partial in a way that
// will do for img.
func (p *Puller) mountable(img *image.Image, id digest.Digest) bool {
	if _, err := p.cfg.Layers.Get(id); err == nil {
		return true
	}
	part := p.cfg.Layers.Partial(id)
	return part != nil && p.accepts(img, part)
}

// fill begins the fills of an image's layers, in their order.
func (p *Puller) fill(ctx context.Context, img *image.Image, o Options, look *lookup) *Pull {
	pull := &Pull{Image: img, Resolved: time.Now(), puller: p, lazy: o.Lazy, layers: img.Unique(), renew: map[digest.Digest]*sync.Once{}}
	holding, unhold := context.WithCancel(ctx)
	pull.unhold = unhold
	p.hold(holding, pull)
	if p.site != nil {
		for _, id := range p.site.attach(ctx, img) {
			pull.renew[id] = new(sync.Once)
		}
	}
	pull.Local = p.have(img)
	if o.Lazy && !pull.Local {
		pull.Lazy, pull.Why = p.startLazily(ctx, img, o, look)
	}
	for _, l := range pull.layers {
		f, b := p.begin(ctx, img, l, o, pull.Lazy)
		pull.fills, pull.blobs = append(pull.fills, f), append(pull.blobs, b)
	}
	return pull
}

// begin begins the fill of one layer, or joins the one there is. One that
// waits for nobody goes to the front when somebody waits for it now.
func (p *Puller) begin(ctx context.Context, img *image.Image, l image.Layer, o Options, lazy *Start) (*layer.Fill, *blob) {
	b := &blob{p: p, img: img, l: l, o: o, class: Startup, base: Startup}
	if part := p.cfg.Layers.Partial(l.DiffID); o.Lazy && part != nil && p.accepts(img, part) {
		b.class, b.base, b.gate = Background, Background, p.gateOf(l.DiffID, lazy)
	}
	f := p.cfg.Layers.Fill(ctx, l, b)
	if joined, ok := f.Source().(*blob); ok && joined != b {
		joined.raise(b.class, b.gate == nil)
	}
	return f, b
}

// gateOf is closed when a partial layer may fill: that of the start that began
// it, or of this one. nil holds nothing.
func (p *Puller) gateOf(id digest.Digest, lazy *Start) <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	if o := p.origins[id]; o != nil {
		return o.s.background
	}
	if lazy != nil {
		return lazy.background
	}
	return nil
}

// Wait blocks until every layer is readable.
func (p *Pull) Wait(ctx context.Context) error { return p.each(ctx, (*layer.Fill).Wait) }

// WaitMountable blocks until every layer can be mounted: whole or not, unless
// the pull is not to be lazy.
func (p *Pull) WaitMountable(ctx context.Context) error {
	return p.each(ctx, p.mountable)
}

func (p *Pull) mountable(f *layer.Fill, ctx context.Context) (*layer.Layer, error) {
	if part := p.puller.cfg.Layers.Partial(f.Layer.DiffID); p.lazy && part != nil && p.puller.accepts(p.Image, part) {
		return nil, nil
	}
	l, err := f.Wait(ctx)
	if once := p.renew[f.Layer.DiffID]; err == nil && once != nil && p.puller.cfg.Lazy.Whole != nil {
		once.Do(func() { p.puller.cfg.Lazy.Whole(f.Layer.DiffID) })
	}
	return l, err
}

// WaitLayer blocks until the image's layer number i, from the bottom, can be mounted.
func (p *Pull) WaitLayer(ctx context.Context, i int) error {
	for n, l := range p.layers {
		if l.DiffID == p.Image.Layers[i].DiffID {
			_, err := p.mountable(p.fills[n], ctx)
			return err
		}
	}
	return nil
}

// Fetched is how many compressed bytes came from the registry for this pull. What
// came, or comes, because of others that want the same layers is not counted.
func (p *Pull) Fetched() int64 {
	var n int64
	for _, b := range p.blobs {
		n += b.got.Load()
	}
	if p.Lazy != nil {
		n += p.Lazy.Bytes()
	}
	return n
}

// Deferred reports whether the pull's layers may stay partial for long, or for
// ever: completion is off, or waits for its hours.
func (p *Pull) Deferred() bool {
	cfg := &p.puller.cfg.Lazy
	return p.lazy && (cfg.Off || cfg.Hours != nil) && slices.ContainsFunc(p.fills, (*layer.Fill).Partial)
}

// Background lets the layers of a lazy pull fill: the start is over. It may be
// called more than once.
func (p *Pull) Background() {
	if p.Lazy != nil {
		p.Lazy.letFill()
	}
	if p.lazy && slices.ContainsFunc(p.fills, (*layer.Fill).Partial) {
		p.unhold() // who runs with the layers keeps them from here on
	}
}

// WaitComplete blocks until every layer is on disk. It returns an error that
// wraps layer.ErrLied if all are, but a pack has given wrong bytes before.
func (p *Pull) WaitComplete(ctx context.Context) error {
	err := p.each(ctx, (*layer.Fill).WaitComplete)
	if err == nil && p.Lazy != nil {
		err = p.Lazy.Lied()
	}
	return err
}

// each waits for all fills. The first error, whichever layer's, ends it.
func (p *Pull) each(ctx context.Context, wait func(*layer.Fill, context.Context) (*layer.Layer, error)) error {
	g, ctx := errgroup.WithContext(ctx)
	for _, f := range p.fills {
		g.Go(func() error {
			_, err := wait(f, ctx)
			return err
		})
	}
	return g.Wait()
}

// LayerProgress is how far one layer of a pull has come.
type LayerProgress struct {
	Layer image.Layer
	layer.Progress
	From Origins
}

// Origins are compressed bytes by where they came from.
type Origins struct {
	Local    int64 // they were here
	PoP      int64 // its store or another node; of what came uncompressed, what the registry would have sent
	Registry int64
}

// originsOf says where what is here of a fill came from.
func originsOf(f *layer.Fill, p layer.Progress) Origins {
	if f.Elsewhere() {
		return Origins{PoP: f.Layer.Size}
	}
	had := max(0, p.Fetched-p.Received) // less after bytes that did not verify
	o := Origins{Registry: p.Received, PoP: min(p.Seeded, had)}
	o.Local = had - o.PoP
	if rest := f.Layer.Size - p.Fetched; p.Tar > 0 && rest > 0 {
		if !p.State.Usable() {
			rest = min(rest, p.Tar)
		}
		o.PoP += rest
	}
	return o
}

// Progress tells how far each layer has come, bottom first.
func (p *Pull) Progress() []LayerProgress {
	all := make([]LayerProgress, len(p.fills))
	for i, f := range p.fills {
		now := f.Progress()
		all[i] = LayerProgress{p.layers[i], now, originsOf(f, now)}
	}
	return all
}

// blob is a layer's blob in its registry, as a layer.Source that takes its
// turn on the link from the first Open until it has ended.
type blob struct {
	p   *Puller
	img *image.Image
	l   image.Layer
	o   Options
	got atomic.Int64 // bytes that came

	mu     sync.Mutex
	from   func(context.Context, int64) (io.ReadCloser, error) // unless nil, gives the layer's tar
	failed map[string]int                                      // attempts, by node of the PoP or its store
	class  Class                                               // that it moves in: the least of base and waits
	base   Class                                               // of the pulls that want it, for as long as it lasts
	waits  [Background]int                                     // who waits for it for a while, by class
	gate   <-chan struct{}                                     // unless nil, nothing is fetched before it is closed
	passed chan struct{}                                       // closed by raise, to pass the gate; nil until somebody waits there
	turn   *turn                                               // the newest
}

// Open implements layer.Source.
func (b *blob) Open(ctx context.Context, f *layer.Fill, offset int64) (io.ReadCloser, error) {
	if err := b.pass(ctx); err != nil {
		return nil, err
	}
	b.mu.Lock()
	from := b.from
	b.mu.Unlock()
	if from != nil {
		return from(ctx, offset)
	}
	if err := b.p.roomFor(b.l.DiffID); err != nil {
		return nil, err
	}
	return b.open(ctx, f.Progress, offset)
}

// pass waits at the gate.
func (b *blob) pass(ctx context.Context) error {
	b.mu.Lock()
	gate := b.gate
	if gate == nil {
		b.mu.Unlock()
		return nil
	}
	if b.passed == nil {
		b.passed = make(chan struct{})
	}
	open := b.passed
	b.mu.Unlock()
	select {
	case <-gate:
		return nil
	case <-open:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// raise says that the layer is of class c for somebody else too, who waits for
// it at no gate if ungated.
func (b *blob) raise(c Class, ungated bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if ungated {
		b.openGate()
	}
	b.base = min(b.base, c)
	b.reclass()
}

func (b *blob) classNow() Class {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.class
}

// openGate is called with mu held.
func (b *blob) openGate() {
	b.gate = nil
	if b.passed != nil {
		close(b.passed)
		b.passed = nil
	}
}

// wait has the layer be of class c for as long as somebody waits for it, at no
// gate. release must follow.
func (b *blob) wait(c Class) (release func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.openGate()
	b.waits[c]++
	b.reclass()
	return func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.waits[c]--
		b.reclass()
	}
}

// reclass gives the layer the class that follows from who wants it. It is called
// with mu held.
func (b *blob) reclass() {
	c := b.base
	for w := range Class(len(b.waits)) {
		if b.waits[w] > 0 {
			c = min(c, w)
		}
	}
	was := b.class
	if b.class = c; b.turn == nil || c == was {
		return
	}
	if c < was {
		b.p.cfg.Link.raise(b.turn, c)
	} else {
		b.p.cfg.Link.lower(b.turn, c)
	}
}

func (b *blob) open(ctx context.Context, stats func() layer.Progress, offset int64) (io.ReadCloser, error) {
	b.mu.Lock()
	t := b.p.cfg.Link.enter(entry{host: b.img.Ref.Host, size: b.l.Size, class: b.class, order: b.o.Order, inflaters: b.o.Inflaters, stats: stats})
	b.turn = t
	b.mu.Unlock()
	return t.open(ctx, func() (io.ReadCloser, error) {
		o := registry.OpenOptions{PlainHTTP: b.o.PlainHTTP, Observe: func(n int) { b.got.Add(int64(n)) }}
		if b.classNow() == Background {
			o.Window = b.p.cfg.Link.window(b.p.cfg.Registry.RoundTrip(b.img.Ref.Host, b.o.PlainHTTP))
		}
		return b.p.cfg.Registry.Open(ctx, b.img.Ref, registry.Blob{Digest: b.l.Digest, Size: b.l.Size}, offset, -1, o)
	})
}

// Chain returns the diffIDs, bottom first, of a chain whose layers can all be
// mounted, else an error that wraps layer.ErrUnknown.
func (p *Puller) Chain(_ context.Context, chain digest.Digest) ([]digest.Digest, error) {
	ids := p.cfg.Catalog.Chain(chain)
	if ids == nil {
		return nil, fmt.Errorf("chain %s: %w", chain, layer.ErrUnknown)
	}
	strict := p.strictest(chain, ids)
	for _, id := range ids {
		if strict == nil || !p.mountable(strict, id) {
			return nil, fmt.Errorf("%s: %w", id, layer.ErrUnknown)
		}
	}
	return ids, nil
}

// strictest is the image with the strictest policy of those that have the chain,
// for who asks for it may mean any of them. nil is none.
func (p *Puller) strictest(chain digest.Digest, ids []digest.Digest) *image.Image {
	var found *image.Image
	rank := map[string]int{TrustRepository: 1, TrustSigned: 2, TrustPoP: 3}
	for _, img := range p.cfg.Catalog.WithLayer(ids[len(ids)-1]) {
		if slices.Contains(img.ChainIDs(), chain) && (found == nil || rank[p.policy(img)] > rank[p.policy(found)]) {
			found = img
		}
	}
	return found
}

// Has reports whether a layer is readable.
func (p *Puller) Has(id digest.Digest) bool {
	_, err := p.cfg.Layers.Peek(id)
	return err == nil
}

// Files says where a layer lies. A layer that was readable but not complete
// when the node stopped is filled again first. Files waits for that as long as
// ctx lives; the fill goes on until Close.
func (p *Puller) Files(ctx context.Context, id digest.Digest) (mount.Files, error) {
	l, err := p.cfg.Layers.Get(id)
	if part := p.cfg.Layers.Partial(id); part != nil && err != nil {
		return part.Files(), nil
	}
	if err == nil && l.At != "" && !p.reachable(ctx, l) {
		err = errors.Join(fmt.Errorf("layer %s lies in the PoP's store, which is away: %w", id, layer.ErrUnknown), p.cfg.Layers.Detach(id))
	}
	if errors.Is(err, layer.ErrUnknown) {
		for _, img := range p.cfg.Catalog.WithLayer(id) {
			missing := img.Layers[slices.IndexFunc(img.Layers, func(l image.Layer) bool { return l.DiffID == id })]
			l, err = p.cfg.Layers.Fill(p.life, missing, &blob{p: p, img: img, l: missing, class: Startup, base: Startup}).Wait(ctx)
			if err == nil || ctx.Err() != nil {
				break
			}
		}
	}
	if err != nil {
		return mount.Files{}, err
	}
	return l.Files(), nil
}

// Import turns the blob that open gives into a layer and returns it when it is readable.
func (p *Puller) Import(ctx context.Context, l image.Layer, src layer.Source) (*layer.Layer, error) {
	return p.cfg.Layers.Import(ctx, l, src).Wait(ctx)
}

// session keeps the fills of an image going between the calls of a client
// that asks for one layer after the other, as containerd does.
type session struct {
	made  chan struct{} // closed when pull is there
	pull  *Pull
	end   context.CancelFunc
	users int         // calls under way; guarded by the puller
	idle  *time.Timer // runs while there are none; guarded by the puller
}

// clientStart is how long the start of a container may take of which dewd does
// not see when it is ready.
const clientStart = 10 * time.Second

// BackgroundSoon is Background for containers of which nobody knows when they
// have started.
func (p *Pull) BackgroundSoon() { time.AfterFunc(clientStart, p.Background) }

// Want names one layer of an image as containerd's snapshot labels do.
type Want struct {
	Ref      image.Reference
	Manifest digest.Digest
	Layer    digest.Digest // of the blob
}

// Fetch makes one layer of an image readable and returns its diffID. The
// image's other layers fill meanwhile.
func (p *Puller) Fetch(ctx context.Context, w Want) (digest.Digest, error) {
	s, err := p.join(ctx, w)
	if err != nil {
		return "", err
	}
	defer p.part(s.pull.Image.Desc.Digest, s)
	for i, l := range s.pull.Image.Layers {
		if l.Digest == w.Layer {
			return l.DiffID, s.pull.WaitLayer(ctx, i)
		}
	}
	return "", fmt.Errorf("image %s has no layer %s", w.Ref, w.Layer)
}

// join finds or begins the session of the image that w names. part must follow.
func (p *Puller) join(ctx context.Context, w Want) (*session, error) {
	o := Options{Lazy: !p.cfg.Lazy.Never}
	look := p.newLookup(ctx, w.Ref, o)
	img := p.cfg.Catalog.Manifest(w.Ref, w.Manifest)
	if img == nil {
		ref := w.Ref
		if w.Manifest != "" {
			ref.Dgst = w.Manifest
		}
		var err error
		if img, err = p.resolve(ctx, ref, o, look); err != nil {
			return nil, err
		}
	}
	img = as(img, w.Ref)
	s, run, err := p.enlist(img.Desc.Digest)
	if err != nil {
		return nil, err
	}
	if run != nil { // nobody else makes it
		s.pull = p.fill(run, img, o, look)
		s.pull.BackgroundSoon()
		close(s.made)
	}
	select {
	case <-s.made:
		return s, nil
	case <-ctx.Done():
		p.part(img.Desc.Digest, s)
		return nil, context.Cause(ctx)
	}
}

// as is the image by another reference: the one that a client named, which
// may be a tag though the manifest was asked for by its digest.
func as(img *image.Image, ref image.Reference) *image.Image {
	named := *img
	named.Ref = ref
	return &named
}

// enlist counts the caller in the session of a manifest. If there was none it
// returns the context of a new one, whose pull the caller must make.
func (p *Puller) enlist(d digest.Digest) (s *session, run context.Context, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.life.Err() != nil {
		return nil, nil, errClosed
	}
	s = p.sessions[d]
	if s == nil || s.failed() {
		s = &session{made: make(chan struct{})}
		run, s.end = context.WithCancel(p.life)
		p.sessions[d] = s
	}
	s.users++
	if s.idle != nil {
		s.idle.Stop()
	}
	return s, run, nil
}

// errClosed is what clients get while the node stops.
var errClosed = errors.New("no more fetches: the node stops")

// part ends what join began.
func (p *Puller) part(d digest.Digest, s *session) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if s.users--; s.users == 0 && p.life.Err() == nil {
		s.idle = time.AfterFunc(p.sessionIdle, func() { p.endIdle(d, s) })
	}
}

func (p *Puller) endIdle(d digest.Digest, s *session) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if s.users > 0 {
		return
	}
	s.end()
	if p.sessions[d] == s {
		delete(p.sessions, d)
	}
}

// failed reports whether a fill of the session has erred.
func (s *session) failed() bool {
	select {
	case <-s.made:
		return s.pull.failed()
	default:
		return false
	}
}

// failed reports whether a fill of the pull has erred.
func (p *Pull) failed() bool {
	for _, f := range p.fills {
		if f.Progress().State == layer.Failed {
			return true
		}
	}
	return false
}

// Close ends the fills that clients left running.
func (p *Puller) Close() error {
	p.end()
	p.work.Wait()
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, s := range p.sessions {
		if s.idle != nil {
			s.idle.Stop()
		}
	}
	clear(p.sessions)
	return nil
}
