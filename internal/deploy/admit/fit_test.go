package admit

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"dewpoint/internal/spec"
	"dewpoint/testkit"
)

// What can never fit fails at once, and says what would.
func TestNever(t *testing.T) {
	a, _ := open(t, Config{})
	_, err := a.Enter(Claim{Memory: 17 * gib})
	var never *NeverError
	if !errors.As(err, &never) || never.Need != 17*gib || never.Have != 16*gib-256<<20 ||
		never.Kind() != "no_memory" {
		t.Fatalf("%v", err)
	}
	o, _ := open(t, Config{Overcommit: true})
	if k := enter(t, o, Claim{Memory: 17 * gib}); !granted(k) {
		t.Error("where limits are no claims it waits")
	}
}

// What does not fit now waits, says so, lets others pass, and goes on when memory is free.
func TestMemory(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		a, w := open(t, Config{Reserve: gib})
		w.set(func(w *world) { w.free = 6 * gib })
		all := []*Ticket{enter(t, a, Claim{Memory: 4 * gib}), enter(t, a, Claim{Memory: 4 * gib}),
			enter(t, a, Claim{Memory: gib})}
		want(t, all, "", spec.WaitsMemory, "")
		w.set(func(w *world) { w.free = 10 * gib })
		begun := time.Now()
		if err := all[1].Run(t.Context()); err != nil {
			t.Fatal(err)
		}
		if d := time.Since(begun); d > every {
			t.Errorf("it took %v until that was seen", d)
		}
	})
}

type limits int64

// Unused implements Limits.
func (l *limits) Unused() int64 { return int64(*l) }

// What containers that run may yet take of their limits is kept for them, unless limits are no claims.
func TestUnused(t *testing.T) {
	for _, overcommit := range []bool{false, true} {
		inBubble(t, func(t *testing.T) {
			unused := limits(10 * gib)
			// of 16, all free
			a, _ := open(t, Config{Reserve: gib, Overcommit: overcommit, Limits: &unused})
			big := enter(t, a, Claim{Memory: 6 * gib})
			small := enter(t, a, Claim{Memory: gib})
			if overcommit {
				want(t, []*Ticket{big, small}, "", "")
				return
			}
			want(t, []*Ticket{big, small}, spec.WaitsMemory, "")
			if s := a.Stats(); s.Unused != int64(unused) {
				t.Errorf("%d bytes are unused", s.Unused)
			}
			unused = 8 * gib // one of them has ended
			begun := time.Now()
			if err := big.Run(t.Context()); err != nil {
				t.Fatal(err)
			}
			if d := time.Since(begun); d > seldom+every {
				t.Errorf("it took %v until that was seen", d)
			}
		})
	}
}

// A promise ends with a failure at once, and with a success when the kernel's figure can have it.
func TestPromises(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		a, w := open(t, Config{Reserve: gib})
		w.set(func(w *world) { w.free = 5 * gib })
		k := enter(t, a, Claim{Memory: 3 * gib})
		next := enter(t, a, Claim{Memory: 3 * gib})
		k.Done(0)
		want(t, []*Ticket{next}, "")
		third := enter(t, a, Claim{Memory: 3 * gib})
		next.Done(10 << 20)
		want(t, []*Ticket{third}, spec.WaitsMemory)
		begun := time.Now()
		if err := third.Run(t.Context()); err != nil {
			t.Fatal(err)
		}
		if d := time.Since(begun); d < settle-every || d > settle+every {
			t.Errorf("after %v", d)
		}
	})
}

// What containers of an image take is learned.
func TestLearnt(t *testing.T) {
	a, _ := open(t, Config{Overcommit: true})
	enter(t, a, Claim{Image: "big"}).Done(2 * gib)
	big, unknown, limited := enter(t, a, Claim{Image: "big"}), enter(t, a, Claim{Image: "x"}),
		enter(t, a, Claim{Image: "big", Memory: gib})
	if big.need != 2*gib+overhead || unknown.need != defaultEstimate || limited.need != gib {
		t.Errorf("claims of %d, %d and %d bytes", big.need, unknown.need, limited.need)
	}
	for range 80 {
		a.learnt.add("big", 1<<20)
	}
	if n := a.learnt.bytesOf("big", 0); n > 16<<20 {
		t.Errorf("%d bytes of an image that has become small", n)
	}
	for i := range 2 * mostLearn {
		a.learnt.add(fmt.Sprint(i), 1)
	}
	if len(a.learnt) > mostLearn {
		t.Errorf("%d images are remembered", len(a.learnt))
	}
}

// tenant runs containers of size that live for life, one after the other and several at
// once, until ctx ends. It counts those that were admitted.
func tenant(ctx context.Context, t *testing.T, a *Admitter, w *world, size int64, life time.Duration,
	count *int) {
	for ctx.Err() == nil {
		k, err := a.Enter(Claim{Caller: "small", Memory: size})
		if err != nil {
			t.Error(err)
			return
		}
		if k.Run(ctx) != nil {
			return
		}
		w.set(func(w *world) { w.free -= size; *count++ })
		k.Done(size)
		time.Sleep(life)
		w.set(func(w *world) { w.free += size })
	}
}

// A large claim is not overtaken for ever by small ones that together always take what is
// free; while it waits they go on.
func TestBigIsNotStarved(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		a, w := open(t, Config{Reserve: gib})
		ctx, stop := context.WithCancel(t.Context())
		var small sync.WaitGroup
		n := 0
		for i := range 60 { // 15 of the 15 GiB at any time, and more would come: twice what there is
			small.Go(func() {
				time.Sleep(time.Duration(i) * 300 * time.Millisecond)
				tenant(ctx, t, a, w, gib/2, 15*time.Second, &n)
			})
		}
		time.Sleep(time.Minute)
		big := enter(t, a, Claim{Caller: "big", Memory: 12 * gib})
		want(t, []*Ticket{big}, spec.WaitsMemory)
		begun := time.Now()
		if err := big.Run(t.Context()); err != nil {
			t.Fatal(err)
		}
		if d := time.Since(begun); d > 5*time.Minute {
			t.Errorf("it waited %v", d)
		}
		stop()
		small.Wait()
	})
}

// A claim that nothing satisfies does not keep others from what is free.
func TestBigDoesNotBlock(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		a, w := open(t, Config{Reserve: gib})
		w.set(func(w *world) { w.free = 9 * gib }) // the rest is of a container that stays
		enter(t, a, Claim{Caller: "big", Memory: 12 * gib})
		ctx, stop := context.WithTimeout(t.Context(), 4*time.Minute)
		defer stop()
		var small sync.WaitGroup
		n := 0
		for range 8 {
			small.Go(func() { tenant(ctx, t, a, w, gib, 10*time.Second, &n) })
		}
		small.Wait()
		if n < 100 { // without the big one 190
			t.Errorf("%d small ones in four minutes", n)
		}
	})
}

// Other work's pressure leaves one slot per processor; the deployments' own changes nothing, nor does what
// has ended.
func TestPressure(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		a, w := open(t, Config{})
		time.Sleep(5 * time.Second)
		var all []*Ticket
		come := func(n int) {
			all = nil
			for range n {
				all = append(all, enter(t, a, Claim{}))
			}
		}
		done := func() {
			for _, k := range all {
				k.Done(0)
			}
		}
		press := func(percent float64) { w.set(func(w *world) { w.pressure.CPU = percent }) }
		come(6)
		press(90)
		time.Sleep(5 * time.Second)
		want(t, all, "", "", "", "", spec.WaitsTurn, spec.WaitsTurn) // ours
		done()
		time.Sleep(gaugeEvery)
		come(4)
		want(t, all, "", "", "", "") // what they leave behind
		done()
		time.Sleep(quiet + 3*gaugeEvery)
		come(4)
		want(t, all, "", "", spec.WaitsCPU, spec.WaitsCPU)
		press(0)
		time.Sleep(othersFor + time.Second) // it cannot be told from ours, and is not believed for ever
		want(t, all, "", "", "", "")
		done()
		press(90)
		time.Sleep(quiet + 10*gaugeEvery)
		press(0)
		time.Sleep(gaugeEvery + gaugeEvery/2)
		come(4)
		want(t, all, "", "", "", "") // it was pressed until just now
		w.set(func(w *world) { w.pressure.Memory = 20 })
		time.Sleep(seldom)
		if s := a.Stats(); s.Limit != 2 {
			t.Errorf("%d slots while the kernel reclaims", s.Limit)
		}
	})
}

// Images that are here pass those that are fetched. Of one image one is fetched; when it
// is here the others go on, before those that came later.
func TestLink(t *testing.T) {
	a, _ := open(t, Config{Fetch: 2, Max: 1})
	fetch := func(image, host string) *Ticket {
		return enter(t, a, Claim{Image: image, Host: host, Fetch: true})
	}
	all := []*Ticket{fetch("a", "h"), fetch("a", "h"), fetch("b", "h"), fetch("c", "h"), fetch("d", "other")}
	want(t, all, "", spec.WaitsLink, "", spec.WaitsLink, "")
	here, later := enter(t, a, Claim{Image: "x"}), enter(t, a, Claim{Image: "y"})
	want(t, []*Ticket{here, later}, "", spec.WaitsTurn)
	inBackground(t, func(ctx context.Context) { all[0].Run(ctx) }, func() {
		waitFor(t, func() bool { return all[0].Place().Waits == spec.WaitsTurn })
		want(t, all, spec.WaitsTurn, spec.WaitsTurn, "", "", "")
		for i, k := range []*Ticket{all[0], all[1], later} {
			if k.Place().Position != i+1 {
				t.Errorf("%d is at position %d", i, k.Place().Position)
			}
		}
		here.Done(0)
		waitFor(t, func() bool { return granted(all[0]) })
	})
	// One that fails leaves the fetch to the others, who do not wait for each other any more.
	again := []*Ticket{fetch("e", "third"), fetch("e", "third"), fetch("e", "third")}
	want(t, again, "", spec.WaitsLink, spec.WaitsLink)
	again[0].Done(0)
	want(t, again, "", "", "")
}

// inBackground runs f beside then.
func inBackground(t *testing.T, f func(context.Context), then func()) {
	var g sync.WaitGroup
	ctx, cancel := context.WithCancel(t.Context())
	defer g.Wait()
	defer cancel()
	g.Go(func() { f(ctx) })
	then()
}

func waitFor(t *testing.T, ok func() bool) {
	t.Helper()
	testkit.Eventually(t, "the state that this waits for", ok)
}

// Registries that are silent leave room for others.
func TestSilentRegistries(t *testing.T) {
	a, _ := open(t, Config{Fetch: 2})
	for _, host := range []string{"silent", "silent too", "and this"} {
		for i := range 10 {
			enter(t, a, Claim{Image: host + fmt.Sprint(i), Host: host, Fetch: true})
		}
	}
	want(t, []*Ticket{enter(t, a, Claim{Image: "z", Host: "good", Fetch: true})}, "")
}

// What is certain not to fit on the disk is refused when it is known; what
// others may leave room for waits.
func TestDisk(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		a, w := open(t, Config{})
		w.set(func(w *world) { w.disk = 10 * gib })
		var full *DiskError
		k := enter(t, a, Claim{Image: "b", Fetch: true})
		if err := k.Wait(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := k.Resolved(12 * gib); !errors.As(err, &full) || full.Kind() != "disk_full" {
			t.Fatalf("%v", err)
		}
		if err := k.Resolved(3 * gib); err != nil {
			t.Fatal(err)
		}
		next := enter(t, a, Claim{Image: "c", Fetch: true, Absent: 3 * gib})
		want(t, []*Ticket{next}, spec.WaitsDisk)
		k.Done(0)
		if err := next.Wait(t.Context()); err != nil {
			t.Error(err)
		}
		next.Done(0)
		if a.disk != 0 || len(a.hosts) != 0 || len(a.images) != 0 {
			t.Errorf("%d bytes promised, hosts %v, images %v", a.disk, a.hosts, a.images)
		}
	})
}

// Whatever comes in whatever order: no limit is passed, nobody is forgotten, nothing
// stays.
func TestRandomSchedules(t *testing.T) {
	for seed := range uint64(25) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			inBubble(t, func(t *testing.T) { randomSchedule(t, rand.New(rand.NewPCG(seed, 2))) })
		})
	}
}

func randomSchedule(t *testing.T, rnd *rand.Rand) {
	a, w := open(t, Config{Max: 1 + rnd.IntN(5), Fetch: 1 + rnd.IntN(3), Reserve: gib})
	group := &Group{Limit: 1 + rnd.IntN(2)}
	var work sync.WaitGroup
	var mu sync.Mutex
	ended := 0
	const n = 150
	for range n {
		c := Claim{Caller: fmt.Sprint(rnd.IntN(4)), Image: fmt.Sprint(rnd.IntN(12)), Host: fmt.Sprint(rnd.IntN(3)),
			Fetch: rnd.IntN(3) == 0, Memory: rnd.Int64N(9 * gib), Absent: rnd.Int64N(20 * gib)}
		if rnd.IntN(3) == 0 {
			c.Group = group
		}
		patience := time.Duration(1+rnd.IntN(300)) * time.Second
		pause, took := time.Duration(rnd.IntN(2000))*time.Millisecond,
			time.Duration(rnd.IntN(9000))*time.Millisecond
		used, life, fails := c.Memory/2, time.Duration(rnd.IntN(60))*time.Second, rnd.IntN(5) == 0
		time.Sleep(time.Duration(rnd.IntN(1500)) * time.Millisecond)
		k := enter(t, a, c)
		check(t, a, group)
		work.Go(func() {
			defer func() { mu.Lock(); ended++; mu.Unlock() }()
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			if k.Wait(ctx) != nil {
				return
			}
			time.Sleep(pause)
			if fails {
				k.Done(0)
				return
			}
			if k.Run(ctx) != nil {
				return
			}
			check(t, a, group)
			w.set(func(w *world) { w.free -= used })
			time.Sleep(took / 2)
			k.Started()
			time.Sleep(took / 2)
			k.Done(used)
			check(t, a, group)
			time.Sleep(life)
			w.set(func(w *world) { w.free += used })
		})
	}
	work.Wait()
	time.Sleep(2 * settle)
	s := a.Stats()
	if ended != n || s.Running+s.Fetching+s.Callers != 0 || s.Promised != 0 || group.used != 0 || a.disk != 0 ||
		a.ticking || a.kept.by != nil {
		t.Errorf("%d of %d ended; %+v, group %d, disk %d", ended, n, s, group.used, a.disk)
	}
}

// check looks for limits that are passed, and counters that are not what they count.
func check(t *testing.T, a *Admitter, g *Group) {
	t.Helper()
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.used[running] > a.cfg.Max || g.used > g.Limit {
		t.Errorf("%d run of %d, %d of the group's %d", a.used[running], a.cfg.Max, g.used, g.Limit)
	}
	fetch := 0
	for image, n := range a.images {
		if fetch += n; n > 1 && a.failed[image].IsZero() {
			t.Errorf("%d fetch image %s", n, image)
		}
	}
	if a.used[fetching] != fetch {
		t.Errorf("%d fetch, counted %d", fetch, a.used[fetching])
	}
	for host, n := range a.hosts {
		if n > a.cfg.Fetch {
			t.Errorf("%d images of %s at once", n, host)
		}
	}
	var used, waiting [over]int
	for _, c := range a.callers {
		for s := range over {
			used[s] += c.used[s]
			waiting[s] += len(c.lines[s])
		}
	}
	if used != a.used || waiting != a.waiting {
		t.Errorf("used %v, waiting %v; counted %v and %v", used, waiting, a.used, a.waiting)
	}
	// Promises fit into what was free when they were made; what is taken of them by
	// containers that run counts twice for a moment.
	if a.promised < 0 || a.promised > 16*gib {
		t.Errorf("%d bytes are promised", a.promised)
	}
}
