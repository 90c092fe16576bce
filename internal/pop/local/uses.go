package local

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"dewpoint/internal/pop"
)

func (l *line) Touch(ctx context.Context, epoch string, touches []pop.Touch) error {
	h, err := l.reach(ctx, epoch)
	if err != nil {
		return err
	}
	defer h.mu.Unlock()
	h.touches = append(h.touches, touches...)
	if over := len(h.touches) - mostTouches; over > 0 {
		h.dropLocked(over)
	}
	return nil
}

func (h *Hub) dropLocked(n int) {
	h.touches = slices.Delete(h.touches, 0, n)
	h.dropped += n
}

// aheadLocked is how many of h.touches the position lies behind.
func (h *Hub) aheadLocked(position string) int {
	of, count, _ := strings.Cut(position, "/")
	n := 0
	if of == fmt.Sprint(h.epoch) {
		fmt.Sscan(count, &n)
	}
	return min(max(n-h.dropped, 0), len(h.touches))
}

func (l *line) Touches(ctx context.Context, epoch, after string, limit int) ([]pop.Touch, string, error) {
	h, err := l.reach(ctx, epoch)
	if err != nil {
		return nil, "", err
	}
	defer h.mu.Unlock()
	from := h.aheadLocked(after)
	to := min(from+max(limit, 0), len(h.touches))
	if from == to {
		return nil, after, nil
	}
	return slices.Clone(h.touches[from:to]), fmt.Sprintf("%d/%d", h.epoch, h.dropped+to), nil
}

func (l *line) SavePolicy(ctx context.Context, epoch string, p pop.PolicyState) error {
	h, err := l.reach(ctx, epoch)
	if err != nil {
		return err
	}
	defer h.mu.Unlock()
	if h.policy != nil && h.policy.Token > p.Token {
		return pop.ErrFenced
	}
	p.Data = slices.Clone(p.Data)
	h.policy = &p
	h.dropLocked(h.aheadLocked(p.Position))
	return nil
}

func (l *line) LoadPolicy(ctx context.Context, epoch string) (pop.PolicyState, error) {
	h, err := l.reach(ctx, epoch)
	if err != nil {
		return pop.PolicyState{}, err
	}
	defer h.mu.Unlock()
	if h.policy == nil {
		return pop.PolicyState{}, nil
	}
	p := *h.policy
	p.Data = slices.Clone(p.Data)
	return p, nil
}

// Publish gives the event to all lines that listen, in the order of the lock.
func (l *line) Publish(ctx context.Context, e pop.Event) error {
	h, err := l.reachAny(ctx)
	if err != nil {
		return err
	}
	defer h.mu.Unlock()
	for other := range h.lines {
		if other.event != nil {
			other.event(e)
		}
	}
	return nil
}

func (l *line) Listen(ctx context.Context, connected func(), event func(pop.Event)) error {
	gone := make(chan struct{})
	h, err := l.reachAny(ctx)
	if err != nil {
		return err
	}
	l.event, l.hangUp = event, func() { close(gone) }
	connected()
	h.mu.Unlock()
	select {
	case <-gone:
		return errors.New("hung up")
	case <-ctx.Done():
		h.mu.Lock()
		defer h.mu.Unlock()
		if l.hangUp != nil {
			l.event, l.hangUp = nil, nil
		}
		return ctx.Err()
	}
}

func (l *line) Close() error {
	l.hub.mu.Lock()
	defer l.hub.mu.Unlock()
	delete(l.hub.lines, l)
	return nil
}
