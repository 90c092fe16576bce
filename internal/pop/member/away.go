package member

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
func (s *common) present(ctx context.Context, st *pop.Store) error {
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
func (s *attacher) remounted(ctx context.Context) {
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
	if same {
		return
	}
	for _, l := range s.layers.Layers() {
		if l.At != "" {
			s.node.Remount(l.DiffID)
		}
	}
}

// unreachable reports whether a layer is attached whose tar cannot be reached now: the store, or the
// part of it where it lies, does not answer. It may look well from here, as long as
// nobody reads what is not in the page cache.
func (s *attacher) unreachable(ctx context.Context, id digest.Digest) bool {
	have, err := s.layers.Peek(id)
	return err == nil && have.At != "" && !s.reachable(ctx, have)
}

// reachable reports whether the tar of a layer of the store is there: what the kernel
// believes to know of it is not asked.
func (s *attacher) reachable(ctx context.Context, l *layer.Layer) bool {
	if s.cfg.Dir == nil {
		return false
	}
	name, err := filepath.Rel(s.cfg.Dir.Path("."), l.At)
	if err != nil || !filepath.IsLocal(name) {
		return false // of a store that was configured once
	}
	if s.isProved(l.DiffID) {
		return true
	}
	ctx, cancel := context.WithTimeout(ctx, storePatience)
	defer cancel()
	size, err := s.cfg.Dir.Reach(ctx, name)
	return err == nil && size == l.Size
}

// disown lets go of the image's layers that lie in a store which is away, so that
// they are fetched. What runs with them keeps them.
func (s *attacher) disown(img *image.Image) (lost []digest.Digest) {
	for _, l := range img.Unique() {
		if have, err := s.layers.Peek(l.DiffID); err == nil && have.At != "" {
			s.detach(img, l.DiffID)
			lost = append(lost, l.DiffID)
		}
	}
	return lost
}

func (s *attacher) detach(img *image.Image, id digest.Digest) {
	s.log.Warn("a layer of the PoP's store is away: it is fetched anew", "layer", id, "image", img.Ref)
	if err := s.Detach(id); err != nil {
		s.log.Warn("detach layer", "layer", id, "err", err)
	}
}

// Mountable implements fetch.Attached.
func (s *attacher) Mountable(ctx context.Context, l *layer.Layer) bool {
	return s.reachable(ctx, l) && s.prewarmer.activateOne(ctx, l)
}

// Detach implements fetch.Attached. What comes in the layer's place is not inactive.
func (s *attacher) Detach(id digest.Digest) error {
	err := s.layers.Detach(id)
	s.prewarmer.prewarmed.setInactive(id, false)
	return err
}

// alone has a layer that this node fetches for itself given to the store later: there
// is no lease now under which it could.
func (s *routes) alone(f *layer.Fill) {
	s.count(func(h *pop.Hits) { h.Registry++; h.RegistryBytes += f.Layer.Size })
	s.work.Go(func() {
		s.uploads.expects(f.Layer.DiffID)
		if _, err := f.WaitComplete(s.life); err == nil {
			s.uploads.later(f.Layer.DiffID)
		}
	})
}
