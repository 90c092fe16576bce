package admit

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"dewpoint/internal/spec"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const gib = 1 << 30

// world is a machine whose memory and pressure tests set.
type world struct {
	mu       sync.Mutex
	free     int64
	pressure Pressure
	disk     int64
	told     time.Time // when pressure was asked for last
}

func (w *world) set(f func(*world)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f(w)
}

// open makes an Admitter of four slots on a machine of 16 GiB, all of them free.
func open(t testing.TB, cfg Config) (*Admitter, *world) {
	w := &world{free: 16 * gib, disk: 100 * gib}
	if cfg.Max == 0 {
		cfg.Max = 4
	}
	cfg.Processors = 2
	cfg.Memory = func() (Memory, error) {
		w.mu.Lock()
		defer w.mu.Unlock()
		return Memory{Available: w.free, Total: 16 * gib}, nil
	}
	cfg.Pressure = func() Pressure {
		w.mu.Lock()
		defer w.mu.Unlock()
		now := time.Now()
		if !w.told.IsZero() {
			w.pressure.Waited += time.Duration(w.pressure.CPU / 100 * float64(now.Sub(w.told)))
		}
		w.told = now
		return w.pressure
	}
	cfg.Disk = w
	a := New(cfg)
	t.Cleanup(a.Close)
	return a, w
}

// Free implements Room.
func (w *world) Free() (int64, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.disk, nil
}

func enter(t testing.TB, a *Admitter, c Claim) *Ticket {
	t.Helper()
	k, err := a.Enter(c)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// inBubble runs f with virtual time. What f opens is closed by the bubble's end.
func inBubble(t *testing.T, f func(t *testing.T)) {
	t.Helper()
	synctest.Test(t, f)
}

func granted(k *Ticket) bool { return k.Place().Position == 0 }

// want checks which of the tickets wait for nothing, and what the others wait for.
func want(t *testing.T, tickets []*Ticket, waits ...string) {
	t.Helper()
	for i, k := range tickets {
		if got := k.Place().Waits; got != waits[i] {
			t.Errorf("ticket %d waits for %q, want %q", i, got, waits[i])
		}
	}
}

// An idle node admits at once; no goroutine runs for it.
func TestIdle(t *testing.T) {
	a, _ := open(t, Config{})
	k := enter(t, a, Claim{Caller: "x"})
	if err := k.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := k.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	k.Started()
	k.Done(1 << 20)
	k.Done(0)
	if a.ticking || len(a.callers) != 0 {
		t.Error("something stays of a deployment that is over")
	}
}

// No more than Max are under way; who ends lets the next one in, in order.
func TestSlots(t *testing.T) {
	a, _ := open(t, Config{})
	var all []*Ticket
	for range 7 {
		all = append(all, enter(t, a, Claim{}))
	}
	want(t, all, "", "", "", "", spec.WaitsTurn, spec.WaitsTurn, spec.WaitsTurn)
	for i, p := range []int{0, 0, 0, 0, 1, 2, 3} {
		if got := all[i].Place().Position; got != p {
			t.Errorf("position %d of ticket %d, want %d", got, i, p)
		}
	}
	all[2].Done(0)
	want(t, all, "", "", "", "", "", spec.WaitsTurn, spec.WaitsTurn)
	if p := all[6].Place().Position; p != 2 {
		t.Errorf("position %d, want 2", p)
	}
}

// Who is canceled leaves at once, and keeps nothing: neither a place in the queue nor a slot.
func TestCancel(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		a, _ := open(t, Config{Max: 1})
		first, second, third := enter(t, a, Claim{}), enter(t, a, Claim{}), enter(t, a, Claim{})
		ctx, cancel := context.WithCancelCause(t.Context())
		cause := errors.New("changed his mind")
		got := make(chan error)
		go func() { got <- second.Wait(ctx) }()
		synctest.Wait()
		cancel(cause)
		if err := <-got; !errors.Is(err, cause) {
			t.Errorf("%v, want the cause", err)
		}
		if p := third.Place().Position; p != 1 {
			t.Errorf("the next one is at %d", p)
		}
		first.Done(0)
		if err := third.Wait(t.Context()); err != nil {
			t.Error(err)
		}
		// One that was granted while its caller went does not keep the slot.
		fourth := enter(t, a, Claim{})
		third.Done(0)
		for range 20 { // select chooses among what is ready
			if fourth.Wait(ctx) != nil {
				break
			}
		}
		fifth := enter(t, a, Claim{})
		if err := fifth.Wait(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// Closing ends the waits.
func TestClose(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		a, _ := open(t, Config{Max: 1})
		enter(t, a, Claim{})
		k := enter(t, a, Claim{})
		got := make(chan error)
		go func() { got <- k.Wait(context.Background()) }()
		synctest.Wait()
		a.Close()
		if err := <-got; !errors.Is(err, errClosed) {
			t.Errorf("%v", err)
		}
	})
}

// Whoever floods has no more under way than another who waits, however long his take,
// and the other one's are not behind his.
func TestFair(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		a, _ := open(t, Config{})
		done := map[string]int{}
		var mu sync.Mutex
		var work sync.WaitGroup
		run := func(caller string, n int, took time.Duration) {
			for range n {
				k := enter(t, a, Claim{Caller: caller})
				work.Go(func() {
					if err := k.Run(t.Context()); err != nil {
						t.Error(err)
					}
					time.Sleep(took)
					mu.Lock()
					done[caller]++
					mu.Unlock()
					k.Done(1 << 20)
				})
			}
		}
		run("flood", 400, time.Second)
		synctest.Wait()
		run("b", 40, time.Second)
		run("slow", 6, 10*time.Second)
		time.Sleep(61*time.Second + 500*time.Millisecond)
		mu.Lock()
		if done["b"] != 40 || done["slow"] < 5 {
			t.Errorf("after a minute of four slots between three: %v", done)
		}
		if f := done["flood"]; f < 80 { // more than its third, when the others have no more
			t.Errorf("the one who floods was starved: %v", done)
		}
		mu.Unlock()
		work.Wait()
	})
}

// Positions are the order in which tickets go on.
func TestPositions(t *testing.T) {
	for seed := range uint64(60) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		a, _ := open(t, Config{Max: 3})
		var all, held []*Ticket
		admitted := func() {
			for _, k := range all {
				if granted(k) && !slices.Contains(held, k) {
					held = append(held, k)
				}
			}
		}
		for range 30 {
			all = append(all, enter(t, a, Claim{Caller: fmt.Sprint("c", rnd.IntN(5))}))
			if admitted(); rnd.IntN(3) == 0 {
				i := rnd.IntN(len(held))
				held[i].Done(0)
				held = slices.Delete(held, i, i+1)
				all = slices.DeleteFunc(all, func(k *Ticket) bool { return k.at == over })
				admitted()
			}
		}
		var order []*Ticket
		for _, k := range all {
			if !granted(k) {
				order = append(order, k)
			}
		}
		slices.SortFunc(order, func(x, y *Ticket) int { return x.Place().Position - y.Place().Position })
		for i, k := range order {
			if k.Place().Position != i+1 {
				t.Fatalf("seed %d: positions are not 1 to %d", seed, len(order))
			}
		}
		// As if slots were without end: nobody gives one back.
		a.mu.Lock()
		defer a.mu.Unlock()
		for i, k := range order {
			next := a.next(running)
			if next != k {
				t.Fatalf("seed %d: the one at position %d is not the one that goes on", seed, i+1)
			}
			a.grant(next)
		}
	}
}

// The queue is bounded. Who comes then is told when to come again; a caller who has little
// in it still finds room.
func TestBusy(t *testing.T) {
	a, _ := open(t, Config{Queue: 64, Max: 1})
	enter(t, a, Claim{Caller: "flood"})
	var err error
	n := 0
	for ; err == nil; n++ {
		_, err = a.Enter(Claim{Caller: "flood"})
	}
	var busy *BusyError
	if !errors.As(err, &busy) || n-1 != 32 || busy.Waiting != 32 || busy.Mine != 32 || busy.Kind() != "busy" {
		t.Fatalf("after %d: %v", n, err)
	}
	if !strings.HasPrefix(busy.Remedy(), "try again in ") || busy.After < time.Second {
		t.Errorf("%s", busy.Remedy())
	}
	for i := range 24 {
		enter(t, a, Claim{Caller: fmt.Sprint(i)})
	}
	if _, err := a.Enter(Claim{Caller: "3"}); err == nil {
		t.Error("the last eighth went to one who has a place already")
	}
	for i := range 8 {
		enter(t, a, Claim{Caller: fmt.Sprint("late ", i)})
	}
	if _, err := a.Enter(Claim{Caller: "last"}); !errors.As(err, &busy) {
		t.Errorf("the queue has no end: %v", err)
	}
	if s := a.Stats(); s.Busy != 3 || s.Waiting[spec.WaitsTurn] != 64 {
		t.Errorf("%+v", s)
	}
}

// When to come again follows from how fast deployments end.
func TestPace(t *testing.T) {
	var p pace
	at := time.Unix(1000, 0)
	if got := p.time(7, at); got != 7*time.Second {
		t.Errorf("nothing known: %v", got)
	}
	for i := range 200 { // ten a second
		p.add(at.Add(time.Duration(i) * 100 * time.Millisecond))
	}
	at = at.Add(20 * time.Second)
	if got := p.time(100, at); got != 10*time.Second {
		t.Errorf("ten a second: %v", got)
	}
	if got := p.time(1e6, at.Add(time.Hour)); got != 600*time.Second {
		t.Errorf("%v", got)
	}
}

// A group is no more at once than it may be, and holds up nobody.
func TestGroup(t *testing.T) {
	a, _ := open(t, Config{})
	g := &Group{Limit: 1}
	all := []*Ticket{enter(t, a, Claim{Group: g}), enter(t, a, Claim{Group: g}), enter(t, a, Claim{})}
	want(t, all, "", spec.WaitsTurn, "")
	all[0].Done(0)
	want(t, all, "", "", "")
}

// A container that runs and is not ready holds a slot for a moment only; its memory
// stays promised.
func TestStarted(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		a, _ := open(t, Config{Max: 1})
		k := enter(t, a, Claim{Memory: gib})
		next := enter(t, a, Claim{Memory: gib})
		k.Started()
		begun := time.Now()
		if err := next.Run(t.Context()); err != nil {
			t.Fatal(err)
		}
		if d := time.Since(begun); d != bootTime {
			t.Errorf("after %v", d)
		}
		if s := a.Stats(); s.Promised != 2*gib || s.Running != 1 {
			t.Errorf("%+v", s)
		}
		k.Done(0)
		next.Done(0)
		if s := a.Stats(); s.Promised != 0 || s.Running != 0 {
			t.Errorf("%+v", s)
		}
	})
}
