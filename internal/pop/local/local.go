// Package local is the coordinator of a PoP within one process: of a single node,
// which needs no Redis, and of many in tests and simulations.
//
// A Hub remembers; each node has a session with it. The hub's clock is the process's
// monotonic one, which a synctest bubble may replace. Forget makes it lose its memory, Cut
// keeps a node from reaching it.
package local

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"sync"
	"time"

	"dewpoint/internal/pop"
	"dewpoint/internal/pop/session"
)

const mostTouches = 65536

var errCut = errors.New("the hub cannot be reached")

// A Hub is what the nodes of a PoP have in common.
type Hub struct {
	mu       sync.Mutex
	epoch    int // 0: nothing is remembered
	epochs   int
	born     time.Time
	token    uint64 // survives lost memory; begins with the time, above those of an earlier process
	leases   map[string]*lease
	sessions map[string]*peer
	touches  []pop.Touch
	dropped  int // touches of this epoch that are not in touches any longer
	policy   *pop.PolicyState
	lines    map[*line]struct{}
	joined   int
}

type lease struct {
	token uint64
	owner string
	node  string
	seq   uint64
	until time.Time
}

type peer struct {
	node   string
	seq    uint64
	member *pop.Member
	refs   map[string]struct{}
	until  time.Time
}

// NewHub is a hub without nodes.
func NewHub() *Hub {
	h := &Hub{token: uint64(time.Now().UnixMicro()), lines: map[*line]struct{}{}}
	h.clearLocked()
	return h
}

// New is the coordinator of a node that is alone.
func New(cfg pop.Config) (*session.Session, error) { return NewHub().Join(cfg) }

// Join is a session of cfg.Node.
func (h *Hub) Join(cfg pop.Config) (*session.Session, error) {
	cfg, err := session.Defaults(cfg)
	if err != nil {
		return nil, err
	}
	return session.New(cfg, h.Line(cfg)), nil
}

// Line is what a session of cfg.Node speaks to the hub by, for who puts something in
// between. All fields of cfg are set (session.Defaults).
func (h *Hub) Line(cfg pop.Config) session.Server {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.joined++
	l := &line{hub: h, cfg: cfg, session: fmt.Sprintf("%s/%d", cfg.Node, h.joined)}
	h.lines[l] = struct{}{}
	return l
}

// Forget makes the hub lose its memory.
func (h *Hub) Forget() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.clearLocked()
}

func (h *Hub) clearLocked() {
	h.epoch, h.policy = 0, nil
	h.leases, h.sessions = map[string]*lease{}, map[string]*peer{}
	h.touches, h.dropped = nil, 0
}

// Cut keeps the node from reaching the hub, or lets it again.
func (h *Hub) Cut(node string, cut bool) {
	h.eachLine(func(l *line) {
		if l.cfg.Node == node {
			l.cut = cut
			if cut {
				l.hangUpLocked()
			}
		}
	})
}

// Disconnect breaks all connections for events; they may be made again at once.
func (h *Hub) Disconnect() { h.eachLine((*line).hangUpLocked) }

func (h *Hub) eachLine(f func(*line)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for l := range h.lines {
		f(l)
	}
}

// leaseLocked is nil if nobody holds it.
func (h *Hub) leaseLocked(key string) *lease {
	if l := h.leases[key]; l != nil && time.Now().Before(l.until) {
		return l
	}
	return nil
}

func (h *Hub) holdingLocked(l *lease) *pop.Holding {
	holder := pop.Member{Node: l.node}
	if p := h.sessions[l.owner]; p != nil && p.member != nil {
		holder = *p.member
	}
	return &pop.Holding{Holder: holder, Token: l.token}
}

func (h *Hub) sweepLocked() {
	now := time.Now()
	for name, p := range h.sessions {
		if !now.Before(p.until) {
			delete(h.sessions, name)
		}
	}
	for key, l := range h.leases {
		if !now.Before(l.until) {
			delete(h.leases, key)
		}
	}
}

// A line implements session.Server. Its fields below cfg are guarded by hub.mu.
type line struct {
	hub     *Hub
	session string
	cfg     pop.Config
	cut     bool
	event   func(pop.Event)
	hangUp  func()
}

var _ session.Server = (*line)(nil)

func (l *line) hangUpLocked() {
	if l.hangUp != nil {
		l.hangUp()
	}
	l.event, l.hangUp = nil, nil
}

// reach locks the hub if it can be reached and the epoch is its.
func (l *line) reach(ctx context.Context, epoch string) (*Hub, error) {
	h, err := l.reachAny(ctx)
	if err == nil && (h.epoch == 0 || epoch != strconv.Itoa(h.epoch)) {
		h.mu.Unlock()
		return nil, session.ErrEpoch
	}
	return h, err
}

func (l *line) reachAny(ctx context.Context) (*Hub, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	l.hub.mu.Lock()
	if l.cut {
		l.hub.mu.Unlock()
		return nil, errCut
	}
	return l.hub, nil
}

func (l *line) Begin(ctx context.Context, floor uint64) (string, error) {
	h, err := l.reachAny(ctx)
	if err != nil {
		return "", err
	}
	defer h.mu.Unlock()
	if h.epoch == 0 {
		h.epochs++
		h.epoch, h.born = h.epochs, time.Now()
		h.token = max(h.token, floor)
	}
	return strconv.Itoa(h.epoch), nil
}

func (l *line) Beat(ctx context.Context, epoch string, b session.Beat) (session.Pulse, error) {
	h, err := l.reach(ctx, epoch)
	if err != nil {
		return session.Pulse{}, err
	}
	defer h.mu.Unlock()
	h.sweepLocked()
	p := h.sessions[l.session]
	if p == nil {
		if !b.Full {
			return session.Pulse{}, session.ErrUnknown
		}
		p = &peer{node: l.cfg.Node, refs: map[string]struct{}{}}
		h.sessions[l.session] = p
	}
	if p.seq >= b.Seq {
		return session.Pulse{}, errors.New("a late beat")
	}
	p.hear(b, time.Now().Add(l.cfg.TTL))
	var pulse session.Pulse
	for _, r := range b.Leases {
		if !l.renewLocked(r, b.Seq) {
			pulse.Lost = append(pulse.Lost, r.Key)
		}
	}
	pulse.Top = h.token
	return pulse, nil
}

func (p *peer) hear(b session.Beat, until time.Time) {
	p.seq, p.until = b.Seq, until
	if b.Member != nil {
		p.member = b.Member
	}
	if b.Full {
		clear(p.refs)
	}
	for _, key := range b.Use {
		p.refs[key] = struct{}{}
	}
	for _, key := range b.Drop {
		delete(p.refs, key)
	}
}

func (l *line) renewLocked(r session.Renewal, seq uint64) bool {
	h, until := l.hub, time.Now().Add(l.cfg.TTL)
	there := h.leaseLocked(r.Key)
	switch {
	case there != nil && there.token == r.Token:
		there.until = until
		return true
	case r.Restore && (there == nil || there.token < r.Token):
		h.leases[r.Key] = &lease{token: r.Token, owner: l.session, node: l.cfg.Node, seq: seq, until: until}
		h.token = max(h.token, r.Token)
		return true
	}
	return false
}

func (l *line) Acquire(ctx context.Context, epoch string, seq uint64, key string, above uint64) (uint64,
	*pop.Holding, error) {
	h, err := l.reach(ctx, epoch)
	if err != nil {
		return 0, nil, err
	}
	defer h.mu.Unlock()
	there := h.leaseLocked(key)
	if there != nil && (there.node != l.cfg.Node || there.owner == l.session && there.seq >= seq) {
		return 0, h.holdingLocked(there), nil
	}
	h.token = max(h.token, above) + 1
	h.leases[key] = &lease{token: h.token, owner: l.session, node: l.cfg.Node, seq: seq,
		until: time.Now().Add(l.cfg.TTL)}
	return h.token, nil, nil
}

func (l *line) Release(ctx context.Context, epoch, key string, token uint64) error {
	h, err := l.reach(ctx, epoch)
	if err != nil {
		return err
	}
	defer h.mu.Unlock()
	if there := h.leases[key]; there != nil && there.token == token {
		delete(h.leases, key)
	}
	return nil
}

func (l *line) Holder(ctx context.Context, epoch, key string) (*pop.Holding, error) {
	h, err := l.reach(ctx, epoch)
	if err != nil {
		return nil, err
	}
	defer h.mu.Unlock()
	if there := h.leaseLocked(key); there != nil {
		return h.holdingLocked(there), nil
	}
	return nil, nil
}

func (l *line) Users(ctx context.Context, epoch string, keys []string) (map[string][]string, error) {
	h, err := l.reach(ctx, epoch)
	if err != nil {
		return nil, err
	}
	defer h.mu.Unlock()
	h.sweepLocked()
	users := map[string][]string{}
	for _, key := range keys {
		for _, p := range h.sessions {
			if _, uses := p.refs[key]; uses && !slices.Contains(users[key], p.node) {
				users[key] = append(users[key], p.node)
			}
		}
		slices.Sort(users[key])
	}
	return users, nil
}

func (l *line) Members(ctx context.Context, epoch string) ([]pop.Member, error) {
	h, err := l.reach(ctx, epoch)
	if err != nil {
		return nil, err
	}
	defer h.mu.Unlock()
	h.sweepLocked()
	names := slices.Sorted(maps.Keys(h.sessions))
	slices.SortStableFunc(names, func(a, b string) int {
		return h.sessions[a].until.Compare(h.sessions[b].until)
	})
	var all []pop.Member
	for _, name := range names {
		if p := h.sessions[name]; p.member != nil {
			all = append(all, *p.member)
		}
	}
	return session.OnePerNode(all), nil
}

func (l *line) Settled(ctx context.Context, epoch string) (bool, error) {
	h, err := l.reach(ctx, epoch)
	if err != nil {
		return false, err
	}
	defer h.mu.Unlock()
	return time.Since(h.born) >= l.cfg.TTL, nil
}
