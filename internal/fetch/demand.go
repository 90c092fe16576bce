package fetch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"dewpoint/internal/fetch/link"
	"dewpoint/internal/layer"
	"dewpoint/internal/layer/presence"
	"dewpoint/internal/pack"
	"dewpoint/internal/registry"

	"github.com/opencontainers/go-digest"
)

// origin is where a partial layer gets its bytes when they are read.
type origin struct {
	s    *Start
	n    int // in the pack's header; -1 without a pack
	part *layer.Partial

	useless atomic.Bool // the pack, for this layer

	edges edges
	where func() []place // what the pack's chunks hold of the layer, ascending

	mu     sync.Mutex // held while points are fetched
	points atomic.Pointer[pack.Points]

	busyMu sync.Mutex // guards what follows
	// segments that are being fetched; closed when they are here, or are not to be had
	busy   map[int]chan struct{}
	passes passes

	stuck atomic.Int64 // unix nanoseconds when the layer's stream was last seen not to move
}

func newOrigin(s *Start, n int, part *layer.Partial) *origin {
	o := &origin{s: s, n: n, part: part}
	o.where = sync.OnceValue(o.places)
	return o
}

// place is a stretch of a layer that a chunk holds.
type place struct {
	from, to int64
	chunk    int
}

// demand brings the absent bytes that readers of partial layers wait for.
type demand struct {
	*common
	partials *partials
	failures failures
	waits    waits

	mu    sync.Mutex
	wants map[want]bool // being served
}

// want is a stretch of a layer that somebody waits for.
type want struct {
	id       digest.Digest
	from, to int64
}

// Want sees to it that the absent bytes of [from, to) of a partial layer come,
// or that who waits for them gets an error after the configured time. It
// returns at once; a want that is being served already changes nothing.
func (d *demand) Want(id digest.Digest, from, to int64) {
	w := want{id, from, to}
	d.mu.Lock()
	if d.wants[w] || d.life.Err() != nil {
		d.mu.Unlock()
		return
	}
	d.wants[w] = true
	d.mu.Unlock()
	d.stats.wants.Add(1)
	begun := time.Now()
	d.work.Go(func() {
		d.serve(w)
		d.stats.waited.Add(int64(time.Since(begun)))
		d.cfg.Lazy.Audience.Waited(time.Since(begun))
		d.waits.add(layerWait{layer: id, from: from, begun: begun, took: time.Since(begun)})
		d.cfg.Log.Debug("bytes that were waited for", "layer", id, "from", from, "to", to, "took",
			time.Since(begun))
		d.mu.Lock()
		defer d.mu.Unlock()
		delete(d.wants, w)
	})
}

// serve brings what is wanted. Errors are retried; when nothing at all has come
// for the layer for the configured time, who waits gets an error.
func (d *demand) serve(w want) {
	ctx, cancel := context.WithCancel(d.life)
	defer cancel()
	watch := d.watchProgress(ctx, cancel, w.id)
	defer watch.Wait()
	defer cancel()
	var last error
	for pause := 100 * time.Millisecond; ; pause = min(2*pause, 5*time.Second) {
		done, progress, err := d.attempt(ctx, w)
		if done {
			return
		}
		if progress {
			pause = 50 * time.Millisecond
			continue
		}
		if err != nil && (ctx.Err() == nil || last == nil) {
			last = err
		}
		select {
		case <-time.After(pause):
			continue
		case <-ctx.Done():
		}
		if d.life.Err() == nil {
			d.cfg.Log.Error("bytes that a container waits for do not come; it gets an I/O error",
				"layer", w.id, "from", w.from, "to", w.to, "after", d.wait(), "err", last)
			d.stats.failed.Add(1)
			d.failures.add(w.id, last)
			d.cfg.Layers.FailReads(w.id, w.from, w.to)
		}
		return
	}
}

// attempt tries once to bring some of what is wanted.
func (d *demand) attempt(ctx context.Context, w want) (done, progress bool, err error) {
	part := d.cfg.Layers.Partial(w.id)
	if part == nil { // expelled, and about to be repaired; or left by another time
		return false, false, fmt.Errorf("%s: %w", w.id, layer.ErrUnknown)
	}
	end := min(w.to, part.Size)
	from, to := part.Absent(w.from, end)
	if from >= end {
		return true, false, nil
	}
	err = d.bring(ctx, w.id, from, min(to, end))
	at, _ := part.Absent(w.from, end)
	return false, err == errWaited || err == nil && at > from, err
}

// wait is how long a reader waits for absent bytes.
func (d *demand) wait() time.Duration {
	if d.cfg.Lazy.Wait > 0 {
		return d.cfg.Lazy.Wait
	}
	return defaultWait
}

// watchProgress calls cancel when nothing has come for a layer for so long as
// readers are to wait. It ends with ctx.
func (d *demand) watchProgress(ctx context.Context, cancel func(), id digest.Digest) *sync.WaitGroup {
	var group sync.WaitGroup
	group.Go(func() {
		tick := time.NewTicker(d.wait() / 8)
		defer tick.Stop()
		seen, at := d.come(id), time.Now()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			if n := d.come(id); n != seen {
				seen, at = n, time.Now()
			} else if time.Since(at) >= d.wait() {
				cancel()
				return
			}
		}
	})
	return &group
}

// come is a number that changes whenever bytes come for a partial layer.
func (d *demand) come(id digest.Digest) int64 {
	var n int64
	if part := d.cfg.Layers.Partial(id); part != nil {
		n = part.Early() + part.Passed()
	}
	if o := d.partials.originOf(id); o != nil {
		n += o.s.got.Load()
	}
	return n
}

// Bring makes [from, to) of a partial layer, all of it absent, present, or waits for another fetch that does,
// or tries to.
func (d *demand) Bring(ctx context.Context, id digest.Digest, from, to int64) error {
	if err := d.bring(ctx, id, from, to); !errors.Is(err, errWaited) {
		return err
	}
	return nil
}

// errWaited says that somebody else has fetched, or tried to.
var errWaited = errors.New("waited for another fetch")

// bring makes some of [from, to), all of it absent, present: by a chunk of the
// pack, by the layer's segments, or by its stream. What the registry does not
// have, or what does not verify, is not tried again.
func (d *demand) bring(ctx context.Context, id digest.Digest, from, to int64) error {
	o := d.partials.originOf(id)
	if o == nil {
		return errors.New("nothing is known of where it comes from")
	}
	if n, ok := d.pop.Want(ctx, o.part, from, to); ok {
		o.s.within.Add(n * o.part.Layer.Size / max(1, o.part.Size)) // as the registry would have sent it
		return nil
	}
	if k, ok := o.chunkAt(from); ok && !o.useless.Load() {
		if err := o.bringChunk(ctx, k); !o.giveUp(err) {
			return err
		}
	}
	if !o.useless.Load() {
		points, err := o.getPoints(ctx)
		enter := err == nil && points != nil && points.Enterable()
		switch {
		case enter && o.byStream(points, from, to) && o.streamBrings(ctx, from, to):
			return nil
		case enter:
			err = o.bringSegments(ctx, points, from, to)
		}
		if (err != nil || enter) && !o.giveUp(err) {
			return err
		}
	}
	return o.follow(ctx, from, to, d.wait())
}

// giveUp reports whether err says that the pack is of no use any more: it does
// not verify, or the registry has it no longer. The layer's stream remains.
func (o *origin) giveUp(err error) bool {
	var re *registry.Error
	lost := errors.As(err, &re) && (re.Kind == registry.NotFound || re.Kind == registry.Mismatch) ||
		errors.Is(err, fs.ErrNotExist)
	if !lost && !errors.Is(err, pack.ErrInvalid) {
		return false
	}
	if !o.useless.Swap(true) {
		o.s.p.cfg.Log.Warn("a startup pack is of no use any more: what is missing comes with the layer's stream",
			"layer", o.part.Layer.DiffID, "err", err)
	}
	return true
}

// chunkAt returns the chunk of the pack that holds the byte at off.
func (o *origin) chunkAt(off int64) (int, bool) {
	if o.n < 0 {
		return 0, false
	}
	where := o.where()
	i, found := slices.BinarySearchFunc(where, off, func(p place, off int64) int {
		switch {
		case p.to <= off:
			return -1
		case p.from > off:
			return 1
		}
		return 0
	})
	if !found {
		return 0, false
	}
	return where[i].chunk, true
}

func (o *origin) places() []place {
	all := []place{}
	for k, c := range o.s.head.Chunks {
		for _, r := range c.Ranges {
			if r.Layer == o.n {
				all = append(all, place{r.Offset, r.Offset + r.Length, k})
			}
		}
		for _, r := range c.Copies {
			if r.Layer == o.n {
				all = append(all, place{r.Offset, r.Offset + r.Length, k})
			}
		}
	}
	slices.SortFunc(all, func(a, b place) int { return int(min(1, max(-1, a.from-b.from))) })
	return all
}

// aheadOfStream is how many chunks the pack's stream may be away from one that
// is waited for: it brings it sooner than a request of its own.
const aheadOfStream = 2

// aheadOfPassed is how many bytes away the stream of a pack may be that is passed on to other nodes, and so
// read to its end: what is fetched beside it crosses the PoP's link twice.
const aheadOfPassed = 4 << 20

// isNear reports whether the stream is to be waited for, which brings chunk next now, by who wants chunk k
// behind it.
func (s *Start) isNear(next, k int) bool {
	if s.pack.passed && s.head.ChunkSpan(k).Offset-s.head.ChunkSpan(next).Offset <= aheadOfPassed {
		return true
	}
	return k-next <= aheadOfStream
}

// ended reports whether nothing more comes of the pack's stream.
func (s *Start) ended() bool {
	select {
	case <-s.done:
		return true
	default:
		return false
	}
}

// bringChunk waits for the pack's stream if that is about to bring the chunk,
// and else fetches the chunk by itself.
func (o *origin) bringChunk(ctx context.Context, k int) error {
	for {
		ended := o.s.ended()
		o.s.mu.Lock()
		next := o.s.next
		o.s.mu.Unlock()
		if next > k {
			return nil
		}
		if ended || !o.s.isNear(next, k) {
			return o.fetchChunk(ctx, k)
		}
		select {
		case <-o.s.done:
		case <-time.After(2 * time.Millisecond):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func (o *origin) fetchChunk(ctx context.Context, k int) error {
	h, err := o.takeChunk(ctx, k)
	if err != nil {
		return err
	}
	defer h.release()
	stored, err := o.s.fetch(ctx, link.Demand, o.s.head.ChunkSpan(k))
	if err != nil {
		return err
	}
	data, err := o.s.head.DecodeChunk(k, stored, nil)
	if err != nil {
		return err
	}
	return o.s.putChunk(k, data)
}

// fetch reads a part of the pack in its turn.
func (s *Start) fetch(ctx context.Context, c link.Class, at pack.Span) ([]byte, error) {
	slot := s.p.slots.slotsOf(s.img.Ref.Host)
	if err := slot.Acquire(ctx, 1); err != nil {
		return nil, err
	}
	defer slot.Release(1)
	return s.read(ctx, c, at)
}

// read reads a part of the pack.
func (s *Start) read(ctx context.Context, c link.Class, at pack.Span) ([]byte, error) {
	k := s.p.cfg.Link.Claim(c)
	defer k.Release()
	r, err := s.open(ctx, k, at)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	b := make([]byte, at.Length)
	_, err = io.ReadFull(r, b)
	return b, err
}

// getPoints returns the layer's restart points, or nil if it has none.
func (o *origin) getPoints(ctx context.Context) (*pack.Points, error) {
	if o.n < 0 || o.s.head.Layers[o.n].Points == nil {
		return nil, nil
	}
	if have := o.points.Load(); have != nil {
		return have, nil
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if have := o.points.Load(); have != nil {
		return have, nil
	}
	stored, err := o.s.fetch(ctx, link.Demand, o.s.head.PointsSpan(o.n))
	if err != nil {
		return nil, err
	}
	points, err := o.s.head.DecodePoints(o.n, stored)
	if err == nil {
		o.points.Store(points)
	}
	return points, err
}

// putPages puts the whole pages of b, which lies at off, and returns how many
// bytes of b are of no use any more.
func (o *origin) putPages(off int64, b []byte, last bool) (int, error) {
	skip := int((presence.Page - off%presence.Page) % presence.Page)
	end := len(b)
	if !last {
		end -= int((off + int64(len(b))) % presence.Page)
	}
	if skip >= end {
		return 0, nil
	}
	return end, o.s.p.Put(o.part, off+int64(skip), b[skip:end])
}

// sums are those of the segments i to j.
func sums(points *pack.Points, i, j int) []layer.Sum {
	all := make([]layer.Sum, 0, j-i+1)
	for k := i; k <= j; k++ {
		a, b := points.Data(k)
		all = append(all, layer.Sum{Span: layer.Span{From: a, To: b}, SHA256: points.Sum(k)})
	}
	return all
}

// show shows what the stream has written of [from, to), as far as the pack has
// digests for it. Else readers wait until the whole stream has verified.
func (o *origin) show(from, to int64) error {
	points := o.points.Load()
	if points == nil {
		return nil
	}
	_, err := o.part.Vouch(sums(points, points.Segment(from), points.Segment(to-1)))
	return err
}

// errStreamSilent says that a layer's stream does not move.
var errStreamSilent = errors.New("the layer's stream does not move")

// follow brings the layer's stream to the front and waits until it has brought
// [from, to), but no longer than patience for it to move on.
func (o *origin) follow(ctx context.Context, from, to int64, patience time.Duration) error {
	p := o.s.p
	class := link.Demand
	if !o.s.ended() { // the pack is what the same container, and others, wait for too
		class = link.Startup
	}
	fill := p.cfg.Layers.Fill(ctx, o.part.Layer, p.newBlob(o.s.img, o.part.Layer, o.s.o, link.Background))
	if joined, ok := fill.Source().(*blob); ok {
		defer joined.wait(class)()
	}
	for seen, at := o.part.Passed(), time.Now(); ; {
		if err := o.show(from, to); err != nil {
			return err
		}
		if absent, _ := o.part.Absent(from, to); absent > from {
			return nil
		}
		if fill.Progress().State == layer.Failed {
			_, err := fill.Wait(ctx)
			return err
		}
		if n := o.part.Passed(); n != seen {
			seen, at = n, time.Now()
		} else if time.Since(at) > patience {
			return errStreamSilent
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
