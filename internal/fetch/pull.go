package fetch

import (
	"context"
	"slices"
	"sync"
	"time"

	"dewpoint/internal/fetch/link"
	"dewpoint/internal/image"
	"dewpoint/internal/layer"
	"dewpoint/internal/registry"
	"dewpoint/internal/trace"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sync/errgroup"
)

// pulls bring images.
type pulls struct {
	*common
	packs    *packs
	partials *partials
	cache    *cache
	waits    *waits // what readers have waited for
}

// Options are what one pull may differ in.
type Options struct {
	// Local takes what the reference was last resolved to, without asking the
	// registry, if all its layers are here.
	Local bool
	Lazy  bool // mount before the layers are whole, if that is faster
	// Background has nobody wait for the layers: they go last on the link.
	Background bool
	Order      link.Order // for experiments
	Inflaters  int        // for experiments; 0 is the node's own number
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

	pulls  *pulls
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
func (p *pulls) Pull(ctx context.Context, ref image.Reference, o Options) (*Pull, error) {
	if err := p.cache.enter(ctx, ref); err != nil {
		return nil, err
	}
	look := p.packs.newLookup(ctx, ref, o)
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
func (p *pulls) resolve(ctx context.Context, ref image.Reference, o Options, look *lookup) (*image.Image,
	error) {
	known := p.cfg.Catalog.Get(ref)
	if known != nil && (ref.Dgst != "" || o.Local && p.partials.Have(known)) {
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

// PullIsLocal reports whether a pull of ref would need nothing from elsewhere and, if the image
// is known, how many of its compressed bytes are absent.
func (p *pulls) PullIsLocal(ref image.Reference, o Options) (here bool, absent int64) {
	known := p.cfg.Catalog.Get(ref)
	if known == nil || ref.Dgst == "" && !o.Local {
		return false, 0
	}
	absent = p.partials.absent(known)
	return absent == 0 && p.partials.Have(known), absent
}

// fill begins the fills of an image's layers, in their order.
func (p *pulls) fill(ctx context.Context, img *image.Image, o Options, look *lookup) *Pull {
	pull := &Pull{Image: img, Resolved: time.Now(), pulls: p, lazy: o.Lazy, layers: img.Unique(),
		renew: map[digest.Digest]*sync.Once{}}
	holding, unhold := context.WithCancel(ctx)
	pull.unhold = unhold
	p.cache.holds.hold(holding, pull)
	for _, id := range p.pop.Attach(ctx, img, look.begun) {
		pull.renew[id] = new(sync.Once)
	}
	pull.Local = p.partials.Have(img)
	p.cache.order.used(pull.layers, p.cfg.Layers.Peek)
	if o.Lazy && !pull.Local {
		pull.Lazy, pull.Why = p.partials.startLazily(ctx, img, o, look)
	}
	for _, l := range pull.layers {
		f, b := p.begin(ctx, img, l, o, pull.Lazy)
		pull.fills, pull.blobs = append(pull.fills, f), append(pull.blobs, b)
	}
	return pull
}

// begin begins the fill of one layer, or joins the one there is. One that
// waits for nobody goes to the front when somebody waits for it now.
func (p *pulls) begin(ctx context.Context, img *image.Image, l image.Layer, o Options,
	lazy *Start) (*layer.Fill, *blob) {
	class := link.Startup
	if o.Background {
		class = link.Background
	}
	b := p.newBlob(img, l, o, class)
	if part := p.cfg.Layers.Partial(l.DiffID); o.Lazy && part != nil && p.packs.accepts(img, part) {
		b.class, b.base, b.gate = link.Background, link.Background, p.partials.gateOf(l.DiffID, lazy)
	}
	f := p.cfg.Layers.Fill(ctx, l, b)
	if joined, ok := f.Source().(*blob); ok && joined != b {
		joined.raise(b.class, b.gate == nil)
	}
	return f, b
}

// Wait blocks until every layer is readable.
func (p *Pull) Wait(ctx context.Context) error { return p.each(ctx, (*layer.Fill).Wait) }

// WaitMountable blocks until every layer can be mounted: whole or not, unless
// the pull is not to be lazy.
func (p *Pull) WaitMountable(ctx context.Context) error {
	return p.each(ctx, p.mountable)
}

func (p *Pull) mountable(f *layer.Fill, ctx context.Context) (*layer.Layer, error) {
	if part := p.pulls.cfg.Layers.Partial(f.Layer.DiffID); p.lazy && part != nil &&
		p.pulls.packs.accepts(p.Image, part) {
		return nil, nil
	}
	l, err := f.Wait(ctx)
	if err == nil && l.At != "" { // it may have been let go of since: its tar could not be reached
		l, err = p.pulls.known(ctx, p.Image, l)
	}
	if once := p.renew[f.Layer.DiffID]; err == nil && once != nil {
		once.Do(func() { p.pulls.partials.Remount(f.Layer.DiffID) })
	}
	return l, err
}

// known returns a layer that was attached, and is fetched anew if it has been let go of.
func (p *pulls) known(ctx context.Context, img *image.Image, l *layer.Layer) (*layer.Layer, error) {
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
	cfg := &p.pulls.cfg.Lazy
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
// wraps layer.ErrEarlyMismatch if all are, but a pack has given wrong bytes before.
func (p *Pull) WaitComplete(ctx context.Context) error {
	err := p.each(ctx, (*layer.Fill).WaitComplete)
	if err == nil && p.Lazy != nil {
		err = p.Lazy.Mismatch()
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
	Local    int64 // they were here, or in containerd's content store
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
	if b, ok := f.Source().(*blob); ok {
		stored := min(p.Received, b.had.Load())
		o.Registry -= stored
		o.Local += max(0, stored-b.vain.Load())
	}
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
