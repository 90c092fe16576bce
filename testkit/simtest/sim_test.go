package simtest

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"dewpoint/internal/pop"
)

var (
	one       = flag.Uint64("seed", 0, "run the schedule of this seed only, and tell it")
	schedules = flag.Uint64("schedules", usual, "how many schedules are run")
	from      = flag.Uint64("from", 1, "the first seed")
	fresh     = flag.Uint64("fresh", unusual, "how many schedules are run of seeds that the clock chooses")
	tell      = flag.Bool("tell", false, "tell the schedules that fail")
)

// chosen is the first seed that the clock chooses: each second has a million of its own.
var chosen = uint64(time.Now().Unix()) << 20

func TestMain(m *testing.M) {
	debug.SetGCPercent(800) // a schedule makes much garbage and keeps little
	flag.Parse()
	if testing.Short() {
		*schedules, *fresh = min(*schedules, 30), min(*fresh, 10)
	}
	if *one == 0 {
		fmt.Printf("seeds %d to %d, and %d to %d\n", *from, *from+*schedules-1, chosen, chosen+*fresh-1)
	}
	goleak.VerifyTestMain(m)
}

// again is how one schedule is run again.
func again(seed uint64) string {
	return fmt.Sprintf("again: go test ./testkit/simtest -run 'TestSchedules$' -args -seed %d", seed)
}

// TestSchedules runs schedules of faults, each decided by its seed, against the store's protocol:
// the same in each run, and others that nobody has seen.
func TestSchedules(t *testing.T) {
	if *one != 0 {
		synctest.Test(t, func(t *testing.T) { schedule(t, *one) })
		return
	}
	var next atomic.Uint64
	for i := range runtime.GOMAXPROCS(0) {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			t.Parallel()
			for k := next.Add(1) - 1; k < *schedules+*fresh && !t.Failed(); k = next.Add(1) - 1 {
				seed := *from + k
				if k >= *schedules {
					seed = chosen + k - *schedules
				}
				synctest.Test(t, func(t *testing.T) { schedule(t, seed) })
			}
		})
	}
}

// schedule is one schedule: trouble, then calm, in which everything must come right. It
// returns a sum of what happened when.
func schedule(t *testing.T, seed uint64) uint64 {
	w := newWorld(t, seed)
	rng := rand.New(rand.NewPCG(seed, 7))
	for _, n := range w.nodes {
		time.Sleep(time.Duration(rng.Int64N(1e9)))
		n.boot()
	}
	w.wg.Go(func() { w.trouble(rng) })
	time.Sleep(busy)
	w.disk.Look(func() { w.stop = true })
	w.calm()
	if seed%4 == 0 {
		w.comesRight()
	}
	if *one != 0 {
		t.Log(strings.Join(append(w.lines, ""), "\n"))
	}
	sum := w.heard.Sum64()
	for _, n := range w.nodes {
		n.kill(false)
	}
	w.wg.Wait()
	w.disk.Wait()
	return sum
}

// calm ends the faults and the containers.
func (w *world) calm() {
	for _, n := range w.nodes {
		n.calm()
	}
	w.wg.Wait() // all that was begun, crashed nodes have come back
	w.disk.Wait()
	for _, n := range w.nodes {
		if n.process() == nil {
			n.boot()
		}
		n.calm()
	}
	w.wg.Wait()
	w.note("calm")
}

// comesRight waits until all that is left over has gone, and checks what has become of the store.
func (w *world) comesRight() {
	ctx := context.Background()
	for end := time.Now().Add(2*forget + 8*grace); time.Now().Before(end); time.Sleep(25 * time.Second) {
		for _, n := range w.nodes {
			n.process().keep(ctx)
		}
	}
	if !w.broken {
		w.tidy(ctx)
		w.deployable(ctx)
	}
}

// tidy checks that nothing is left but whole layers, no more than there is room for.
func (w *world) tidy(ctx context.Context) {
	layers, err := w.nodes[0].process().store.Objects(ctx)
	if err != nil {
		w.violated("layers: %v", err)
	}
	named := map[string]bool{}
	var sum int64
	for _, l := range layers {
		base := "layers/" + l.Name
		named[base+".data"], named[base+".table"], named["layers/"+l.DiffID.Encoded()+".json"] = true, true, true
		sum += l.Size
		under := func(u *pop.Layer) bool { return u.DiffID == l.Upper }
		if l.Upper != "" && !slices.ContainsFunc(layers, under) {
			w.violated("%s is there, and what it stands on is not", l.Name)
		}
	}
	if high := 0.95 * float64(w.capacity()); float64(sum) > high {
		w.violated("%d bytes are in the store, which is to hold %.0f", sum, high)
	}
	for _, name := range w.disk.Names() {
		if !named[name] && name != "dewpoint.json" && !strings.HasPrefix(name, "nodes/n") {
			w.violated("%s is left", name)
		}
	}
}

// deployable checks that every node can deploy everything.
func (w *world) deployable(ctx context.Context) {
	for _, n := range w.nodes {
		for _, of := range w.layers {
			p := n.process()
			err := p.deploy(ctx, of, p.rng)
			for end := time.Now().Add(time.Minute); err != nil &&
				time.Now().Before(end); err = p.deploy(ctx, of, p.rng) {
				time.Sleep(time.Second)
			}
			if err != nil && !errors.Is(err, pop.ErrDamaged) {
				w.violated("%s cannot deploy %s: %v", n.name, of.id, err)
			}
		}
	}
}
