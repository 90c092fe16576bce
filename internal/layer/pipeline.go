package layer

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"dewpoint/internal/image"
	"dewpoint/internal/layer/inflate"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

// The sizes and numbers of the buffers between the stages bound the memory of
// a fill: at most depth+stages buffers of each kind are alive, about 6 MiB,
// whatever the size of the layer.
const (
	chunkBytes = 256 << 10 // of the compressed stream
	chunkDepth = 4
	pieceBytes = 512 << 10 // of the uncompressed stream
	pieceDepth = 2
	kickBytes  = 8 << 20 // write-back is started every so many bytes
)

var (
	chunkPool = sync.Pool{New: func() any { b := make([]byte, chunkBytes); return &b }}
	piecePool = sync.Pool{New: func() any { b := make([]byte, pieceBytes); return &b }}
)

// chunk is some compressed bytes on their way.
type chunk struct {
	buf  *[]byte
	n    int
	at   int64  // offset of the first byte in the blob
	hash []byte // state of the blob's hash before that byte
}

// piece is some uncompressed bytes on their way.
type piece struct {
	buf   *[]byte
	n     int
	at    int64
	draft *progress // where a fill may go on after this piece, or nil
}

// pipeline is one run of a fill: download | hash | inflate | hash | write,
// with the table of contents read and progress recorded behind the writer.
type pipeline struct {
	f    *Fill
	from *progress // where this run begins; never nil
	data *os.File
	tree *os.File // the layer's directory, of trees
	kept *os.File // compressed bytes kept for streams without restart points, or nil
	has  *arrival

	partial *Partial // the same layer, mounted already, or nil
	aside   bool     // the layer is made beside its place, see Fill.aside
	tar     bool     // the source gives the layer's tar (Way)

	// cut is why the source ended before its time. What it gave before passes
	// all stages, so that none of it has to be fetched again; then it is the
	// run's error. It is set before the chunks end.
	cut atomic.Pointer[error]

	blobHash, dataHash hash.Hash
	size               int64             // of data, once inflated
	format             image.Compression // as found in the stream
	keep               saver
	points             *pointWriter // nil if none are kept
	marked             int64        // In of the last point of progress
}

// fill makes the layer's files and verifies them. It leaves them in f.dir.
// Until f.keep has settled it may still write to the progress there.
func (f *Fill) fill(ctx context.Context) (*Layer, error) {
	way, err := f.way(ctx)
	if err != nil {
		return nil, fmt.Errorf("layer %s: %w", f.Layer.Digest, &sourceError{err})
	}
	f.wrong = way.Wrong
	if way.Elsewhere != nil {
		return f.attach(way.Elsewhere)
	}
	p, err := f.prepare(way.Tar)
	if err != nil {
		return nil, err
	}
	f.keep = &p.keep
	defer func() {
		go func() {
			<-p.keep.settled
			p.close()
		}()
	}()
	chunks := make(chan chunk, chunkDepth)
	hashed := make(chan chunk, chunkDepth)
	pieces := make(chan piece, pieceDepth)
	summed := make(chan piece, pieceDepth)
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return thenClose(chunks, p.download(ctx, chunks)) })
	g.Go(func() error { return thenClose(hashed, p.hashBlob(ctx, chunks, hashed)) })
	g.Go(func() error { return thenClose(pieces, p.inflate(ctx, hashed, pieces)) })
	g.Go(func() error { return thenClose(summed, p.hashData(ctx, pieces, summed)) })
	g.Go(func() error {
		err := p.write(ctx, summed)
		p.keep.stop(err == nil)
		return err
	})
	g.Go(func() error { return p.keep.run(p) })
	var idx *index
	g.Go(func() (err error) { idx, err = p.index(ctx); return err })
	err = g.Wait()
	var l *Layer
	if err == nil {
		l, err = p.verified(idx)
	}
	if err != nil {
		if lost := f.keep.settle(); lost != nil && !errors.Is(err, lost) {
			err = errors.Join(err, lost)
		}
		return nil, fmt.Errorf("layer %s: %w", f.Layer.Digest, err)
	}
	return l, nil
}

// way asks the source how to go on.
func (f *Fill) way(ctx context.Context) (Way, error) {
	if by, ok := f.Source().(Preparer); ok && f.Layer.DiffID != "" {
		return by.Prepare(ctx, f)
	}
	return Way{}, nil
}

// attach makes the layer one that lies elsewhere.
func (f *Fill) attach(e *Elsewhere) (*Layer, error) {
	f.lies(f.store.disk.dir(e.DiffID))
	f.keep = nil
	return f.store.attach(f.dir, e)
}

// lies says where the fill's files are now.
func (f *Fill) lies(dir string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.dir = dir
}

// prepare opens the layer's files and finds where to begin. tar says what the
// source gives.
func (f *Fill) prepare(tar bool) (*pipeline, error) {
	dir := filepath.Join(f.store.cfg.Dir, importPrefix+f.Layer.Digest.Encoded())
	aside := f.aside()
	switch {
	case f.Layer.DiffID == "":
	case aside:
		dir = fmt.Sprintf("%s-%x", dir, f.begun.UnixNano()) // others may import the same blob
	default:
		dir = f.store.disk.dir(f.Layer.DiffID)
	}
	f.lies(dir)
	if err := os.MkdirAll(f.dir, 0o755); err != nil {
		return nil, err
	}
	f.runs.Add(1)
	p := &pipeline{f: f, tar: tar, aside: aside, has: newArrival(), blobHash: sha256.New(),
		dataHash: sha256.New()}
	if !aside {
		p.partial = f.store.Partial(f.Layer.DiffID)
	}
	p.from = loadProgress(f.dir, f.Layer.Digest)
	if p.from != nil && p.restore() != nil {
		p.from = nil
	}
	var err error
	if p.from == nil {
		p.blobHash.Reset()
		p.dataHash.Reset()
		p.from = &progress{Version: progressVersion, Blob: f.Layer.Digest}
		if p.from.BlobHash, err = state(p.blobHash); err != nil {
			return nil, err
		}
		if p.from.DataHash, err = state(p.dataHash); err != nil {
			return nil, err
		}
	}
	f.fetched.Store(max(p.from.BlobAt, p.from.Kept))
	if tar {
		p.from = tarProgress(p.from, f.Layer.DiffID)
	}
	p.data, err = os.OpenFile(filepath.Join(f.dir, "data"), os.O_RDWR|os.O_CREATE, 0o644)
	if err == nil && f.store.cfg.Tree {
		p.tree, err = os.Open(f.dir)
	}
	if err == nil && keeps(f.Layer) && !tar {
		err = p.openKept()
	}
	if err == nil && !tar {
		err = p.from.saveBoot(f.dir)
	}
	if err != nil {
		p.close()
		return nil, err
	}
	if p.partial != nil {
		p.partial.resume(p.from.Point.Out)
	}
	p.keep.start(p.from)
	p.has.add(0, p.from.Point.Out)
	f.resumed = p.from.Point.In > 0 || p.from.Kept > 0
	if !tar { // openKept may have forgotten some
		f.fetched.Store(max(p.from.BlobAt, p.from.Kept))
	}
	f.written.Store(p.from.Point.Out)
	return p, nil
}

// keeps tells streams that usually have no restart point but their start.
func keeps(l image.Layer) bool { return l.Compression() == image.Zstd }

func (p *pipeline) restore() error {
	fi, err := os.Stat(filepath.Join(p.f.dir, "data"))
	if err != nil {
		return err
	}
	if fi.Size() < p.from.Point.Out {
		return io.ErrUnexpectedEOF
	}
	return errors.Join(setState(p.blobHash, p.from.BlobHash), setState(p.dataHash, p.from.DataHash))
}

// openKept opens the kept blob and forgets what of it is not certain.
func (p *pipeline) openKept() error {
	var err error
	p.kept, err = os.OpenFile(filepath.Join(p.f.dir, blobFile), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	fi, err := p.kept.Stat()
	if err != nil {
		return err
	}
	if p.from.Boot != "" { // written in this boot: the page cache has it all
		p.from.Kept = fi.Size()
	}
	p.from.Kept = min(p.from.Kept, fi.Size(), p.f.Layer.Size)
	if p.from.Kept < p.from.BlobAt {
		return p.kept.Truncate(0)
	}
	return p.kept.Truncate(p.from.Kept)
}

// written is the Layer.written of layer id, what the fill has synced by. Its name is that of its later place.
func (p *pipeline) written(id digest.Digest) (*os.File, error) {
	f, name := p.data, filepath.Join(p.f.store.disk.dir(id), "data")
	if p.tree != nil {
		f, name = p.tree, filepath.Dir(name)
	}
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("dup", err)
	}
	return os.NewFile(uintptr(fd), name), nil
}

func (p *pipeline) close() {
	for _, f := range []*os.File{p.data, p.tree, p.kept} {
		if f != nil {
			f.Close()
		}
	}
}

func state(h hash.Hash) ([]byte, error) { return h.(encoding.BinaryMarshaler).MarshalBinary() }

func setState(h hash.Hash, b []byte) error { return h.(encoding.BinaryUnmarshaler).UnmarshalBinary(b) }

// send passes v on unless ctx ends first.
func send[T any](ctx context.Context, ch chan<- T, v T) error {
	select {
	case ch <- v:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// receive returns the next value, false after the last.
func receive[T any](ctx context.Context, ch <-chan T) (T, bool, error) {
	select {
	case v, ok := <-ch:
		return v, ok, nil
	case <-ctx.Done():
		var none T
		return none, false, context.Cause(ctx)
	}
}

// thenClose ends the stage's output, but not after an error: the next stage
// must not take a failure for the end of the stream.
func thenClose[T any](ch chan T, err error) error {
	if err == nil {
		close(ch)
	}
	return err
}

// download reads the kept part of the blob from disk and the rest from the source.
func (p *pipeline) download(ctx context.Context, out chan<- chunk) error {
	at := p.from.BlobAt
	if p.kept != nil && p.from.Kept > at {
		r := io.NewSectionReader(p.kept, at, p.from.Kept-at)
		n, err := p.pump(ctx, r, at, out, false)
		if err != nil {
			return err
		}
		at += n
	}
	if at == p.f.Layer.Size && !p.tar {
		return nil
	}
	r, err := p.f.Source().Open(ctx, p.f, at)
	if err != nil {
		return &sourceError{err}
	}
	defer r.Close()
	n, err := p.pump(ctx, r, at, out, true)
	switch {
	case err != nil && ctx.Err() == nil:
		err = &sourceError{err}
		p.cut.Store(&err)
		return nil
	case err != nil || p.tar:
		return err
	case at+n > p.f.Layer.Size:
		return fmt.Errorf("the registry sent more than the %d bytes that the manifest says: %w", p.f.Layer.Size,
			ErrMismatch)
	case at+n < p.f.Layer.Size:
		return fmt.Errorf("%d bytes of %d arrived: %w", at+n, p.f.Layer.Size, io.ErrUnexpectedEOF)
	}
	return nil
}

// pump cuts r into chunks. It counts how long it waited for either side.
func (p *pipeline) pump(ctx context.Context, r io.Reader, at int64, out chan<- chunk, remote bool) (int64,
	error) {
	begin := at
	var link pace
	for {
		buf := chunkPool.Get().(*[]byte)
		t0 := time.Now()
		n, err := p.readChunk(r, *buf, remote, link.gather())
		t1 := time.Now()
		link.note(n, t1.Sub(t0))
		p.f.waiting.Add(int64(t1.Sub(t0)))
		if n > 0 {
			p.f.state.CompareAndSwap(int32(Waiting), int32(Filling))
			if err := send(ctx, out, chunk{buf: buf, n: n, at: at}); err != nil {
				return at - begin, err
			}
			p.f.blocked.Add(int64(time.Since(t1)))
			at += int64(n)
		}
		if err == io.EOF {
			return at - begin, nil
		}
		if err != nil {
			return at - begin, err
		}
	}
}

// readChunk fills b, or less if what has arrived has been waiting for long:
// over a slow link a full chunk would take seconds. Between reads it lets bytes
// gather.
func (p *pipeline) readChunk(r io.Reader, b []byte, remote bool, gather time.Duration) (int, error) {
	n, start := 0, time.Now()
	for n < len(b) {
		m, err := r.Read(b[n:])
		n += m
		switch {
		case remote && p.tar:
			p.f.tar.Add(int64(m))
		case remote:
			p.f.received.Add(int64(m))
			p.f.fetched.Add(int64(m))
		}
		if err != nil {
			return n, err
		}
		if time.Since(start) > 20*time.Millisecond+gather {
			break
		}
		if gather > 0 && m < gatherBytes {
			time.Sleep(gather)
		}
	}
	return n, nil
}

// pace is how fast a source has been lately. Over a slow link every packet
// would wake this process, and each of its stages: it pays to let some gather,
// as long as they fit the least window that TCP begins with.
type pace struct{ rate float64 } // bytes a second

const (
	slowLink    = 1.5e6    // bytes a second from which on nothing has to gather
	gatherBytes = 24 << 10 // that are worth waking for
	gatherMost  = 40 * time.Millisecond
)

func (p *pace) note(n int, took time.Duration) {
	if took > time.Millisecond {
		p.rate += (float64(n)/took.Seconds() - p.rate) * min(1, took.Seconds()/0.2)
	}
}

// gather is how long to let bytes gather between two reads.
func (p *pace) gather() time.Duration {
	if p.rate == 0 || p.rate > slowLink {
		return 0
	}
	return min(gatherMost, time.Duration(gatherBytes/p.rate*float64(time.Second)))
}

// hashBlob hashes the compressed bytes and keeps them where need be.
func (p *pipeline) hashBlob(ctx context.Context, in <-chan chunk, out chan<- chunk) error {
	for {
		c, ok, err := receive(ctx, in)
		if !ok {
			return err
		}
		if p.tar {
			if err := send(ctx, out, c); err != nil {
				return err
			}
			continue
		}
		if c.hash, err = state(p.blobHash); err != nil {
			return err
		}
		b := (*c.buf)[:c.n]
		p.blobHash.Write(b)
		if p.kept != nil && c.at+int64(c.n) > p.from.Kept {
			if _, err := p.kept.WriteAt(b, c.at); err != nil {
				return err
			}
			p.keep.keptTo(c.at + int64(c.n))
		}
		if err := send(ctx, out, c); err != nil {
			return err
		}
	}
}

// inflate cuts the uncompressed stream into pieces, so that one ends wherever
// a restart point was found.
func (p *pipeline) inflate(ctx context.Context, in <-chan chunk, out chan<- piece) error {
	src := &chunkReader{ctx: ctx, p: p, in: in, skip: p.from.Point.In - p.from.BlobAt}
	var from *inflate.Point
	if p.from.Point.In > 0 {
		from = &p.from.Point
	}
	body, err := p.sniff(src)
	if err != nil {
		return p.unlessCut(err)
	}
	r, err := inflate.NewReader(body, p.format, from)
	if err != nil {
		return err
	}
	defer r.Close()
	if p.f.store.cfg.Points && pointed(p.format) {
		if p.points, err = keepPoints(p.f.dir, p.from.Point.Out); err != nil {
			return err
		}
		defer p.points.close()
	}
	at := p.from.Point.Out
	p.marked = p.from.Point.In
	for {
		if r.In()-p.marked >= p.f.store.cfg.Interval || p.points.due(at) {
			r.Mark()
		}
		pc := piece{buf: piecePool.Get().(*[]byte), at: at}
		pc.n, pc.draft, err = p.inflatePiece(r, src, *pc.buf)
		ended := err == io.EOF || err != nil && p.unlessCut(err) == nil
		// of the stream itself: also a source may say that it was cut
		if !ended && errors.Is(err, io.ErrUnexpectedEOF) {
			err = fmt.Errorf("%w: it ends early", inflate.ErrCorrupt)
		}
		if err != nil && !ended {
			return err
		}
		at += int64(pc.n)
		if at > p.f.store.cfg.MaxBytes {
			return fmt.Errorf("it inflates past %d bytes, the most that a layer may have: %w",
				p.f.store.cfg.MaxBytes, ErrTooLarge)
		}
		if pc.n > 0 || pc.draft != nil {
			if err := send(ctx, out, pc); err != nil {
				return err
			}
		}
		if ended {
			p.size = at
			return p.unlessCut(src.drain())
		}
	}
}

// unlessCut is err, or nil if it comes of the source's.
func (p *pipeline) unlessCut(err error) error {
	if cut := p.cut.Load(); cut != nil && errors.Is(err, *cut) {
		return nil
	}
	return err
}

// sniff finds out how the stream is compressed, whatever its media type says,
// unless the fill goes on in the middle of it.
func (p *pipeline) sniff(src io.Reader) (io.Reader, error) {
	if p.from.Point.In > 0 || p.tar {
		p.format = p.from.Compression
		return src, nil
	}
	head := make([]byte, image.SniffLen)
	n, err := io.ReadFull(src, head)
	if err != nil && err != io.EOF && err != io.ErrUnexpectedEOF {
		return nil, err
	}
	p.format = image.Sniff(head[:n])
	return io.MultiReader(bytes.NewReader(head[:n]), src), nil
}

func (p *pipeline) inflatePiece(r inflate.Reader, src *chunkReader, b []byte) (int, *progress, error) {
	n := 0
	for n < len(b) {
		m, err := r.Read(b[n:])
		n += m
		if pt, ok := r.Point(); ok && err == nil {
			if err := p.points.add(pt); err != nil {
				return n, nil, err
			}
			if pt.In-p.marked < p.f.store.cfg.Interval {
				continue
			}
			p.marked = pt.In
			if p.tar {
				continue // nobody can go on from there in the blob
			}
			at, h := src.stateAt(pt.In)
			return n, &progress{Version: progressVersion, Blob: p.f.Layer.Digest, Point: pt, BlobAt: at, BlobHash: h,
				Compression: p.format}, nil
		}
		if err != nil {
			return n, nil, err
		}
	}
	return n, nil, nil
}

func (p *pipeline) hashData(ctx context.Context, in <-chan piece, out chan<- piece) error {
	for {
		pc, ok, err := receive(ctx, in)
		if !ok {
			return err
		}
		p.dataHash.Write((*pc.buf)[:pc.n])
		if pc.draft != nil {
			if pc.draft.DataHash, err = state(p.dataHash); err != nil {
				return err
			}
		}
		if err := send(ctx, out, pc); err != nil {
			return err
		}
	}
}

// write puts the pieces into data and tells who waits for them.
func (p *pipeline) write(ctx context.Context, in <-chan piece) error {
	kicked := p.from.Point.Out
	end := kicked
	for {
		pc, ok, err := receive(ctx, in)
		if err != nil {
			return err
		}
		if cut := p.cut.Load(); !ok && cut != nil {
			return *cut
		}
		if !ok {
			p.has.end(end)
			return nil
		}
		if err := p.put((*pc.buf)[:pc.n], pc.at); err != nil {
			return err
		}
		end = pc.at + int64(pc.n)
		piecePool.Put(pc.buf)
		p.has.add(pc.at, end)
		p.f.written.Store(end)
		if pc.draft != nil {
			p.keep.offer(pc.draft)
		}
		if end-kicked >= kickBytes {
			// Only a start of write-back: an error shows at the fsync.
			_ = unix.SyncFileRange(int(p.data.Fd()), kicked, end-kicked, unix.SYNC_FILE_RANGE_WRITE)
			kicked = end
		}
	}
}

// put writes what comes next of the stream.
func (p *pipeline) put(b []byte, at int64) error {
	if p.partial != nil {
		return p.partial.pass(at, b)
	}
	_, err := p.data.WriteAt(b, at)
	return err
}

// verified checks the two digests and gives the layer its final shape.
func (p *pipeline) verified(idx *index) (*Layer, error) {
	f := p.f
	if got := digest.NewDigest(digest.SHA256, p.blobHash); got != f.Layer.Digest && !p.tar {
		return nil, fmt.Errorf("the registry's bytes hash to %s, the manifest says %s: %w", got, f.Layer.Digest,
			ErrMismatch)
	}
	got := digest.NewDigest(digest.SHA256, p.dataHash)
	if f.Layer.DiffID != "" && got != f.Layer.DiffID {
		return nil, fmt.Errorf("it unpacks to %s, the image's configuration says %s: %w", got, f.Layer.DiffID,
			ErrMismatch)
	}
	if p.partial != nil {
		if err := p.partial.check(p.size); err != nil {
			return nil, err
		}
	}
	if err := p.data.Truncate(p.size); err != nil {
		return nil, err
	}
	if err := p.checkEarly(got); err != nil {
		return nil, err
	}
	l := &Layer{store: f.store, DiffID: got, Size: p.size, Blob: f.Layer.Digest, BlobSz: f.Layer.Size,
		Tree: f.store.cfg.Tree, dir: f.dir, used: time.Now()}
	if err := idx.build(l); err != nil {
		return nil, err
	}
	if p.partial != nil && l.Tree {
		if err := p.partial.checkIndex(p.data); err != nil {
			return nil, err
		}
	}
	var err error
	if l.written, err = p.written(got); err != nil || !p.aside {
		return l, err
	}
	have, err := f.adopt(l)
	if have != l {
		l.written.Close()
	}
	return have, err
}

// aside reports whether the layer is to be made beside its place: that is not known yet, or what is mounted
// from there is lost.
func (f *Fill) aside() bool {
	p := f.store.Partial(f.Layer.DiffID)
	return f.Layer.DiffID == "" || f.lost != nil || p != nil && p.isLost()
}

// adopt moves a layer that was made aside to the place that its diffID names, or drops
// it for the one that is there.
func (f *Fill) adopt(l *Layer) (*Layer, error) {
	if err := f.keep.settle(); err != nil {
		return nil, err
	}
	s := f.store
	s.mu.Lock()
	defer s.mu.Unlock()
	for other := s.fills[l.DiffID]; other != nil && other != f; other = s.fills[l.DiffID] {
		s.mu.Unlock()
		<-other.ended
		s.mu.Lock()
	}
	if have := s.layers[l.DiffID]; have != nil && have != f.lost {
		return have, os.RemoveAll(f.dir)
	}
	dir := s.disk.dir(l.DiffID)
	if err := s.vacate(l.DiffID, dir); err != nil {
		return nil, err
	}
	if err := os.Rename(f.dir, dir); err != nil {
		return nil, err
	}
	f.Layer.DiffID = l.DiffID
	f.lies(dir)
	l.dir = dir
	s.layers[l.DiffID] = l
	return l, nil
}
