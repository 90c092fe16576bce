package pop

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"
)

// A checkpoint in the store is an object as a layer is: a Layer whose Checkpoint is not
// empty, and whose DiffID is the checkpoint's ID. Its data are the checkpoint's data
// file, its table is empty. So it is drafted, published, marked, verified, evicted and deleted
// by the code that does so with layers.
//
// It stands on another layer, Upper. That one is not evicted before it, and goes with
// it if no other checkpoint stands on it. Nothing more is promised: an upper layer that was
// damaged leaves the store, whoever stands on it. A checkpoint without its upper is of no use; who
// wants to use one looks for both, and a sweep takes it out of the store.

// Checkpoints returns the records of the checkpoints in the store. Those that
// cannot be read are left out and reported together. What was published anew under a
// name that was seen before may be told as it was: Hold looks again.
func (s *Store) Checkpoints(ctx context.Context) ([]*Layer, error) {
	names, err := s.cfg.FS.Names(ctx, layersDir)
	if err != nil {
		return nil, err
	}
	all := []*Layer{}
	var bad error
	for _, name := range names {
		if !strings.HasSuffix(name, ".json") || strings.HasPrefix(name, ".") {
			continue
		}
		s.mu.Lock()
		l := s.read[name].layer
		s.mu.Unlock()
		if l == nil {
			if l, err = s.readRecord(ctx, path.Join(layersDir, name)); err != nil {
				bad = errors.Join(bad, unlessUnknown(err))
				continue
			}
			s.mu.Lock()
			s.read[name] = seenRecord{layer: l} // whoever needs to know more reads it again
			s.mu.Unlock()
		}
		if l.Checkpoint != nil {
			all = append(all, l)
		}
	}
	return all, bad
}

// Seen is how long after a change of the store all nodes see it.
func (s *Store) Seen() time.Duration { return s.cfg.Grace / 2 }

// Lead takes the lease under which an object is copied into the store: while it is held, no sweep takes
// the draft for a dead node's, however long nothing is written to it. Errors are those of Leases.Acquire.
func (s *Store) Lead(ctx context.Context, id digest.Digest) (Lease, error) {
	return s.cfg.Coord.Acquire(ctx, LayerLease(id), s.Above(ctx, id))
}

// Hold is Use for a time: until release is called the mark stays, even after Unuse.
// When the last of several has called it, the mark is taken away.
func (s *Store) Hold(ctx context.Context, id digest.Digest) (l *Layer, release func(), err error) {
	s.mu.Lock()
	s.held[id]++
	s.mu.Unlock()
	l, err = s.Use(ctx, id)
	if err != nil {
		s.unhold(id)
		return nil, nil, err
	}
	return l, func() {
		if s.unhold(id) > 0 {
			return
		}
		if err := s.Unuse(context.WithoutCancel(ctx), id); err != nil {
			s.cfg.Log.Debug("mark stays", "object", id, "err", err)
		}
	}, nil
}

func (s *Store) unhold(id digest.Digest) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.held[id]--
	n := s.held[id]
	if n == 0 {
		delete(s.held, id)
	}
	return n
}

func (s *Store) isHeld(id digest.Digest) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.held[id] > 0
}

// incomplete takes checkpoints out of the store whose upper layer has gone. That a record is
// not seen proves little, so it must be missing for the time of grace.
func (w *sweep) incomplete(ctx context.Context) error {
	var errs error
	for _, l := range w.objects {
		if l.Checkpoint == nil || l.Upper == "" {
			continue
		}
		if _, err := w.s.record(ctx, l.Upper); err == nil || !errors.Is(err, ErrUnknown) {
			continue
		}
		if w.age("without/"+l.DiffID.Encoded(), 0) >= w.s.cfg.Grace {
			_, err := w.s.evict(ctx, l.DiffID)
			errs = errors.Join(errs, err)
		}
	}
	return errs
}

// uppers is how many of the objects stand on each layer.
func uppers(objects []*Layer) map[string]int {
	on := map[string]int{}
	for _, l := range objects {
		if l.Upper != "" {
			on[l.Upper.String()]++
		}
	}
	return on
}

// Failures is how often a node could not restore a checkpoint, in a row.
type Failures struct {
	Count int    `json:"count"`
	Why   string `json:"why,omitempty"`
}

const (
	failedDir = "failed"
	ordersDir = "orders"
	lostDir   = "lost"
)

func failuresOf(id digest.Digest, node string) string {
	return path.Join(failedDir, id.Encoded()+"."+node)
}

// NoteFailures tells the other nodes how often this one could not restore a checkpoint; 0
// takes back what it told.
func (s *Store) NoteFailures(ctx context.Context, id digest.Digest, f Failures) error {
	if id.Validate() != nil {
		return fmt.Errorf("%q: %w", id, ErrUnknown)
	}
	name := failuresOf(id, s.cfg.Node)
	defer s.tell(ctx, Event{Kind: Saved, Key: id.String()})
	if f.Count == 0 {
		return s.remove(ctx, name)
	}
	b, err := json.Marshal(f)
	if err != nil {
		return err
	}
	if err := s.cfg.FS.Mkdir(ctx, failedDir); err != nil { // stores of an earlier version have none
		return err
	}
	return s.cfg.FS.WriteFile(ctx, name, b)
}

// Failures returns what all nodes have told, by checkpoint and node.
func (s *Store) Failures(ctx context.Context) (map[digest.Digest]map[string]Failures, error) {
	names, err := s.cfg.FS.Names(ctx, failedDir)
	if err != nil {
		return nil, unlessGone(err)
	}
	all := map[digest.Digest]map[string]Failures{}
	for _, name := range names {
		id, ok := idOf(name)
		_, node, _ := strings.Cut(name, ".")
		if !ok || node == "" {
			continue
		}
		b, err := s.cfg.FS.ReadFile(ctx, path.Join(failedDir, name))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		var f Failures
		if json.Unmarshal(b, &f) != nil || f.Count <= 0 {
			continue
		}
		if all[id] == nil {
			all[id] = map[string]Failures{}
		}
		all[id][node] = f
	}
	return all, nil
}

// PutOrder keeps what a node has learned of a checkpoint's use, over what is there.
func (s *Store) PutOrder(ctx context.Context, id digest.Digest, order []byte) error {
	if err := s.cfg.FS.Mkdir(ctx, ordersDir); err != nil { // stores of an earlier version have none
		return err
	}
	return s.cfg.FS.WriteFile(ctx, path.Join(ordersDir, id.Encoded()), order)
}

// Order returns what PutOrder was given last, or an error that wraps ErrUnknown.
func (s *Store) Order(ctx context.Context, id digest.Digest) ([]byte, error) {
	if id.Validate() != nil {
		return nil, fmt.Errorf("%q: %w", id, ErrUnknown)
	}
	b, err := s.cfg.FS.ReadFile(ctx, path.Join(ordersDir, id.Encoded()))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("order of %s: %w", id, ErrUnknown)
	}
	return b, err
}

// noteLost writes down that an object has left the store, if that is since it was damaged: who has made it
// and is down now hears of it by Lost.
func (s *Store) noteLost(ctx context.Context, id digest.Digest, damaged bool) {
	name := path.Join(lostDir, id.Encoded())
	var err error
	if !damaged {
		err = s.remove(ctx, name) // of an earlier time
	} else if err = s.cfg.FS.Mkdir(ctx, lostDir); err == nil { // stores of an earlier version have none
		err = s.cfg.FS.WriteFile(ctx, name, nil)
	}
	if err != nil {
		s.cfg.Log.Debug("that an object was damaged is told to those alone that hear it now", "object", id, "err",
			err)
	}
}

// Lost are the objects that were damaged and are not in the store now. They are forgotten when they are
// published again, or after the time in which notes are.
func (s *Store) Lost(ctx context.Context) ([]digest.Digest, error) {
	names, err := s.cfg.FS.Names(ctx, lostDir)
	var all []digest.Digest
	for _, name := range names {
		if id, ok := idOf(name); ok && !s.Has(ctx, id) {
			all = append(all, id)
		}
	}
	return all, unlessGone(err)
}

// forgetNotes removes what was told and learned of checkpoints that are not in the store
// for so long that nobody will publish them again, and that something was damaged which is there again.
func (w *sweep) forgetNotes(ctx context.Context) error {
	var errs error
	for _, dir := range []string{failedDir, ordersDir, lostDir} {
		names, err := w.names(ctx, dir)
		if err != nil {
			errs = errors.Join(errs, unlessGone(err))
			continue
		}
		for _, name := range names {
			id, ok := idOf(name)
			if !ok {
				continue
			}
			_, err := w.s.cfg.FS.Stat(ctx, recordOf(id))
			mended := err == nil && dir == lostDir
			if !mended && !errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if file := path.Join(dir, name); mended || w.age(file, 0) >= w.s.cfg.Forget {
				errs = errors.Join(errs, w.s.remove(ctx, file))
			}
		}
	}
	return errs
}
