package store

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	"dewpoint/internal/durable"
	"dewpoint/internal/pop"

	"github.com/opencontainers/go-digest"
)

// notes are what this node has seen of a checkpoint.
type notes struct {
	Failures int       `json:"failures"` // of restoring it, in a row
	Why      string    `json:"why"`
	At       time.Time `json:"at"`
}

// loadNotes reads what is noted; what cannot be read was never noted.
func (s *Store) loadNotes(id string) {
	var n notes
	b, err := readFile(s.path(id + notesEnd))
	if err == nil {
		err = json.Unmarshal(b, &n)
	}
	if err != nil || n.Failures < 0 {
		s.cfg.Log.Warn("what was noted of a checkpoint is lost", "id", id, "err", err)
		return
	}
	s.notes[id] = n
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
	s.mu.Lock()
	n := s.notes[id]
	n.Failures, n.Why, n.At = n.Failures+1, fmt.Sprintf("%.500s", why), time.Now().UTC()
	s.notes[id] = n
	s.mu.Unlock()
	s.note(ctx, id, n)
	failed, err := s.failures(ctx)
	if err != nil {
		s.cfg.Log.Debug("other nodes' failures are not known", "err", err)
	}
	_, quarantined = s.judge(id, failed)
	if s.condemned(id, failed) {
		if _, err := s.unpublish(ctx, id); err != nil {
			s.cfg.Log.Warn("a checkpoint that cannot be restored stays in the PoP's store", "id", id, "err", err)
		}
	}
	return quarantined
}

// Succeeded notes that a checkpoint was restored: failures before that count no more.
func (s *Store) Succeeded(ctx context.Context, id string) {
	s.change.Lock()
	defer s.change.Unlock()
	s.mu.Lock()
	n := s.notes[id]
	delete(s.notes, id)
	s.mu.Unlock()
	if n.Failures > 0 {
		s.note(ctx, id, notes{})
	}
}

// note writes down what is known of a checkpoint, here and for the others; s.change is held.
func (s *Store) note(ctx context.Context, id string, n notes) {
	var err error
	b := []byte(nil)
	if n.Failures == 0 {
		err = removed(os.Remove(s.path(id + notesEnd)))
	} else if b, err = json.Marshal(n); err == nil {
		err = durable.WriteFile(s.path(id+notesEnd), b, 0o600)
	}
	if st := s.pop(); st != nil {
		err = errors.Join(err, st.NoteFailures(ctx, digestOf(id), pop.Failures{Count: n.Failures, Why: n.Why}))
		s.lookAgain()
	}
	if err != nil {
		s.cfg.Log.Warn("a checkpoint's failure is not noted everywhere", "id", id, "err", err)
	}
}

// failed is what other nodes have noted, by node.
type failed map[digest.Digest]map[string]pop.Failures

func (s *Store) failures(ctx context.Context) (failed, error) {
	st := s.pop()
	if st == nil {
		return nil, nil
	}
	all, err := st.Failures(ctx)
	return all, err
}

// judge is how often restoring a checkpoint failed, and whether it is not to be used here.
func (s *Store) judge(id string, f failed) (failures int, quarantined bool) {
	s.mu.Lock()
	own := s.notes[id].Failures
	s.mu.Unlock()
	return own + s.elsewhere(id, f), own >= s.cfg.MaxFailures || s.condemned(id, f)
}

// condemned reports whether a checkpoint is not to be used anywhere: one node alone
// that cannot restore does not take it from the others.
func (s *Store) condemned(id string, f failed) bool {
	s.mu.Lock()
	own := s.notes[id].Failures
	s.mu.Unlock()
	sum, nodes := min(own, s.cfg.MaxFailures), 0
	if own > 0 {
		nodes++
	}
	for node, n := range f[digestOf(id)] {
		if node != s.cfg.Node && n.Count > 0 {
			sum += min(n.Count, s.cfg.MaxFailures)
			nodes++
		}
	}
	return nodes >= 2 && sum >= 2*s.cfg.MaxFailures
}

func (s *Store) elsewhere(id string, f failed) (sum int) {
	for node, n := range f[digestOf(id)] {
		if node != s.cfg.Node {
			sum += n.Count
		}
	}
	return sum
}

// forgetAfter is how long it is remembered that what is neither here nor in the
// PoP's store could not be restored.
const forgetAfter = 7 * 24 * time.Hour

// forgetNotes removes what is noted of checkpoints that are gone for long.
func (s *Store) forgetNotes(ctx context.Context) error {
	s.mu.Lock()
	none := len(s.notes) == 0
	s.mu.Unlock()
	if none {
		return nil
	}
	shared, _, err := s.shared(ctx)
	if err != nil || s.cfg.PoP != nil && s.pop() == nil {
		return nil // nobody knows
	}
	there := map[string]bool{}
	for _, r := range shared {
		there[r.ID] = true
	}
	s.change.Lock()
	defer s.change.Unlock()
	s.mu.Lock()
	var gone []string
	for id, n := range s.notes {
		if s.entries[id] == nil && !there[id] && time.Since(n.At) > forgetAfter {
			gone = append(gone, id)
			delete(s.notes, id)
		}
	}
	s.mu.Unlock()
	var errs error
	for _, id := range gone {
		errs = errors.Join(errs, removed(os.Remove(s.path(id+notesEnd))))
	}
	return errs
}

// SetOrder keeps in which order the memory of a checkpoint was touched, as its
// user writes it down: for the next restores here and, if they share a store, on other nodes.
func (s *Store) SetOrder(ctx context.Context, id string, order []byte) error {
	if len(order) > maxRecord {
		return fmt.Errorf("an order of %d bytes: too long", len(order))
	}
	var err error
	s.change.Lock()
	s.mu.Lock()
	local := s.entries[id] != nil
	s.mu.Unlock()
	if local {
		err = durable.WriteFile(s.path(id+orderEnd), order, 0o600)
	}
	s.change.Unlock()
	if st := s.pop(); st != nil && st.Has(ctx, digestOf(id)) {
		err = errors.Join(err, st.PutOrder(ctx, digestOf(id), order))
	}
	return err
}

// Order is what was kept last, or nil.
func (s *Store) Order(ctx context.Context, id string) []byte {
	if b, err := readFile(s.path(id + orderEnd)); err == nil {
		return b
	}
	if st := s.pop(); st != nil {
		if b, err := st.Order(ctx, digestOf(id)); err == nil && len(b) <= maxRecord {
			return b
		}
	}
	return nil
}
