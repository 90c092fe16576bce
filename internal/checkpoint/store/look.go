package store

import (
	"context"
	"slices"
	"time"

	"dewpoint/internal/pop"
)

// What checkpoints the PoP's store has is found by listing its directory and reading every record that is new
// there, a layer's too: on a distributed file system that takes longer than all else that decides on a start,
// and longer the more is in the store. So it is done behind starts: a look holds until something is told that
// it did not see (Heard). Where nobody tells, a start looks itself unless somebody has just looked.

// look is what was seen in the PoP's store. The zero value has seen nothing.
type look struct {
	at      time.Time // when it began: what changed later it may not have seen
	store   *pop.Store
	records []Record
	failed  failed
}

const (
	// lookEvery is how old a look may be that something may have been changed since.
	lookEvery = 2 * time.Second
	// lookLast is after how long one is made though nothing was told: who told may have been killed before.
	// One that is twice as old holds no more.
	lookLast = 10 * time.Minute
	// lookLater is the pause after one that failed.
	lookLater = time.Minute
)

// Look has what the PoP's store has at hand for a List of one image that follows. One that comes meanwhile
// waits for it.
func (s *Store) Look(ctx context.Context) { _, _, _ = s.recent(ctx) } // List says why it could not

// recent is shared, unless a look is at hand that holds.
func (s *Store) recent(ctx context.Context) ([]Record, failed, error) {
	st := s.pop()
	if st == nil {
		return nil, nil, nil
	}
	if l, ok := s.holds(st); ok {
		return l.records, l.failed, nil
	}
	select {
	case s.looking <- struct{}{}:
		defer func() { <-s.looking }()
	case <-ctx.Done():
		return nil, nil, context.Cause(ctx)
	}
	before, ok := s.holds(st)
	if ok { // somebody has looked meanwhile
		return before.records, before.failed, nil
	}
	at := time.Now()
	records, failed, err := s.shared(ctx)
	if err == nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.looked.at.Equal(before.at) { // else something has changed meanwhile
			s.looked = look{at, st, records, failed}
		}
	}
	return records, failed, err
}

// holds is the last look, and whether it says what st has now.
func (s *Store) holds(st *pop.Store) (look, bool) {
	told := s.cfg.Told != nil && s.cfg.Told()
	s.mu.Lock()
	defer s.mu.Unlock()
	l, age := s.looked, time.Since(s.looked.at)
	return l, l.store == st && (age < s.every || told && age < 2*lookLast && s.sawAll(st))
}

// sawAll reports whether the last look began when every node saw what was told last. s.mu is held.
func (s *Store) sawAll(st *pop.Store) bool {
	return !s.news.IsZero() && s.looked.at.Sub(s.news) >= st.Seen()
}

// lookAgain forgets what was seen: this node has changed it.
func (s *Store) lookAgain() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.looked = look{at: time.Now()}
}

// Heard is told of events of the PoP, in their order, the Resync that each subscription begins with among
// them.
func (s *Store) Heard(e pop.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.concerned(e) {
		return
	}
	s.news = time.Now()
	s.looked = look{at: s.news}
	select {
	case s.told <- struct{}{}:
	default:
	}
}

// concerned reports whether an event may change what a look has seen. s.mu is held.
func (s *Store) concerned(e pop.Event) bool {
	switch e.Kind {
	case pop.Resync, pop.Saved, pop.Returned:
		return true
	case pop.Evicted, pop.Damaged: // of layers, most of them; while it is being looked, nobody knows
		return s.looked.store == nil ||
			slices.ContainsFunc(s.looked.records, func(r Record) bool { return digestOf(r.ID).String() == e.Key })
	}
	return false
}

// Follow looks at the PoP's store when something was told, and once more when all nodes must see that, so
// that starts need not, until ctx ends. While nothing is told it looks every ten minutes.
func (s *Store) Follow(ctx context.Context) {
	wait := lookLast
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.told:
		case <-time.After(wait):
		}
		_, _, err := s.recent(ctx)
		wait = s.due(err)
	}
}

// due is how long it is until Follow has to look again.
func (s *Store) due(err error) time.Duration {
	st := s.pop()
	if err != nil || st == nil {
		return lookLater
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.looked.store != st || !s.news.IsZero() && !s.sawAll(st) {
		return max(s.every, time.Until(s.news.Add(st.Seen())))
	}
	return max(s.every, time.Until(s.looked.at.Add(lookLast)))
}
