package fetch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"dewpoint/internal/fetch/link"
	"dewpoint/internal/image"
	"dewpoint/internal/layer"
	"dewpoint/internal/pack"
	"dewpoint/internal/trace"

	"github.com/opencontainers/go-digest"
)

// LazyConfig bounds what is mounted before it is whole. The zero value waits
// for absent bytes for a minute and completes layers as soon as it can.
type LazyConfig struct {
	Never bool          // every layer is pulled whole
	Wait  time.Duration // a reader waits so long for absent bytes, then it gets EIO; 0 is a minute
	// Delay is the time between a start and the completion of its layers.
	Delay time.Duration
	// Hours are when layers are completed; nil is always.
	Hours Hours
	// Off leaves layers as they are: only what is read is fetched.
	Off      bool
	Audience Audience // nil: nobody wants to know
	Disk     Disk     // asked when the disk is full; nil: nobody
}

// Hours are the times of a day at which layers are completed.
type Hours interface{ Between(time.Time) bool }

// Audience is told what becomes of partial layers.
type Audience interface {
	// Whole is told of every layer that has become complete and may have been mounted before.
	Whole(digest.Digest)
	// Waited is told of every wait for absent bytes that is over. It must not block.
	Waited(time.Duration)
}

// deaf is an Audience that listens to nothing.
type deaf struct{}

func (deaf) Whole(digest.Digest) {}

func (deaf) Waited(time.Duration) {}

// Disk is where the layers lie.
type Disk interface {
	// MakeFree frees some bytes of it, if it can.
	MakeFree(ctx context.Context, bytes int64)
}

const (
	defaultWait = time.Minute
	// smallImage is what is fetched whole whatever a pack says: the round trips
	// of a lazy start cost as much.
	smallImage = 512 << 10
)

// Start is an image that runs before it is whole: its pack streams in, in the
// order of first use, and is put into the layers. It is safe for concurrent use.
type Start struct {
	Trust string // why the pack is believed: pop, signed, repository

	p    *partials
	img  *image.Image
	o    Options
	pack *packFile
	rest io.Reader // of the pack, behind what was read of it
	head *pack.Header

	outlook *outlook // by which it is decided; nil if the layers run already

	partials   []*layer.Partial // by the pack's layers; nil where the layer is not partial
	background chan struct{}    // closed when the layers may fill
	once       sync.Once
	done       chan struct{} // closed when the pack has been read, or given up
	got        atomic.Int64  // compressed bytes that came beside the layers' fills, from the registry
	// the same from within the PoP; of what came uncompressed, what the registry would have sent
	within atomic.Int64

	mu       sync.Mutex
	next     int   // chunks before it are here
	mismatch error // what of the pack turned out to be wrong
}

// Mismatch returns an error that wraps layer.ErrEarlyMismatch once something of the pack has
// turned out to be wrong. Its bytes may have been used until then.
func (s *Start) Mismatch() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mismatch
}

// Mismatched is to be called when a partial layer turns out to have had wrong bytes.
func (p *partials) Mismatched(part *layer.Partial, why error) {
	o := p.originOf(part.Layer.DiffID)
	p.stats.mismatches.Add(1)
	if o == nil {
		return
	}
	o.s.mu.Lock()
	defer o.s.mu.Unlock()
	o.s.mismatch = fmt.Errorf("the startup pack of %s does not match it, and the container has run with it: %w", o.s.img.Ref, why)
}

// Bytes is how many compressed bytes came from the registry for the start beside the layers' own
// streams: the pack, and what was read on demand.
func (s *Start) Bytes() int64 { return s.got.Load() }

// Within is the same from the PoP's store and other nodes.
func (s *Start) Within() int64 { return s.within.Load() }

// startLazily begins an image by its pack. It returns nil if the image is
// better pulled whole, or cannot be begun otherwise; why says on what grounds it
// was decided, either way.
func (p *partials) startLazily(ctx context.Context, img *image.Image, o Options, look *lookup) (s *Start,
	why string) {
	if p.cfg.Lazy.Never {
		return nil, ""
	}
	absent := p.absent(img)
	if absent < smallImage {
		return nil, fmt.Sprintf("only %d bytes are to be fetched", absent)
	}
	w := p.outlook(img, o, absent)
	// Not worth it even with a pack of no size: the search is not waited for.
	if p.packs.Quarantined(img.Desc.Digest) == "" && p.packs.localPack(img.Desc.Digest) == nil && !w.lazily() {
		return nil, w.String()
	}
	_, step := trace.Start(ctx, "find pack")
	f, err := look.result(ctx, img)
	step.Fail(err)
	step.End()
	if err != nil {
		if !errors.Is(err, errNoPack) {
			p.cfg.Log.Warn("no startup pack can be used", "image", img.Ref, "why", err)
		}
		return nil, err.Error()
	}
	if w = w.sized(f); !w.lazily() {
		return nil, w.String()
	}
	s, err = p.openStart(ctx, img, o, f, w)
	if errors.As(err, new(notWorth)) {
		return nil, err.Error()
	}
	if err != nil {
		p.cfg.Log.Warn("a startup pack cannot be used; the image is pulled whole", "image", img.Ref, "err", err)
		return nil, err.Error()
	}
	p.stats.starts.Add(1)
	return s, s.outlook.String()
}

// Have reports whether every layer can be mounted without asking a registry first.
func (p *partials) Have(img *image.Image) bool {
	for _, l := range img.Layers {
		if !p.Mountable(img, l.DiffID) {
			return false
		}
	}
	return true
}

// Mountable reports whether the layer is readable, or partial in a way that
// will do for img.
func (p *partials) Mountable(img *image.Image, id digest.Digest) bool {
	if _, err := p.cfg.Layers.Get(id); err == nil {
		return true
	}
	part := p.cfg.Layers.Partial(id)
	return part != nil && p.packs.accepts(img, part)
}

// absent is the compressed bytes that have to come to this node before all layers can be mounted.
func (p *partials) absent(img *image.Image) int64 {
	var n int64
	for _, l := range img.Unique() {
		if !p.Mountable(img, l.DiffID) && !p.Stored(l) {
			n += l.Size
		}
	}
	return n
}

// openStart reads the pack up to its tables, begins the layers, and lets the
// chunks come.
func (p *partials) openStart(ctx context.Context, img *image.Image, o Options, f *packFile,
	w outlook) (*Start, error) {
	s := &Start{p: p, img: img, o: o, pack: f, outlook: &w, background: make(chan struct{}),
		done: make(chan struct{})}
	_, step := trace.Start(ctx, "read tables")
	stream, end, err := s.readTables(ctx)
	step.Fail(err)
	step.End()
	if err != nil {
		s.abandon()
		return nil, err
	}
	p.work.Go(func() {
		defer end()
		defer close(s.done)
		err := s.put(stream)
		if err == nil && f.passed {
			_, err = io.Copy(io.Discard, s.rest) // what only other nodes may want
		}
		if err != nil && p.life.Err() == nil {
			p.cfg.Log.Warn("a startup pack ends early; what it lacks is fetched on demand", "image", img.Ref, "err",
				err)
		}
	})
	for i, part := range s.partials {
		if part != nil {
			p.adopt(s, i, part)
		}
	}
	return s, nil
}

// readTables opens the pack and begins its layers. ctx, and a registry that is
// silent, end that; what follows in the stream goes on until end is called.
func (s *Start) readTables(ctx context.Context) (stream *pack.Stream, end func(), err error) {
	claim := s.p.cfg.Link.Claim(link.Startup)
	life, cancel := context.WithCancelCause(s.p.life)
	unhook := context.AfterFunc(ctx, func() { cancel(context.Cause(ctx)) })
	heard := s.cutSilence(func() { cancel(errSilent) })
	stream, body, err := s.openPack(life, claim)
	s.rest = body
	heard()
	if !unhook() && err == nil {
		err = context.Cause(ctx)
	}
	end = func() {
		if body != nil {
			body.Close()
		}
		cancel(nil)
		claim.Release()
	}
	if err != nil {
		end()
		return nil, nil, err
	}
	return stream, end, nil
}

// packSilence is how long a registry may be silent while a pack's tables are
// awaited: whole layers may do better.
const packSilence = 3 * time.Second

var errSilent = fmt.Errorf("the registry gives nothing of the startup pack for %v", packSilence)

// cutSilence calls stop if nothing comes of the pack for packSilence, until the
// function that it returns is called.
func (s *Start) cutSilence(stop func()) (heard func()) {
	if s.pack.local {
		return func() {}
	}
	done := make(chan struct{})
	var group sync.WaitGroup
	group.Go(func() {
		tick := time.NewTicker(packSilence)
		defer tick.Stop()
		for seen := int64(0); ; {
			select {
			case <-done:
				return
			case <-tick.C:
			}
			if n := s.got.Load(); n != seen {
				seen = n
				continue
			}
			stop()
			return
		}
	})
	return func() {
		close(done)
		group.Wait()
	}
}

// abandon leaves the layers that have begun to their streams: they may be
// mounted already, for somebody else.
func (s *Start) abandon() {
	bare := s.p.bareStart(s.img, s.o)
	for _, part := range s.partials {
		if part != nil {
			s.p.adopt(bare, -1, part)
		}
	}
	bare.letFill()
}

// bareStart is one without a pack.
func (p *partials) bareStart(img *image.Image, o Options) *Start {
	s := &Start{p: p, img: img, o: o, background: make(chan struct{}), done: make(chan struct{})}
	close(s.done)
	return s
}

// open opens a part of the pack; what is read of it counts as fetched.
func (s *Start) open(ctx context.Context, c *link.Claim, at pack.Span) (io.ReadCloser, error) {
	r, err := s.pack.open(ctx, at)
	if err != nil || s.pack.local {
		s.within.Add(s.p.pop.Brought(s.img.Desc.Digest))
		return r, err
	}
	if near, ok := r.(*Near); ok {
		return &counted{ReadCloser: near.ReadCloser, n: &s.within, total: new(atomic.Int64)}, nil
	}
	total := &s.p.stats.packBytes
	if c.Class == link.Demand {
		total = &s.p.stats.demandBytes
	}
	return c.Reader(ctx, &counted{ReadCloser: r, n: &s.got, total: total}), nil
}

// counted counts what is read.
type counted struct {
	io.ReadCloser
	n, total *atomic.Int64
}

func (c *counted) Read(b []byte) (int, error) {
	n, err := c.ReadCloser.Read(b)
	c.n.Add(int64(n))
	c.total.Add(int64(n))
	return n, err
}

// openPack opens the pack and reads it up to its tables.
func (s *Start) openPack(ctx context.Context, c *link.Claim) (*pack.Stream, io.ReadCloser, error) {
	body, err := s.open(ctx, c, pack.Span{Length: s.pack.size})
	if err != nil {
		return nil, nil, err
	}
	stream, err := s.begin(body)
	if err != nil {
		return nil, nil, errors.Join(err, body.Close())
	}
	return stream, body, nil
}

// begin reads header and tables, checks them, and begins the layers.
func (s *Start) begin(r io.Reader) (*pack.Stream, error) {
	stream, err := pack.Open(r)
	if err != nil {
		return nil, err
	}
	s.head = stream.Header
	if err := s.fits(); err != nil {
		return nil, err
	}
	if s.Trust, err = s.p.packs.trust(s.img, s.pack, stream.HeaderDigest); err != nil {
		return nil, err
	}
	if err := s.worth(); err != nil {
		return nil, err
	}
	s.partials = make([]*layer.Partial, len(s.head.Layers))
	for _, l := range s.head.Layers {
		if l.Table == nil {
			continue
		}
		item, err := stream.Next()
		if err == nil {
			err = s.beginLayer(item)
		}
		if err != nil {
			return nil, err
		}
	}
	return stream, s.useful()
}

// fits checks that the pack is about this image's layers.
func (s *Start) fits() error {
	if s.head.Image != s.img.Desc.Digest {
		return fmt.Errorf("it is the pack of %s: %w", s.head.Image, pack.ErrInvalid)
	}
	blobs := map[digest.Digest]image.Layer{}
	for _, l := range s.img.Layers {
		blobs[l.DiffID] = l
	}
	for _, l := range s.head.Layers {
		if have, ok := blobs[l.DiffID]; !ok || have.Digest != l.Blob || have.Size != l.BlobSize {
			return fmt.Errorf("its layer %s is not one of the image: %w", l.DiffID, pack.ErrInvalid)
		}
	}
	return nil
}

// worth looks again at whether to start lazily, with what the pack says of
// itself. It is a notWorth if not.
func (s *Start) worth() error {
	if s.outlook == nil {
		return nil
	}
	*s.outlook = s.outlook.opened(s.head, s.pack.local)
	if !s.outlook.lazily() {
		return notWorth{*s.outlook}
	}
	return nil
}

// notWorth says that a pull of the whole image is expected to be as quick as a
// start by its pack.
type notWorth struct{ outlook }

func (e notWorth) Error() string { return e.String() }

func (s *Start) origin() layer.Origin {
	return layer.Origin{Ref: s.img.Ref.String(), Manifest: s.img.Desc.Digest,
		Trust: s.Trust}
}

func (s *Start) beginLayer(item pack.Item) error {
	id := s.head.Layers[item.Layer].DiffID
	for _, l := range s.img.Layers {
		if l.DiffID != id {
			continue
		}
		part, err := s.p.cfg.Layers.Begin(l, item.Data, s.origin())
		if err == nil && part.Size != s.head.Layers[item.Layer].Size {
			err = fmt.Errorf("its table and its header differ: %w", pack.ErrInvalid)
		}
		if err == nil && s.p.packs.accepts(s.img, part) {
			s.partials[item.Layer] = part
			return nil
		}
		if err == nil || errors.Is(err, layer.ErrBusy) {
			return nil
		}
		return err
	}
	return nil
}

// useful is an error if no layer began.
func (s *Start) useful() error {
	for _, part := range s.partials {
		if part != nil {
			return nil
		}
	}
	return errors.New("all its layers are here or on their way")
}

// put puts the chunks into the layers as they come.
func (s *Start) put(stream *pack.Stream) error {
	for range s.head.Chunks {
		item, err := stream.Next()
		if err != nil {
			return err
		}
		if err := s.putChunk(item.Chunk, item.Data); err != nil {
			return err
		}
		s.mu.Lock()
		s.next = item.Chunk + 1
		s.mu.Unlock()
	}
	return nil
}

func (s *Start) putChunk(k int, data []byte) error {
	return s.head.Chunks[k].Each(data, func(l int, offset int64, b []byte) error {
		if s.partials[l] == nil {
			return nil
		}
		if err := s.p.Put(s.partials[l], offset, b); err != nil {
			return err
		}
		s.partials[l].Warm(offset, len(b))
		return nil
	})
}
