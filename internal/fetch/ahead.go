package fetch

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"dewpoint/internal/fetch/link"
	"dewpoint/internal/layer/presence"
	"dewpoint/internal/pack"
	"dewpoint/internal/registry"
)

const (
	// farthest is how many segments are fetched at most for a reader that goes
	// through a layer.
	farthest = 16
	// aheadBytes bounds the compressed bytes of those that it has not asked for.
	aheadBytes = 8 << 20
	// streamAfter is the number of misses in sequence after which a layer's stream
	// is used that is no further away than streamNear, in compressed bytes.
	streamAfter = 2
	streamNear  = 4 << 20
	// streamPatience is how long such a stream may not move; then it is not used for
	// streamAvoided.
	streamPatience = 2 * time.Second
	streamAvoided  = 30 * time.Second
)

// pass is a reader that goes through a layer, from one segment to the next.
type pass struct {
	next   int // segment that it is expected to miss
	window int // segments that were fetched for its last miss
	misses int // in sequence
}

// passes are those that were under way last, the newest first.
type passes struct{ list [4]pass }

// find is where the pass is that comes to segment i, or -1. here reports whether a
// segment need not be fetched.
func (ps *passes) find(i int, here func(int) bool) int {
	for n := range ps.list {
		q := &ps.list[n]
		for q.window > 0 && q.next < i && here(q.next) {
			q.next++
		}
		if q.window > 0 && q.next == i {
			return n
		}
	}
	return -1
}

// at is the pass that comes to segment i, or a new one in place of the one that
// has not been used for the longest.
func (ps *passes) at(i int, here func(int) bool) *pass {
	p, n := pass{}, ps.find(i, here)
	if n < 0 {
		n = len(ps.list) - 1
	} else {
		p = ps.list[n]
	}
	copy(ps.list[1:n+1], ps.list[:n])
	ps.list[0] = p
	return &ps.list[0]
}

// missed counts a miss and doubles what is fetched for it.
func (p *pass) missed() {
	p.misses++
	p.window = min(max(2*p.window, 1), farthest)
}

// hold is a stretch of segments, or a chunk, that one fetch has reserved.
type hold struct {
	o          *origin
	first, end int // segments; those before first are released
}

// chunkKey is what a chunk is reserved under, beside the segments.
func chunkKey(k int) int { return -1 - k }

// takeChunk reserves a chunk. If it is being fetched, takeChunk waits for that
// and returns errWaited.
func (o *origin) takeChunk(ctx context.Context, k int) (*hold, error) {
	o.busyMu.Lock()
	if other := o.busy[chunkKey(k)]; other != nil {
		o.busyMu.Unlock()
		return nil, waited(ctx, other)
	}
	defer o.busyMu.Unlock()
	return o.hold(chunkKey(k), chunkKey(k)+1), nil
}

// waited waits for another fetch; then what is absent is to be looked at again.
func waited(ctx context.Context, other <-chan struct{}) error {
	select {
	case <-other:
		return errWaited
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// hold reserves what lies from first to before end. It is called with busyMu held.
func (o *origin) hold(first, end int) *hold {
	if o.busy == nil {
		o.busy = map[int]chan struct{}{}
	}
	for k := first; k < end; k++ {
		o.busy[k] = make(chan struct{})
	}
	return &hold{o, first, end}
}

// releaseTo releases what lies before k.
func (h *hold) releaseTo(k int) {
	h.o.busyMu.Lock()
	defer h.o.busyMu.Unlock()
	for ; h.first < k; h.first++ {
		close(h.o.busy[h.first])
		delete(h.o.busy, h.first)
	}
}

func (h *hold) release() { h.releaseTo(h.end) }

// take reserves the segments i to j, and those behind them that are to come with
// them. If some of i to j are being fetched, take waits for one of them and
// returns errWaited; but who waits for the last of those that come for a reader
// who goes through the layer gets the ones that follow, so that the link is not
// idle for a round trip.
func (o *origin) take(ctx context.Context, points *pack.Points, i, j int) (*hold, error) {
	o.busyMu.Lock()
	for k := i; k <= j; k++ {
		other := o.busy[k]
		if other == nil {
			continue
		}
		h := o.takeNext(points, k)
		o.busyMu.Unlock()
		if h != nil {
			return h, nil
		}
		return nil, waited(ctx, other)
	}
	defer o.busyMu.Unlock()
	p := o.passes.at(i, func(k int) bool { return o.here(points, k) })
	p.missed()
	p.next = o.extent(points, i, j, p.window)
	return o.hold(i, p.next), nil
}

// takeNext reserves what follows segment k, if k is the last that comes for a
// pass that has missed before. It is called with busyMu held.
func (o *origin) takeNext(points *pack.Points, k int) *hold {
	for n := range o.passes.list {
		p := &o.passes.list[n]
		if p.next != k+1 || p.window < 2 || p.next >= points.Len() || o.busy[p.next] != nil ||
			o.here(points, p.next) || o.streamIsNear(points, p) {
			continue
		}
		p.missed()
		first := p.next
		p.next = o.extent(points, first, first, p.window)
		return o.hold(first, p.next)
	}
	return nil
}

// extent is the end of what is fetched for a miss of the segments i to j. It is
// called with busyMu held.
func (o *origin) extent(points *pack.Points, i, j, window int) int {
	end := j + 1
	_, asked := points.Blob(j)
	for end < min(i+window, points.Len()) && o.busy[end] == nil && !o.here(points, end) {
		if _, to := points.Blob(end); to-asked > aheadBytes {
			break
		}
		end++
	}
	return end
}

// here reports whether segment k need not be fetched: its pages are there, but
// perhaps for those that it shares with others, or the layer's stream has passed.
func (o *origin) here(points *pack.Points, k int) bool {
	if k >= points.Len() {
		return false
	}
	from, to := points.Data(k)
	if to <= o.part.Passed() {
		return true
	}
	from = (from + presence.Page - 1) / presence.Page * presence.Page
	if to < o.part.Size {
		to -= to % presence.Page
	}
	if from >= to {
		return true
	}
	at, _ := o.part.Absent(from, to)
	return at >= to
}

// byStream reports whether [from, to), which is absent, is to come with the
// layer's stream. See streamIsNear.
func (o *origin) byStream(points *pack.Points, from, to int64) bool {
	_, j := o.edges.narrow(points.Segment(from), points.Segment(to-1), from, to)
	o.busyMu.Lock()
	defer o.busyMu.Unlock()
	n := o.passes.find(j, func(k int) bool { return o.here(points, k) })
	return o.busy[j] == nil && n >= 0 && o.streamIsNear(points, &o.passes.list[n])
}

// streamIsNear reports whether the segment that p comes to had better come with
// the layer's stream: the reader has missed several times in sequence, the stream
// is, or may be, on its way, and it is little behind. What comes with it need not
// come twice. It is called with busyMu held.
func (o *origin) streamIsNear(points *pack.Points, p *pass) bool {
	passed := o.part.Passed()
	if time.Since(time.Unix(0, o.stuck.Load())) < streamAvoided {
		return false
	}
	if p.misses < streamAfter || p.next >= points.Len() || !o.s.mayComplete() {
		return false
	}
	if _, end := points.Data(p.next); end <= passed {
		return false
	}
	at, _ := points.Blob(points.Segment(passed))
	_, to := points.Blob(p.next)
	return to-at <= streamNear
}

// streamBrings reports whether the layer's stream has brought [from, to).
func (o *origin) streamBrings(ctx context.Context, from, to int64) bool {
	err := o.follow(ctx, from, to, streamPatience)
	if err != nil {
		o.stuck.Store(time.Now().UnixNano())
	}
	return err == nil
}

// mayComplete reports whether the layers may be filled now.
func (s *Start) mayComplete() bool {
	select {
	case <-s.background:
		hours := s.p.cfg.Lazy.Hours
		return hours == nil || hours.Between(time.Now())
	default:
		return false
	}
}

// bringSegments brings the segments that [from, to) touches, whole: what lies
// beside the bytes that are waited for costs nothing more. Segments behind them
// come with them for readers that go through the layer.
func (o *origin) bringSegments(ctx context.Context, points *pack.Points, from, to int64) error {
	i, j := o.edges.narrow(points.Segment(from), points.Segment(to-1), from, to)
	h, err := o.take(ctx, points, i, j)
	if err != nil {
		return err
	}
	defer h.release()
	asked := h.first == i // else what follows
	if asked {
		if there, err := o.part.Vouch(sums(points, i, j)); there || err != nil {
			return err
		}
	}
	if err := o.fetchSegments(ctx, points, h); err != nil || asked {
		return err
	}
	return errWaited
}

// fetchSegments fetches what h holds with one request, and one for the windows
// at the same time. Segments are shown and released as they come.
func (o *origin) fetchSegments(ctx context.Context, points *pack.Points, h *hold) error {
	slot := o.s.p.slots.slotsOf(o.s.img.Ref.Host)
	if err := slot.Acquire(ctx, 1); err != nil {
		return err
	}
	defer slot.Release(1)
	ctx, cancel := context.WithCancel(ctx)
	windows := o.fetchWindows(ctx, points, h)
	defer windows.wait()
	defer cancel()
	from, _ := points.Blob(h.first)
	_, to := points.Blob(h.end - 1)
	blob, err := o.openBlob(ctx, from, to)
	if err != nil {
		return err
	}
	defer blob.Close()
	l := laying{o: o, points: points, blob: blob, have: from, next: h.first}
	for l.next < h.end && err == nil {
		if err = l.read(); err != nil {
			break
		}
		if windows.wait(); windows.err != nil {
			err = windows.err
			break
		}
		if err = l.inflate(windows.of(points, l.next)); err == nil && l.next < h.end {
			h.releaseTo(l.next) // the last one goes when edges knows its end
		}
	}
	return errors.Join(err, o.edges.left(o, l.next, l.at, l.buf))
}

// windowFetch is the windows of some segments on their way.
type windowFetch struct {
	done chan struct{}
	at   int64 // of b in the layer's windows
	b    []byte
	err  error
}

func (w *windowFetch) wait() { <-w.done }

// of is the window of segment k, as stored.
func (w *windowFetch) of(points *pack.Points, k int) []byte {
	at := points.Window(k)
	if at.Length == 0 {
		return nil
	}
	return w.b[at.Offset-w.at:][:at.Length]
}

// fetchWindows begins to fetch the windows of what h holds.
func (o *origin) fetchWindows(ctx context.Context, points *pack.Points, h *hold) *windowFetch {
	first, last := points.Window(h.first), points.Window(h.end-1)
	w := &windowFetch{done: make(chan struct{}), at: first.Offset}
	at := pack.Span{Offset: o.s.head.WindowsSpan(o.n).Offset + first.Offset,
		Length: last.Offset + last.Length - first.Offset}
	if at.Length == 0 {
		close(w.done)
		return w
	}
	go func() {
		defer close(w.done)
		w.b, w.err = o.s.read(ctx, link.Demand, at)
	}()
	return w
}

// openBlob opens the compressed bytes [from, to) of the layer.
func (o *origin) openBlob(ctx context.Context, from, to int64) (io.ReadCloser, error) {
	s, l := o.s, o.part.Layer
	k := s.p.cfg.Link.Claim(link.Demand)
	r, err := s.p.cfg.Registry.Open(ctx, s.img.Ref, registry.Blob{Digest: l.Digest, Size: l.Size}, from, to-from,
		registry.OpenOptions{})
	if err != nil {
		k.Release()
		return nil, err
	}
	body := k.Reader(ctx, &counted{ReadCloser: r, n: &s.got, total: &s.p.stats.demandBytes})
	return &releasing{body, k}, nil
}

// releasing is a stream that ends its claim.
type releasing struct {
	io.ReadCloser
	k *link.Claim
}

func (r *releasing) Close() error {
	r.k.Release()
	return r.ReadCloser.Close()
}

// laying puts consecutive segments into a layer, from one stream.
type laying struct {
	o      *origin
	points *pack.Points
	blob   io.Reader
	next   int    // segment
	raw    []byte // the end of what was read of blob
	have   int64  // up to where blob was read
	buf    []byte // inflated, behind the last page that was put
	at     int64  // of buf[0]
}

// read reads the compressed bytes of the next segment. Neighbours may share a byte.
func (l *laying) read() error {
	from, to := l.points.Blob(l.next)
	raw := make([]byte, to-from)
	n := copy(raw, l.raw[len(l.raw)-int(l.have-from):])
	_, err := io.ReadFull(l.blob, raw[n:])
	l.raw, l.have = raw, to
	return err
}

// inflate inflates the next segment, which was read, and puts the pages that lie
// wholly within it and those before it. After an error buf is as before.
func (l *laying) inflate(window []byte) error {
	o, first := l.o, l.buf == nil
	from, to := l.points.Data(l.next)
	if first {
		l.at = from
	}
	have := len(l.buf)
	buf := slices.Grow(l.buf, int(to-from))[:have+int(to-from)]
	if err := l.points.Inflate(l.next, bytes.NewReader(l.raw), window, buf[have:]); err != nil {
		return fmt.Errorf("layer %s at %d: %w", o.part.Layer.Digest, from, err)
	}
	if first {
		if err := o.edges.right(o, l.next, from, buf); err != nil {
			return err
		}
	}
	n, err := o.putPages(l.at, buf, to == o.part.Size)
	if err != nil {
		return err
	}
	l.buf = append(buf[:0], buf[n:]...)
	l.at += int64(n)
	l.next++
	return nil
}
