package evict

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func must(t testing.TB, name string, snapshot []byte, capacity int64) Policy {
	t.Helper()
	p, err := New(name, snapshot, capacity)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func each(t *testing.T, f func(t *testing.T, name string)) {
	for _, name := range Names() {
		t.Run(name, func(t *testing.T) { f(t, name) })
	}
}

// drain evicts everything and returns it in that order.
func drain(t testing.TB, p Policy) []string {
	t.Helper()
	var out []string
	for {
		key, ok := p.Victim(nil)
		if !ok {
			return out
		}
		if slices.Contains(out, key) {
			t.Fatalf("%q is named after it was removed", key)
		}
		p.Remove(key)
		out = append(out, key)
	}
}

// cache drives a policy as a cache of capacity bytes would, and checks what it says against what is there.
type cache struct {
	t        testing.TB
	p        Policy
	there    map[string]int64
	used     int64
	capacity int64
	busy     map[string]bool
	victims  []string
}

func newCache(t testing.TB, p Policy, capacity int64) *cache {
	return &cache{t: t, p: p, there: map[string]int64{}, capacity: capacity, busy: map[string]bool{}}
}

func (c *cache) get(o Object) (hit bool) {
	if _, ok := c.there[o.Key]; ok {
		c.p.Hit(o.Key)
		return true
	}
	for c.used+o.Size > c.capacity && c.evict() {
	}
	if c.used+o.Size <= c.capacity {
		c.p.Add(o)
		c.there[o.Key] = o.Size
		c.used += o.Size
	}
	return false
}

func (c *cache) free(key string) bool { return !c.busy[key] }

func (c *cache) evict() bool {
	c.t.Helper()
	key, ok := c.p.Victim(c.free)
	if !ok {
		for k := range c.there {
			if !c.busy[k] {
				c.t.Fatalf("no victim, though %q may go", k)
			}
		}
		return false
	}
	if _, there := c.there[key]; !there || c.busy[key] {
		c.t.Fatalf("victim %q: there %v, busy %v", key, there, c.busy[key])
	}
	if again, _ := c.p.Victim(c.free); again != key {
		c.t.Fatalf("named %q and, when asked again, %q", key, again)
	}
	c.drop(key)
	c.victims = append(c.victims, key)
	return true
}

func (c *cache) drop(key string) {
	c.p.Remove(key)
	c.used -= c.there[key]
	delete(c.there, key)
}

// play is a random run: some keys are popular, sizes span four orders of magnitude, objects are leased,
// deleted and described anew.
func play(c *cache, seed uint64, n int) {
	r := rand.New(rand.NewPCG(seed, 7))
	for range n {
		k := int(math.Pow(r.Float64(), 3) * 400)
		o := Object{Key: fmt.Sprint(k), Size: 1 + int64(k*k*7919%10000), Cost: float64(k % 17), Images: k % 5}
		switch r.IntN(20) {
		case 0:
			c.busy[o.Key] = true
		case 1, 2:
			clear(c.busy)
		case 3:
			if !c.busy[o.Key] {
				c.drop(o.Key)
			}
		case 4:
			if size, ok := c.there[o.Key]; ok {
				o.Size, o.Images = size, o.Images+1
				c.p.Add(o)
			}
		default:
			c.get(o)
		}
	}
}

func TestContract(t *testing.T) {
	each(t, func(t *testing.T, name string) {
		for seed := range uint64(10) {
			c := newCache(t, must(t, name, nil, 100_000), 100_000)
			play(c, seed, 3000)
			if len(c.victims) < 100 {
				t.Fatalf("seed %d evicted %d: it tests nothing", seed, len(c.victims))
			}
			for key := range c.there {
				c.busy[key] = true
			}
			if key, ok := c.p.Victim(c.free); ok {
				t.Fatalf("all are in use, and %q is named", key)
			}
			if got := drain(t, c.p); len(got) != len(c.there) {
				t.Fatalf("%d of %d objects were evicted", len(got), len(c.there))
			}
		}
	})
}

func TestSameCallsSameVictims(t *testing.T) {
	each(t, func(t *testing.T, name string) {
		a, b := newCache(t, must(t, name, nil, 50_000), 50_000), newCache(t, must(t, name, nil, 50_000), 50_000)
		play(a, 1, 5000)
		play(b, 1, 5000)
		if !slices.Equal(a.victims, b.victims) {
			t.Fatal("two runs of the same calls differ")
		}
	})
}

func TestSnapshotGoesOn(t *testing.T) {
	each(t, func(t *testing.T, name string) {
		for seed := range uint64(8) {
			a := newCache(t, must(t, name, nil, 50_000), 50_000)
			play(a, seed, 2000)
			b, err := a.p.Snapshot()
			if err != nil {
				t.Fatal(err)
			}
			restored := newCache(t, must(t, name, b, 50_000), 50_000)
			for k, v := range a.there {
				restored.there[k] = v
			}
			restored.used = a.used
			clear(a.busy)
			a.victims = nil
			play(a, seed+100, 2000)
			play(restored, seed+100, 2000)
			if !slices.Equal(a.victims, restored.victims) {
				t.Fatalf("seed %d: the restored policy decides otherwise", seed)
			}
		}
	})
}

func TestSnapshotsOfOthersAreRefused(t *testing.T) {
	each(t, func(t *testing.T, name string) {
		p := must(t, name, nil, 100)
		p.Add(Object{Key: "a", Size: 1})
		good, err := p.Snapshot()
		if err != nil {
			t.Fatal(err)
		}
		bad := []string{"{}", "x", string(good) + "{}", `{"version":2,"policy":"` + name + `"}`,
			`{"version":1,"policy":"` + name + `","objects":[{"key":"a"},{"key":"a"}]}`,
			`{"version":1,"policy":"` + name + `","objects":[{"key":"a","size":-1}]}`,
			`{"version":1,"policy":"` + name + `","clock":1e301}`}
		for _, other := range Names() {
			if other != name {
				b, _ := must(t, other, nil, 100).Snapshot()
				bad = append(bad, string(b))
			}
		}
		for _, s := range bad {
			if _, err := New(name, []byte(s), 100); !errors.Is(err, ErrSnapshot) {
				t.Errorf("%s: %v", s, err)
			}
		}
	})
	if _, err := New("fifo", nil, 1); !errors.Is(err, ErrUnknown) {
		t.Errorf("an unknown policy: %v", err)
	}
}

// What a policy remembers is bounded by what is in the cache, not by what ever was.
func TestMemoryIsBounded(t *testing.T) {
	each(t, func(t *testing.T, name string) {
		c := newCache(t, must(t, name, nil, 1000), 1000)
		most := 0
		for i := range 20_000 {
			c.get(Object{Key: fmt.Sprint(i), Size: 10})
			if i%1000 == 0 {
				b, err := c.p.Snapshot()
				if err != nil {
					t.Fatal(err)
				}
				most = max(most, len(b))
			}
		}
		limit := 30_000
		if name == "contest" { // 100 objects, and up to as many in each shadow
			limit = 80_000
		}
		if most > limit {
			t.Fatalf("100 objects take %d bytes of snapshot", most)
		}
	})
}

func TestNonsenseCountsAsTheNearestSense(t *testing.T) {
	each(t, func(t *testing.T, name string) {
		p := must(t, name, nil, -1)
		for i, o := range []Object{{Size: -5}, {Cost: math.NaN()}, {Cost: math.Inf(1)},
			{Size: math.MaxInt64, Cost: -1, Images: -3}, {Size: 1, Cost: math.MaxFloat64, Images: math.MaxInt}} {
			o.Key = fmt.Sprint(i)
			p.Add(o)
			p.Hit(o.Key)
		}
		p.Hit("unknown")
		p.Remove("unknown")
		b, err := p.Snapshot()
		if err != nil {
			t.Fatal(err)
		}
		if got := drain(t, must(t, name, b, 0)); len(got) != 5 {
			t.Fatalf("%q is what a snapshot kept of 5 objects", got)
		}
	})
}

func TestLRUNamesWhatWasUsedLongestAgo(t *testing.T) {
	p := must(t, "lru", nil, 0)
	for _, k := range []string{"a", "b", "c"} {
		p.Add(Object{Key: k, Size: 1})
	}
	p.Hit("a")
	p.Add(Object{Key: "b", Size: 2}) // no use
	if o, ok := p.Get("b"); !ok || o != (Object{Key: "b", Size: 2, Cost: 2, Images: 1}) {
		t.Errorf("b is %+v, %v", o, ok)
	}
	if _, ok := p.Get("d"); ok {
		t.Error("what never came is there")
	}
	if got := drain(t, p); !slices.Equal(got, []string{"b", "c", "a"}) {
		t.Fatal(got)
	}
}

func TestGDSFNamesWhatSavesLeast(t *testing.T) {
	p := must(t, "gdsf", nil, 0)
	p.Add(Object{Key: "shared", Size: 100, Cost: 100, Images: 16})
	p.Add(Object{Key: "plain", Size: 100, Cost: 100})
	p.Add(Object{Key: "dear", Size: 100, Cost: 500})
	p.Add(Object{Key: "large", Size: 1000, Cost: 100})
	p.Add(Object{Key: "popular", Size: 100, Cost: 100})
	for range 9 {
		p.Hit("popular")
	}
	if got := drain(t, p); !slices.Equal(got, []string{"large", "plain", "shared", "dear", "popular"}) {
		t.Fatal(got)
	}
}

func TestGDSFForgetsFameByEvicting(t *testing.T) {
	turnover := func(remove func(p Policy, key string)) string {
		p := must(t, "gdsf", nil, 0)
		p.Add(Object{Key: "famous", Size: 1})
		for range 5 {
			p.Hit("famous")
		}
		for i := range 10 {
			p.Add(Object{Key: fmt.Sprint(i), Size: 1})
			remove(p, fmt.Sprint(i))
		}
		p.Add(Object{Key: "new", Size: 1})
		key, _ := p.Victim(nil)
		return key
	}
	if got := turnover(func(p Policy, key string) {
		p.Victim(func(k string) bool { return k == key })
		p.Remove(key)
	}); got != "famous" {
		t.Errorf("after ten turnovers %q goes", got)
	}
	if got := turnover(func(p Policy, key string) { p.Remove(key) }); got != "new" {
		t.Errorf("after ten objects were deleted %q goes", got)
	}
}

func TestOverdueGoesBeforeWhatIsInUse(t *testing.T) {
	p := must(t, "overdue", nil, 0)
	p.Add(Object{Key: "rare", Size: 1})
	for _, k := range []string{"replaced", "steady"} {
		p.Add(Object{Key: k, Size: 1})
	}
	for range 30 {
		p.Hit("replaced")
		p.Hit("steady")
	}
	if got, _ := p.Victim(nil); got != "rare" {
		t.Fatalf("while both are in use, %q goes", got)
	}
	for range 100 { // more than 20 gaps of 2
		p.Hit("steady")
	}
	if got := drain(t, p); !slices.Equal(got, []string{"replaced", "rare", "steady"}) {
		t.Fatal(got)
	}
}

func TestOverdueAndLeasedStays(t *testing.T) {
	p := must(t, "overdue", nil, 0)
	for _, k := range []string{"a", "b"} {
		p.Add(Object{Key: k, Size: 1})
		for range 5 {
			p.Hit(k)
		}
	}
	for range 500 {
		p.Add(Object{Key: "c", Size: 1})
		p.Hit("c")
	}
	if got, ok := p.Victim(func(k string) bool { return k != "a" }); got != "b" || !ok {
		t.Fatalf("with a in use, %q goes", got)
	}
	if got, _ := p.Victim(nil); got != "a" {
		t.Fatalf("of two overdue objects %q goes, not the one that was due first", got)
	}
}

// A contest follows the one that saves most, and is that one's cache from then on.
func TestContestFollowsTheBest(t *testing.T) {
	p := newContest(100)
	c := newCache(t, p, 100)
	s3 := newCache(t, must(t, "s3fifo", nil, 100), 100)
	play := func(rounds int) (ours, theirs int) {
		for i := range rounds {
			for hot := range 8 {
				o := Object{Key: fmt.Sprint("hot", hot), Size: 10}
				for range 2 {
					ours, theirs = ours+b2i(c.get(o)), theirs+b2i(s3.get(o))
				}
			}
			for scan := range 20 {
				o := Object{Key: fmt.Sprint("scan", i, " ", scan), Size: 10}
				c.get(o)
				s3.get(o)
			}
		}
		return ours, theirs
	}
	if p.leader.name != "lru-overdue" {
		t.Fatalf("%s leads before anything is known", p.leader.name)
	}
	play(20)
	if ours, theirs := play(100); ours < theirs*98/100 || theirs < 1500 {
		t.Errorf("%d hits with a contest that %s leads, %d with s3fifo", ours, p.leader.name, theirs)
	}
}

// When another leads, what its shadow does not have goes first, and all else stays.
func TestContestChangesItsLeader(t *testing.T) {
	p := newContest(100)
	c := newCache(t, p, 100)
	play(c, 5, 3000)
	for i, s := range p.shadows {
		p.lead(s)
		if p.strays.n+p.kept.n != len(c.there) || p.bytes() != c.used {
			t.Fatalf("%s leads, and %d of %d objects are left", s.name, p.strays.n+p.kept.n, len(c.there))
		}
		for e := p.kept.back; e != nil; e = e.prev {
			if s.get(e.Key) == nil {
				t.Fatalf("%s does not have %q", s.name, e.Key)
			}
		}
		if i == 0 || p.strays.n == 0 {
			continue
		}
		key, _ := p.Victim(nil)
		if s.get(key) != nil {
			t.Errorf("%s leads, and %q goes, which it has, before %q", s.name, key, p.strays.back.Key)
		}
	}
}

// Shadows have no more bytes than the cache has when it is full, and not many more objects, whatever is
// leased, deleted or described anew.
func TestShadowsAreAsLargeAsTheCache(t *testing.T) {
	p := newContest(5000)
	c := newCache(t, p, 5000)
	for seed := range uint64(50) {
		play(c, seed, 100)
		for _, s := range p.shadows {
			if s.used > 5000 || s.used > p.full || s.n > 2*max(len(p.all), 16)+1 {
				t.Fatalf("%s has %d objects of %d bytes; the cache %d of %d", s.name, s.n, s.used, len(p.all), p.bytes())
			}
		}
		for i := range 100 { // of no size: only their number bounds them
			c.get(Object{Key: fmt.Sprint("empty", seed, i)})
			c.drop(fmt.Sprint("empty", seed, i))
		}
	}
}

func TestS3FIFOKeepsScansOut(t *testing.T) {
	c := newCache(t, must(t, "s3fifo", nil, 100), 100)
	for range 3 {
		for i := range 8 {
			c.get(Object{Key: fmt.Sprint("hot", i), Size: 10})
		}
	}
	for i := range 100 {
		c.get(Object{Key: fmt.Sprint("scan", i), Size: 10})
	}
	for i := range 8 {
		if !c.get(Object{Key: fmt.Sprint("hot", i), Size: 10}) {
			t.Errorf("hot%d went with a scan", i)
		}
	}
}

func TestS3FIFORemembersWhatItEvicted(t *testing.T) {
	for _, deleted := range []bool{false, true} {
		p := newS3FIFO(100)
		p.Add(Object{Key: "a", Size: 10})
		if !deleted {
			p.Victim(nil)
		}
		p.Remove("a")
		p.Add(Object{Key: "a", Size: 10})
		if inMain := p.all["a"].in == &p.main; inMain == deleted {
			t.Errorf("deleted %v: back in the main queue %v", deleted, inMain)
		}
	}
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}

func FuzzSnapshot(f *testing.F) {
	for _, name := range Names() {
		c := newCache(f, must(f, name, nil, 20_000), 20_000)
		play(c, 3, 300)
		b, err := c.p.Snapshot()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, name := range Names() {
			p, err := New(name, b, 1000)
			if err != nil || len(b) == 0 {
				continue
			}
			p.Add(Object{Key: "one more", Size: 10})
			out, err := p.Snapshot()
			if err != nil {
				t.Fatalf("%s: what came from a snapshot makes none: %v", name, err)
			}
			if a, b := drain(t, p), drain(t, must(t, name, out, 1000)); !slices.Equal(a, b) {
				t.Fatalf("%s: victims %q, after a restart %q", name, a, b)
			}
		}
	})
}

func BenchmarkPolicy(b *testing.B) {
	for _, name := range Names() {
		b.Run(name, func(b *testing.B) {
			c := newCache(b, must(b, name, nil, 1<<20), 1<<20)
			r := rand.New(rand.NewPCG(1, 1))
			keys := make([]string, 20_000)
			for i := range keys {
				keys[i] = fmt.Sprint(i)
			}
			b.ReportAllocs()
			for b.Loop() {
				c.get(Object{Key: keys[int(math.Pow(r.Float64(), 3)*20_000)], Size: 100})
			}
		})
	}
}
