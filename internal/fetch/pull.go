// Package fetch brings images to the node: it resolves them, decides what
// crosses the link when (see package link), and fills the layers.
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
	"log/slog"
	"slices"
	"sync"
	"time"

	"dewpoint/internal/fetch/link"
	"dewpoint/internal/image"
	"dewpoint/internal/layer"
	"dewpoint/internal/layer/mount"
	"dewpoint/internal/registry"
	"dewpoint/internal/trace"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/semaphore"
)

// Config names the parts that a Puller works with. Registry, Layers,
// Catalog and Link are required.
type Config struct {
	Registry *registry.Client
	Layers   *layer.Store
	Catalog  *Catalog
	Link     *link.Link
	Packs    PackConfig
	Lazy     LazyConfig
	Cache    CacheConfig
	Images   ImagesConfig
	Log      *slog.Logger // nil discards
}

// Puller pulls images. It is safe for concurrent use.
type Puller struct {
	cfg  Config
	pop  PoP             // what this node has in common with others
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
	waits    waits
	order    *order // in which unused layers go

	hoursEvery  time.Duration // how often it is looked whether the hours allow filling; constant
	sessionIdle time.Duration // how long fills go on after the last call that wanted them; constant
	// fresh is how long a layer that was just asked for is kept though nothing
	// refers to it yet: a client that was told of it is about to. It is constant.
	fresh time.Duration

	collecting sync.Mutex // held while layers are being collected; taken before all others

	holdMu sync.Mutex // of the two below; nothing is locked while it is held
	holds  *Holds
	// By reference: how many pulls are under way, and what is closed when containerd has forgotten the image.
	pulling  map[string]int
	retiring map[string]chan struct{}
}

// NewPuller returns a Puller. Close ends what it does in the background.
func NewPuller(cfg Config) *Puller {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	p := &Puller{cfg: cfg, sessions: map[digest.Digest]*session{}, origins: map[digest.Digest]*origin{},
		wants: map[want]bool{}, holds: newHolds(), sessionIdle: time.Minute,
		fresh: 2 * time.Second}
	p.slots, p.hoursEvery = map[string]*semaphore.Weighted{}, time.Minute
	p.pulling, p.retiring = map[string]int{}, map[string]chan struct{}{}
	p.order = newOrder(cfg.Cache, cfg.Log)
	p.life, p.end = context.WithCancel(context.Background())
	p.pop = alone{cfg.Layers}
	return p
}

// Join has images and layers come from within a PoP, too. It is called before everything else, once at most.
func (p *Puller) Join(pop PoP) { p.pop = pop }

// Holds are the layers that must stay for now.
func (p *Puller) Holds() *Holds { return p.holds }

// Options are what one pull may differ in.
type Options struct {
	// Local takes what the reference was last resolved to, without asking the
	// registry, if all its layers are here.
	Local     bool
	Lazy      bool       // mount before the layers are whole, if that is faster
	Order     link.Order // for experiments
	Inflaters int        // for experiments; 0 is the node's own number
	// Known, unless nil, is told of the image by Pull once it is known, before anything
	// of it is brought.
	Known func(*image.Image)
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
	if err := p.enter(ctx, ref); err != nil {
		return nil, err
	}
	look := p.newLookup(ctx, ref, o)
	img, err := p.resolve(ctx, ref, o, look)
	if err != nil {
		return nil, err
	}
	if o.Known != nil {
		o.Known(img)
	}
	pull := p.fill(ctx, img, o, look)
	look.settle()
	return pull, nil
}

// resolve finds out what ref is. look is told of the manifest before all of the
// image is known.
func (p *Puller) resolve(ctx context.Context, ref image.Reference, o Options, look *lookup) (*image.Image,
	error) {
	known := p.cfg.Catalog.Get(ref)
	if known != nil && (ref.Dgst != "" || o.Local && p.Have(known)) {
		return known, nil
	}
	var asked bool
	ask := func() (*image.Image, error) {
		asked = true
		look.warm()
		ctx, step := trace.Start(ctx, "registry")
		defer step.End()
		return p.cfg.Registry.Resolve(ctx, ref,
			registry.ResolveOptions{Manifest: look.begin})
	}
	img, begun, err := p.pop.Resolve(ctx, ref, o.Local, ask)
	if look.begun = begun; err != nil {
		return nil, err
	}
	if asked {
		return img, p.cfg.Catalog.Put(img)
	}
	look.recorded = p.cfg.Catalog.PutSoon(img)
	return img, nil
}

// Here reports whether a pull of ref would need nothing from elsewhere and, if the image
// is known, how many of its compressed bytes are absent.
func (p *Puller) Here(ref image.Reference, o Options) (here bool, absent int64) {
	known := p.cfg.Catalog.Get(ref)
	if known == nil || ref.Dgst == "" && !o.Local {
		return false, 0
	}
	absent = p.absent(known)
	return absent == 0 && p.Have(known), absent
}

// Have reports whether every layer can be mounted without asking a registry first.
func (p *Puller) Have(img *image.Image) bool {
	for _, l := range img.Layers {
		if !p.Mountable(img, l.DiffID) {
			return false
		}
	}
	return true
}

// Mountable reports whether the layer is readable, or partial in a way that
// will do for img.
func (p *Puller) Mountable(img *image.Image, id digest.Digest) bool {
	if _, err := p.cfg.Layers.Get(id); err == nil {
		return true
	}
	part := p.cfg.Layers.Partial(id)
	return part != nil && p.accepts(img, part)
}

// fill begins the fills of an image's layers, in their order.
func (p *Puller) fill(ctx context.Context, img *image.Image, o Options, look *lookup) *Pull {
	pull := &Pull{Image: img, Resolved: time.Now(), puller: p, lazy: o.Lazy, layers: img.Unique(),
		renew: map[digest.Digest]*sync.Once{}}
	holding, unhold := context.WithCancel(ctx)
	pull.unhold = unhold
	p.holds.hold(holding, pull)
	for _, id := range p.pop.Attach(ctx, img, look.begun) {
		pull.renew[id] = new(sync.Once)
	}
	pull.Local = p.Have(img)
	p.order.used(pull.layers, p.cfg.Layers.Peek)
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
func (p *Puller) begin(ctx context.Context, img *image.Image, l image.Layer, o Options,
	lazy *Start) (*layer.Fill, *blob) {
	b := p.newBlob(img, l, o, link.Startup)
	if part := p.cfg.Layers.Partial(l.DiffID); o.Lazy && part != nil && p.accepts(img, part) {
		b.class, b.base, b.gate = link.Background, link.Background, p.gateOf(l.DiffID, lazy)
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
	if part := p.puller.cfg.Layers.Partial(f.Layer.DiffID); p.lazy && part != nil &&
		p.puller.accepts(p.Image, part) {
		return nil, nil
	}
	l, err := f.Wait(ctx)
	if err == nil && l.At != "" { // it may have been let go of since: its tar could not be reached
		l, err = p.puller.known(ctx, p.Image, l)
	}
	if once := p.renew[f.Layer.DiffID]; err == nil && once != nil {
		once.Do(func() { p.puller.Remount(f.Layer.DiffID) })
	}
	return l, err
}

// known returns a layer that was attached, and is fetched anew if it has been let go of.
func (p *Puller) known(ctx context.Context, img *image.Image, l *layer.Layer) (*layer.Layer, error) {
	have, err := p.cfg.Layers.Peek(l.DiffID)
	if err == nil {
		return have, nil
	}
	missing := layerOf(img, l.DiffID)
	return p.cfg.Layers.Fill(p.life, missing, p.newBlob(img, missing, Options{}, link.Startup)).Wait(ctx)
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

// Within is how many bytes came from within the PoP for this pull beside its layers' own streams:
// its pack, and what was read on demand, in compressed bytes.
func (p *Pull) Within() int64 {
	if p.Lazy == nil {
		return 0
	}
	return p.Lazy.Within()
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
func (p *Pull) each(ctx context.Context,
	wait func(*layer.Fill, context.Context) (*layer.Layer, error)) error {
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

// Chain returns the diffIDs, bottom first, of a chain whose layers can all be
// mounted, else an error that wraps layer.ErrUnknown.
func (p *Puller) Chain(_ context.Context, chain digest.Digest) ([]digest.Digest, error) {
	ids := p.cfg.Catalog.Chain(chain)
	if ids == nil {
		return nil, fmt.Errorf("chain %s: %w", chain, layer.ErrUnknown)
	}
	strict := p.strictest(chain, ids)
	for _, id := range ids {
		if strict == nil || !p.Mountable(strict, id) {
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
	if err == nil && l.At != "" && !p.pop.Mountable(ctx, l) {
		err = errors.Join(fmt.Errorf("layer %s lies in the PoP's store, which is away: %w", id, layer.ErrUnknown),
			p.pop.Detach(id))
	}
	if errors.Is(err, layer.ErrUnknown) {
		for _, img := range p.cfg.Catalog.WithLayer(id) {
			missing := layerOf(img, id)
			l, err = p.cfg.Layers.Fill(p.life, missing, p.newBlob(img, missing, Options{}, link.Startup)).Wait(ctx)
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

// Saved is a layer that no registry has: what a container has written. Its
// blob is its tar.
func Saved(id digest.Digest, size int64) image.Layer {
	return image.Layer{Digest: id, DiffID: id, Size: size, MediaType: ocispec.MediaTypeImageLayer}
}

// Keep makes the tar that src gives a layer of this node, and returns when it would survive a power cut.
func (p *Puller) Keep(ctx context.Context, l image.Layer, src layer.Source) error {
	_, err := p.cfg.Layers.Fill(ctx, l, src).WaitComplete(ctx)
	return err
}

// Refill fetches a layer of an image as a pull would, behind what somebody waits for, and returns when it is
// on disk.
func (p *Puller) Refill(ctx context.Context, img *image.Image, id digest.Digest) (*layer.Layer, error) {
	l := layerOf(img, id)
	return p.cfg.Layers.Fill(ctx, l, p.newBlob(img, l, Options{}, link.Background)).WaitComplete(ctx)
}

// layerOf is the layer of img with that diffID, which it has.
func layerOf(img *image.Image, id digest.Digest) image.Layer {
	return img.Layers[slices.IndexFunc(img.Layers, func(l image.Layer) bool { return l.DiffID == id })]
}

// Import turns the blob that open gives into a layer and returns it when it is readable.
func (p *Puller) Import(ctx context.Context, l image.Layer, src layer.Source) (*layer.Layer, error) {
	return p.cfg.Layers.Import(ctx, l, src).Wait(ctx)
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
	return p.order.save()
}
