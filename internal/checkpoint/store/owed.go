package store

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"slices"
	"time"

	"dewpoint/internal/durable"
	"dewpoint/internal/pop"

	"github.com/opencontainers/go-digest"
)

// A checkpoint that this node has made is owed to the PoP's store until it is there: a file says so, which is
// durable before the checkpoint is. A daemon that is killed, or a store that is away, does not lose it.

const (
	owedEnd  = ".owed"
	maxTries = 10 // that fail for another reason than that the store is away
	// firstTry is how long who has made a checkpoint has to publish it before it is owed to anybody else.
	firstTry  = time.Minute
	awayPause = 10 * time.Second
	mostPause = time.Hour
)

// debt is a checkpoint that is to be published.
type debt struct {
	Tries int `json:"tries"` // that have failed
	due   time.Time
}

// owe notes that a checkpoint is to be published; s.change is held.
func (s *Store) owe(id string, d debt) error {
	b, err := json.Marshal(d)
	if err == nil {
		err = durable.WriteFile(s.path(id+owedEnd), b, 0o600)
	}
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.owed[id] = d
	return nil
}

// Lost is told of what has left the PoP's store since it was damaged there, a checkpoint or a layer. The
// checkpoints concerned that this node has made and still keeps are owed again.
func (s *Store) Lost(id digest.Digest) {
	s.change.Lock()
	defer s.change.Unlock()
	s.mu.Lock()
	var again []string
	for _, e := range s.entries {
		if e.Node == s.cfg.Node && (digestOf(e.ID) == id || e.Upper != nil && e.Upper.DiffID == id) {
			again = append(again, e.ID)
		}
	}
	s.mu.Unlock()
	for _, id := range again {
		if err := s.owe(id, debt{}); err != nil {
			s.cfg.Log.Warn("a checkpoint that was damaged in the PoP's store is not put there again", "id", id, "err",
				err)
		}
	}
	if len(again) > 0 {
		s.lookAgain()
	}
}

// Missed is Lost for what was damaged while this node was down. It is to be called at the start, when the
// PoP's store is there: it returns an error that wraps ErrNoPoP or pop.ErrStoreAway while it is not.
func (s *Store) Missed(ctx context.Context) error {
	st := s.pop()
	if st == nil {
		return ErrNoPoP
	}
	lost, err := st.Lost(ctx)
	if err != nil {
		return err
	}
	for _, id := range lost {
		s.Lost(id)
	}
	return nil
}

// loadOwed reads what an earlier daemon owed: it is due at once.
func (s *Store) loadOwed(id string) {
	var d debt
	b, err := readFile(s.path(id + owedEnd))
	if err == nil {
		err = json.Unmarshal(b, &d)
	}
	if err != nil || d.Tries < 0 {
		d = debt{}
	}
	s.owed[id] = d
}

// Owed are the checkpoints of this node that Settle was not called for and that are due, the oldest first;
// none while there is no store to publish them in.
func (s *Store) Owed() []Record {
	if s.pop() == nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []Record
	for id, d := range s.owed {
		if e := s.entries[id]; e != nil && !time.Now().Before(d.due) {
			all = append(all, e.Record)
		}
	}
	slices.SortFunc(all, func(a, b Record) int { return a.Created.Compare(b.Created) })
	return all
}

// Superseded reports whether the PoP's store has as many later checkpoints of the same image and key as it
// keeps.
func (s *Store) Superseded(ctx context.Context, r Record) bool {
	all, _, err := s.shared(ctx)
	if err != nil {
		return false
	}
	later := slices.DeleteFunc(all, func(o Record) bool {
		return o.Manifest != r.Manifest || o.Key != r.Key || !o.Created.After(r.Created)
	})
	return len(later) >= s.cfg.Keep
}

// Settle notes how publishing a checkpoint ended: nil, and what will never succeed, ends the debt. What
// failed is due again later, as long as the store is away, else so many times. It reports whether it is.
func (s *Store) Settle(ctx context.Context, id string, err error) (again bool) {
	s.change.Lock()
	defer s.change.Unlock()
	s.mu.Lock()
	d, owed := s.owed[id]
	s.mu.Unlock()
	if !owed {
		return false
	}
	pause := awayPause
	switch hopeless := errors.Is(err, ErrQuarantined) || errors.Is(err, ErrDamaged) ||
		errors.Is(err, ErrUnknown); {
	case err != nil && ctx.Err() != nil:
	case errors.Is(err, ErrNoPoP) || errors.Is(err, pop.ErrStoreAway):
	case err == nil || hopeless || d.Tries+1 >= maxTries:
		if err := s.forgive(id); err != nil {
			s.cfg.Log.Warn("a checkpoint is published once more at the next start", "id", id, "err", err)
		}
		return false
	default:
		pause = min(mostPause, awayPause<<d.Tries)
		d.Tries++
	}
	d.due = time.Now().Add(pause)
	if err := s.owe(id, d); err != nil {
		s.cfg.Log.Warn("how often a checkpoint was published in vain is not noted", "id", id, "err", err)
		s.mu.Lock()
		s.owed[id] = d
		s.mu.Unlock()
	}
	return true
}

// forgive ends a debt; s.change is held.
func (s *Store) forgive(id string) error {
	s.mu.Lock()
	delete(s.owed, id)
	s.mu.Unlock()
	return removed(os.Remove(s.path(id + owedEnd)))
}
