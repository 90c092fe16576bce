package poptest

import (
	"bytes"
	"errors"
	"fmt"
	"testing"

	"dewpoint/internal/pop"
	"dewpoint/testkit"
)

func references(t *testing.T, bed Bed) {
	a, b := bed.Join(t, "a"), bed.Join(t, "b")
	use(t, a, "x", "y")
	use(t, a, "x") // a set
	use(t, b, "y", "z")
	users, err := a.Users(t.Context(), "x", "y", "z", "nobody's")
	must(t, err)
	if got, want := fmt.Sprint(users), "map[x:[a] y:[a b] z:[b]]"; got != want {
		t.Errorf("users are %s, not %s", got, want)
	}
	must(t, a.Drop(t.Context(), "x", "never used"))
	must(t, b.Drop(t.Context(), "y"))
	if !usedBy(t, b, "x") || !usedBy(t, b, "y", "a") {
		t.Error("dropped keys are used")
	}
	must(t, a.Use(t.Context()))
	many := make([]string, 2500)
	for i := range many {
		many[i] = fmt.Sprint("many", i)
	}
	use(t, b, many...)
	users, err = a.Users(t.Context(), many...)
	must(t, err)
	if len(users) != len(many) {
		t.Errorf("%d keys used, not %d", len(users), len(many))
	}
}

func deadReferences(t *testing.T, bed Bed) {
	a, b := bed.Join(t, "a"), bed.Join(t, "b")
	use(t, a, "x")
	use(t, b, "x")
	ch, cancel := subscribe(t, a)
	defer cancel()
	until(t, ch, pop.Resync)
	bed.Cut(t, "a", true)
	testkit.Eventually(t, "a's references expire", func() bool { return usedBy(t, b, "x", "b") })
	bed.Cut(t, "a", false)
	testkit.Eventually(t, "a's references are back", func() bool { return usedBy(t, b, "x", "a", "b") })
	until(t, ch, pop.Resync) // what a knew may have been evicted
}

func referencesSurvive(t *testing.T, bed Bed) {
	a, b := bed.Join(t, "a"), bed.Join(t, "b")
	use(t, a, "x", "y")
	must(t, a.Drop(t.Context(), "y"))
	bed.Forget(t)
	testkit.Eventually(t, "a's references are back", func() bool { return usedBy(t, b, "x", "a") })
	if !usedBy(t, b, "y") {
		t.Error("y came back")
	}
	use(t, a, "z")
	if !usedBy(t, b, "z", "a") {
		t.Error("z is not used")
	}
}

func changedWhileAway(t *testing.T, bed Bed) {
	a, b := bed.Join(t, "a"), bed.Join(t, "b")
	use(t, a, "x", "y")
	bed.Cut(t, "a", true)
	away(t, "use", a.Use(t.Context(), "new", "short"))
	away(t, "drop", a.Drop(t.Context(), "x", "short"))
	bed.Cut(t, "a", false)
	testkit.Eventually(t, "a's changes are known", func() bool { return usedBy(t, b, "new", "a") && usedBy(t, b, "x") })
	if !usedBy(t, b, "y", "a") || !usedBy(t, b, "short") {
		t.Error("not what a uses")
	}
}

func settled(t *testing.T, bed Bed) {
	a, b := bed.Join(t, "a"), bed.Join(t, "b")
	use(t, a, "x")
	for _, forget := range []func(testing.TB){func(testing.TB) {}, bed.Forget, bed.Restart} {
		forget(t)
		ok := false
		testkit.Eventually(t, "the coordinator is back", func() (back bool) {
			var err error
			ok, err = b.Settled(t.Context())
			return err == nil
		})
		if ok {
			t.Error("a new epoch was settled")
		}
		testkit.Eventually(t, "the epoch settles", func() bool { ok, err := b.Settled(t.Context()); return err == nil && ok })
		if !usedBy(t, b, "x", "a") {
			t.Error("the epoch settled without the references of a living node")
		}
	}
}

func events(t *testing.T, bed Bed) {
	a, b := bed.Join(t, "a"), bed.Join(t, "b")
	ofA, cancelA := subscribe(t, a)
	ofB, cancelB := subscribe(t, b)
	defer cancelB()
	for _, ch := range []<-chan pop.Event{ofA, ofB} {
		if e := next(t, ch); e.Kind != pop.Resync {
			t.Errorf("the first event is %+v", e)
		}
	}
	acquire(t, a, "settle down", 0) // so that the epoch is known: a new one is a Resync
	drain(ofA)
	drain(ofB)
	for i := range 20 {
		must(t, a.Publish(t.Context(), pop.Event{Kind: pop.Published, Key: fmt.Sprint(i), Token: uint64(i)}))
	}
	for _, ch := range []<-chan pop.Event{ofA, ofB} {
		for i := range 20 {
			e := next(t, ch)
			for e.Kind == pop.Resync && i == 0 {
				e = next(t, ch)
			}
			if want := (pop.Event{Kind: pop.Published, Key: fmt.Sprint(i), Node: "a", Token: uint64(i)}); e != want {
				t.Fatalf("event %d is %+v", i, e)
			}
		}
	}
	cancelA()
	for range ofA { // ends
	}
	must(t, a.Publish(t.Context(), pop.Event{Kind: pop.Evicted, Key: "k"}))
	until(t, ofB, pop.Evicted)
}

// drain takes what is there already.
func drain(ch <-chan pop.Event) {
	for {
		select {
		case <-ch:
		default:
			return
		}
	}
}

func eventsAfterDisconnect(t *testing.T, bed Bed) {
	a, b := bed.Join(t, "a"), bed.Join(t, "b")
	ch, cancel := subscribe(t, b)
	defer cancel()
	until(t, ch, pop.Resync)
	// What is published after the last Resync comes.
	heard := func(what string) {
		t.Helper()
		for resync := false; ; {
			e := next(t, ch)
			if resync && e.Key == what {
				return
			}
			if e.Kind == pop.Resync {
				resync = true
				testkit.Eventually(t, what, func() bool {
					return a.Publish(t.Context(), pop.Event{Kind: pop.Evicted, Key: what}) == nil
				})
			}
		}
	}
	acquire(t, b, "settle down", 0) // so that the epoch is known: a new one is a Resync
	drain(ch)
	bed.Disconnect(t)
	heard("publish after a disconnect")
	bed.Forget(t)
	must(t, b.Use(t.Context(), "k")) // b notices the new epoch
	heard("publish in a new epoch")
	bed.Cut(t, "b", true)
	testkit.Eventually(t, "b is cut off", func() bool { return errors.Is(b.Touch(t.Context(), pop.Touch{}), pop.ErrAway) })
	must(t, a.Publish(t.Context(), pop.Event{Kind: pop.Published})) // missed, or not
	bed.Cut(t, "b", false)
	heard("publish after a partition")
	late, stop := subscribe(t, b)
	defer stop()
	until(t, late, pop.Resync)
}

func slowReader(t *testing.T, bed Bed) {
	a := bed.Join(t, "a")
	ch, cancel := subscribe(t, a)
	defer cancel()
	until(t, ch, pop.Resync)
	const n = 1000
	for i := range n {
		must(t, a.Publish(t.Context(), pop.Event{Kind: pop.Published, Token: uint64(i)}))
	}
	must(t, a.Publish(t.Context(), pop.Event{Kind: pop.Evicted}))
	missed, got := false, 0
	for e := next(t, ch); e.Kind != pop.Evicted; e = next(t, ch) {
		if e.Kind == pop.Resync {
			missed = true
		} else {
			got++
		}
	}
	if got < n && !missed {
		t.Errorf("%d of %d events came, without a Resync", got, n)
	}
	if got == n {
		t.Error("a reader that does not read misses nothing: the queue has no bound")
	}
}

func members(t *testing.T, bed Bed) {
	a, b := bed.Join(t, "a"), bed.Join(t, "b")
	m := pop.Member{Address: "10.0.0.2:1", Capacity: 1 << 40, Used: 3,
		Hits:     pop.Hits{Local: 4, RegistryBytes: 5},
		Fetching: []pop.Fetch{{Key: "k", Done: 1, Size: 2}}}
	testkit.Eventually(t, "b is announced", func() bool { return b.Announce(t.Context(), m) == nil })
	use(t, a, "x")
	all, err := a.Members(t.Context())
	must(t, err)
	m.Node = "b"
	if len(all) != 1 || fmt.Sprint(all[0]) != fmt.Sprint(m) {
		t.Errorf("members are %+v", all)
	}
	must(t, a.Announce(t.Context(), pop.Member{Used: 1}))
	must(t, a.Announce(t.Context(), pop.Member{Used: 2}))
	all, err = b.Members(t.Context())
	must(t, err)
	if len(all) != 2 || all[0].Node != "a" || all[0].Used != 2 {
		t.Errorf("members are %+v", all)
	}
	names := func(want string) func() bool {
		return func() bool {
			all, err := a.Members(t.Context())
			got := ""
			for _, m := range all {
				got += m.Node
			}
			return err == nil && got == want
		}
	}
	bed.Cut(t, "b", true)
	testkit.Eventually(t, "b is no member", names("a"))
	bed.Cut(t, "b", false)
	testkit.Eventually(t, "b is a member again", names("ab"))
	bed.Forget(t)
	testkit.Eventually(t, "both are members of the new epoch", names("ab"))
}

// twins: two machines with one name are told of; one that was started anew is not.
func twins(t *testing.T, bed Bed) {
	twin := func(c pop.Coordinator) string {
		all, err := c.Members(t.Context())
		must(t, err)
		if len(all) != 1 || all[0].Node != "a" {
			t.Fatalf("members are %+v", all)
		}
		return all[0].Address + " " + all[0].Twin
	}
	a := bed.Join(t, "a")
	testkit.Eventually(t, "a is announced", func() bool {
		return a.Announce(t.Context(), pop.Member{Address: "10.0.0.1:1"}) == nil
	})
	again := bed.Join(t, "a")
	must(t, again.Announce(t.Context(), pop.Member{Address: "10.0.0.1:1"}))
	if got := twin(again); got != "10.0.0.1:1 " {
		t.Errorf("a and its twin are at %q", got)
	}
	must(t, a.Announce(t.Context(), pop.Member{Address: "10.0.0.2:1"}))
	testkit.Eventually(t, "both are known", func() bool {
		got := twin(again)
		return got == "10.0.0.2:1 10.0.0.1:1" || got == "10.0.0.1:1 10.0.0.2:1"
	})
	must(t, a.Close())
	testkit.Eventually(t, "the other one is gone", func() bool { return twin(again) == "10.0.0.1:1 " })
}

func touches(t *testing.T, bed Bed) {
	a, b := bed.Join(t, "a"), bed.Join(t, "b")
	acquire(t, a, "warm", 0)
	none, at, err := a.Touches(t.Context(), "", 10)
	must(t, err)
	if len(none) != 0 || at != "" {
		t.Errorf("%d touches until %q", len(none), at)
	}
	first := pop.Touch{Key: "k0", Size: 1 << 40, Cost: 0.25, Image: "i", Namespace: "n"}
	must(t, a.Touch(t.Context(), first, pop.Touch{Key: "k1"}))
	must(t, b.Touch(t.Context(), pop.Touch{Key: "k2"}))
	got, at, err := b.Touches(t.Context(), "", 2)
	must(t, err)
	first.Node = "a"
	if len(got) != 2 || got[0] != first || got[1].Key != "k1" {
		t.Errorf("touches are %+v", got)
	}
	more, end, err := b.Touches(t.Context(), at, 100)
	must(t, err)
	if len(more) != 1 || more[0].Key != "k2" || more[0].Node != "b" {
		t.Errorf("then %+v", more)
	}
	if rest, still, err := a.Touches(t.Context(), end, 1); err != nil || len(rest) != 0 || still != end {
		t.Errorf("after the end: %v until %q, %v", rest, still, err)
	}
	bed.Forget(t)
	must(t, b.Touch(t.Context(), pop.Touch{Key: "new"}))
	again, _, err := a.Touches(t.Context(), end, 100)
	must(t, err)
	if len(again) != 1 || again[0].Key != "new" {
		t.Errorf("in a new epoch: %+v", again)
	}
}

func policy(t *testing.T, bed Bed) {
	a, b := bed.Join(t, "a"), bed.Join(t, "b")
	acquire(t, a, "warm", 0)
	if p, err := a.LoadPolicy(t.Context()); err != nil || p.Data != nil || p.Token != 0 || p.Position != "" {
		t.Errorf("before any: %+v, %v", p, err)
	}
	must(t, a.Touch(t.Context(), pop.Touch{Key: "k0"}, pop.Touch{Key: "k1"}, pop.Touch{Key: "k2"}))
	_, at, err := a.Touches(t.Context(), "", 2)
	must(t, err)
	data := []byte("\x00\xff\r\nany bytes")
	must(t, a.SavePolicy(t.Context(), pop.PolicyState{Data: data, Position: at, Token: 7}))
	p, err := b.LoadPolicy(t.Context())
	must(t, err)
	if !bytes.Equal(p.Data, data) || p.Position != at || p.Token != 7 {
		t.Errorf("loaded %+v", p)
	}
	rest, _, err := b.Touches(t.Context(), p.Position, 10)
	must(t, err)
	if len(rest) != 1 || rest[0].Key != "k2" {
		t.Errorf("then %+v", rest)
	}
	if all, _, err := b.Touches(t.Context(), "", 10); err != nil || len(all) > 2 {
		t.Errorf("touches that nobody needs are kept: %+v, %v", all, err)
	}
	if err := b.SavePolicy(t.Context(), pop.PolicyState{Token: 6}); !errors.Is(err, pop.ErrFenced) ||
		errors.Is(err, pop.ErrAway) {
		t.Errorf("saved with a smaller token: %v", err)
	}
	must(t, b.SavePolicy(t.Context(), pop.PolicyState{Token: 8, Data: []byte("b")}))
	if p, err := a.LoadPolicy(t.Context()); err != nil || string(p.Data) != "b" {
		t.Errorf("loaded %+v, %v", p, err)
	}
}
