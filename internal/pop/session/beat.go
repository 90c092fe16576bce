package session

import (
	"context"
	"errors"
	"time"

	"dewpoint/internal/pop"
)

// beats sends a beat every fifth of the lease period, sooner after one that failed.
func (s *Session) beats() {
	pause := time.NewTimer(0)
	defer pause.Stop()
	for {
		select {
		case <-s.ctx.Done():
			return
		case <-pause.C:
		case <-s.kick:
		}
		err := s.beat(s.ctx, "beat", nil)
		s.note(err)
		if err != nil {
			pause.Reset(s.cfg.TTL / 20)
		} else {
			pause.Reset(s.cfg.TTL / 5)
		}
	}
}

// note logs when the coordinator goes away and when it is back.
func (s *Session) note(err error) {
	s.mu.Lock()
	before, closed := s.away, s.closed
	s.away = err != nil
	s.mu.Unlock()
	switch {
	case closed || before == (err != nil):
	case err != nil:
		s.cfg.Log.Warn("the PoP's coordinator is away", "error", err)
	default:
		s.cfg.Log.Info("the PoP's coordinator is back")
	}
}

// beat tells the server all there is to tell. One beat is under way at a time. Who waited
// for its turn, and whose keys were told meanwhile, need not send another.
func (s *Session) beat(ctx context.Context, what string, keys []string) error {
	if s.isClosed() {
		return s.explain(ctx, what, pop.ErrAway)
	}
	bounded, cancel := context.WithTimeout(ctx, min(s.cfg.Timeout, s.cfg.TTL/5))
	defer cancel()
	select {
	case s.turn <- struct{}{}:
	case <-bounded.Done():
		return s.explain(ctx, what, bounded.Err())
	}
	defer func() { <-s.turn }()
	if len(keys) > 0 && s.told(keys) {
		return nil
	}
	err := s.inEpoch(bounded, s.beatOnce)
	if errors.Is(err, ErrUnknown) {
		s.takenForDead()
		err = s.inEpoch(bounded, s.beatOnce)
	}
	return s.explain(ctx, what, err)
}

func (s *Session) beatOnce(ctx context.Context, epoch string) error {
	b, upTo, held := s.compose(epoch)
	sent := time.Now()
	pulse, err := s.server.Beat(ctx, epoch, b)
	if err != nil {
		return err
	}
	lost := map[string]bool{}
	for _, key := range pulse.Lost {
		lost[key] = true
	}
	for _, l := range held {
		if lost[l.key] {
			l.lose()
		} else {
			l.renew(sent, epoch)
		}
	}
	s.saw(pulse.Top)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.epoch == epoch {
		s.known = true
		s.refs.confirm(b.Full, upTo)
	}
	return nil
}

// compose is a beat of what there is to say now, with the version of the references
// in it and the leases that it renews.
func (s *Session) compose(epoch string) (b Beat, upTo uint64, held []*lease) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seq++
	b = Beat{Seq: s.seq, Member: s.member, Full: s.refs.full}
	b.Use, b.Drop = s.refs.changes()
	for _, l := range s.leases {
		held = append(held, l)
		b.Leases = append(b.Leases, Renewal{Key: l.key, Token: l.token, Restore: l.epoch != epoch})
	}
	return b, s.refs.version, held
}

func (s *Session) takenForDead() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.refs.full = true
	if s.known {
		s.board.resync()
	}
}

func (s *Session) told(keys []string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.refs.told(keys)
}

func (s *Session) Use(ctx context.Context, keys ...string) error {
	return s.refer(ctx, "use", true, keys)
}

func (s *Session) Drop(ctx context.Context, keys ...string) error {
	return s.refer(ctx, "drop", false, keys)
}

func (s *Session) refer(ctx context.Context, what string, used bool, keys []string) error {
	if len(keys) == 0 {
		return nil
	}
	s.mu.Lock()
	s.refs.set(used, keys)
	s.mu.Unlock()
	return s.beat(ctx, what, keys)
}

func (s *Session) Users(ctx context.Context, keys ...string) (map[string][]string, error) {
	all := map[string][]string{}
	err := s.do(ctx, "users", func(ctx context.Context, epoch string) error {
		clear(all)
		const most = 1000 // per step, to keep steps short
		for rest := keys; len(rest) > 0; rest = rest[min(most, len(rest)):] {
			users, err := s.server.Users(ctx, epoch, rest[:min(most, len(rest))])
			if err != nil {
				return err
			}
			for key, nodes := range users {
				all[key] = nodes
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return all, nil
}

// references are the keys that the node uses and what of that the server was not told.
type references struct {
	used    map[string]struct{}
	changed map[string]uint64 // at which version
	version uint64
	full    bool // the server is to be told all of it
}

func newReferences() references {
	return references{used: map[string]struct{}{}, changed: map[string]uint64{}, full: true}
}

func (r *references) set(used bool, keys []string) {
	for _, key := range keys {
		r.version++
		r.changed[key] = r.version
		if used {
			r.used[key] = struct{}{}
		} else {
			delete(r.used, key)
		}
	}
}

func (r *references) changes() (use, drop []string) {
	if r.full {
		for key := range r.used {
			use = append(use, key)
		}
		return use, nil
	}
	for key := range r.changed {
		if _, used := r.used[key]; used {
			use = append(use, key)
		} else {
			drop = append(drop, key)
		}
	}
	return use, drop
}

// confirm says that the server knows all changes until the version.
func (r *references) confirm(full bool, version uint64) {
	for key, v := range r.changed {
		if v <= version {
			delete(r.changed, key)
		}
	}
	if full {
		r.full = false
	}
}

func (r *references) told(keys []string) bool {
	if r.full {
		return false
	}
	for _, key := range keys {
		if _, changed := r.changed[key]; changed {
			return false
		}
	}
	return true
}
