package poptest

import (
	"context"
	"errors"
	"slices"

	"dewpoint/internal/pop"
	"dewpoint/internal/pop/session"
)

// A Fault is how a step fails.
type Fault int

const (
	None   Fault = iota
	Before       // an error, and nothing happened
	After        // an error, but it happened
	Silent       // no answer until the caller gives up; nothing happened
)

// ErrFault is what a step that is to fail returns; sessions wrap it with pop.ErrAway.
var ErrFault = errors.New("a fault on command")

// Faulty is a server whose steps fail on command. Between a session and its server,
//
//	session.New(cfg, &poptest.Faulty{Server: hub.Line(cfg), Fault: fault})
//
// it makes a coordinator that fails as a real one would: what was acquired by a step that
// failed After stays held until it expires, and beats in the background fail, too.
type Faulty struct {
	session.Server
	// Fault decides on each step: op is the name of the method in lower case, key the
	// key that it is about, or "". It is called by several goroutines at once.
	Fault func(op, key string) Fault
}

var _ session.Server = (*Faulty)(nil)

func (f *Faulty) step(ctx context.Context, op, key string, do func() error) error {
	fault := f.Fault(op, key)
	switch fault {
	case Before:
		return ErrFault
	case Silent:
		<-ctx.Done()
		return ctx.Err()
	}
	err := do()
	if fault == After && err == nil {
		err = ErrFault
	}
	return err
}

// answer is a step with an answer, which is lost if it fails.
func answer[T any](ctx context.Context, f *Faulty, op, key string, do func() (T, error)) (T, error) {
	var v, none T
	err := f.step(ctx, op, key, func() (err error) {
		v, err = do()
		return err
	})
	if err != nil {
		return none, err
	}
	return v, nil
}

func first(keys []string) string {
	if len(keys) == 0 {
		return ""
	}
	return keys[0]
}

func (f *Faulty) Begin(ctx context.Context, floor uint64) (string, error) {
	return answer(ctx, f, "begin", "", func() (string, error) { return f.Server.Begin(ctx, floor) })
}

func (f *Faulty) Beat(ctx context.Context, epoch string, b session.Beat) (session.Pulse, error) {
	return answer(ctx, f, "beat", first(slices.Concat(b.Use, b.Drop)), func() (session.Pulse, error) {
		return f.Server.Beat(ctx, epoch, b)
	})
}

func (f *Faulty) Acquire(ctx context.Context, epoch string, seq uint64, key string,
	above uint64) (token uint64, held *pop.Holding, err error) {
	token, err = answer(ctx, f, "acquire", key, func() (token uint64, err error) {
		token, held, err = f.Server.Acquire(ctx, epoch, seq, key, above)
		return token, err
	})
	if err != nil {
		return 0, nil, err
	}
	return token, held, nil
}

func (f *Faulty) Release(ctx context.Context, epoch, key string, token uint64) error {
	return f.step(ctx, "release", key, func() error { return f.Server.Release(ctx, epoch, key, token) })
}

func (f *Faulty) Holder(ctx context.Context, epoch, key string) (*pop.Holding, error) {
	return answer(ctx, f, "holder", key, func() (*pop.Holding, error) {
		return f.Server.Holder(ctx, epoch, key)
	})
}

func (f *Faulty) Users(ctx context.Context, epoch string, keys []string) (map[string][]string, error) {
	return answer(ctx, f, "users", first(keys), func() (map[string][]string, error) {
		return f.Server.Users(ctx, epoch, keys)
	})
}

func (f *Faulty) Members(ctx context.Context, epoch string) ([]pop.Member, error) {
	return answer(ctx, f, "members", "", func() ([]pop.Member, error) { return f.Server.Members(ctx, epoch) })
}

func (f *Faulty) Settled(ctx context.Context, epoch string) (bool, error) {
	return answer(ctx, f, "settled", "", func() (bool, error) { return f.Server.Settled(ctx, epoch) })
}

func (f *Faulty) Touch(ctx context.Context, epoch string, touches []pop.Touch) error {
	return f.step(ctx, "touch", "", func() error { return f.Server.Touch(ctx, epoch, touches) })
}

func (f *Faulty) Touches(ctx context.Context, epoch, after string, limit int) (touches []pop.Touch,
	position string, err error) {
	touches, err = answer(ctx, f, "touches", "", func() (touches []pop.Touch, err error) {
		touches, position, err = f.Server.Touches(ctx, epoch, after, limit)
		return touches, err
	})
	if err != nil {
		return nil, "", err
	}
	return touches, position, nil
}

func (f *Faulty) SavePolicy(ctx context.Context, epoch string, p pop.PolicyState) error {
	return f.step(ctx, "savepolicy", "", func() error { return f.Server.SavePolicy(ctx, epoch, p) })
}

func (f *Faulty) LoadPolicy(ctx context.Context, epoch string) (pop.PolicyState, error) {
	return answer(ctx, f, "loadpolicy", "", func() (pop.PolicyState, error) {
		return f.Server.LoadPolicy(ctx, epoch)
	})
}

func (f *Faulty) Publish(ctx context.Context, e pop.Event) error {
	return f.step(ctx, "publish", e.Key, func() error { return f.Server.Publish(ctx, e) })
}
