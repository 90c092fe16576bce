package server

import (
	"context"
	"sync"
)

// late is a part that is made after some of those that ask for it: the puller, for instance, serves the
// snapshotter, and asks what it has mounted. It is safe for concurrent use.
type late[T any] struct {
	once  sync.Once
	there chan struct{} // closed when part is set
	part  T
}

func newLate[T any]() *late[T] { return &late[T]{there: make(chan struct{})} }

// set is called once.
func (l *late[T]) set(part T) {
	l.once.Do(func() {
		l.part = part
		close(l.there)
	})
}

// get is the part, and whether it is there.
func (l *late[T]) get() (part T, ok bool) {
	select {
	case <-l.there:
		return l.part, true
	default:
		return part, false
	}
}

// wait returns the part when it is there.
func (l *late[T]) wait(ctx context.Context) (part T, err error) {
	select {
	case <-l.there:
		return l.part, nil
	case <-ctx.Done():
		return part, context.Cause(ctx)
	}
}
