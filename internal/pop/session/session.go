// Package session is the half of a coordinator that runs in each node: it knows
// what the node holds, uses and says of itself, and keeps the other half, a Server
// that remembers for all nodes, told.
//
// A session sends a beat every fifth of the lease period. A beat carries the node's
// description, all its leases and what has changed in its references, so one
// step either keeps all of it alive or none. Use, Drop and Announce are a change of
// what the session has to say, followed by a beat; when that fails, the next
// beat that goes through says it.
//
// Every step names the epoch that the session believes in. When the server has
// lost its memory the step is refused, the session learns of the new epoch and says
// everything again: all references and the leases that it still counts on, under
// their tokens. The same happens, without a new epoch, when the server took the session for dead.
//
// A lease is lost three fifths of the period after the last beat that renewed it was sent,
// by this node's monotonic clock. The server frees it no earlier than four fifths
// after that beat arrived, so the holder knows first. That clock stands still while
// the whole machine is suspended: then only the token tells.
//
// Steps that the session gave up on may happen late, when a stopped server goes on. Beats and
// acquisitions are therefore numbered, and late ones do nothing or leave a lease
// that this node may take over and that otherwise expires.
package session

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"dewpoint/internal/pop"
)

// A Session is a pop.Coordinator.
type Session struct {
	cfg    pop.Config
	server Server
	ctx    context.Context // of the background work
	cancel context.CancelFunc
	wg     sync.WaitGroup
	turn   chan struct{} // held by who sends a beat
	kick   chan struct{} // asks for a beat now
	board  board

	mu        sync.Mutex
	closed    bool
	epoch     string // "": not known
	seq       uint64
	top       uint64 // the greatest token seen
	member    *pop.Member
	leases    map[string]*lease
	acquiring map[string]chan struct{}
	refs      references
	known     bool // a beat of this epoch was heard
	away      bool // the last beat failed
}

var _ pop.Coordinator = (*Session)(nil)

// Defaults fills in the zero fields of cfg.
func Defaults(cfg pop.Config) (pop.Config, error) {
	if cfg.Node == "" {
		return cfg, errors.New("a coordinator needs the node's name")
	}
	if cfg.TTL == 0 {
		cfg.TTL = 15 * time.Second
	}
	if cfg.TTL < 100*time.Millisecond {
		return cfg, fmt.Errorf("a lease period of %v is too short", cfg.TTL)
	}
	if cfg.Timeout == 0 {
		cfg.Timeout = min(2*time.Second, cfg.TTL/5)
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	return cfg, nil
}

// New starts a session of cfg.Node, whose fields are all set (Defaults). It owns
// the server. It is there at once; whether the server is, calls tell.
func New(cfg pop.Config, server Server) *Session {
	ctx, cancel := context.WithCancel(context.Background())
	s := &Session{
		cfg: cfg, server: server, ctx: ctx, cancel: cancel,
		turn: make(chan struct{}, 1), kick: make(chan struct{}, 1),
		leases:    map[string]*lease{},
		acquiring: map[string]chan struct{}{},
		refs:      newReferences(),
		board:     board{boxes: map[*box]struct{}{}},
	}
	s.wg.Go(s.beats)
	s.wg.Go(s.listen)
	return s
}

func (s *Session) Close() error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil
	}
	s.closed = true
	held := make([]*lease, 0, len(s.leases))
	for _, l := range s.leases {
		held = append(held, l)
	}
	s.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), s.cfg.Timeout)
	defer cancel()
	for _, l := range held {
		l.lose()
		if ctx.Err() == nil {
			_ = s.release(ctx, l)
		}
	}
	s.cancel()
	s.wg.Wait()
	return s.server.Close()
}

// do runs a step in the current epoch, again if there is a new one or the connection broke.
func (s *Session) do(ctx context.Context, what string,
	step func(ctx context.Context, epoch string) error) error {
	if s.isClosed() {
		return fmt.Errorf("%s: %w: closed", what, pop.ErrAway)
	}
	bounded, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	return s.explain(ctx, what, s.inEpoch(bounded, step))
}

func (s *Session) inEpoch(ctx context.Context, step func(ctx context.Context, epoch string) error) error {
	var err error
	for range 8 { // some for connections of the pool that broke together
		var epoch string
		if epoch, err = s.current(ctx); err == nil {
			err = step(ctx, epoch)
		}
		switch {
		case errors.Is(err, ErrEpoch):
			s.outdated(epoch)
		case !errors.Is(err, ErrBroken):
			return err
		}
	}
	return err
}

// explain makes the error of a step the caller's: its own context's, one that the
// contract names, or ErrAway.
func (s *Session) explain(ctx context.Context, what string, err error) error {
	var held *pop.HeldError
	switch {
	case err == nil || errors.As(err, &held):
		return err
	case ctx.Err() != nil:
		return fmt.Errorf("%s: %w", what, ctx.Err())
	case errors.Is(err, pop.ErrFenced) || errors.Is(err, pop.ErrAway):
		return fmt.Errorf("%s: %w", what, err)
	}
	return fmt.Errorf("%s: %w: %w", what, pop.ErrAway, err)
}

func (s *Session) isClosed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closed
}

// current is the epoch that the session believes in, or else the server's.
func (s *Session) current(ctx context.Context) (string, error) {
	s.mu.Lock()
	epoch, floor := s.epoch, s.top
	s.mu.Unlock()
	if epoch != "" {
		return epoch, nil
	}
	epoch, err := s.server.Begin(ctx, floor)
	if err == nil {
		s.learn(epoch)
	}
	return epoch, err
}

// learn makes epoch the current one: everything is to be said again.
func (s *Session) learn(epoch string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.epoch == epoch {
		return
	}
	s.epoch, s.known = epoch, false
	s.refs.full = true
	s.board.resync()
	select {
	case s.kick <- struct{}{}:
	default:
	}
}

func (s *Session) outdated(epoch string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.epoch == epoch {
		s.epoch = ""
	}
}

func (s *Session) nextSeq() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seq++
	return s.seq
}

func (s *Session) saw(token uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.top = max(s.top, token)
}

func (s *Session) Settled(ctx context.Context) (settled bool, err error) {
	err = s.do(ctx, "settled", func(ctx context.Context, epoch string) (err error) {
		settled, err = s.server.Settled(ctx, epoch)
		return err
	})
	return settled, err
}

func (s *Session) Announce(ctx context.Context, m pop.Member) error {
	m.Node = s.cfg.Node
	m.Fetching = slices.Clone(m.Fetching)
	s.mu.Lock()
	s.member = &m
	s.mu.Unlock()
	return s.beat(ctx, "announce", nil)
}

func (s *Session) Members(ctx context.Context) (all []pop.Member, err error) {
	err = s.do(ctx, "members", func(ctx context.Context, epoch string) (err error) {
		all, err = s.server.Members(ctx, epoch)
		return err
	})
	return all, err
}

func (s *Session) Touch(ctx context.Context, touches ...pop.Touch) error {
	mine := make([]pop.Touch, len(touches))
	for i, t := range touches {
		t.Node = s.cfg.Node
		mine[i] = t
	}
	return s.do(ctx, "touch", func(ctx context.Context, epoch string) error {
		return s.server.Touch(ctx, epoch, mine)
	})
}

func (s *Session) Touches(ctx context.Context, after string, limit int) (touches []pop.Touch, position string,
	err error) {
	err = s.do(ctx, "read touches", func(ctx context.Context, epoch string) (err error) {
		touches, position, err = s.server.Touches(ctx, epoch, after, limit)
		return err
	})
	return touches, position, err
}

func (s *Session) SavePolicy(ctx context.Context, p pop.PolicyState) error {
	return s.do(ctx, "save the policy", func(ctx context.Context, epoch string) error {
		return s.server.SavePolicy(ctx, epoch, p)
	})
}

func (s *Session) LoadPolicy(ctx context.Context) (p pop.PolicyState, err error) {
	err = s.do(ctx, "load the policy", func(ctx context.Context, epoch string) (err error) {
		p, err = s.server.LoadPolicy(ctx, epoch)
		return err
	})
	return p, err
}
