package checkpoint

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"
	"time"

	"dewpoint/internal/checkpoint/image"
	"dewpoint/internal/checkpoint/lazypages"
	"dewpoint/internal/checkpoint/store"
)

const (
	lazyAbove = 256 << 20        // bytes of memory from which on it comes while the processes run
	lastPages = 10 * time.Second // that memory on its way has to come in when the daemon stops
	maxOrder  = 4096             // pages that are remembered as the first ones
)

// late is the memory of a restore that comes while its processes run.
type late struct {
	dir     string // CRIU's images
	source  lazypages.Source
	release func(read error) // of both; what reading them returned
}

// serving are the restores whose memory is not all there. It is safe for concurrent use.
type serving struct {
	mu      sync.Mutex
	all     map[*lazypages.Server]string // containers, by name
	claimed map[string]bool              // checkpoints, by ID, that one restore at once has come late
	closed  bool
	gone    sync.WaitGroup
}

// lazy reports whether a checkpoint's memory is to come late. What is not unpacked here would have to be
// inflated and written as well, and what is not in the page cache to be read from the disk, which takes about
// as long as the rest of restoring it: so for one restore at once it comes late from three quarters of that
// size on. Others that begin meanwhile unpack it, once for all of them.
func (m *Manager) lazy(r *store.Record) (late, one bool) {
	above := m.cfg.LazyAbove
	if a := m.able.Load(); len(m.cfg.RestoreLazy) == 0 || a == nil || !a.Lazy || a.carrier() != nil ||
		above < 0 {
		return false, false
	}
	one = r.Data.Pages <= above && r.Data.Pages > above/4*3 && !m.cfg.Store.Warm(r.ID)
	return one || r.Data.Pages > above, one
}

// claim is false if a restore has claimed the checkpoint already, and else claims it until end is called.
func (s *serving) claim(id string) (end func(), ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.claimed[id] {
		return nil, false
	}
	s.claimed[id] = true
	return sync.OnceFunc(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.claimed, id)
	}), true
}

// unpack has a checkpoint here for the restores to come, whose memory came late since it was not.
func (m *Manager) unpack(r *store.Record) {
	m.serving.mu.Lock()
	closed := m.serving.closed
	m.serving.mu.Unlock()
	if closed || r.Data.Pages > m.cfg.LazyAbove || m.cfg.Store.HasUnpacked(r.ID) {
		return
	}
	_, release, err := m.cfg.Store.Unpacked(m.life, *r)
	if err != nil {
		m.cfg.Log.Debug("a checkpoint is not unpacked for later", "id", r.ID, "err", err)
		return
	}
	release()
}

// bringLate brings what of the checkpoint CRIU reads itself. What is unpacked here is read from there: it
// need not be inflated. end is called when nobody reads it any more.
func (p *Plan) bringLate(ctx context.Context, out *Prepared, end func()) (dir string, release func(),
	err error) {
	st := p.m.cfg.Store
	var source lazypages.Source
	var let func(error)
	if st.HasUnpacked(p.Record.ID) {
		var unpacked func()
		if dir, unpacked, err = st.Unpacked(ctx, *p.Record); err == nil {
			source, let = lazypages.Dir(dir), func(error) { unpacked() }
		}
	} else {
		dir, source, let, err = st.Meta(ctx, *p.Record,
			func(ctx context.Context, dir string, img *image.Reader) error {
				_, _, err := lazypages.Eager(ctx, dir, img)
				return err
			})
	}
	if err != nil {
		return "", end, err
	}
	out.late = &late{dir: dir, source: source, release: func(read error) { let(read); end() }}
	return dir, func() {
		if out.late != nil { // it was not started
			out.late.release(nil)
		}
	}, nil
}

// Serve serves the memory that comes late to the container of that name, which is created
// and not started. What goes wrong after the start ends the container: Config.Lost is told.
func (p *Plan) Serve(ctx context.Context, name string, prep *Prepared) error {
	if prep.late == nil {
		return nil
	}
	m := p.m
	var order []lazypages.Page
	if b := m.cfg.Store.Order(ctx, p.Record.ID); b != nil && json.Unmarshal(b, &order) != nil {
		order = nil
	}
	m.serving.mu.Lock()
	defer m.serving.mu.Unlock()
	if m.serving.closed {
		return context.Canceled
	}
	mark, err := m.late.put(name)
	if err != nil {
		return fmt.Errorf("serve its memory: %w", err)
	}
	s, err := lazypages.Serve(m.life,
		lazypages.Config{Dir: prep.late.dir, Work: m.cfg.Containers.WorkDir(name),
			Source: prep.late.source, Order: order, Guard: m.cfg.Guard, Held: mark, Kill: func(err error) {
				m.cfg.Audience.Lost(name, err, !p.outcome.CompareAndSwap(open, lost))
			}, Log: m.cfg.Log})
	if err != nil {
		m.late.remove(mark)
		return fmt.Errorf("serve its memory: %w", err)
	}
	m.serving.all[s] = name
	held := prep.late
	prep.late = nil
	m.serving.gone.Go(func() {
		err := s.Wait()
		held.release(err)
		m.serving.mu.Lock()
		m.late.remove(mark)
		delete(m.serving.all, s)
		m.serving.mu.Unlock()
		m.served(p.Record.ID, order, s, err)
		if err == nil {
			m.unpack(p.Record)
		}
	})
	return nil
}

// whole returns when all memory of a container is there: what is on its way is asked for.
func (m *Manager) whole(ctx context.Context, name string) error {
	var coming []*lazypages.Server
	m.serving.mu.Lock()
	for s, n := range m.serving.all {
		if n == name {
			s.Hurry()
			coming = append(coming, s)
		}
	}
	m.serving.mu.Unlock()
	for _, s := range coming {
		select {
		case <-s.Done():
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		if err := s.Err(); err != nil {
			return fmt.Errorf("its memory did not come: %w", err)
		}
	}
	return nil
}

// served remembers what was touched first.
func (m *Manager) served(id string, order []lazypages.Page, s *lazypages.Server, err error) {
	st := s.Stats()
	m.cfg.Log.Info("memory of a restore", "checkpoint", id, "restored", st.Restored, "filled", st.Filled,
		"faults", st.Faults, "longest", st.Longest, "err", err)
	touched := s.Touched()
	if err != nil || len(touched) == 0 || len(order) >= maxOrder {
		return
	}
	order = append(order, touched...)
	b, err := json.Marshal(order[:min(len(order), maxOrder)])
	if err == nil {
		err = m.cfg.Store.SetOrder(context.WithoutCancel(m.life), id, b)
	}
	if err != nil {
		m.cfg.Log.Debug("remember the order of a checkpoint's pages", "id", id, "err", err)
	}
}

// Close lets memory that is on its way come in, for some seconds; containers that lack some
// then are killed, since nobody could give it to them any more.
func (m *Manager) Close() {
	m.serving.mu.Lock()
	m.serving.closed = true
	for s := range m.serving.all {
		s.Hurry()
	}
	m.serving.mu.Unlock()
	in := make(chan struct{})
	go func() { m.serving.gone.Wait(); close(in) }()
	select {
	case <-in:
	case <-time.After(lastPages):
	}
	m.stop()
	<-in
}
