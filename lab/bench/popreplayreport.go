package bench

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
)

// tally is what some deployments come to.
type tally struct {
	n, hits, failed int
	sum, squares    float64 // of seconds
	hitSum          float64 // of those that hit
	registry, image int64
}

func tallyOf(all []deployed) (t tally) {
	for _, d := range all {
		if d.Failed {
			t.failed++
			continue
		}
		t.n++
		t.sum += d.Seconds
		t.squares += d.Seconds * d.Seconds
		t.registry += d.Registry
		t.image += d.Image
		if d.hit() {
			t.hits++
			t.hitSum += d.Seconds
		}
	}
	return t
}

func (t tally) mean() float64 { return t.sum / float64(t.n) }
func (t tally) deviation() float64 {
	return math.Sqrt(max(0, t.squares/float64(t.n)-t.mean()*t.mean()))
}
func (t tally) hitRatio() float64  { return float64(t.hits) / float64(t.n) }
func (t tally) byteRatio() float64 { return 1 - float64(t.registry)/float64(t.image) }
func (t tally) hitMean() float64   { return t.hitSum / float64(t.hits) }
func (t tally) missed() float64    { return float64(t.registry) / float64(t.n) } // bytes, in the mean

// settled is the last quarter of a run, when caches are as full as they will be.
func (r *replayed) settled() tally { return tallyOf(r.lastQuarter()) }

func (r *replayed) lastQuarter() []deployed { return r.Deployed[len(r.Deployed)*3/4:] }

// hitsOf tells apart the settled deployments of images that their node had not deployed before, and of
// others.
func (r *replayed) hitsOf() (first, again tally) {
	var f, a []deployed
	for _, d := range r.lastQuarter() {
		if d.Again {
			a = append(a, d)
		} else {
			f = append(f, d)
		}
	}
	return tallyOf(f), tallyOf(a)
}

// add notes what came of a run.
func (z *zoneReplay) add(r *replayed, way string, round int) {
	all, settled := tallyOf(r.Deployed), r.settled()
	u := r.usage
	z.b.report.add(Sample{Engine: way, Image: z.name(), Mbit: z.mbit, Round: round, What: "deployment, mean",
		Seconds: all.mean(), CPU: u.Nodes.CPU / float64(all.n),
		Peak: u.Nodes.Peak, Wire: u.WAN.In})
	f := func(what, unit string, v float64) {
		if !math.IsNaN(v) && !math.IsInf(v, 0) {
			z.b.figure(z.name(), way, what, unit, v)
		}
	}
	wholes, bytes, expected := r.simulated()
	unique := float64(sum(z.blobs()))
	f("unique", "bytes", unique)
	f("failed", "", float64(all.failed))
	f("hit ratio", "", all.hitRatio())
	f("hit ratio, simulated", "", expected.WholeHitRatio)
	f("byte hit ratio", "", all.byteRatio())
	f("byte hit ratio, simulated", "", expected.ByteHitRatio)
	f("hit ratio, settled", "", settled.hitRatio())
	f("hit ratio, settled, simulated", "", wholes)
	f("byte hit ratio, settled", "", settled.byteRatio())
	f("byte hit ratio, settled, simulated", "", bytes)
	f("time, settled", "s", settled.mean())
	f("deviation, settled", "s", settled.deviation())
	f("time of a hit, settled", "s", settled.hitMean())
	first, again := r.hitsOf()
	f("time of a first hit, settled", "s", first.hitMean())
	f("time of a hit again, settled", "s", again.hitMean())
	f("WAN / unique bytes", "", float64(u.WAN.In)/unique)
	f("registry bytes / unique bytes", "", float64(all.registry)/unique)
	f("CPU of nodes / deployment", "s", u.Nodes.CPU/float64(all.n))
	f("CPU of clients / deployment", "s", u.Client.CPU/float64(all.n))
	f("CPU of servers / deployment", "s", u.Servers.CPU/float64(all.n))
	f("dewd peak", "MiB", float64(u.Nodes.Dewd)/(1<<20))
	f("whole run", "s", u.Seconds)
	f("largest cache of a node / its bound, at the end", "", r.full)
}

// simulated is the simulator's share of whole hits and of bytes in the last quarter.
func (r *replayed) simulated() (wholes, bytes float64, all *expectation) {
	from := len(r.expected.hits) * 3 / 4
	t := tallyOf(r.expected.hits[from:])
	return t.hitRatio(), t.byteRatio(), r.expected
}

// compare holds the two ways against each other, and against what their misses alone would make of the
// time. That is predicted from the separate caches' run: its time of a hit, and what its missed bytes
// cost beyond that, apply to the shared cache's misses.
func (z *zoneReplay) compare() {
	z.b.doc.table("", []string{"", "one shared cache", "a cache on each node"}, z.rows())
	var rows [][]string
	for i, sh := range z.runs[sharedCache] {
		if i >= len(z.runs[separateCache]) {
			break
		}
		s, p := sh.settled(), z.runs[separateCache][i].settled()
		less := 1 - s.mean()/p.mean()
		byBytes, byMisses := predicted(s, p, tally.missed),
			predicted(s, p, func(t tally) float64 { return 1 - t.hitRatio() })
		byBoth := predictedByBoth(s, z.runs[separateCache][i].lastQuarter())
		rows = append(rows, []string{fmt.Sprint(i + 1), fmt.Sprintf("%.3f", 1-s.hitRatio()),
			fmt.Sprintf("%.3f", 1-p.hitRatio()), fmt.Sprintf("%.3f ± %.3f", s.mean(), s.deviation()),
			fmt.Sprintf("%.3f ± %.3f", p.mean(), p.deviation()), percentOf(less), percentOf(byMisses),
			percentOf(byBytes), percentOf(byBoth), fmt.Sprintf("%.0f %%", 100*thesisReplay[z.zone].less)})
		for what, v := range map[string]float64{"shorter by": less,
			"shorter by, predicted by bytes missed": byBytes, "shorter by, predicted by misses": byMisses,
			"shorter by, predicted by both": byBoth} {
			if !math.IsNaN(v) && !math.IsInf(v, 0) {
				z.b.figure(z.name(), sharedCache, what, "", v)
			}
		}
	}
	z.b.doc.table("Settled, the last quarter of each run.",
		[]string{"round", "misses: shared", "separate", "time, s: shared", "separate", "shorter by",
			"predicted by misses", "by bytes missed", "by both", "thesis"}, rows)
	at := z.name() + ": "
	z.b.doc.atMost(at+"WAN bytes over unique bytes", "", 1.02, z.median(sharedCache, "WAN / unique bytes"))
	for _, by := range []string{"misses", "both"} {
		z.b.doc.atMost(fmt.Sprintf("%show much shorter it is, and what is predicted by %s, apart", at,
			map[string]string{"misses": "how many miss", "both": "how many miss and how much"}[by]), "points", 5,
			100*math.Abs(z.median(sharedCache, "shorter by")-z.median(sharedCache, "shorter by, predicted by "+by)))
	}
	z.b.doc.atMost(at+"dewd's peak on any node", "MiB", 64, z.most(sharedCache, "dewd peak"))
	z.b.doc.atMost(at+"failed deployments", "", 0, z.most(sharedCache, "failed"))
}

// rows are the medians of the two ways, side by side.
func (z *zoneReplay) rows() (rows [][]string) {
	for _, f := range z.b.figures {
		if f.Image != z.name() || f.State != sharedCache {
			continue
		}
		row := []string{strings.TrimSuffix(f.What+", "+f.Unit, ", ")}
		for _, way := range []string{sharedCache, separateCache} {
			cell := ""
			if v := z.median(way, f.What); !math.IsNaN(v) {
				cell = strconv.FormatFloat(v, 'g', 4, 64)
				if v >= 1e4 {
					cell = strconv.FormatFloat(v, 'f', 0, 64)
				}
			}
			row = append(row, cell)
		}
		rows = append(rows, row)
	}
	return rows
}

func (z *zoneReplay) median(way, what string) float64 {
	f := find(z.b.figures, z.name(), way, what)
	if f == nil {
		return math.NaN()
	}
	return f.median()
}

// most is the largest of any round.
func (z *zoneReplay) most(way, what string) float64 {
	f := find(z.b.figures, z.name(), way, what)
	if f == nil {
		return math.NaN()
	}
	return slices.Max(f.Values)
}

func percentOf(v float64) string {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return ""
	}
	return fmt.Sprintf("%.1f %%", 100*v)
}

// predicted is by how much the shared cache's deployments would be shorter if only their misses differed.
func predicted(shared, separate tally, misses func(tally) float64) float64 {
	each := (separate.mean() - separate.hitMean()) / misses(separate)
	return 1 - (separate.hitMean()+each*misses(shared))/separate.mean()
}

// model is what deployments of one run took, by least squares: a hit, what each miss costs, and each byte
// missed.
type model struct{ hit, miss, byte float64 }

func modelOf(all []deployed) model {
	var n, sy, s1, s2, s11, s12, s22, s1y, s2y float64
	for _, d := range all {
		if d.Failed {
			continue
		}
		m, b, y := 0.0, float64(d.Registry), d.Seconds
		if !d.hit() {
			m = 1
		}
		n, sy, s1, s2 = n+1, sy+y, s1+m, s2+b
		s11, s12, s22, s1y, s2y = s11+m*m, s12+m*b, s22+b*b, s1y+m*y, s2y+b*y
	}
	// Of deviations from the means, in which the first unknown is not.
	s11, s12, s22, s1y, s2y = s11-s1*s1/n, s12-s1*s2/n, s22-s2*s2/n, s1y-s1*sy/n, s2y-s2*sy/n
	det := s11*s22 - s12*s12
	m := model{miss: (s1y*s22 - s2y*s12) / det, byte: (s2y*s11 - s1y*s12) / det}
	m.hit = (sy - m.miss*s1 - m.byte*s2) / n
	return m
}

// predictedByBoth is by how much the shared cache's deployments would be shorter if only how often they miss,
// and how much, differed.
func predictedByBoth(shared tally, separate []deployed) float64 {
	m := modelOf(separate)
	return 1 - (m.hit+m.miss*(1-shared.hitRatio())+m.byte*shared.missed())/tallyOf(separate).mean()
}

var replayPanels = []panel{
	{"share of deployments that found all layers", func(i instant) float64 { return i.hits }},
	{"mean time of a deployment, s", func(i instant) float64 { return i.seconds }},
	{"standard deviation, s", func(i instant) float64 { return i.cpu }},
}

// chart draws figures 4.7 and 4.8, and leaves each deployment in a file.
func (z *zoneReplay) chart() error {
	var lines []timeline
	raw := map[string][]*replayed{}
	for _, way := range []string{sharedCache, separateCache} {
		for _, r := range z.runs[way] {
			lines = append(lines, z.line(way, r.Deployed))
			raw[way] = append(raw[way], r)
		}
		if runs := z.runs[way]; len(runs) > 0 {
			lines = append(lines, z.line(way+", simulated", runs[0].expected.hits))
		}
	}
	name := fmt.Sprintf("%s-%d-%s", z.zone, z.deployments, rate(z.mbit))
	title := fmt.Sprintf("%s of %s, shared cache %.2f and each node's %.2f of the working set", z.kind(), z.zone,
		thesisReplay[z.zone].shared, thesisReplay[z.zone].node)
	if err := z.b.doc.chart(name, title+" (figures 4.7, 4.8)",
		plotPanels(title, "%.0f deployments", replayPanels, lines)); err != nil {
		return err
	}
	b, err := json.Marshal(map[string]any{"commit": commit(), "machine": machine(), "zone": z.zone,
		"mbit": z.mbit, "synthetic": z.script.synthetic, "runs": raw})
	if err != nil {
		return err
	}
	return os.WriteFile(fmt.Sprintf("%s-%s.json", z.b.report.prefix, name), b, 0o644)
}

// line has an instant for each bin of deployments.
func (z *zoneReplay) line(name string, all []deployed) timeline {
	l := timeline{engine: name}
	bin := z.bin
	for from := 0; from < len(all); from += bin {
		t := tallyOf(all[from:min(len(all), from+bin)])
		if t.n == 0 {
			continue
		}
		at := instant{t: float64(from + bin), hits: t.hitRatio(), seconds: t.mean(), cpu: t.deviation()}
		if t.sum == 0 { // simulated
			at.seconds, at.cpu = math.NaN(), math.NaN()
		}
		l.instants = append(l.instants, at)
	}
	return l
}
