// Package poptest is the contract of a pop.Coordinator, as tests, and a wrapper that
// makes one fail on command.
package poptest

import (
	"context"
	"errors"
	"testing"
	"time"

	"dewpoint/internal/pop"
	"dewpoint/testkit"
)

// A Bed is the coordinator of one PoP, and the means to hurt it.
type Bed interface {
	// Join is a new session of the node, with the bed's TTL. The test closes it, or the bed does in the end.
	Join(t testing.TB, node string) pop.Coordinator
	// Cut keeps the node from reaching the coordinator, or lets it again.
	Cut(t testing.TB, node string, cut bool)
	// Disconnect breaks all connections once.
	Disconnect(t testing.TB)
	// Forget makes the coordinator lose its memory while it runs.
	Forget(t testing.TB)
	// Restart ends it without warning, and starts it empty.
	Restart(t testing.TB)
	// Pause makes it answer nobody, or lets it go on.
	Pause(t testing.TB, pause bool)
}

// TTL is a lease period that makes tests short.
const TTL = 1500 * time.Millisecond

// Run runs the contract, each part on a bed of its own.
func Run(t *testing.T, bed func(t *testing.T) Bed) {
	parts := []struct {
		name string
		test func(*testing.T, Bed)
	}{
		{"a lease has one holder", oneHolder},
		{"many want one lease", manyWant},
		{"a lease is renewed", renewed},
		{"a killed holder", killedHolder},
		{"a holder that comes back late", lateHolder},
		{"a node takes over from its earlier self", earlierSelf},
		{"tokens grow when memory is lost", tokensGrow},
		{"leases survive lost memory", leasesSurvive},
		{"a broken lease", brokenLease},
		{"a lease taken while its holder was cut off", takenWhileCut},
		{"references", references},
		{"references of a dead node", deadReferences},
		{"references survive lost memory", referencesSurvive},
		{"references changed while away", changedWhileAway},
		{"settled", settled},
		{"events", events},
		{"events after a disconnect", eventsAfterDisconnect},
		{"events for a slow reader", slowReader},
		{"members", members},
		{"two machines with one name", twins},
		{"touches", touches},
		{"policy", policy},
		{"away and back", awayAndBack},
		{"an acquisition that happened late", lateAcquisition},
		{"cancelled", cancelled},
		{"closed", closed},
		{"restarted empty", restarted},
	}
	for _, p := range parts {
		t.Run(p.name, func(t *testing.T) {
			t.Parallel()
			p.test(t, bed(t))
		})
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// acquire takes a lease that is free, waiting while the coordinator is away.
func acquire(t *testing.T, c pop.Coordinator, key string, above uint64) pop.Lease {
	t.Helper()
	var l pop.Lease
	testkit.Eventually(t, "acquire "+key, func() bool {
		var err error
		l, err = c.Acquire(t.Context(), key, above)
		if err != nil && !errors.Is(err, pop.ErrAway) {
			t.Fatal(err)
		}
		return err == nil
	})
	return l
}

// await takes a lease as soon as it is free.
func await(t *testing.T, c pop.Coordinator, key string) pop.Lease {
	t.Helper()
	var l pop.Lease
	testkit.Eventually(t, "acquire "+key, func() bool {
		var err error
		l, err = c.Acquire(t.Context(), key, 0)
		return err == nil
	})
	return l
}

func refused(t *testing.T, c pop.Coordinator, key string) *pop.HeldError {
	t.Helper()
	_, err := c.Acquire(t.Context(), key, 0)
	var held *pop.HeldError
	if !errors.As(err, &held) {
		t.Fatalf("acquire %s: %v, not held", key, err)
	}
	return held
}

func isLost(l pop.Lease) bool {
	select {
	case <-l.Lost():
		return true
	default:
		return false
	}
}

func lost(t *testing.T, l pop.Lease) {
	t.Helper()
	testkit.Receive(t, "the lease of "+l.Key()+" is lost", l.Lost())
}

func next(t *testing.T, ch <-chan pop.Event) pop.Event {
	t.Helper()
	select {
	case e, ok := <-ch:
		if !ok {
			t.Fatal("no more events")
		}
		return e
	case <-time.After(testkit.Limit):
		t.Fatal("no event")
	}
	return pop.Event{}
}

// until reads events until one of the kind.
func until(t *testing.T, ch <-chan pop.Event, kind string) {
	t.Helper()
	for next(t, ch).Kind != kind {
	}
}

func usedBy(t *testing.T, c pop.Coordinator, key string, nodes ...string) bool {
	t.Helper()
	users, err := c.Users(t.Context(), key)
	if errors.Is(err, pop.ErrAway) {
		return false
	}
	must(t, err)
	got := users[key]
	if len(got) != len(nodes) {
		return false
	}
	for i := range nodes {
		if got[i] != nodes[i] {
			return false
		}
	}
	return true
}

func away(t *testing.T, what string, err error) {
	t.Helper()
	if !errors.Is(err, pop.ErrAway) {
		t.Errorf("%s: %v, not away", what, err)
	}
}

// use makes the node use keys, again while the coordinator is away.
func use(t *testing.T, c pop.Coordinator, keys ...string) {
	t.Helper()
	testkit.Eventually(t, "use", func() bool { return c.Use(t.Context(), keys...) == nil })
}

func subscribe(t *testing.T, c pop.Coordinator) (<-chan pop.Event, context.CancelFunc) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ch, err := c.Subscribe(ctx)
	must(t, err)
	return ch, cancel
}
