package member

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"time"

	"dewpoint/internal/durable"
	"dewpoint/internal/fetch"
	"dewpoint/internal/pack"
	"dewpoint/internal/pop"
	"dewpoint/internal/pop/peer"

	"github.com/opencontainers/go-digest"
)

// packs has startup packs in common with the other nodes.
type packs struct {
	*common

	mu     sync.Mutex
	relays map[digest.Digest]*packRelay // by manifest
	// bytes of packs that came out of the store, by manifest, until a start asks
	brought map[digest.Digest]int64
}

// SharePack puts a pack that this node has made into the PoP's store, unless
// another node was first. It returns at once.
func (s *Member) SharePack(manifest digest.Digest) {
	if s == nil {
		return
	}
	s.work.Go(func() {
		if err := s.sharePack(s.life, manifest); err != nil {
			s.log.Warn("a startup pack is not shared with the PoP", "manifest", manifest, "err", err)
		}
	})
}

func (s *packs) sharePack(ctx context.Context, manifest digest.Digest) error {
	st := s.usable()
	if st == nil {
		return nil
	}
	have, err := st.Pack(ctx, manifest)
	if err == nil {
		return have.Close()
	}
	f, err := os.Open(s.node.PackPath(manifest))
	if err != nil {
		return err
	}
	defer f.Close()
	return st.PutPack(ctx, manifest, f)
}

// BringPack implements fetch.Neighbours. A start does not wait for long.
func (s *packs) BringPack(ctx context.Context, manifest digest.Digest) error {
	if !s.node.LacksPack(manifest) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, storePatience)
	defer cancel()
	return s.bringPack(ctx, manifest)
}

// bringPack copies a pack of the PoP's store to this node's own: it has what is
// read first, also when the store is away.
func (s *packs) bringPack(ctx context.Context, manifest digest.Digest) error {
	defer s.lock(manifest)()
	st := s.usable()
	if st == nil || !s.node.LacksPack(manifest) {
		return nil
	}
	from, err := st.Pack(ctx, manifest)
	if errors.Is(err, pop.ErrUnknown) {
		return nil
	}
	if err != nil {
		return err
	}
	defer from.Close()
	size, err := from.Size()
	if err != nil || size > peer.MaxPack {
		return errors.Join(err, fmt.Errorf("a pack of %d bytes", size))
	}
	err = durable.Commit(s.node.PackPath(manifest), 0o600, func(f *os.File) error {
		_, err := io.CopyBuffer(struct{ io.Writer }{f}, struct{ io.Reader }{io.NewSectionReader(from, 0, size)},
			make([]byte, 256<<10))
		return err
	})
	if err == nil {
		s.mu.Lock()
		s.brought[manifest] = size
		s.mu.Unlock()
		if terr := st.TouchPack(ctx, manifest, size); terr != nil {
			s.log.Debug("use is not noted", "pack", manifest, "err", terr)
		}
	}
	return err
}

// Brought implements fetch.Neighbours.
func (s *packs) Brought(manifest digest.Digest) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.brought[manifest]
	delete(s.brought, manifest)
	return n
}

// A pack that comes from a registry is passed on to the other nodes that start
// the image meanwhile, and kept for those that start it soon after: the link
// carries it once.

// packRelay is such a pack, in a file beside the node's own.
type packRelay struct {
	path string
	size int64

	mu      sync.Mutex
	written int64
	err     error // why no more comes
	more    chan struct{}
}

// relayKept is how long a pack that has come is kept for others.
const relayKept = 10 * time.Minute

func packLease(manifest digest.Digest) string { return "pack/" + manifest.String() }

// registryPack is a pack as its registry has it.
type registryPack struct {
	manifest digest.Digest
	size     int64
	open     fetch.OpenPack
}

// Pass implements fetch.Neighbours. The pack crosses the PoP's link once: it is taken from the node that has
// it or is fetching it, else fetched under a lease and passed on.
func (s *packs) Pass(manifest digest.Digest, size int64, open fetch.OpenPack) (fetch.OpenPack, bool) {
	if s.cfg.Peers == nil || s.cfg.Address == "" || s.cfg.PackDir == "" {
		return open, false
	}
	f := registryPack{manifest, size, open}
	return func(ctx context.Context, at pack.Span) (io.ReadCloser, error) {
		if r := s.relayed(manifest, size); r != nil {
			return r.open(ctx, at)
		}
		if at.Offset != 0 || at.Length != size {
			return open(ctx, at)
		}
		return s.openPack(ctx, f)
	}, true
}

// openPack opens a whole pack: from another node, or for all of them.
func (s *packs) openPack(ctx context.Context, f registryPack) (io.ReadCloser, error) {
	m := f.manifest
	for began := time.Now(); ; {
		lease, err := s.cfg.Coord.Acquire(ctx, packLease(m), 0)
		if err == nil {
			if r := s.packFromPeers(ctx, m); r != nil {
				s.release(ctx, lease)
				return &fetch.Near{ReadCloser: r}, nil
			}
			return s.pass(ctx, f, lease)
		}
		var held *pop.HeldError
		if !errors.As(err, &held) || held.Holder.Address == "" || held.Holder.Node == s.cfg.Node {
			break
		}
		r, err := s.cfg.Peers.Pack(ctx, held.Holder.Address, m)
		if err == nil {
			return &fetch.Near{ReadCloser: r}, nil
		}
		if time.Since(began) >= packPatience(err) {
			break
		}
		if err := s.awaitChange(ctx, 50*time.Millisecond); err != nil {
			return nil, err
		}
	}
	return f.open(ctx, pack.Span{Length: f.size})
}

// packPatience is how long the node that holds a pack's lease is waited for that has answered so: it may be
// slow to begin, on a slow link or a busy processor, and a pack that is not waited for crosses the link
// again.
func packPatience(err error) time.Duration {
	switch {
	case errors.Is(err, peer.ErrUnknown): // it has not begun
		return 10 * time.Second
	case errors.Is(err, peer.ErrAway):
		return time.Second
	}
	return 0
}

// packFromPeers is the pack from a node that has all of it; nil if none has.
func (s *packs) packFromPeers(ctx context.Context, m digest.Digest) io.ReadCloser {
	key := packLease(m)
	users, err := s.cfg.Coord.Users(ctx, key)
	if err != nil || len(users[key]) == 0 {
		return nil
	}
	members, err := s.cfg.Coord.Members(ctx)
	if err != nil {
		return nil
	}
	for _, member := range members {
		for _, node := range users[key] {
			if member.Node != node || node == s.cfg.Node || member.Address == "" {
				continue
			}
			if r, err := s.cfg.Peers.Pack(ctx, member.Address, m); err == nil {
				return r
			}
		}
	}
	return nil
}

// relayed is the relay of a pack of that size that is here whole, or nil.
func (s *packs) relayed(m digest.Digest, size int64) *packRelay {
	s.mu.Lock()
	r := s.relays[m]
	s.mu.Unlock()
	if r == nil || r.size != size {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.written < r.size {
		return nil
	}
	return r
}

// pass opens the pack at its registry and keeps what is read of it for others.
func (s *packs) pass(ctx context.Context, f registryPack, lease pop.Lease) (io.ReadCloser, error) {
	m := f.manifest
	release := func() {
		ctx, cancel := context.WithTimeout(context.Background(), storePatience)
		defer cancel()
		_ = lease.Release(ctx) // else it expires
	}
	body, err := f.open(ctx, pack.Span{Length: f.size})
	if err != nil {
		release()
		return nil, err
	}
	r := &packRelay{path: filepath.Join(s.cfg.PackDir, m.Encoded()+".relay"), size: f.size}
	to, err := os.OpenFile(r.path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		release()
		s.log.Warn("a startup pack is not passed on", "manifest", m, "err", err)
		return body, nil
	}
	s.mu.Lock()
	s.relays[m] = r
	s.mu.Unlock()
	return &passing{ReadCloser: body, s: s, m: m, r: r, to: to, release: release}, nil
}

// passing is a pack that is read and written down.
type passing struct {
	io.ReadCloser
	s       *packs
	m       digest.Digest
	r       *packRelay
	to      *os.File
	release func()
}

func (p *passing) Read(b []byte) (int, error) {
	n, err := p.ReadCloser.Read(b)
	if n > 0 && p.r.err == nil {
		_, werr := p.to.Write(b[:n])
		p.r.add(int64(n), werr)
	}
	return n, err
}

// Close ends the relay. One that is not whole goes.
func (p *passing) Close() error {
	if p.r.err == nil && p.r.written < p.r.size {
		p.r.add(0, io.ErrUnexpectedEOF)
	}
	err := errors.Join(p.ReadCloser.Close(), p.to.Close())
	if p.r.err != nil {
		p.s.dropRelay(p.m, p.r)
		p.release()
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), storePatience)
	defer cancel()
	_ = p.s.cfg.Coord.Use(ctx, packLease(p.m)) // it is told later if it is away
	p.release()
	time.AfterFunc(relayKept, func() {
		if p.s.life.Err() == nil {
			p.s.dropRelay(p.m, p.r)
		}
	})
	return err
}

func (s *packs) dropRelay(m digest.Digest, r *packRelay) {
	s.mu.Lock()
	if s.relays[m] == r {
		delete(s.relays, m)
	}
	s.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), storePatience)
	defer cancel()
	_ = s.cfg.Coord.Drop(ctx, packLease(m)) // it is told later if it is away
	os.Remove(r.path)
}

// add notes that n bytes more have been written, or why no more are.
func (r *packRelay) add(n int64, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.written += n
	if r.err == nil {
		r.err = err
	}
	if r.more != nil {
		close(r.more)
		r.more = nil
	}
}

func (r *packRelay) open(ctx context.Context, at pack.Span) (io.ReadCloser, error) {
	f, err := os.Open(r.path)
	if err != nil {
		return nil, err
	}
	return &relayReader{ctx: ctx, r: r, f: f, at: at.Offset, end: at.Offset + at.Length}, nil
}

// relayReader reads behind the relay.
type relayReader struct {
	ctx     context.Context
	r       *packRelay
	f       *os.File
	at, end int64
}

func (r *relayReader) Read(b []byte) (int, error) {
	if r.at >= r.end {
		return 0, io.EOF
	}
	written, err := r.r.wait(r.ctx, r.at)
	if err != nil {
		return 0, err
	}
	n, err := r.f.ReadAt(b[:min(int64(len(b)), written-r.at, r.end-r.at)], r.at)
	r.at += int64(n)
	return n, err
}

func (r *relayReader) Close() error { return r.f.Close() }

// wait blocks until more than at has been written.
func (r *packRelay) wait(ctx context.Context, at int64) (int64, error) {
	for {
		r.mu.Lock()
		if r.written > at {
			defer r.mu.Unlock()
			return r.written, nil
		}
		if r.err != nil {
			defer r.mu.Unlock()
			return 0, r.err
		}
		if r.more == nil {
			r.more = make(chan struct{})
		}
		more := r.more
		r.mu.Unlock()
		select {
		case <-more:
		case <-ctx.Done():
			return 0, context.Cause(ctx)
		}
	}
}

// pack is what this node gives to others of a pack.
func (s *packs) pack(ctx context.Context, m digest.Digest) io.ReadCloser {
	s.mu.Lock()
	r := s.relays[m]
	s.mu.Unlock()
	if r == nil {
		return nil
	}
	body, err := r.open(ctx, pack.Span{Length: r.size})
	if err != nil {
		return nil
	}
	return body
}
