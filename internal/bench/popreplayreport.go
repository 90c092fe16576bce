package bench

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"text/tabwriter"
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
func (r *replayed) settled() tally { return tallyOf(r.Deployed[len(r.Deployed)*3/4:]) }

// hitsOf tells apart the settled deployments of images that their node had not deployed before, and of others.
func (r *replayed) hitsOf() (first, again tally) {
	var f, a []deployed
	for _, d := range r.Deployed[len(r.Deployed)*3/4:] {
		if d.Again {
			a = append(a, d)
		} else {
			f = append(f, d)
		}
	}
	return tallyOf(f), tallyOf(a)
}

// add notes what came of a run.
func (z *zoneReplay) add(r *replayed, way string, mbit float64, round int) {
	all, settled := tallyOf(r.Deployed), r.settled()
	u := r.usage
	z.b.report.add(Sample{Engine: way, Image: z.zone, Mbit: mbit, Round: round, What: "deployment, mean", Seconds: all.mean(), CPU: u.Nodes.CPU / float64(all.n),
		Peak: u.Nodes.Peak, Wire: u.WAN.In})
	f := func(what, unit string, v float64) {
		if !math.IsNaN(v) && !math.IsInf(v, 0) {
			z.b.figure(z.at(mbit), way, what, unit, v)
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
	f("dewd peak", "MB", float64(u.Nodes.Dewd)/(1<<20))
	f("whole run", "s", u.Seconds)
}

func (z *zoneReplay) at(mbit float64) string { return fmt.Sprintf("%s %s", z.zone, rate(mbit)) }

// simulated is the simulator's share of whole hits and of bytes in the last quarter.
func (r *replayed) simulated() (wholes, bytes float64, all *expectation) {
	from := len(r.expected.hits) * 3 / 4
	t := tallyOf(r.expected.hits[from:])
	return t.hitRatio(), t.byteRatio(), r.expected
}

// compare holds the two ways against each other, and against what their misses alone would make of the
// time. That is predicted from the separate caches' run: its time of a hit, and what its missed bytes
// cost beyond that, apply to the shared cache's misses.
func (z *zoneReplay) compare(mbit float64) {
	w := tabwriter.NewWriter(z.b.stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "\nzone\tMbit/s\tround\tmiss ratio, settled: shared\tseparate\ttime, settled, s: shared\tseparate\tshorter by\tpredicted by bytes missed\tpredicted by misses\tthesis\n")
	for i, sh := range z.runs[sharedCache] {
		if i >= len(z.runs[separateCache]) {
			break
		}
		s, p := sh.settled(), z.runs[separateCache][i].settled()
		less := 1 - s.mean()/p.mean()
		byBytes, byMisses := predicted(s, p, tally.missed), predicted(s, p, func(t tally) float64 { return 1 - t.hitRatio() })
		fmt.Fprintf(w, "%s\t%s\t%d\t%.3f\t%.3f\t%.3f ± %.3f\t%.3f ± %.3f\t%.1f %%\t%.1f %%\t%.1f %%\t%.0f %%\n", z.zone, rate(mbit), i, 1-s.hitRatio(), 1-p.hitRatio(),
			s.mean(), s.deviation(), p.mean(), p.deviation(), 100*less, 100*byBytes, 100*byMisses, 100*thesisReplay[z.zone].less)
		for what, v := range map[string]float64{"shorter by": less, "shorter by, predicted by bytes missed": byBytes, "shorter by, predicted by misses": byMisses} {
			if !math.IsNaN(v) && !math.IsInf(v, 0) {
				z.b.figure(z.at(mbit), sharedCache, what, "", v)
			}
		}
	}
	w.Flush()
}

// predicted is by how much the shared cache's deployments would be shorter if only their misses differed.
func predicted(shared, separate tally, misses func(tally) float64) float64 {
	each := (separate.mean() - separate.hitMean()) / misses(separate)
	return 1 - (separate.hitMean()+each*misses(shared))/separate.mean()
}

var replayPanels = []panel{
	{"share of deployments that found all layers", func(i instant) float64 { return i.hits }},
	{"mean time of a deployment, s", func(i instant) float64 { return i.seconds }},
	{"standard deviation, s", func(i instant) float64 { return i.cpu }},
}

// chart draws figures 4.7 and 4.8, and leaves each deployment in a file.
func (z *zoneReplay) chart(mbit float64) error {
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
	kind := "trace"
	if z.script.synthetic {
		kind = "synthetic trace"
	}
	prefix := fmt.Sprintf("%s-%s-%s", z.b.report.prefix, z.zone, rate(mbit))
	title := fmt.Sprintf("%s: %s, shared cache %.2f and each node's %.2f of the working set", z.zone, kind, thesisReplay[z.zone].shared, thesisReplay[z.zone].node)
	if err := os.WriteFile(prefix+".svg", []byte(plotPanels(title, "%.0f deployments", replayPanels, lines)), 0o644); err != nil {
		return err
	}
	b, err := json.Marshal(map[string]any{"commit": commit(), "machine": machine(), "zone": z.zone, "mbit": mbit, "synthetic": z.script.synthetic, "runs": raw})
	if err != nil {
		return err
	}
	return os.WriteFile(prefix+".json", b, 0o644)
}

// line has an instant for each bin of deployments.
func (z *zoneReplay) line(name string, all []deployed) timeline {
	l := timeline{engine: name}
	bin := z.b.replay.bin
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
