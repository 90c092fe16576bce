package layer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"dewpoint/internal/durable"
	"dewpoint/internal/image"
	"dewpoint/internal/layer/erofs"
	"dewpoint/internal/layer/inflate"
	"dewpoint/internal/layer/toc"

	"github.com/opencontainers/go-digest"
)

// Source gives the bytes of one blob as the registry serves them.
type Source interface {
	// Open returns the bytes from offset to the end for the fill f, whose
	// Progress tells how fast they are taken. It may be called again after
	// what it returned was closed. Reads may block; they end when ctx does.
	Open(ctx context.Context, f *Fill, offset int64) (io.ReadCloser, error)
}

// State is where a fill stands.
type State int32

const (
	Waiting  State = iota // for its turn on the link
	Filling               // bytes arrive
	Readable              // verified, may be mounted
	Complete              // and on disk
	Failed
)

func (s State) String() string {
	return [...]string{"waiting", "filling", "verified", "complete", "failed"}[s]
}

// Usable reports whether the layer may be mounted.
func (s State) Usable() bool { return s == Readable || s == Complete }

// Fill is the making of one layer. All who want the layer share it; it lives
// as long as the context of any of them. It is safe for concurrent use.
type Fill struct {
	Layer image.Layer // DiffID is empty for imports until it is readable

	store   *Store
	dir     string   // written by run alone, with mu held
	source  Source   // read from now; guarded by store.mu
	others  []Source // of the same blob, of those who joined; guarded by store.mu
	cancel  context.CancelCauseFunc
	users   int          // guarded by store.mu
	keep    *saver       // of the newest run; nil if its layer lies elsewhere
	lost    *Layer       // readable, and lost: the run is to replace it; of run alone
	again   atomic.Bool  // what it had brought was lost, and is fetched once more
	resumed bool         // the newest run went on from an earlier fill's bytes
	wrong   func(error)  // of the newest run's Way
	runs    atomic.Int64 // how often it was begun
	begun   time.Time    // zero if the layer was here
	shownAt atomic.Int64 // unix nanoseconds when it became readable; 0 before
	seeded  bool         // Seed has given it another node's

	state    atomic.Int32
	fetched  atomic.Int64 // compressed bytes that need not be fetched again
	received atomic.Int64 // of them, those that this fill read from its source
	tar      atomic.Int64 // uncompressed bytes read from a source that gives those
	seed     atomic.Int64 // compressed bytes that Seed has saved
	written  atomic.Int64 // uncompressed bytes
	waiting  atomic.Int64 // nanoseconds spent waiting for the source
	blocked  atomic.Int64 // nanoseconds the source spent waiting for us

	readable chan struct{} // closed when readable or failed
	ended    chan struct{} // closed when complete or failed
	mu       sync.Mutex
	layer    *Layer
	err      error
}

// errUnwanted ends a fill that nobody waits for any more.
var errUnwanted = errors.New("nobody waits for the layer any more")

// Fill makes the layer l readable and then complete, from what earlier fills
// left and from src. If the store has the layer, it returns an ended fill; if
// a fill of it is running, it joins that one and src is not used. The fill is
// given up, its progress kept, when ctx and those of all who joined are done.
func (s *Store) Fill(ctx context.Context, l image.Layer, src Source) *Fill {
	return s.start(ctx, l.DiffID, l, src)
}

// Import is Fill for a blob whose diffID is not known before it is inflated.
// It does not resume.
func (s *Store) Import(ctx context.Context, l image.Layer, src Source) *Fill {
	l.DiffID = ""
	return s.start(ctx, l.Digest, l, src)
}

func (s *Store) start(ctx context.Context, key digest.Digest, l image.Layer, src Source) *Fill {
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.begins != "" && s.begins == key { // being made a partial one
		s.begun.Wait()
	}
	f := s.fills[key]
	for f != nil && f.users == 0 { // given up, but not gone
		s.mu.Unlock()
		<-f.ended
		s.mu.Lock()
		f = s.fills[key]
	}
	if have := s.layers[l.DiffID]; have != nil && f == nil {
		have.touch()
		return s.have(l, have)
	}
	if f == nil {
		f = &Fill{Layer: l, store: s, source: src, begun: time.Now(),
			readable: make(chan struct{}), ended: make(chan struct{})}
		var run context.Context
		run, f.cancel = context.WithCancelCause(s.life)
		s.fills[key] = f
		s.work.Go(func() { f.run(run, key) })
	}
	if f.users > 0 && l.Digest == f.Layer.Digest && len(f.others) < maxSources {
		f.others = append(f.others, src)
	}
	f.users++
	context.AfterFunc(ctx, func() { f.leave() })
	return f
}

// maxSources bounds the sources that a fill turns to when its own fails.
const maxSources = 8

// have is the fill of a layer that is there; it ends when that is complete.
// It is called with mu held.
func (s *Store) have(l image.Layer, have *Layer) *Fill {
	f := &Fill{Layer: l, store: s, layer: have, readable: make(chan struct{}), ended: make(chan struct{})}
	f.fetched.Store(l.Size)
	f.written.Store(have.Size)
	close(f.readable)
	if have.Complete() {
		f.state.Store(int32(Complete))
		close(f.ended)
		return f
	}
	f.state.Store(int32(Readable))
	s.work.Go(func() { f.conclude(have.settleOrLeave()) })
	return f
}

// leave is called once for each context that wanted the fill.
func (f *Fill) leave() {
	f.store.mu.Lock()
	f.users--
	last := f.users == 0
	f.store.mu.Unlock()
	if last {
		f.cancel(errUnwanted)
	}
}

// Wait blocks until the layer is readable.
func (f *Fill) Wait(ctx context.Context) (*Layer, error) {
	l, err := f.await(ctx, f.readable)
	if shown := f.shown(); shown != nil {
		return shown, nil
	}
	return l, err
}

func (f *Fill) shown() *Layer {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.layer
}

// WaitComplete blocks until the layer is complete.
func (f *Fill) WaitComplete(ctx context.Context) (*Layer, error) { return f.await(ctx, f.ended) }

func (f *Fill) await(ctx context.Context, ch <-chan struct{}) (*Layer, error) {
	select {
	case <-ch:
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.err != nil {
		return nil, f.err
	}
	return f.layer, nil
}

// Fills are those under way, imports too, in no order.
func (s *Store) Fills() []*Fill {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Values(s.fills))
}

// Source is what the fill reads from: that of its first user, or, if that has
// failed, of another one. It is nil if nothing had to be filled.
func (f *Fill) Source() Source {
	f.store.mu.Lock()
	defer f.store.mu.Unlock()
	return f.source
}

// Partial reports whether the layer can be mounted, though it may not be
// readable yet.
func (f *Fill) Partial() bool { return f.store.Partial(f.Layer.DiffID) != nil }

// Progress is a snapshot of a fill's counters. Two of them tell what limited
// the fill between them: Blocked grows when the link is faster than this node.
type Progress struct {
	State    State
	Fetched  int64         // compressed bytes here, those of earlier fills included
	Received int64         // compressed bytes read from the source by this fill
	Tar      int64         // uncompressed bytes read from a source that gives the tar
	Seeded   int64         // of Fetched, those of another node's checkpoint
	Written  int64         // uncompressed bytes in data
	Waiting  time.Duration // the node waited for the source
	Blocked  time.Duration // the source waited for the node
	Begun    time.Time     // zero if the layer was here already
	Readable time.Time     // when it became readable; zero before, and if it was here
	Again    bool          // the disk has lost it once: it was, or is, fetched twice
}

// Progress returns the fill's counters now.
func (f *Fill) Progress() Progress {
	var shown time.Time
	if at := f.shownAt.Load(); at > 0 {
		shown = time.Unix(0, at)
	}
	return Progress{
		Begun: f.begun, Readable: shown,
		State: State(f.state.Load()), Fetched: f.fetched.Load(), Received: f.received.Load(), Tar: f.tar.Load(),
		Again:   f.again.Load(),
		Written: f.written.Load(),
		Seeded:  min(f.seed.Load(), f.fetched.Load()),
		Waiting: time.Duration(f.waiting.Load()), Blocked: time.Duration(f.blocked.Load()),
	}
}

// maxWrong bounds how often a layer is fetched anew that does not verify. A source that gives tars from
// elsewhere gives up each of them long before.
const maxWrong = 64

// run carries the fill to its end. What the disk has lost is brought once more, from the start.
func (f *Fill) run(ctx context.Context, key digest.Digest) {
	defer f.cancel(nil)
	err := f.bring(ctx)
	if lost := err; errors.Is(lost, durable.ErrLost) && ctx.Err() == nil {
		f.store.cfg.Log.Warn("the disk has lost what was written of a layer; fetching it once more", "layer",
			f.Layer.Digest, "mounted", f.shown() != nil, "err", lost)
		f.again.Store(true)
		if err = f.lose(false); err == nil {
			err = f.bring(ctx)
		}
		if f.lost != nil { // nothing replaces it
			err = errors.Join(lost, err)
		}
	}
	switch {
	case errors.Is(err, durable.ErrLost):
		err = errors.Join(err, f.lose(true))
	case err != nil && ctx.Err() != nil:
		err = context.Cause(ctx)
	}
	if err != nil && f.Layer.DiffID != "" && strings.HasPrefix(filepath.Base(f.dir), importPrefix) {
		err = errors.Join(err, f.store.disk.discard(f.dir)) // no later fill goes on from what lies beside its place
	}
	f.store.mu.Lock()
	delete(f.store.fills, key)
	f.store.mu.Unlock()
	f.conclude(err)
}

// lose removes what the disk has lost of the layer. What is mounted stays, unless this is for good, until the
// next run replaces it.
func (f *Fill) lose(forGood bool) (err error) {
	f.written.Store(0)
	f.seeded = true
	l, p := f.shown(), f.store.Partial(f.Layer.DiffID)
	if (l == nil || l.dir != f.dir) && (p == nil || p.place() != f.dir) {
		err = f.store.disk.discard(f.dir)
	}
	switch {
	case l != nil && forGood:
		err = errors.Join(err, l.leave())
	case l != nil:
		f.lost = l
	case p != nil && forGood:
		f.store.mu.Lock()
		err = errors.Join(err, f.store.vacate(p.Layer.DiffID, f.store.disk.dir(p.Layer.DiffID)))
		f.store.mu.Unlock()
	case p != nil:
		err = errors.Join(err, p.lose())
	}
	return err
}

// bring makes the layer complete. Bytes that do not verify are thrown away; if some of them came from an
// earlier fill, or all as a tar from elsewhere, which may be what was wrong, the layer is fetched anew from
// the start.
func (f *Fill) bring(ctx context.Context) error {
	l, err := f.fetch(ctx)
	for again := 0; damaged(err); again++ {
		err = errors.Join(err, f.reject())
		if !f.resumed && f.wrong == nil || again == maxWrong {
			break
		}
		f.store.cfg.Log.Warn("what an earlier fill left, or what came from elsewhere, does not verify; fetching the layer anew", "layer", f.Layer.Digest, "err", err)
		if f.wrong != nil {
			f.wrong(err)
		}
		l, err = f.fetch(ctx)
	}
	if wrong := f.store.Partial(f.Layer.DiffID); wrong != nil && errors.Is(err, ErrEarlyMismatch) {
		if err = f.store.expel(wrong, err); err == nil {
			l, err = f.fetch(ctx)
		}
	}
	if err == nil {
		err = l.declare()
	}
	if err != nil {
		return err
	}
	l = f.becomeReadable(l)
	if err = f.keep.settle(); err != nil {
		l.lose(err)
		return err
	}
	return errors.Join(f.store.repairExpelled(l), l.settle()) // of a complete tree the data may be gone
}

// sourceError is an error of the source: another one may do better.
type sourceError struct{ error }

func (e *sourceError) Unwrap() error { return e.error }

// fetch is fill from the sources of all who want the layer, one after the other.
func (f *Fill) fetch(ctx context.Context) (*Layer, error) {
	for {
		l, err := f.fill(ctx)
		var of *sourceError
		if !errors.As(err, &of) || ctx.Err() != nil || errors.Is(err, durable.ErrLost) ||
			!errors.Is(err, ErrAgain) && !f.nextSource() {
			return l, err
		}
		level := slog.LevelWarn
		if errors.Is(err, ErrAgain) {
			level = slog.LevelDebug // the source knows what it does
		}
		f.store.cfg.Log.Log(ctx, level, "a layer's source fails, another one is asked", "layer", f.Layer.Digest,
			"err", err)
	}
}

func (f *Fill) nextSource() bool {
	f.store.mu.Lock()
	defer f.store.mu.Unlock()
	if len(f.others) == 0 {
		return false
	}
	f.source, f.others = f.others[0], f.others[1:]
	return true
}

// reject throws away what does not verify. A layer that is mounted already
// keeps what was verified by itself; its stream begins anew.
func (f *Fill) reject() error {
	f.written.Store(0)
	p := f.store.Partial(f.Layer.DiffID)
	if p == nil {
		return f.store.disk.discard(f.dir)
	}
	p.resume(0)
	for _, name := range []string{bootFile, progressFile, pointsFile, blobFile} {
		if err := os.Remove(filepath.Join(f.dir, name)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}

// damaged tells errors that no resumed fill can get over.
func damaged(err error) bool {
	if errors.Is(err, durable.ErrLost) {
		return false // whatever else it is
	}
	for _, d := range []error{ErrMismatch, ErrTooLarge, inflate.ErrCorrupt, toc.ErrCorrupt, toc.ErrUnsafe,
		toc.ErrLimit, erofs.ErrTooLarge} {
		if errors.Is(err, d) {
			return true
		}
	}
	return false
}

// becomeReadable shows the layer, or the same one that is there, to those who wait and to Get.
func (f *Fill) becomeReadable(l *Layer) *Layer {
	f.store.mu.Lock()
	if have := f.store.layers[l.DiffID]; have != nil && have != f.lost {
		l = have
	} else {
		f.store.layers[l.DiffID] = l
	}
	f.store.mu.Unlock()
	f.lost = nil
	if p := f.store.Partial(l.DiffID); p != nil {
		p.become()
	}
	f.mu.Lock()
	f.layer = l
	f.mu.Unlock()
	if State(f.state.Swap(int32(Readable))) != Readable { // else it was, and is replaced
		f.shownAt.Store(time.Now().UnixNano())
		close(f.readable)
	}
	return l
}

// conclude ends the fill. A layer that became readable stays so, whatever err
// says, unless it is lost: it may be mounted. The next Fill tries again to complete it.
func (f *Fill) conclude(err error) {
	f.mu.Lock()
	f.err = explain(err)
	if errors.Is(err, durable.ErrLost) {
		f.layer = nil
	}
	f.mu.Unlock()
	if err != nil {
		if State(f.state.Swap(int32(Failed))) != Readable {
			close(f.readable)
		}
	} else {
		f.state.Store(int32(Complete))
	}
	close(f.ended)
}

// explain adds what an operator can do where the kernel's word alone does not say.
func explain(err error) error {
	switch {
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return fmt.Errorf("disk full: free some space (\"dew prune\" removes what nothing uses) and pull again: %w",
			err)
	case errors.Is(err, syscall.EROFS):
		return fmt.Errorf("the store is on a read-only file system: %w", err)
	case errors.Is(err, durable.ErrLost):
		return fmt.Errorf("the disk does not keep what is written: look for its errors in the kernel's log (dmesg), repair or replace it, and deploy again: %w",
			err)
	}
	return err
}
