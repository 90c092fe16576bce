package session

import (
	"context"
	"fmt"
	"sync"
	"time"

	"dewpoint/internal/pop"
)

type lease struct {
	s     *Session
	key   string
	token uint64
	epoch string      // in which it was renewed last; guarded by s.mu
	timer *time.Timer // closes lost; guarded by s.mu
	lost  chan struct{}
	once  sync.Once
}

func (l *lease) Key() string           { return l.key }
func (l *lease) Token() uint64         { return l.token }
func (l *lease) Lost() <-chan struct{} { return l.lost }

func (l *lease) Release(ctx context.Context) error {
	l.lose()
	return l.s.do(ctx, "release "+l.key, func(ctx context.Context, epoch string) error {
		return l.s.server.Release(ctx, epoch, l.key, l.token)
	})
}

// release is Release of a session that is being closed.
func (s *Session) release(ctx context.Context, l *lease) error {
	return s.inEpoch(ctx, func(ctx context.Context, epoch string) error {
		return s.server.Release(ctx, epoch, l.key, l.token)
	})
}

func (l *lease) lose() {
	l.once.Do(func() {
		l.s.mu.Lock()
		l.timer.Stop()
		if l.s.leases[l.key] == l {
			delete(l.s.leases, l.key)
		}
		l.s.mu.Unlock()
		close(l.lost)
	})
}

// renew puts off the loss: the server has renewed the lease after sent.
func (l *lease) renew(sent time.Time, epoch string) {
	l.s.mu.Lock()
	defer l.s.mu.Unlock()
	if l.s.leases[l.key] == l {
		l.epoch = epoch
		l.timer.Reset(time.Until(sent.Add(l.s.patience())))
	}
}

// patience is how long after the sending of the last renewal a lease is counted on.
func (s *Session) patience() time.Duration { return s.cfg.TTL * 3 / 5 }

func (s *Session) Acquire(ctx context.Context, key string, above uint64) (pop.Lease, error) {
	what := "acquire " + key
	if above >= MaxToken {
		return nil, fmt.Errorf("%s: a token above %d cannot be given", what, above)
	}
	if s.isClosed() {
		return nil, s.explain(ctx, what, pop.ErrAway)
	}
	bounded, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	done, err := s.enter(bounded, key)
	if err != nil {
		return nil, s.explain(ctx, what, err)
	}
	defer done()
	var l *lease
	err = s.inEpoch(bounded, func(ctx context.Context, epoch string) error {
		sent := time.Now()
		token, held, err := s.server.Acquire(ctx, epoch, s.nextSeq(), key, above)
		if err != nil {
			return err
		}
		if held != nil {
			return &pop.HeldError{Key: key, Holder: held.Holder, Token: held.Token}
		}
		l = s.adopt(key, token, epoch, sent)
		return nil
	})
	if err != nil {
		return nil, s.explain(ctx, what, err)
	}
	return l, nil
}

// enter lets one Acquire of a key through at a time; the others wait for it.
func (s *Session) enter(ctx context.Context, key string) (done func(), err error) {
	for {
		s.mu.Lock()
		if l := s.leases[key]; l != nil {
			s.mu.Unlock()
			return nil, &pop.HeldError{Key: key, Holder: s.self(), Token: l.token}
		}
		other := s.acquiring[key]
		if other == nil {
			mine := make(chan struct{})
			s.acquiring[key] = mine
			s.mu.Unlock()
			return func() { s.leave(key, mine) }, nil
		}
		s.mu.Unlock()
		select {
		case <-other:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

func (s *Session) leave(key string, mine chan struct{}) {
	s.mu.Lock()
	delete(s.acquiring, key)
	s.mu.Unlock()
	close(mine)
}

func (s *Session) self() pop.Member {
	if s.member != nil {
		return *s.member
	}
	return pop.Member{Node: s.cfg.Node}
}

func (s *Session) adopt(key string, token uint64, epoch string, sent time.Time) *lease {
	l := &lease{s: s, key: key, token: token, epoch: epoch, lost: make(chan struct{})}
	s.mu.Lock()
	s.top = max(s.top, token)
	l.timer = time.AfterFunc(time.Until(sent.Add(s.patience())), l.lose)
	s.leases[key] = l
	closed := s.closed
	s.mu.Unlock()
	if closed {
		l.lose()
	}
	return l
}

func (s *Session) Break(ctx context.Context, key string, token uint64) error {
	return s.do(ctx, "break "+key, func(ctx context.Context, epoch string) error {
		return s.server.Release(ctx, epoch, key, token)
	})
}

func (s *Session) Holder(ctx context.Context, key string) (h pop.Holding, held bool, err error) {
	err = s.do(ctx, "holder of "+key, func(ctx context.Context, epoch string) error {
		found, err := s.server.Holder(ctx, epoch, key)
		if found != nil {
			h, held = *found, true
		}
		return err
	})
	return h, held, err
}
