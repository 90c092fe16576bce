package local

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"dewpoint/internal/pop"
	"dewpoint/internal/pop/session"
	"dewpoint/testkit/poptest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type bed struct{ hub *Hub }

func (b bed) Join(t testing.TB, node string) pop.Coordinator {
	c, err := b.hub.Join(pop.Config{Node: node, TTL: poptest.TTL})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func (b bed) Cut(_ testing.TB, node string, cut bool) { b.hub.Cut(node, cut) }
func (b bed) Disconnect(testing.TB)                   { b.hub.Disconnect() }
func (b bed) Forget(testing.TB)                       { b.hub.Forget() }

func (b bed) Restart(testing.TB) {
	b.hub.Forget()
	b.hub.Disconnect()
}

func (b bed) Pause(_ testing.TB, pause bool) {
	for _, node := range []string{"a", "b", "c"} {
		b.hub.Cut(node, pause)
	}
}

func TestContract(t *testing.T) {
	poptest.Run(t, func(*testing.T) poptest.Bed { return bed{NewHub()} })
}

func TestConfig(t *testing.T) {
	if _, err := New(pop.Config{}); err == nil {
		t.Error("a node without a name")
	}
	if _, err := New(pop.Config{Node: "a", TTL: 1}); err == nil {
		t.Error("a lease period of a nanosecond")
	}
}

func join(t *testing.T, hub *Hub, fault func(op, key string) poptest.Fault) pop.Coordinator {
	t.Helper()
	cfg, err := session.Defaults(pop.Config{Node: "a"})
	if err != nil {
		t.Fatal(err)
	}
	return session.New(cfg, &poptest.Faulty{Server: hub.Line(cfg), Fault: fault})
}

// In virtual time: a lease whose answer was lost expires, unless its node asks again.
func TestAcquiredButNotTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hub := NewHub()
		var fault atomic.Int32
		a := join(t, hub, func(op, _ string) poptest.Fault {
			if op == "acquire" {
				return poptest.Fault(fault.Load())
			}
			return poptest.None
		})
		b, err := hub.Join(pop.Config{Node: "b"})
		if err != nil {
			t.Fatal(err)
		}
		defer a.Close()
		defer b.Close()
		for _, c := range []struct {
			fault poptest.Fault
			taken bool
		}{{poptest.Before, false}, {poptest.After, true}, {poptest.Silent, false}} {
			key := fmt.Sprint(c.fault)
			fault.Store(int32(c.fault))
			if _, err := a.Acquire(t.Context(), key, 0); !errors.Is(err, pop.ErrAway) {
				t.Fatalf("fault %d: %v", c.fault, err)
			}
			if _, held, err := b.Holder(t.Context(), key); err != nil || held != c.taken {
				t.Errorf("fault %d: held %v, %v", c.fault, held, err)
			}
			fault.Store(int32(poptest.None))
			time.Sleep(16 * time.Second)
			if l, err := b.Acquire(t.Context(), key, 0); err != nil {
				t.Errorf("fault %d: after a lease period: %v", c.fault, err)
			} else if err := l.Release(t.Context()); err != nil {
				t.Error(err)
			}
		}
	})
}

// In virtual time, to the instant: beats fail from one moment on.
func TestLostBeforeItIsFree(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hub := NewHub()
		var dead atomic.Bool
		a := join(t, hub, func(op, _ string) poptest.Fault {
			if op == "beat" && dead.Load() {
				return poptest.Silent
			}
			return poptest.None
		})
		b, err := hub.Join(pop.Config{Node: "b"})
		if err != nil {
			t.Fatal(err)
		}
		defer a.Close()
		defer b.Close()
		l, err := a.Acquire(t.Context(), "k", 0)
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Hour)
		start := time.Now()
		dead.Store(true)
		<-l.Lost()
		if d := time.Since(start); d > 9*time.Second {
			t.Errorf("lost after %v", d)
		}
		if _, held, err := b.Holder(t.Context(), "k"); err != nil || !held {
			t.Errorf("the lease is free when its holder learns that it is lost: %v", err)
		}
		time.Sleep(15*time.Second - time.Since(start))
		if _, err := b.Acquire(t.Context(), "k", 0); err != nil {
			t.Errorf("after a lease period: %v", err)
		}
	})
}

func TestServer(t *testing.T) {
	poptest.RunServer(t, NewHub().Line(pop.Config{Node: "a", TTL: time.Hour}))
}

// The server took the session for dead while events came all the time.
func TestTakenForDead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hub := NewHub()
		var dead atomic.Bool
		a := join(t, hub, func(op, _ string) poptest.Fault {
			if op == "beat" && dead.Load() {
				return poptest.Silent
			}
			return poptest.None
		})
		b, err := hub.Join(pop.Config{Node: "b"})
		if err != nil {
			t.Fatal(err)
		}
		defer a.Close()
		defer b.Close()
		if err := a.Use(t.Context(), "x"); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		ch, err := a.Subscribe(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if e := <-ch; e.Kind != pop.Resync {
			t.Errorf("first %+v", e)
		}
		users := func() int {
			users, err := b.Users(t.Context(), "x")
			if err != nil {
				t.Error(err)
			}
			return len(users)
		}
		time.Sleep(time.Minute)
		select {
		case e := <-ch:
			t.Errorf("%+v, though nothing happened", e)
		default:
		}
		dead.Store(true)
		time.Sleep(16 * time.Second)
		if users() != 0 {
			t.Error("the references of a dead node are there after a lease period")
		}
		dead.Store(false)
		select {
		case e := <-ch:
			if e.Kind != pop.Resync {
				t.Errorf("then %+v", e)
			}
		case <-time.After(time.Hour):
			t.Error("no Resync")
		}
		time.Sleep(time.Second)
		if users() != 1 {
			t.Error("the references are not back")
		}
	})
}
