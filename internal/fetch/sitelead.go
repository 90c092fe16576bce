package fetch

import (
	"context"
	"io"
	"os"
	"time"

	"dewpoint/internal/layer"
	"dewpoint/internal/pack"
	"dewpoint/internal/pop"

	"github.com/opencontainers/go-digest"
)

// copyEvery is the time between two looks how far a layer has come that is
// copied into the store, and so about how much work a dead node costs.
const copyEvery = 2 * time.Second

// lead begins the fetching of a layer for the whole PoP, where another node has
// left it. The lease ends with the fill, and after the layer was published.
func (s *site) lead(ctx context.Context, b *blob, f *layer.Fill, lease pop.Lease) (layer.Way, error) {
	id := b.l.DiffID
	// Between the look into the store and the lease somebody may have published.
	if w, ok := s.fromStore(ctx, b, id); ok {
		return w, lease.Release(context.WithoutCancel(ctx))
	}
	if m, ok := s.holder(ctx, b); ok {
		if w, ok := s.fromPeer(ctx, b, m); ok {
			return w, lease.Release(context.WithoutCancel(ctx))
		}
	}
	s.mu.Lock()
	s.leading[id] = lease
	s.mu.Unlock()
	s.seed(ctx, f, id)
	s.count(func(h *pop.Hits) { h.Registry++; h.RegistryBytes += b.l.Size })
	s.p.work.Go(func() {
		l := &leader{s: s, b: b, f: f, id: id, lease: lease, began: time.Now()}
		l.run(s.p.life)
		s.mu.Lock()
		delete(s.leading, id)
		s.mu.Unlock()
		ctx, cancel := context.WithTimeout(context.WithoutCancel(s.p.life), sitePatience)
		defer cancel()
		if err := lease.Release(ctx); err != nil {
			s.log.Debug("lease ends by itself", "layer", id, "err", err)
		}
	})
	return layer.Way{}, nil
}

// seed takes over what a dead node had copied.
func (s *site) seed(ctx context.Context, f *layer.Fill, id digest.Digest) {
	st := s.usable()
	if st == nil {
		return
	}
	c, err := st.Checkpoint(ctx, id)
	if err != nil {
		return
	}
	defer c.Close()
	err = f.Seed(c.Record, c.Data)
	s.log.Info("a layer goes on from where another node of the PoP had come", "layer", id, "bytes", c.Size, "err", err)
}

// holder is a node that has the whole layer, though the store does not.
func (s *site) holder(ctx context.Context, b *blob) (pop.Member, bool) {
	if s.cfg.Peers == nil {
		return pop.Member{}, false
	}
	key := hasKey(b.l.DiffID)
	users, err := s.cfg.Coord.Users(ctx, key)
	if err != nil || len(users[key]) == 0 {
		return pop.Member{}, false
	}
	members, err := s.cfg.Coord.Members(ctx)
	if err != nil {
		return pop.Member{}, false
	}
	for _, m := range members {
		for _, node := range users[key] {
			if m.Node == node && m.Node != s.cfg.Node && m.Address != "" && b.failures(m.Address) < peerFailures {
				return m, true
			}
		}
	}
	return pop.Member{}, false
}

// hasKey is what a node is said to use that has a whole layer of its own.
func hasKey(id digest.Digest) string { return "has/" + id.String() }

// leader copies a layer into the store while it arrives. One goroutine uses it.
type leader struct {
	s     *site
	b     *blob
	f     *layer.Fill
	id    digest.Digest
	lease pop.Lease
	began time.Time
	draft *pop.Draft // nil until something is to be copied, and when the store fails
	err   error      // why nothing is copied any more
}

// run returns when the layer is published, or will not be by this node.
func (l *leader) run(ctx context.Context) {
	ended := make(chan error, 1)
	l.s.p.work.Go(func() {
		_, err := l.f.WaitComplete(ctx)
		ended <- err
	})
	tick := time.NewTicker(copyEvery)
	defer tick.Stop()
	for {
		select {
		case err := <-ended:
			l.end(ctx, err)
			return
		case <-tick.C:
			l.fail(l.checkpoint(ctx))
		}
	}
}

// fail notes that the store does not take the layer; the fill goes on.
func (l *leader) fail(err error) {
	if err == nil || l.err != nil {
		return
	}
	l.err = err
	l.s.log.Warn("a layer is not copied into the PoP's store", "layer", l.id, "err", err)
}

// checkpoint copies what has arrived and says so.
func (l *leader) checkpoint(ctx context.Context) error {
	st := l.s.usable()
	if st == nil || l.err != nil {
		return nil
	}
	record, path, size, err := l.f.Checkpoint()
	if err != nil || l.draft != nil && size <= l.draft.At() {
		return nil // nothing new
	}
	if err := l.copy(ctx, st, path, size); err != nil {
		return err
	}
	return l.draft.Checkpoint(ctx, record)
}

// copy writes the tar in the file at path up to size into the store.
func (l *leader) copy(ctx context.Context, st *pop.Store, path string, size int64) error {
	var err error
	if l.draft == nil {
		if l.draft, err = st.Draft(ctx, l.id, l.lease.Token()); err != nil {
			return err
		}
	}
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	from := l.draft.At()
	_, err = io.CopyBuffer(struct{ io.Writer }{l.draft}, struct{ io.Reader }{io.NewSectionReader(f, from, size-from)}, make([]byte, 1<<20))
	return err
}

// end publishes the layer, or leaves what there is to another node.
func (l *leader) end(ctx context.Context, err error) {
	have, gerr := l.s.p.cfg.Layers.Peek(l.id)
	if err == nil && gerr == nil && have.At == "" && !have.Tree {
		l.fail(l.publish(ctx, have))
	}
	if l.draft == nil {
		return
	}
	if err != nil {
		l.fail(l.checkpoint(ctx))
	}
	if cerr := l.draft.Close(); cerr != nil {
		l.s.log.Debug("close", "layer", l.id, "err", cerr)
	}
	if l.err != nil {
		_ = l.draft.Abandon(ctx) // a sweep does it else
	}
}

// publish copies the rest of a complete layer into the store and shows it there.
func (l *leader) publish(ctx context.Context, have *layer.Layer) error {
	st := l.s.usable()
	if st == nil || l.err != nil {
		return nil // keep publishes it when the store is back
	}
	if st.Has(ctx, l.id) {
		return nil
	}
	path := have.Files().Data
	if err := l.copy(ctx, st, path, have.Size); err != nil {
		return err
	}
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	table, _, err := pack.MakeTable(f, have.Size)
	if err != nil {
		return err
	}
	b, err := table.MarshalBinary()
	if err != nil {
		return err
	}
	rec := pop.Layer{DiffID: l.id, Size: have.Size, Blob: have.Blob, BlobSize: have.BlobSz, Image: l.b.img.Ref.String(), Cost: time.Since(l.began).Seconds()}
	return l.draft.Publish(ctx, rec, b)
}
