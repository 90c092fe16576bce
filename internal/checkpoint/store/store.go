// Package store keeps checkpoints: on the node below one directory, and in the
// store that the nodes of a PoP share.
//
// A checkpoint is a data file (package image), the writable layer as it was, and a
// Record that names both. The layer is kept as any layer is, elsewhere. Nothing of a
// checkpoint ever changes, but what is noted of it: how often restoring it failed, and
// which of its memory is touched first.
//
// On the node a checkpoint is there when its record is: the data file is durable before
// that, and the record goes first when a checkpoint is removed. What a crash leaves is no
// checkpoint, and goes at Open. In the PoP's store it is one more object beside
// the layers, under the same rules (package pop): published by a rename, referenced by who
// reads it, evicted by what it saves for its size.
//
// To restore, an engine needs a directory of plain files. It is unpacked once, into
// the cache, and shared by all clones; who uses it says when it is used no more. The cache is
// bounded, holds for one boot of the machine, and costs only time when it is lost.
//
// Checkpoints hold what a process had in memory, secrets too: directories have mode
// 0700 and files 0600.
package store

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"dewpoint/internal/durable"
	"dewpoint/internal/pop"
)

var (
	// ErrUnknown says that there is no such checkpoint.
	ErrUnknown = errors.New("no such checkpoint")
	// ErrDamaged says that a checkpoint is not what it was.
	ErrDamaged = errors.New("damaged checkpoint")
	// ErrTorn says that the PoP's store has the record of a checkpoint and not all of its data, as this node
	// sees it: others may see more, or this one later, so it stays.
	ErrTorn = errors.New("its data are not all in the PoP's store")
	// ErrInUse says that a checkpoint is being read.
	ErrInUse = errors.New("the checkpoint is in use")
	// ErrNoUpper says that a checkpoint's upper layer is not in the PoP's store.
	ErrNoUpper = errors.New("its upper layer is not in the PoP's store")
	// ErrNoPoP says that there is no PoP's store, or that it is away.
	ErrNoPoP = errors.New("there is no PoP's store now")
	// ErrQuarantined says that restoring a checkpoint has failed too often.
	ErrQuarantined = errors.New("the checkpoint is quarantined")
)

// Config says where checkpoints are kept. Dir and Node are required.
type Config struct {
	Dir  string // made if need be
	Node string
	// PoP is the store that this node shares, nil while there is none; nil is never.
	PoP func() *pop.Store
	// Told reports whether Heard is told of what happens in PoP: what was seen there then holds until
	// something did. nil is never.
	Told func() bool
	// Peers are asked for checkpoints while PoP gives no store; nil is nobody.
	Peers Peers
	// Keep is how many checkpoints of one image and key this node keeps, and how many it
	// leaves in the PoP's store when it publishes another; 0 is 2.
	Keep int
	// MaxBytes bounds the data files here, CacheBytes the cache of unpacked
	// ones; 0 is 4 GiB and 4 GiB. What is in use is kept beyond that.
	MaxBytes, CacheBytes int64
	// CacheIdle is how long what nobody uses stays in the cache; 0 is an hour.
	CacheIdle time.Duration
	// MaxFailures is after how many failures in a row a checkpoint is not used any
	// more on this node; after twice as many, of two nodes at least, it leaves the PoP's store. 0 is 3.
	MaxFailures int
	Workers     int          // that unpack one data file; 0 is 2
	Log         *slog.Logger // nil discards
}

func (c Config) withDefaults() Config {
	if c.Keep == 0 {
		c.Keep = 2
	}
	if c.MaxBytes == 0 {
		c.MaxBytes = 4 << 30
	}
	if c.CacheBytes == 0 {
		c.CacheBytes = 4 << 30
	}
	if c.CacheIdle == 0 {
		c.CacheIdle = time.Hour
	}
	if c.MaxFailures == 0 {
		c.MaxFailures = 3
	}
	if c.Workers == 0 {
		c.Workers = 2
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c
}

// Store is a node's checkpoints. It is safe for concurrent use, by one process:
// the owner of the node's root.
//
// It is made of parts, each with a lock of its own; none calls another one while it holds it. What concerns
// several of them, and the order in which files appear and go, is here.
type Store struct {
	*place
	*catalog
	*cache
	*failures
	*uploads
	*view
	*sharing
	*peers
}

// newStore puts the parts together.
func newStore(cfg Config) *Store {
	s := &Store{place: &place{cfg: cfg}}
	s.catalog = &catalog{place: s.place, entries: map[string]*entry{}}
	s.cache = &cache{root: s.place.path(cacheDir), most: cfg.CacheBytes, idle: cfg.CacheIdle, log: cfg.Log,
		dirs: map[string]*unpacked{}}
	s.view = &view{place: s.place, every: lookEvery, looking: make(chan struct{}, 1),
		told: make(chan struct{}, 1)}
	s.failures = &failures{place: s.place, catalog: s.catalog, view: s.view, notes: map[string]notes{}}
	s.uploads = &uploads{place: s.place, catalog: s.catalog, view: s.view, pending: map[string]upload{}}
	s.sharing = &sharing{place: s.place, catalog: s.catalog, failures: s.failures, view: s.view}
	s.peers = &peers{place: s.place, taking: make(chan struct{}, 1), offers: map[string]offers{}}
	return s
}

// Open opens the store in cfg.Dir and removes what a crash has left there.
// There is nothing to be closed.
func Open(cfg Config) (*Store, error) {
	s := newStore(cfg.withDefaults())
	if err := os.MkdirAll(s.place.path(cacheDir), 0o700); err != nil {
		return nil, fmt.Errorf("open checkpoints: %w", err)
	}
	if err := os.Chmod(cfg.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("open checkpoints: %w", err)
	}
	if err := errors.Join(s.load(), s.cache.load()); err != nil {
		return nil, fmt.Errorf("open checkpoints: %w", err)
	}
	return s, nil
}

// load reads the records and removes what none of them names.
func (s *Store) load() error {
	ents, err := os.ReadDir(s.cfg.Dir)
	if err != nil {
		return err
	}
	for _, e := range ents { // records first: they say what the rest is
		if id, ok := strings.CutSuffix(e.Name(), recordEnd); ok {
			s.catalog.adopt(id)
		}
	}
	var errs error
	for _, e := range ents {
		name := e.Name()
		id, end := name, filepath.Ext(name)
		id = strings.TrimSuffix(id, end)
		_, here := s.catalog.get(id)
		switch {
		case name == cacheDir:
		case end == notesEnd && digestOf(id).Validate() == nil: // of what is in the PoP's store, perhaps
			s.failures.load(id)
		case end == pendingEnd && here:
			s.uploads.load(id)
		case here && slices.Contains([]string{dataEnd, recordEnd, orderEnd}, end):
		case strings.HasPrefix(name, scratch):
			// a dump that an earlier daemon has begun may still write into it
			if err := os.RemoveAll(s.place.path(name)); err != nil {
				s.cfg.Log.Warn("what a dump has left stays until the next start", "dir", name, "err", err)
			}
		default:
			errs = errors.Join(errs, os.RemoveAll(s.place.path(name)))
		}
	}
	return errs
}

// Listed is a checkpoint and where it is.
type Listed struct {
	Record
	Local       bool // its data are on this node
	PoP         bool // they are in the PoP's store
	Peer        bool // another node gives them
	Failures    int  // in a row, of restoring it, on all nodes
	Quarantined bool // too many: it is not to be used here
}

// List returns the checkpoints of a manifest, "" is of all, newest first: those of this
// node, and those of the PoP's store unless it does not answer, which is the error then. Of one
// manifest they may be two seconds old: what others have made or removed since is not known. If there
// is no such store now, those of one manifest that other nodes give are among them.
func (s *Store) List(ctx context.Context, manifest string) ([]Listed, error) {
	all := map[string]*Listed{}
	for _, e := range s.catalog.all() {
		all[e.ID] = &Listed{Record: e.Record, Local: true}
	}
	look := s.view.recent
	if manifest == "" {
		look = s.view.shared
	}
	shared, failed, err := look(ctx)
	for _, r := range shared {
		if all[r.ID] == nil {
			all[r.ID] = &Listed{Record: r}
		}
		all[r.ID].PoP = true
	}
	for id, o := range s.peers.offered(ctx, manifest) {
		if all[id] == nil {
			all[id] = &Listed{Record: o.Record, Peer: true}
		}
	}
	out := make([]Listed, 0, len(all))
	for id, l := range all {
		if manifest == "" || l.Manifest == manifest {
			l.Failures, l.Quarantined = s.failures.judge(id, failed)
			out = append(out, *l)
		}
	}
	slices.SortFunc(out, func(a, b Listed) int {
		if c := b.Created.Compare(a.Created); c != 0 {
			return c
		}
		return strings.Compare(a.ID, b.ID)
	})
	return out, err
}

// Knows reports whether there are checkpoints of any version of an image, by its reference: on this node, or
// in the PoP's store as it was seen last. It asks nobody.
func (s *Store) Knows(ref string) bool {
	here := func(e entry) bool { return e.Image == ref }
	return slices.ContainsFunc(s.catalog.all(), here) || s.view.knows(ref)
}

// Drop removes a checkpoint from this node alone. It returns an error that wraps ErrUnknown or ErrInUse.
func (s *Store) Drop(id string) error {
	s.change.Lock()
	there, err := s.drop(id)
	s.change.Unlock()
	if err == nil && !there {
		err = fmt.Errorf("%.12s: %w", id, ErrUnknown)
	}
	s.cache.discard(id)
	return err
}

// Remove removes a checkpoint from this node and from the PoP's store. It returns
// an error that wraps ErrUnknown if it is in neither, or ErrInUse if it is being read here.
// Directories that were unpacked from it stay until they are not used any more.
func (s *Store) Remove(ctx context.Context, id string) error {
	s.change.Lock()
	local, err := s.drop(id)
	s.change.Unlock()
	if err != nil {
		return err
	}
	shared, err := s.sharing.unpublish(ctx, id)
	if err == nil && !local && !shared {
		err = fmt.Errorf("%.12s: %w", id, ErrUnknown)
	}
	s.cache.discard(id)
	return err
}

// drop removes a checkpoint of this node that nobody reads; change is held.
func (s *Store) drop(id string) (there bool, err error) {
	there, err = s.catalog.leave(id)
	if err != nil || !there {
		return there, err
	}
	s.uploads.leave(id)
	// The record goes first, durably: what is left then is no checkpoint.
	if err := os.Remove(s.place.path(id + recordEnd)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return true, err
	}
	err = durable.SyncDir(s.cfg.Dir)
	for _, end := range []string{dataEnd, orderEnd, pendingEnd} {
		if rerr := os.Remove(s.place.path(id + end)); !errors.Is(rerr, os.ErrNotExist) {
			err = errors.Join(err, rerr)
		}
	}
	return true, err
}

// Tidy removes what retention and the bounds demand, and what has been idle. It is
// to be called now and then.
func (s *Store) Tidy(ctx context.Context) error {
	s.change.Lock()
	err := s.retain("")
	s.change.Unlock()
	s.cache.trim()
	return errors.Join(err, s.failures.forget(ctx))
}

// retain removes checkpoints of this node beyond Keep for each image and key, and then
// the least recently used beyond MaxBytes, but for the one of that ID and those that are
// being read; change is held.
func (s *Store) retain(but string) error {
	all := s.catalog.all()
	var sum int64
	for _, e := range all {
		sum += e.Data.Size
	}
	var errs error
	gone := map[string]bool{}
	remove := func(e entry) {
		_, err := s.drop(e.ID)
		if err == nil {
			s.cache.discard(e.ID)
			gone[e.ID] = true
			sum -= e.Data.Size
		} else if !errors.Is(err, ErrInUse) {
			errs = errors.Join(errs, err)
		}
	}
	slices.SortFunc(all, func(a, b entry) int { return b.Created.Compare(a.Created) })
	kept := map[[2]string]int{}
	for _, e := range all {
		of := [2]string{e.Manifest, e.Key}
		if kept[of]++; kept[of] > s.cfg.Keep && e.ID != but {
			remove(e)
		}
	}
	slices.SortFunc(all, func(a, b entry) int { return a.used.Compare(b.used) })
	for _, e := range all {
		if sum > s.cfg.MaxBytes && e.ID != but && !gone[e.ID] {
			remove(e)
		}
	}
	return errs
}

// Fail notes that restoring a checkpoint failed, for this node durably, and for the others
// if they share a store. It reports whether the checkpoint is not to be used here any
// more. If it is not to be used anywhere, it leaves the PoP's store.
func (s *Store) Fail(ctx context.Context, id, why string) (quarantined bool) {
	if digestOf(id).Validate() != nil {
		return false
	}
	s.change.Lock()
	defer s.change.Unlock()
	s.failures.note(ctx, id, s.failures.failed(id, why))
	failed, err := s.view.failures(ctx)
	if err != nil {
		s.cfg.Log.Debug("other nodes' failures are not known", "err", err)
	}
	_, quarantined = s.failures.judge(id, failed)
	if s.failures.condemned(id, failed) {
		if _, err := s.sharing.unpublish(ctx, id); err != nil {
			s.cfg.Log.Warn("a checkpoint that cannot be restored stays in the PoP's store", "id", id, "err", err)
		}
	}
	return quarantined
}
