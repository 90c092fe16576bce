package pulltrace

import (
	"math"
	"math/rand/v2"
	"slices"
	"sort"
)

// model is a registry's users, without sizes: who pulls which version of what, and which of its layers that
// takes. The same seed makes the same run; sizes are dealt to the layers once it is known how often each is
// read.
//
// A repository is built on one of a tenth as many bases, which the popular ones share. A version is three
// layers of the base, up to three of dependencies and up to four of its own; a release makes new layers from
// the top down. A client that has pulled a version has its layers; some of the pulls are by machines that are
// new and have nothing, as many as it takes for BlobsPerPull. An image that was just pulled is often pulled
// by the next client too: machines start together.
type model struct {
	zone   Zone
	rng    *rand.Rand
	chance []float64 // of a repository to be pulled, cumulated
	repos  []repo
	layers int32
	last   int            // the repository of the last pull
	has    map[uint64]int // the last version that a client has of a repository
	reads  int64          // of blobs
	pulls  int64
}

type repo struct {
	first    int       // the version that versions begins with
	versions [][]int32 // the last few, each the layers from the base up
}

// keptVersions is how far back somebody still pulls.
const keptVersions = 6

// events of a run. Seconds are counted from the beginning of the trace.
type events struct {
	pull    func(second float64, client, repo, version int, fetch []int32)
	release func(second float64, repo, version int)
}

func newModel(z Zone, repos int, seed uint64) *model {
	name := uint64(0)
	for _, c := range z.Name {
		name = name<<8 | uint64(c)
	}
	m := &model{zone: z, rng: rand.New(rand.NewPCG(seed, name)), has: make(map[uint64]int),
		repos: make([]repo, repos)}
	m.chance = popularity(repos, z.Skew)
	bases := make([][]int32, max(1, repos/10))
	for i := range bases {
		bases[i] = m.fresh(3)
	}
	for i := range m.repos {
		u := m.rng.Float64()
		base := bases[int(u*u*float64(len(bases)))]
		m.repos[i].versions = [][]int32{slices.Concat(base, m.fresh(2+m.rng.IntN(2)), m.fresh(2+m.rng.IntN(3)))}
	}
	return m
}

func (m *model) fresh(n int) []int32 {
	out := make([]int32, n)
	for i := range out {
		out[i] = m.layers
		m.layers++
	}
	return out
}

// popularity is the cumulated chances of n images of which the first tenth gets TopPulls.
func popularity(n int, skew float64) []float64 {
	top := max(1, int(math.Round(TopImages*float64(n))))
	p := make([]float64, n)
	share := func(from, to int, mass, skew float64) {
		sum := 0.0
		for i := from; i < to; i++ {
			p[i] = math.Pow(float64(i-from+1), -skew)
			sum += p[i]
		}
		for i := from; i < to; i++ {
			p[i] *= mass / sum
		}
	}
	share(0, top, TopPulls, skew)
	share(top, n, 1-TopPulls, 0.3) // nearly even, so that nearly all of them are pulled
	for i := 1; i < n; i++ {
		p[i] += p[i-1]
	}
	return p
}

func (m *model) popular() int {
	return min(sort.SearchFloat64s(m.chance, m.rng.Float64()), len(m.repos)-1)
}

// run plays the whole trace.
func (m *model) run(on events) {
	clock := newClock(m.zone.Pulls)
	perPull, due := m.zone.Releases*float64(len(m.repos))/float64(m.zone.Pulls), 0.0
	for range m.zone.Pulls {
		second := clock.next(m.rng)
		for due += perPull; due >= 1; due-- {
			m.release(second, on)
		}
		m.pull(second, on)
	}
}

// release makes a new version: half of them of what is popular, half of anything.
func (m *model) release(second float64, on events) {
	i := m.rng.IntN(len(m.repos))
	if m.rng.IntN(2) == 0 {
		i = m.popular()
	}
	r := &m.repos[i]
	last := r.versions[len(r.versions)-1]
	keep := len(last) - 1 - m.rng.IntN(3)
	if m.rng.IntN(6) == 0 {
		keep = 3 // dependencies too
	}
	keep = max(3, keep)
	next := slices.Concat(last[:keep], m.fresh(len(last)-keep))
	r.versions = append(r.versions, next)
	if len(r.versions) > keptVersions {
		r.versions = slices.Clone(r.versions[1:])
		r.first++
	}
	if on.release != nil {
		on.release(second, i, r.first+len(r.versions)-1)
	}
}

func (m *model) pull(second float64, on events) {
	i := m.last
	if m.pulls == 0 || m.rng.Float64() >= m.zone.Bursts {
		i = m.popular()
	}
	m.last = i
	r := &m.repos[i]
	back := 0
	for m.rng.IntN(8) == 0 && back < len(r.versions)-1 {
		back++
	}
	at := len(r.versions) - 1 - back
	client := m.rng.IntN(m.zone.Clients)
	key := uint64(client)<<32 | uint64(i)
	last, known := m.has[key]
	fetch := r.versions[at]
	if known && last >= r.first && !m.isNew() {
		fetch = without(fetch, r.versions[last-r.first])
	}
	m.has[key] = r.first + at
	m.pulls++
	m.reads += int64(len(fetch))
	on.pull(second, client, i, r.first+at, fetch)
}

// isNew says whether the client is a new machine. It holds the mean of blobs per pull.
func (m *model) isNew() bool {
	short := BlobsPerPull()*float64(m.pulls+1) - float64(m.reads)
	return m.rng.Float64() < min(max(0.5+short/200, 0), 1)
}

func without(all, have []int32) []int32 {
	return slices.DeleteFunc(slices.Clone(all), func(l int32) bool { return slices.Contains(have, l) })
}

// clock spreads n pulls over Days: more by day than by night, fewer on two days of seven.
type clock struct {
	hours []float64 // cumulated share of the pulls
	n, i  int
}

func newClock(n int) *clock {
	c := &clock{hours: make([]float64, Days*24), n: n}
	sum := 0.0
	for h := range c.hours {
		w := 1 + 0.6*math.Sin(2*math.Pi*(float64(h%24)-9)/24)
		if h/24%7 >= 5 {
			w *= 0.5
		}
		sum += w
		c.hours[h] = sum
	}
	for h := range c.hours {
		c.hours[h] /= sum
	}
	return c
}

func (c *clock) next(r *rand.Rand) float64 {
	u := (float64(c.i) + r.Float64()) / float64(c.n)
	c.i++
	h := min(sort.SearchFloat64s(c.hours, u), len(c.hours)-1)
	before := 0.0
	if h > 0 {
		before = c.hours[h-1]
	}
	return 3600 * (float64(h) + (u-before)/(c.hours[h]-before))
}

// fit finds how many repositories the zone must have for its working set, and the sizes of their layers.
func fit(z Zone, seed uint64) (repos int, sizes []int64) {
	low, high := 2, max(4, z.Pulls)
	best := math.Inf(1)
	for low <= high {
		n := low + (high-low)/2
		got, total := deal(z, n, seed)
		if off := math.Abs(total/z.Bytes - 1); off < best {
			best, repos, sizes = off, n, got
		}
		if total < z.Bytes {
			low = n + 1
		} else {
			high = n - 1
		}
		if best < 0.002 {
			break
		}
	}
	return repos, sizes
}

// deal runs the model and gives each layer a size, so that over its reads MeanBlob, LargeReads and LargeBytes
// hold. It also returns the bytes of all layers that were read.
func deal(z Zone, repos int, seed uint64) (sizes []int64, total float64) {
	m := newModel(z, repos, seed)
	var reads []int64
	m.run(events{pull: func(_ float64, _, _, _ int, fetch []int32) {
		for int(m.layers) > len(reads) {
			reads = append(reads, make([]int64, int(m.layers)-len(reads))...)
		}
		for _, l := range fetch {
			reads[l]++
		}
	}})
	rng := rand.New(rand.NewPCG(seed, 1))
	large, small := classes(reads, rng)
	sizes = make([]int64, len(reads))
	mean := MeanBlob * LargeBytes / LargeReads
	stretch(sizes, reads, large, rng, mean, Large, math.MaxInt64, func(u float64) float64 {
		return -math.Log(1 - u)
	})
	mean = MeanBlob * (1 - LargeBytes) / (1 - LargeReads)
	stretch(sizes, reads, small, rng, mean, 100, Large, func(u float64) float64 {
		return math.Exp(4 * math.Erfinv(2*u-1))
	})
	for _, s := range sizes {
		total += float64(s)
	}
	return sizes, total
}

// classes splits the layers that were read so that LargeReads of the reads, at all levels of popularity, are
// of large ones.
func classes(reads []int64, rng *rand.Rand) (large, small []int) {
	var order []int
	for i, n := range reads {
		if n > 0 {
			order = append(order, i)
		}
	}
	rng.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
	slices.SortStableFunc(order, func(a, b int) int { return int(reads[b] - reads[a]) })
	var all, big int64
	for _, i := range order {
		all += reads[i]
		if float64(big+reads[i]) <= LargeReads*float64(all) {
			big += reads[i]
			large = append(large, i)
		} else {
			small = append(small, i)
		}
	}
	return large, small
}

// stretch gives the layers of a class sizes between floor and ceiling, of the shape that the quantile
// function has, so that over their reads the mean comes out. The quantiles are spread evenly over layers of
// like popularity.
func stretch(sizes, reads []int64, class []int, rng *rand.Rand, mean, floor, ceiling float64,
	quantile func(float64) float64) {
	x := make([]float64, len(class))
	u := rng.Float64()
	for j := range class {
		u = math.Mod(u+math.Phi-1, 1)
		x[j] = quantile(0.001 + 0.998*u)
	}
	for k, round := 1.0, 0; round < 60; round++ {
		var sum, n float64
		for j, i := range class {
			size := min(floor+k*x[j], ceiling)
			sizes[i] = int64(size)
			sum += size * float64(reads[i])
			n += float64(reads[i])
		}
		if k *= (mean - floor) / (sum/n - floor); n == 0 {
			return
		}
	}
}
