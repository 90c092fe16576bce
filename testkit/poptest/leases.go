package poptest

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"dewpoint/internal/pop"
	"dewpoint/testkit"
)

func oneHolder(t *testing.T, bed Bed) {
	a, b := bed.Join(t, "a"), bed.Join(t, "b")
	must(t, a.Announce(t.Context(), pop.Member{Address: "10.0.0.1:7"}))
	first := acquire(t, a, "k", 0)
	for _, c := range []pop.Coordinator{a, b} {
		held := refused(t, c, "k")
		if held.Holder.Node != "a" || held.Holder.Address != "10.0.0.1:7" || held.Token != first.Token() {
			t.Errorf("held by %+v with %d, not by a with %d", held.Holder, held.Token, first.Token())
		}
	}
	h, held, err := b.Holder(t.Context(), "k")
	must(t, err)
	if !held || h.Holder.Address != "10.0.0.1:7" || h.Token != first.Token() {
		t.Errorf("b sees %+v, %v", h, held)
	}
	acquire(t, b, "other", 0)
	must(t, first.Release(t.Context()))
	if !isLost(first) {
		t.Error("a released lease is not lost")
	}
	if _, held, err = b.Holder(t.Context(), "k"); err != nil || held {
		t.Errorf("after the release: %v, %v", held, err)
	}
	second := acquire(t, b, "k", first.Token()+1000)
	if second.Token() <= first.Token()+1000 {
		t.Errorf("token %d is not above %d", second.Token(), first.Token()+1000)
	}
	must(t, first.Release(t.Context())) // late: not another's
	if held := refused(t, a, "k"); held.Holder.Node != "b" {
		t.Errorf("held by %+v, not by b", held.Holder)
	}
	if _, err := a.Acquire(t.Context(), "huge", 1<<63); err == nil {
		t.Error("a token above 2^63 was given")
	}
}

func manyWant(t *testing.T, bed Bed) {
	nodes := []pop.Coordinator{bed.Join(t, "a"), bed.Join(t, "b"), bed.Join(t, "c")}
	for _, n := range nodes {
		acquire(t, n, "warm", 0).Release(t.Context())
	}
	var last uint64
	for range 20 {
		leases := race(t, nodes, 4)
		if len(leases) != 1 {
			t.Fatalf("%d holders", len(leases))
		}
		if leases[0].Token() <= last {
			t.Fatalf("token %d after %d", leases[0].Token(), last)
		}
		last = leases[0].Token()
		must(t, leases[0].Release(t.Context()))
	}
}

// race is who got the lease when each node asked several times at once.
func race(t *testing.T, nodes []pop.Coordinator, times int) (got []pop.Lease) {
	var mu sync.Mutex
	var wg sync.WaitGroup
	for _, n := range slices.Repeat(nodes, times) {
		wg.Go(func() {
			l, err := n.Acquire(t.Context(), "k", 0)
			var held *pop.HeldError
			if err != nil && !errors.As(err, &held) {
				t.Error(err)
			} else if err == nil {
				mu.Lock()
				got = append(got, l)
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	return got
}

func renewed(t *testing.T, bed Bed) {
	a, b := bed.Join(t, "a"), bed.Join(t, "b")
	l := acquire(t, a, "k", 0)
	for end := time.Now().Add(2 * TTL); time.Now().Before(end); time.Sleep(TTL / 10) {
		if held := refused(t, b, "k"); held.Token != l.Token() {
			t.Fatalf("token %d became %d", l.Token(), held.Token)
		}
	}
	if isLost(l) {
		t.Error("the lease was lost")
	}
}

func killedHolder(t *testing.T, bed Bed) {
	a, b := bed.Join(t, "a"), bed.Join(t, "b")
	first := acquire(t, a, "k", 0)
	refused(t, b, "k")
	bed.Cut(t, "a", true)
	second := await(t, b, "k")
	if !isLost(first) {
		t.Error("the lease was another's before its holder knew")
	}
	if second.Token() <= first.Token() {
		t.Errorf("token %d after %d", second.Token(), first.Token())
	}
}

func brokenLease(t *testing.T, bed Bed) {
	a, b, c := bed.Join(t, "a"), bed.Join(t, "b"), bed.Join(t, "c")
	first := acquire(t, a, "k", 0)
	must(t, b.Break(t.Context(), "k", first.Token()))
	second := acquire(t, b, "k", 0)
	if second.Token() <= first.Token() {
		t.Errorf("token %d after %d", second.Token(), first.Token())
	}
	must(t, c.Break(t.Context(), "k", first.Token())) // who has seen the same, and is late
	if held := refused(t, c, "k"); held.Token != second.Token() {
		t.Errorf("held by %+v", held)
	}
	lost(t, first)
	if isLost(second) {
		t.Error("the second holder has lost it too")
	}
}

func lateHolder(t *testing.T, bed Bed) {
	a, b := bed.Join(t, "a"), bed.Join(t, "b")
	first := acquire(t, a, "k", 0)
	bed.Cut(t, "a", true)
	second := await(t, b, "k")
	bed.Cut(t, "a", false)
	testkit.Eventually(t, "a is back", func() bool { return first.Release(t.Context()) == nil })
	if held := refused(t, a, "k"); held.Token != second.Token() || held.Holder.Node != "b" {
		t.Errorf("held by %+v", held)
	}
	if isLost(second) {
		t.Error("the late holder took the lease away")
	}
}

func earlierSelf(t *testing.T, bed Bed) {
	first := acquire(t, bed.Join(t, "a"), "k", 0)
	second := acquire(t, bed.Join(t, "a"), "k", 0) // the node was started again
	if second.Token() <= first.Token() {
		t.Errorf("token %d after %d", second.Token(), first.Token())
	}
	lost(t, first)
	if isLost(second) {
		t.Error("the earlier self took the lease back")
	}
}

func tokensGrow(t *testing.T, bed Bed) {
	a := bed.Join(t, "a")
	var last uint64
	for i := range 6 {
		l := acquire(t, a, "k", 0)
		if l.Token() <= last {
			t.Errorf("token %d after %d", l.Token(), last)
		}
		last = l.Token()
		must(t, l.Release(t.Context()))
		switch i {
		case 1, 2:
			bed.Forget(t)
		case 3:
			bed.Restart(t)
		case 4: // a node that has seen nothing
			bed.Forget(t)
			a = bed.Join(t, "b")
		}
	}
}

func leasesSurvive(t *testing.T, bed Bed) {
	a, b := bed.Join(t, "a"), bed.Join(t, "b")
	l := acquire(t, a, "k", 0)
	for _, forget := range []func(testing.TB){bed.Forget, bed.Restart} {
		forget(t)
		testkit.Eventually(t, "a holds the lease again", func() bool {
			h, held, err := b.Holder(t.Context(), "k")
			return err == nil && held && h.Holder.Node == "a" && h.Token == l.Token()
		})
		if isLost(l) {
			t.Fatal("the lease was lost")
		}
	}
	other := acquire(t, b, "other", 0)
	if other.Token() <= l.Token() {
		t.Errorf("token %d after %d", other.Token(), l.Token())
	}
}

func takenWhileCut(t *testing.T, bed Bed) {
	a, b := bed.Join(t, "a"), bed.Join(t, "b")
	first := acquire(t, a, "k", 0)
	acquire(t, b, "warm", 0)
	bed.Cut(t, "a", true)
	bed.Forget(t)
	second := acquire(t, b, "k", 0)
	if second.Token() <= first.Token() {
		t.Errorf("token %d after %d", second.Token(), first.Token())
	}
	bed.Cut(t, "a", false)
	lost(t, first)
	if held := refused(t, a, "k"); held.Token != second.Token() {
		t.Errorf("held with %d, not %d", held.Token, second.Token())
	}
}

func awayAndBack(t *testing.T, bed Bed) {
	a := bed.Join(t, "a")
	l := acquire(t, a, "k", 0)
	bed.Pause(t, true)
	ctx := t.Context()
	_, err := a.Acquire(ctx, "other", 0)
	away(t, "acquire", err)
	_, _, err = a.Holder(ctx, "k")
	away(t, "holder", err)
	away(t, "use", a.Use(ctx, "x"))
	_, err = a.Users(ctx, "x")
	away(t, "users", err)
	away(t, "publish", a.Publish(ctx, pop.Event{Kind: pop.Published}))
	away(t, "announce", a.Announce(ctx, pop.Member{}))
	_, err = a.Members(ctx)
	away(t, "members", err)
	away(t, "touch", a.Touch(ctx, pop.Touch{Key: "x"}))
	_, _, err = a.Touches(ctx, "", 1)
	away(t, "touches", err)
	_, err = a.LoadPolicy(ctx)
	away(t, "load", err)
	away(t, "save", a.SavePolicy(ctx, pop.PolicyState{}))
	_, err = a.Settled(ctx)
	away(t, "settled", err)
	lost(t, l)
	bed.Pause(t, false)
	testkit.Eventually(t, "what was used while away is announced", func() bool { return usedBy(t, a, "x", "a") })
	acquire(t, a, "k", l.Token())
}

// lateAcquisition: the server is asked, does not answer in time, and then does as asked.
func lateAcquisition(t *testing.T, bed Bed) {
	a, b := bed.Join(t, "a"), bed.Join(t, "b")
	acquire(t, a, "warm", 0)
	acquire(t, b, "warm b", 0)
	bed.Pause(t, true)
	_, err := a.Acquire(t.Context(), "k", 0)
	away(t, "acquire", err)
	bed.Pause(t, false)
	l := acquire(t, a, "k", 0) // at once: what a does not know of does not keep it off
	must(t, l.Release(t.Context()))
	await(t, b, "k")
}

func cancelled(t *testing.T, bed Bed) {
	a := bed.Join(t, "a")
	acquire(t, a, "warm", 0)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	calls := map[string]func(ctx context.Context) error{
		"acquire":   func(ctx context.Context) error { _, err := a.Acquire(ctx, "k", 0); return err },
		"use":       func(ctx context.Context) error { return a.Use(ctx, "k") },
		"members":   func(ctx context.Context) error { _, err := a.Members(ctx); return err },
		"subscribe": func(ctx context.Context) error { _, err := a.Subscribe(ctx); return err },
	}
	for what, call := range calls {
		if err := call(ctx); !errors.Is(err, context.Canceled) || errors.Is(err, pop.ErrAway) {
			t.Errorf("%s: %v, not cancelled", what, err)
		}
	}
	bed.Pause(t, true)
	for what, call := range calls {
		ctx, cancel := context.WithCancel(t.Context())
		stop := time.AfterFunc(20*time.Millisecond, cancel)
		if err := call(ctx); err == nil && what != "subscribe" {
			t.Errorf("%s: no error", what)
		}
		stop.Stop()
		cancel()
	}
	bed.Pause(t, false)
	testkit.Eventually(t, "k can be acquired", func() bool { _, err := a.Acquire(t.Context(), "k", 0); return err == nil })
}

func closed(t *testing.T, bed Bed) {
	a, b := bed.Join(t, "a"), bed.Join(t, "b")
	l := acquire(t, a, "k", 0)
	use(t, a, "x")
	ch, cancel := subscribe(t, a)
	defer cancel()
	must(t, a.Close())
	must(t, a.Close())
	if !isLost(l) {
		t.Error("the lease is not lost")
	}
	acquire(t, b, "k", 0) // at once
	if !usedBy(t, b, "x", "a") {
		t.Error("references ended with the session: containers may run on")
	}
	for range ch { // ends
	}
	_, err := a.Acquire(t.Context(), "other", 0)
	away(t, "acquire", err)
	away(t, "use", a.Use(t.Context(), "y"))
	_, err = a.Members(t.Context())
	away(t, "members", err)
	_, err = a.Subscribe(t.Context())
	away(t, "subscribe", err)
	testkit.Eventually(t, "references expire", func() bool { return usedBy(t, b, "x") })
}

func restarted(t *testing.T, bed Bed) {
	a, b := bed.Join(t, "a"), bed.Join(t, "b")
	l := acquire(t, a, "k", 0)
	use(t, a, "x", "y")
	must(t, a.Announce(t.Context(), pop.Member{Address: "there"}))
	ch, cancel := subscribe(t, b)
	defer cancel()
	until(t, ch, pop.Resync)
	bed.Restart(t)
	until(t, ch, pop.Resync)
	testkit.Eventually(t, "a's references are back", func() bool { return usedBy(t, b, "x", "a") && usedBy(t, b, "y", "a") })
	testkit.Eventually(t, "a is a member", func() bool {
		all, err := b.Members(t.Context())
		return err == nil && len(all) == 1 && all[0].Address == "there"
	})
	if isLost(l) {
		t.Error("the lease was lost")
	}
}
