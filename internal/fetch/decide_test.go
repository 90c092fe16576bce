package fetch

import (
	"strings"
	"testing"
	"time"

	"dewpoint/internal/fetch/link"
	"dewpoint/internal/image"
	"dewpoint/internal/pack"
	"dewpoint/testkit"
	"dewpoint/testkit/registrytest"
)

// known is an image with its pack, as docs/research/benchmarks.md has them.
type known struct {
	absent, start int64   // bytes of the layers; of tables and chunks
	misses        float64 // as opened expects them
}

var (
	redis  = known{33_950_000, 2_510_000, 1}
	python = known{63_540_000, 7_750_000, 1.5}
	goweb  = known{4_650_000, 1_180_000, 4} // a static binary: all its segments
	tiny   = known{1_500_000, 150_000, 1}
)

func (k known) outlook(mbit float64, rtt time.Duration) outlook {
	return outlook{rate: mbit * 1e6 / 8, rtt: rtt, absent: k.absent, pack: k.start, misses: k.misses,
		segment: min(1_160_000, k.absent)}
}

func TestOutlook(t *testing.T) {
	const near, far, satellite = 0, 150 * time.Millisecond, 600 * time.Millisecond
	for name, c := range map[string]struct {
		o    outlook
		lazy bool
	}{
		"redis, 20 Mbit/s":                  {redis.outlook(20, near), true},
		"redis, 20 Mbit/s, far":             {redis.outlook(20, far), true},
		"redis, 100 Mbit/s, far":            {redis.outlook(100, far), true},
		"redis, 1 Gbit/s, far":              {redis.outlook(1000, far), false},
		"redis, 1 Gbit/s":                   {redis.outlook(1000, near), true},
		"redis, 10 Gbit/s":                  {redis.outlook(10000, near), false}, // quickPull
		"python, 20 Mbit/s, by satellite":   {python.outlook(20, satellite), true},
		"python, 400 Mbit/s, far":           {python.outlook(400, far), true},
		"python, 400 Mbit/s, by satellite":  {python.outlook(400, satellite), false}, // whole takes 1.9 s
		"static binary, 20 Mbit/s":          {goweb.outlook(20, near), false},
		"static binary, 20 Mbit/s, far":     {goweb.outlook(20, far), false},
		"static binary, 1 Mbit/s, far":      {goweb.outlook(1, far), false}, // all comes, and the pack beside it
		"static binary, 5 Mbit/s":           {goweb.outlook(5, near), false},
		"tiny, 1 Mbit/s: a miss brings all": {tiny.outlook(1, near), false},
		"tiny, 20 Mbit/s, far":              {tiny.outlook(20, far), false},
	} {
		if got := c.o.lazily(); got != c.lazy {
			t.Errorf("%s: lazily %v: %v", name, got, c.o)
		}
	}
}

// At 150 ms, whatever the image and the link, a start that misses as expected
// and a quarter more often takes no longer than a whole pull.
func TestLazyIsNeverWorse(t *testing.T) {
	began := 0
	for _, mbit := range []float64{1, 5, 20, 100, 200, 400, 1000, 2500} {
		for absent := int64(600_000); absent < 2e9; absent *= 2 {
			for _, share := range []float64{0.01, 0.05, 0.1, 0.2, 0.4, 0.8} {
				for _, misses := range []float64{0.25, 1, 2, 5, 20} {
					k := known{absent, int64(share * float64(absent)), misses}
					o := k.outlook(mbit, 150*time.Millisecond)
					if !o.lazily() {
						continue
					}
					began++
					if o.misses *= 1.25; o.lazy() > o.whole() {
						t.Errorf("lazily: %v", o)
					}
				}
			}
		}
	}
	if began == 0 {
		t.Error("nothing starts lazily")
	}
}

// What the header tells: several runs miss less than one, and a small image of
// which much is read misses everywhere.
func TestOutlookOpened(t *testing.T) {
	lb := newLazyBed(t, image.Gzip)
	b, _ := lb.build(nil)
	stream, err := pack.Open(b)
	lb.must(err)
	h := stream.Header
	w := outlook{rate: 1e6, absent: 20 << 20, trips: 1}
	one := w.opened(h, false)
	if one.trips != 0 || one.pack <= 0 || one.pack >= int64(b.Cap()) {
		t.Errorf("after the header %d bytes and %d round trips are to come", one.pack, one.trips)
	}
	if mean := (lb.img.Layers[0].Size + lb.img.Layers[1].Size) / 2; one.misses != 1 || one.segment < mean/6 ||
		one.segment > mean/2 {
		t.Errorf("%v misses of %d bytes, of layers of %d", one.misses, one.segment, mean)
	}
	more := *h
	more.Profile.Runs = 4
	if m := w.opened(&more, false).misses; m != 0.25 {
		t.Errorf("%v misses after four runs", m)
	}
	more.Profile.Exercised = true
	if m := w.opened(&more, false).misses; m != 0.125 {
		t.Errorf("%v misses after four exercised runs", m)
	}
	small := w
	small.absent = 3 * startBytes(h)
	if m := small.opened(h, false).misses; m != 2 { // segments that the reads lie in
		t.Errorf("%v misses of a small image of which a third is read", m)
	}
	if local := w.opened(h, true); local.pack != 0 {
		t.Errorf("%d bytes of a pack that is here are to come", local.pack)
	}
}

// The same image, pack and link: near it starts lazily, far away and with a miss
// to fear it is pulled whole, and the pull says why.
func TestDecideByDistance(t *testing.T) {
	for _, c := range []struct {
		far  time.Duration
		lazy bool
	}{{0, true}, {700 * time.Millisecond, false}} {
		t.Run(c.far.String(), func(t *testing.T) {
			t.Parallel()
			if c.far > 0 {
				testkit.Long(t)
			}
			lb := newLazyBed(t, image.Gzip)
			b, stats := lb.build(nil)
			lb.publish(b.Bytes(), stats.Header, false)
			// whose client has not measured yet
			lb.restartAs(newClient(t, "", lb.reg), Config{Link: link.New(link.Config{Inflaters: 1, Limit: 12e6})})
			lb.reg.Be(registrytest.Quirks{Far: c.far})
			pull := lb.start(lb.img.Ref)
			if (pull.Lazy != nil) != c.lazy {
				t.Errorf("lazy %v: %s", pull.Lazy != nil, pull.Why)
			}
			if !strings.Contains(pull.Why, "expected") || !strings.Contains(pull.Why, "round trip") {
				t.Errorf("the reason is %q", pull.Why)
			}
			t.Log(pull.Why)
		})
	}
}
