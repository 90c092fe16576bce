package pop

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"

	"github.com/opencontainers/go-digest"
)

// A mark is an empty file, refs/NODE/HEX.NONCE. Each has a name of its own: a
// removal that was given up and happens late after all takes no newer one.

// marks are the names below refs/NODE of one layer's marks; Store.mu guards them.
type marks struct {
	now  string   // the one that counts; "" if none does
	late []string // others that may be there
}

func (m *marks) all() []string {
	if m.now == "" {
		return slices.Clone(m.late)
	}
	return append(slices.Clone(m.late), m.now)
}

// markOf is the layer that the mark of that name is of.
func markOf(name string) (digest.Digest, bool) {
	hex, _, _ := strings.Cut(name, ".")
	id := digest.NewDigestFromEncoded(digest.SHA256, hex)
	return id, id.Validate() == nil
}

func (s *Store) marksDir() string { return path.Join(refsDir, s.cfg.Node) }

// adopt takes up the marks that an earlier process of this node has left:
// what it used may still be mounted. Unuse takes them back.
func (s *Store) adopt(ctx context.Context) error {
	if err := s.cfg.FS.Mkdir(ctx, s.marksDir()); err != nil {
		return err
	}
	names, err := s.cfg.FS.Names(ctx, s.marksDir())
	if err != nil {
		return err
	}
	for _, name := range names {
		if id, ok := markOf(name); ok {
			m := s.marksOf(id)
			m.late = append(m.late, name)
		}
	}
	return nil
}

// marksOf is made if need be.
func (s *Store) marksOf(id digest.Digest) *marks {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.used[id] == nil {
		s.used[id] = new(marks)
	}
	return s.used[id]
}

// turn has one caller at a time mark a layer or take its mark away.
func (s *Store) turn(ctx context.Context, id digest.Digest) (end func(), err error) {
	s.mu.Lock()
	t := s.turns[id]
	if t == nil {
		t = make(chan struct{}, 1)
		s.turns[id] = t
	}
	s.mu.Unlock()
	select {
	case t <- struct{}{}:
		return func() { <-t }, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// Used returns the layers that this node has marked, or may have, in no order.
func (s *Store) Used() []digest.Digest {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := make([]digest.Digest, 0, len(s.used))
	for id := range s.used {
		all = append(all, id)
	}
	return all
}

// Use marks the layer as used by this node and returns its record. From then on
// its files stay until Unuse, whatever becomes of the record. An error wraps ErrUnknown
// if the store does not have it, or ErrStoreAway; a mark that was there before stays.
func (s *Store) Use(ctx context.Context, id digest.Digest) (*Layer, error) {
	if _, err := s.record(ctx, id); err != nil {
		return nil, err // nothing to mark
	}
	end, err := s.turn(ctx, id)
	if err != nil {
		return nil, err
	}
	defer end()
	before := s.marked(id)
	if err := s.mark(ctx, id); err != nil {
		return nil, fmt.Errorf("mark layer %s: %w", id, err)
	}
	// Whoever evicts looks for marks after the record is out of sight. So if the
	// record is there now, the mark is seen in time.
	l, err := s.whole(ctx, id)
	if err != nil && !before {
		err = errors.Join(err, s.unmark(context.WithoutCancel(ctx), id))
	}
	if err != nil {
		return nil, err
	}
	return l, nil
}

// marked reports whether a mark may be there that something stands on.
func (s *Store) marked(id digest.Digest) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.used[id] != nil
}

// mark makes a mark that counts, or makes sure of the one that does.
func (s *Store) mark(ctx context.Context, id digest.Digest) error {
	m := s.marksOf(id)
	s.mu.Lock()
	if m.now == "" {
		m.now = id.Encoded() + "." + rand.Text()[:8]
	}
	name := m.now
	s.mu.Unlock()
	f, err := s.cfg.FS.Append(ctx, path.Join(s.marksDir(), name))
	if err == nil {
		err = f.Close()
	}
	if err != nil {
		return err
	}
	if err := s.cfg.Coord.Use(ctx, id.String()); err != nil && !errors.Is(err, ErrAway) {
		return err
	}
	return nil
}

// Unuse takes this node's mark away. The layer must not be mounted here any more.
// After an error the mark may be there or not, and Used has the layer. What is held (see Hold)
// keeps its mark.
func (s *Store) Unuse(ctx context.Context, id digest.Digest) error {
	end, err := s.turn(ctx, id)
	if err != nil {
		return err
	}
	defer end()
	if s.isHeld(id) {
		return nil
	}
	return s.unmark(ctx, id)
}

func (s *Store) unmark(ctx context.Context, id digest.Digest) error {
	err := s.cfg.Coord.Drop(ctx, id.String())
	if errors.Is(err, ErrAway) {
		err = nil
	}
	m := s.marksOf(id)
	s.mu.Lock()
	m.late, m.now = m.all(), "" // none of them counts from here on
	names := m.all()
	s.mu.Unlock()
	for _, name := range names {
		rerr := s.remove(ctx, path.Join(s.marksDir(), name))
		if rerr != nil {
			err = errors.Join(err, rerr)
			continue
		}
		s.mu.Lock()
		m.late = slices.DeleteFunc(m.late, func(n string) bool { return n == name })
		s.mu.Unlock()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(m.all()) == 0 {
		delete(s.used, id)
	}
	return err
}

// strays removes marks of this node that it does not know of: their making was
// given up and happened late.
func (s *Store) strays(ctx context.Context) error {
	names, err := s.cfg.FS.Names(ctx, s.marksDir())
	if err != nil {
		return unlessGone(err)
	}
	var errs error
	for _, name := range names {
		id, ok := markOf(name)
		if !ok {
			continue
		}
		s.mu.Lock()
		m := s.used[id]
		known := m != nil && slices.Contains(m.all(), name)
		s.mu.Unlock()
		if !known {
			errs = errors.Join(errs, s.remove(ctx, path.Join(s.marksDir(), name)))
		}
	}
	return errs
}

// inUse reports whether any node says that it uses the layer: in the store or to
// the coordinator. The marks of a node that has been silent for very long do not count.
func (s *Store) inUse(ctx context.Context, id digest.Digest) (bool, error) {
	users, err := s.cfg.Coord.Users(ctx, id.String())
	if err != nil || len(users) > 0 {
		return true, err
	}
	nodes, err := s.cfg.FS.Names(ctx, refsDir)
	if err != nil {
		return true, err
	}
	for _, n := range nodes {
		names, err := s.cfg.FS.Names(ctx, path.Join(refsDir, n))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return true, err
		}
		marks := slices.ContainsFunc(names, func(name string) bool {
			of, ok := markOf(name)
			return ok && of == id
		})
		if marks && !s.forgotten(ctx, n) {
			return true, nil
		}
	}
	return false, nil
}
