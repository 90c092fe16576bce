package fetch

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"syscall"

	"dewpoint/internal/image"
	"dewpoint/internal/layer"
	"dewpoint/internal/pop"

	"github.com/opencontainers/go-digest"
)

// What a node does when its PoP's store, a part of it, or the coordinator is away.

// present looks whether the store is still in its directory, and says so. The
// error wraps pop.ErrNotMounted if it is not.
func (s *site) present(ctx context.Context, st *pop.Store) error {
	err := st.Present(ctx)
	was := s.unmounted.Load()
	if !errors.Is(err, pop.ErrNotMounted) {
		if err == nil && was != nil {
			s.unmounted.Store(nil)
			s.log.Info("the PoP's store is there again", "at", s.cfg.Dir.Path("."))
		}
		return err
	}
	if err = fmt.Errorf("%w: is the PoP's file system mounted at %s?", err, s.cfg.Dir.Path(".")); was == nil {
		s.log.Error("the PoP's store is away: this node goes on with what is here and the registry", "err", err)
	}
	s.unmounted.Store(&err)
	return err
}

// remounted has attached layers mounted anew for those that start from here on, if the
// store is another mount than when this was asked last, or nobody knows: what
// is mounted from one whose client has ended gives errors for good.
func (s *site) remounted(ctx context.Context) {
	fi, err := s.cfg.Dir.Stat(ctx, ".")
	if err != nil {
		return
	}
	st, ok := fi.Sys().(*syscall.Stat_t)
	if !ok {
		return
	}
	s.mu.Lock()
	same := s.device == uint64(st.Dev)
	s.device = uint64(st.Dev)
	s.mu.Unlock()
	if same || s.p.cfg.Lazy.Whole == nil {
		return
	}
	for _, l := range s.p.cfg.Layers.Layers() {
		if l.At != "" {
			s.p.cfg.Lazy.Whole(l.DiffID)
		}
	}
}

// gone reports whether a layer is attached whose tar cannot be reached now: the store, or the
// part of it where it lies, does not answer. It may look well from here, as long as
// nobody reads what is not in the page cache.
func (s *site) gone(ctx context.Context, id digest.Digest) bool {
	have, err := s.p.cfg.Layers.Peek(id)
	return err == nil && have.At != "" && !s.p.reachable(ctx, have)
}

// reachable reports whether the tar of a layer of the store is there: what the kernel
// believes to know of it is not asked.
func (p *Puller) reachable(ctx context.Context, l *layer.Layer) bool {
	if p.site == nil || p.site.cfg.Dir == nil {
		return false
	}
	name, err := filepath.Rel(p.site.cfg.Dir.Path("."), l.At)
	if err != nil || !filepath.IsLocal(name) {
		return false // of a store that was configured once
	}
	if p.site.isProved(l.DiffID) {
		return true
	}
	ctx, cancel := context.WithTimeout(ctx, sitePatience)
	defer cancel()
	size, err := p.site.cfg.Dir.Reach(ctx, name)
	return err == nil && size == l.Size
}

// disown lets go of the image's layers that lie in a store which is away, so that
// they are fetched. What runs with them keeps them.
func (s *site) disown(img *image.Image) (lost []digest.Digest) {
	for _, l := range img.Unique() {
		if have, err := s.p.cfg.Layers.Peek(l.DiffID); err == nil && have.At != "" {
			s.detach(img, l.DiffID)
			lost = append(lost, l.DiffID)
		}
	}
	return lost
}

func (s *site) detach(img *image.Image, id digest.Digest) {
	s.log.Warn("a layer of the PoP's store is away: it is fetched anew", "layer", id, "image", img.Ref)
	if err := s.p.letGo(id); err != nil {
		s.log.Warn("detach layer", "layer", id, "err", err)
	}
}

// letGo detaches a layer; what comes in its place does not rest.
func (p *Puller) letGo(id digest.Digest) error {
	err := p.cfg.Layers.Detach(id)
	if p.site != nil {
		p.site.ready.setRest(id, false)
	}
	return err
}

// alone has a layer that this node fetches for itself given to the store later: there
// is no lease now under which it could.
func (s *site) alone(f *layer.Fill) {
	s.count(func(h *pop.Hits) { h.Registry++; h.RegistryBytes += f.Layer.Size })
	s.p.work.Go(func() {
		s.owes(f.Layer.DiffID)
		if _, err := f.WaitComplete(s.p.life); err == nil {
			s.later(f.Layer.DiffID)
		}
	})
}
