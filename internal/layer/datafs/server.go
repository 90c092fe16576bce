package datafs

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// ServerConfig is what a datafs works with.
type ServerConfig struct {
	Device     *os.File          // /dev/fuse, mounted at Mountpoint
	Listener   *net.UnixListener // where dewd comes; Serve closes it
	Mountpoint string
	Adopted    bool          // another datafs served this mount before
	Idle       time.Duration // see idleAfter; 0 is that
	Log        *slog.Logger  // nil is none
}

// readers is how many threads read requests. One that waits for the disk must
// not keep another from being read.
const readers = 4

// server is a running datafs.
type server struct {
	cfg ServerConfig
	dev device
	log *slog.Logger
	// canResend: the kernel has FUSE_NOTIFY_RESEND. noOpendir: it does without OPENDIR.
	canResend, noOpendir atomic.Bool
	// singles: after a refusal the kernel comes again for single pages.
	singles atomic.Bool
	signals signals

	mu     sync.RWMutex
	layers map[uint32]*layer // by number
	ids    map[string]*layer

	linkMu sync.Mutex
	link   *link     // to dewd; nil if none is here
	alone  time.Time // since when

	stores chan *layer // that have something to be stored

	start chan struct{} // closed when requests are read
	begin sync.Once
	// leaving says that the mount goes because dewd wants it to; ending is
	// closed when dewd knows.
	leaving atomic.Bool
	ending  chan struct{}
	end     sync.Once
}

// Serve serves a FUSE mount until the mount is gone, ctx ends, or nothing has
// used it for a while; then it takes the mount away. Its reading threads cannot
// be interrupted: when ctx ends while the mount stays they stay too, and the
// caller is to end the process. One Serve is all that a process is good for.
func Serve(ctx context.Context, cfg ServerConfig) error {
	s := &server{cfg: cfg, log: cfg.Log, layers: map[uint32]*layer{}, ids: map[string]*layer{},
		start: make(chan struct{}), ending: make(chan struct{}), alone: time.Now(), stores: make(chan *layer, 256)}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	if cfg.Idle == 0 {
		s.cfg.Idle = idleAfter
	}
	s.dev.fd = rawFD(cfg.Device)
	s.canResend.Store(cfg.Adopted) // else there would be no second one
	s.noOpendir.Store(cfg.Adopted)
	s.signals.init()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	gone := make(chan error, readers)
	go func() {
		// Requests about layers that are still to be added would fail.
		<-s.start
		for range readers {
			go func() { gone <- s.read() }()
		}
	}()
	if !cfg.Adopted {
		s.begin.Do(func() { close(s.start) })
	}
	var group sync.WaitGroup
	group.Go(func() { s.accept() })
	group.Go(func() { s.signals.watch(ctx, s) })
	group.Go(func() { s.pruneRemoved(ctx) })
	group.Go(func() { s.storeAll(ctx) })
	err := s.supervise(ctx, gone)
	cancel()
	cfg.Listener.Close()
	s.replaceLink(nil, nil)
	group.Wait()
	return err
}

func (s *server) begun() bool {
	select {
	case <-s.start:
		return true
	default:
		return false
	}
}

// resume begins to serve a mount that another datafs has served, with the
// requests that it left unanswered.
func (s *server) resume() error {
	if s.begun() {
		return errMessage
	}
	if err := s.dev.resend(); err != nil {
		return err
	}
	s.begin.Do(func() { close(s.start) })
	return nil
}

// supervise waits for a reason to end.
func (s *server) supervise(ctx context.Context, gone <-chan error) error {
	tick := time.NewTicker(s.cfg.Idle)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case err := <-gone:
			if s.leaving.Load() {
				<-s.ending
			}
			if errors.Is(err, errGone) {
				return nil
			}
			return err
		case <-s.ending:
			return nil
		case <-tick.C:
			if s.abandoned() && s.leave() == nil {
				return nil
			}
		}
	}
}

// abandoned reports whether no dewd was here for long enough.
func (s *server) abandoned() bool {
	s.linkMu.Lock()
	defer s.linkMu.Unlock()
	return s.link == nil && time.Since(s.alone) >= s.cfg.Idle*9/10
}

// leave takes the mount away if nothing uses it; else it returns EBUSY. The
// kernel keeps names that nobody uses any more, so it is made to forget them
// first.
func (s *server) leave() error {
	for _, l := range s.all() {
		s.forgetNames(l)
	}
	for range 20 {
		if !s.held() {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	if s.held() {
		return unix.EBUSY
	}
	if err := unix.Unmount(s.cfg.Mountpoint, unix.UMOUNT_NOFOLLOW); err != nil && err != unix.EINVAL &&
		err != unix.ENOENT {
		return err
	}
	return nil
}

func (s *server) held() bool {
	for _, l := range s.all() {
		l.mu.Lock()
		held := l.held()
		l.mu.Unlock()
		if held {
			return true
		}
	}
	return false
}

func (s *server) all() []*layer {
	s.mu.RLock()
	defer s.mu.RUnlock()
	out := make([]*layer, 0, len(s.layers))
	for _, l := range s.layers {
		out = append(out, l)
	}
	return out
}

func (s *server) byNumber(n uint32) *layer {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.layers[n]
}

func (s *server) byID(id string) *layer {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.ids[id]
}

// accept serves one dewd after the other. A new one takes the place of one that
// is still there.
func (s *server) accept() {
	var group sync.WaitGroup
	defer group.Wait()
	for {
		conn, err := s.cfg.Listener.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			s.log.Error("accept", "error", err)
			time.Sleep(100 * time.Millisecond)
			continue
		}
		l := newLink(conn)
		s.replaceLink(nil, l)
		group.Go(l.run)
		group.Go(func() {
			if err := s.converse(l); err != nil {
				s.log.Error("dewd's connection is closed", "error", err)
			}
			s.replaceLink(l, nil)
			l.close()
		})
	}
}

// replaceLink makes now the link to dewd. If old is not nil, only in its place.
func (s *server) replaceLink(old, now *link) {
	s.linkMu.Lock()
	defer s.linkMu.Unlock()
	if old != nil && s.link != old {
		return
	}
	if s.link != nil {
		s.link.close()
	}
	if s.link = now; now == nil {
		s.alone = time.Now()
	}
}

// tell sends a message to dewd, if one is here.
func (s *server) tell(m message) {
	s.linkMu.Lock()
	l := s.link
	s.linkMu.Unlock()
	if l != nil {
		l.send(m)
	}
}

func (s *server) tellWants(l *layer, wants spans) {
	for _, w := range wants {
		s.tell(message{kind: kindWant, id: l.id, from: w.from, to: w.to})
	}
}

// flags say of a layer what dewd has to know if another datafs takes over.
// l.mu is held.
func (l *layer) flags() uint8 {
	var f uint8
	if l.uses[asFile].held() {
		f |= flagHeldFile
	}
	if l.uses[asTree].held() {
		f |= flagHeldTree
	}
	if l.removed {
		f |= flagRemoved
	}
	return f
}

// answer gives a read that waited what it asked for.
func (s *server) answer(l *layer, r *read, buf []byte) []byte {
	if need := outHeaderSize + r.size; cap(buf) < need {
		buf = make([]byte, need)
	}
	b, err := l.fill(buf[:cap(buf)], r)
	if err != nil {
		s.log.Error("read data", "layer", l.id, "error", err)
		s.dev.fail(r.unique, unix.EIO)
		return buf
	}
	s.dev.data(r.unique, b)
	return buf
}

// drop forgets a layer that was removed if the kernel does not use it any more.
func (s *server) drop(l *layer) {
	s.mu.Lock()
	l.mu.Lock()
	gone := l.removed && !l.held() && s.layers[l.number] == l
	if gone {
		delete(s.layers, l.number)
		delete(s.ids, l.id)
		l.gone = true
		l.close() // the kernel, which has forgotten it, reads nothing of it
	}
	l.mu.Unlock()
	s.mu.Unlock()
	if gone {
		s.tell(message{kind: kindReleased, id: l.id})
	}
}

const treeSuffix = ".tree"

// named returns the layer and which of its two nodes a name in the root means.
func (s *server) named(name string) (*layer, int) {
	as := asFile
	id, found := strings.CutSuffix(name, treeSuffix)
	if found {
		as = asTree
	}
	l := s.byID(id)
	if l == nil || found && l.index.Load() == nil {
		return nil, 0
	}
	return l, as
}

// errnoOf is the number of an error that goes over the socket.
func errnoOf(err error) int64 {
	var errno unix.Errno
	switch {
	case err == nil:
		return 0
	case errors.As(err, &errno):
		return int64(errno)
	}
	return int64(unix.EINVAL)
}

// errorOf is the error that errnoOf made a number of.
func errorOf(n int64) error {
	if n == 0 {
		return nil
	}
	return fmt.Errorf("datafs: %w", unix.Errno(n))
}
