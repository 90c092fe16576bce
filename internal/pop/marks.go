package pop

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"
	"sync"
	"syscall"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sync/errgroup"
)

// A mark is an empty file, refs/NODE/LAYERS.NONCE, of up to perMark layers: making
// one costs as much as looking a layer up. Each has a name of its own: a removal that was
// given up and happens late after all takes no newer one.
//
// A mark of several layers holds each of them for as long as it is there. Who ceases to
// use some of them therefore marks the others anew before it goes.

// perMark is how many layers one mark names: a file's name has up to 255 bytes.
const perMark = 5

// marks are the names below refs/NODE of the marks that name a layer; Store.mu guards them.
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

// retire has a mark count no more; it may still be there.
func (m *marks) retire(name string) {
	if m.now == name && name != "" {
		m.late, m.now = append(m.late, name), ""
	}
}

func (m *marks) forget(name string) {
	m.late = slices.DeleteFunc(m.late, func(n string) bool { return n == name })
}

// idLength is that of a sha256 in a mark's name.
var idLength = base64.RawURLEncoding.EncodedLen(sha256.Size)

// markName is a name that nobody has used for a mark of these layers.
func markName(ids []digest.Digest) (string, error) {
	var b strings.Builder
	for _, id := range ids {
		sum, err := hex.DecodeString(id.Encoded())
		if err != nil || len(sum) != sha256.Size {
			return "", fmt.Errorf("mark %q: %w", id, ErrUnknown)
		}
		b.WriteString(base64.RawURLEncoding.EncodeToString(sum))
	}
	return b.String() + "." + rand.Text()[:8], nil
}

// markedBy are the layers that the mark of that name is of; none if it is no mark's.
func markedBy(name string) (ids []digest.Digest) {
	all, _, _ := strings.Cut(name, ".")
	for ; len(all) >= idLength; all = all[idLength:] {
		sum, err := base64.RawURLEncoding.DecodeString(all[:idLength])
		if err != nil {
			return nil
		}
		ids = append(ids, digest.NewDigestFromBytes(digest.SHA256, sum))
	}
	if len(all) > 0 {
		return nil
	}
	return ids
}

// idOf is the object whose hexadecimals a name begins with, up to a dot.
func idOf(name string) (digest.Digest, bool) {
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
		for _, id := range markedBy(name) {
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

// turns has one caller at a time mark these layers or take their marks away.
func (s *Store) turns(ctx context.Context, ids []digest.Digest) (end func(), err error) {
	ids = slices.Compact(slices.Sorted(slices.Values(ids))) // in one order, so that nobody waits in a circle
	var mine []chan struct{}
	end = func() {
		for _, t := range mine {
			<-t
		}
	}
	for _, id := range ids {
		s.mu.Lock()
		t := s.turn[id]
		if t == nil {
			t = make(chan struct{}, 1)
			s.turn[id] = t
		}
		s.mu.Unlock()
		select {
		case t <- struct{}{}:
			mine = append(mine, t)
		case <-ctx.Done():
			end()
			return nil, context.Cause(ctx)
		}
	}
	return end, nil
}

// Used returns the layers that this node has marked, or may have: those of one mark
// together, each once.
func (s *Store) Used() [][]digest.Digest {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all [][]digest.Digest
	said := map[digest.Digest]bool{}
	for _, id := range slices.Sorted(maps.Keys(s.used)) {
		if said[id] {
			continue
		}
		together := []digest.Digest{id}
		said[id] = true
		for _, name := range s.used[id].all() {
			for _, other := range markedBy(name) {
				if !said[other] && s.used[other] != nil {
					together, said[other] = append(together, other), true
				}
			}
		}
		all = append(all, together)
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
	have, err := s.secure(ctx, []digest.Digest{id}, nil)
	return have[id], err
}

// Glance is what a look at a layer has shown that was made before it was marked: it may be out of date.
type Glance struct {
	done chan struct{}
	rec  *Layer
	file fs.FileInfo // of the record, before that was read
	err  error
}

// Record waits for the look, and returns the record that it has read, or an error that wraps ErrUnknown.
func (g *Glance) Record() (*Layer, error) {
	<-g.done
	return g.rec, g.err
}

// Glance looks at a layer, behind its caller. Its data are looked up, too: who marks the layer looks at them
// last, and finds them known.
func (s *Store) Glance(ctx context.Context, id digest.Digest) *Glance {
	g := &Glance{done: make(chan struct{})}
	go func() {
		defer close(g.done)
		if g.file, g.err = s.cfg.FS.Stat(ctx, recordOf(id)); errors.Is(g.err, fs.ErrNotExist) {
			g.err = fmt.Errorf("%s: %w", id, ErrUnknown)
		}
		if g.err == nil {
			g.rec, g.err = s.record(ctx, id)
		}
		if g.err == nil {
			_, _ = s.cfg.FS.Stat(ctx, g.rec.data())
		}
	}()
	return g
}

// UseAll is Use of several layers that are likely to be there, at the cost of one or
// little more. It returns the records of those that are; the error is of the others.
func (s *Store) UseAll(ctx context.Context, layers map[digest.Digest]*Glance) (map[digest.Digest]*Layer,
	error) {
	return s.secure(ctx, slices.Sorted(maps.Keys(layers)), layers)
}

// Glances are those of several layers.
func (s *Store) Glances(ctx context.Context, ids []digest.Digest) map[digest.Digest]*Glance {
	all := map[digest.Digest]*Glance{}
	for _, id := range ids {
		all[id] = s.Glance(ctx, id)
	}
	return all
}

// secure marks layers and then looks whether they are there. glances has what was seen of them before, if
// anything was.
func (s *Store) secure(ctx context.Context, ids []digest.Digest,
	glances map[digest.Digest]*Glance) (map[digest.Digest]*Layer, error) {
	end, err := s.turns(ctx, ids)
	if err != nil {
		return nil, err
	}
	defer end()
	before := map[digest.Digest]bool{}
	for _, id := range ids {
		before[id] = s.marked(id)
	}
	if err := s.mark(ctx, ids); err != nil {
		return nil, fmt.Errorf("mark layers %v: %w", ids, err)
	}
	// Whoever evicts looks for marks after the record is out of sight. So if the
	// record is there now, the mark is seen in time.
	have, err := s.wholes(ctx, ids, glances)
	var vain []digest.Digest
	for _, id := range ids {
		if have[id] == nil && !before[id] {
			vain = append(vain, id)
		}
	}
	if len(vain) > 0 {
		err = errors.Join(err, s.unmark(context.WithoutCancel(ctx), vain))
	}
	return have, err
}

// wholes are the records of those layers whose data are seen to be there. The error
// is of the others.
func (s *Store) wholes(ctx context.Context, ids []digest.Digest,
	glances map[digest.Digest]*Glance) (map[digest.Digest]*Layer, error) {
	var mu sync.Mutex
	have := map[digest.Digest]*Layer{}
	var errs error
	var looks sync.WaitGroup
	for _, id := range ids {
		looks.Go(func() {
			l, err := s.whole(ctx, id, glances[id])
			mu.Lock()
			defer mu.Unlock()
			if errs = errors.Join(errs, err); err == nil {
				have[id] = l
			}
		})
	}
	looks.Wait()
	return have, errs
}

// recordNow is the record of a layer as it is now. One whose file is as it was before a look read it is not
// read again.
func (s *Store) recordNow(ctx context.Context, id digest.Digest, g *Glance) (*Layer, error) {
	if g == nil {
		return s.record(ctx, id)
	}
	l, err := g.Record()
	if err != nil {
		return s.record(ctx, id)
	}
	fi, err := s.cfg.FS.Stat(ctx, recordOf(id))
	if err != nil || !sameFile(fi, g.file) || s.Shuns(l.Name) {
		return s.record(ctx, id)
	}
	return l, nil
}

// sameFile reports whether two looks saw the same file, which nobody has written to between them.
func sameFile(a, b fs.FileInfo) bool {
	x, _ := a.Sys().(*syscall.Stat_t)
	y, _ := b.Sys().(*syscall.Stat_t)
	return a.Size() == b.Size() && !a.ModTime().IsZero() && a.ModTime().Equal(b.ModTime()) &&
		(x == nil || y == nil || x.Ino == y.Ino)
}

// marked reports whether a mark may be there that something stands on.
func (s *Store) marked(id digest.Digest) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.used[id] != nil
}

// mark makes marks that count of those layers that have none, and makes sure of those there are.
func (s *Store) mark(ctx context.Context, ids []digest.Digest) error {
	if len(ids) == 0 {
		return nil
	}
	names, err := s.marksFor(ids)
	if err != nil {
		return err
	}
	keys := make([]string, len(ids))
	for i, id := range ids {
		keys[i] = id.String()
	}
	var making errgroup.Group
	making.Go(func() error { // what is told in vain goes with the marks
		err := s.cfg.Coord.Use(ctx, keys...)
		if errors.Is(err, ErrAway) {
			return nil
		}
		return err
	})
	for _, name := range names {
		making.Go(func() error { return s.cfg.FS.Make(ctx, path.Join(s.marksDir(), name)) })
	}
	return making.Wait()
}

// marksFor are the marks that count of these layers. Those of layers that have none are to be made.
func (s *Store) marksFor(ids []digest.Digest) (names []string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var bare []digest.Digest
	for _, id := range slices.Compact(slices.Sorted(slices.Values(ids))) {
		if m := s.used[id]; m == nil || m.now == "" {
			bare = append(bare, id)
		} else if !slices.Contains(names, m.now) {
			names = append(names, m.now)
		}
	}
	for some := range slices.Chunk(bare, perMark) {
		name, err := markName(some)
		if err != nil {
			return nil, err
		}
		for _, id := range some {
			if s.used[id] == nil {
				s.used[id] = new(marks)
			}
			s.used[id].now = name
		}
		names = append(names, name)
	}
	return names, nil
}

// Unuse takes this node's marks of these layers away, which must not be mounted here any
// more. After an error the marks may be there or not, and Used has the layers. What is held (see Hold)
// keeps its mark.
func (s *Store) Unuse(ctx context.Context, ids ...digest.Digest) error {
	for {
		all := s.together(ids)
		end, err := s.turns(ctx, all)
		if err != nil {
			return err
		}
		if slices.ContainsFunc(s.together(ids), func(id digest.Digest) bool { return !slices.Contains(all, id) }) {
			end() // marked with others meanwhile
			continue
		}
		defer end()
		return s.unmark(ctx, slices.DeleteFunc(slices.Clone(ids), s.isHeld))
	}
}

// together are these layers, and those that have a mark in common with one of them.
func (s *Store) together(ids []digest.Digest) []digest.Digest {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := slices.Clone(ids)
	for _, id := range ids {
		if m := s.used[id]; m != nil {
			for _, name := range m.all() {
				all = append(all, markedBy(name)...)
			}
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// unmark takes away all marks of these layers. It is called in the turns of all
// that they name.
func (s *Store) unmark(ctx context.Context, ids []digest.Digest) error {
	if len(ids) == 0 {
		return nil
	}
	keys := make([]string, len(ids))
	for i, id := range ids {
		keys[i] = id.String()
	}
	err := s.cfg.Coord.Drop(ctx, keys...)
	if errors.Is(err, ErrAway) {
		err = nil
	}
	for _, name := range s.retire(ids) {
		err = errors.Join(err, s.unmake(ctx, name, ids))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, id := range ids {
		if m := s.used[id]; m != nil && len(m.all()) == 0 {
			delete(s.used, id)
		}
	}
	return err
}

// retire has no mark of these layers count from here on, and returns them all.
func (s *Store) retire(ids []digest.Digest) (names []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, id := range ids {
		m := s.used[id]
		if m == nil {
			continue
		}
		m.retire(m.now)
		for _, name := range m.late {
			if !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
	}
	return names
}

// unmake removes a mark. Layers beside ids that it holds are marked anew before.
func (s *Store) unmake(ctx context.Context, name string, ids []digest.Digest) error {
	var others []digest.Digest
	s.mu.Lock()
	for _, id := range markedBy(name) {
		m := s.used[id]
		if slices.Contains(ids, id) || m == nil || !slices.Contains(m.all(), name) {
			continue
		}
		m.retire(name)
		others = append(others, id)
	}
	s.mu.Unlock()
	if len(others) > 0 {
		if err := s.mark(ctx, others); err != nil {
			return fmt.Errorf("mark anew what stays in use: %w", err)
		}
	}
	if err := s.remove(ctx, path.Join(s.marksDir(), name)); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, id := range markedBy(name) {
		if m := s.used[id]; m != nil {
			m.forget(name)
		}
	}
	return nil
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
		if ids := markedBy(name); len(ids) > 0 && !s.knows(name, ids) {
			errs = errors.Join(errs, s.remove(ctx, path.Join(s.marksDir(), name)))
		}
	}
	return errs
}

// knows reports whether a mark is known, of any of the layers that it names.
func (s *Store) knows(name string, ids []digest.Digest) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.ContainsFunc(ids, func(id digest.Digest) bool {
		m := s.used[id]
		return m != nil && slices.Contains(m.all(), name)
	})
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
			return slices.Contains(markedBy(name), id)
		})
		if marks && !s.forgotten(ctx, n) {
			return true, nil
		}
	}
	return false, nil
}
