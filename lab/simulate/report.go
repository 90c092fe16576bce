package simulate

import (
	"fmt"
	"io"
	"path/filepath"
	"strings"

	"dewpoint/internal/evict"

	"dewpoint/testkit/pulltrace"
)

// report writes the study's text.
func (s *study) report(w io.Writer, args []string) error {
	p := &page{w: w, plots: filepath.Base(s.plots)}
	p.f("# What a PoP's cache should let go of\n\n")
	p.f("**All traces here are synthetic.** They are calibrated to published facts of the IBM registry traces; they are not those traces. Run\n")
	p.f("`dewlab simulate TRACE…` on the real ones for what they say.\n\n")
	p.f("    dewlab simulate %s\n\nseed %d unless another is named, scale %g (but at least %d pulls of each zone), commit %s. The link to the registry has %.0f Mbit/s and %v, the one to the shared cache %.0f Mbit/s and %v; a deployment that moves\nnothing takes %v; layers come one after the other. Of a layer that is in the shared cache a start reads %.0f %%, of one in a node's own what it reads takes no time. The refetch cost that policies are told is in %s.\n\n",
		strings.Join(args, " "), s.o.seed, s.o.scale, studyPulls, commit(s.version), s.o.cfg.WAN.Bandwidth/1e6,
		s.o.cfg.WAN.RTT, s.o.cfg.LAN.Bandwidth/1e6, s.o.cfg.LAN.RTT, s.o.cfg.Start, 100*s.o.cfg.Reads, s.o.cfg.Cost)
	s.writeVerdict(p)
	s.writeZones(p)
	s.writePolicies(p)
	s.writeSharing(p)
	s.writeReplay(p)
	s.writeLimits(p)
	return p.err
}

// page is a document being written. It keeps the first error.
type page struct {
	w     io.Writer
	plots string
	err   error
}

func (p *page) f(format string, a ...any) {
	if p.err == nil {
		_, p.err = fmt.Fprintf(p.w, format, a...)
	}
}

// row writes a table's row; head writes its first and the line below.
func (p *page) row(cells ...string) { p.f("| %s |\n", strings.Join(cells, " | ")) }

func (p *page) head(cells ...string) {
	p.row(cells...)
	p.f("|%s\n", strings.Repeat("---|", len(cells)))
}

func (p *page) chart(name, alt string) { p.f("![%s](%s/%s.svg)\n\n", alt, p.plots, name) }

func (s *study) writeVerdict(p *page) {
	p.f("## The result\n\nByte hit ratio of a shared cache against LRU's, in points, over %d zones and %d capacities, with what policies are told that a refetch costs in bytes and in seconds.\n", len(s.rounds[0].zones), len(studyShares))
	p.f("*Below* is by more than %g points, *tied* is below by no more.\n\n", studyTie)
	p.head("seed", "cost in", "policy", "mean", "least", "where", "below LRU", "tied")
	for _, r := range s.rounds {
		for _, v := range r.verdicts() {
			p.row(fmt.Sprint(r.seed), r.cost, "`"+v.policy+"`", fmt.Sprintf("%+.2f", v.mean),
				fmt.Sprintf("%+.3f", v.least), v.where, fmt.Sprintf("%d of %d", v.below, v.n), fmt.Sprint(v.tied))
		}
	}
	p.f("\n**The constants of `overdue`, `lru-overdue` and `contest` were tuned on traces of seed %d, and on none of these.** That `lru-overdue` takes no account of costs was decided on seed %d as well. All are of the same generator, though: another seed is other images, sizes and pulls by the same habits.\n\n", tunedSeed, lookedSeed)
	p.f("The default is `%s`. It keeps shadows, caches without contents, of `lru`, `lru-overdue`, `overdue` and `s3fifo`, and becomes like the one that had most bytes lately (`internal/evict`).\n", evict.Default)
	p.f("`overdue` is GDSF with the logarithm of the uses, in which what was in steady use and has stopped goes first; `lru-overdue` is LRU in which it does.\n\n")
}

func (s *study) writeZones(p *page) {
	p.f("## The traces, and figure 4.1\n\n")
	p.head("zone", "scale", "pulls", "blob reads", "distinct blobs", "distinct GB, × 1/scale", "table 4.1: GB",
		"images", "clients", "LRU hits at 32 GB × scale", "thesis")
	var reads, bytes, large, largeBytes int64
	for _, z := range s.rounds[0].zones {
		r := z.result
		reads, bytes, large, largeBytes = reads+r.Blobs, bytes+r.BlobBytes, large+r.Large, largeBytes+r.LargeBytes
		said := "–"
		if h, ok := thesisHits[z.zone.Name]; ok {
			said = percent(h)
		}
		p.row(z.zone.Name, fmt.Sprintf("%.3g", z.scale), fmt.Sprint(r.Manifests), fmt.Sprint(r.Blobs),
			fmt.Sprint(r.Unique), fmt.Sprintf("%.0f", float64(r.UniqueBytes)/1e9/z.scale),
			fmt.Sprintf("%.0f", z.zone.Bytes/1e9), fmt.Sprint(r.Images), fmt.Sprint(r.Clients),
			percent(z.small.HitRatio), said)
	}
	p.f("\nIn all %d reads of blobs, %.2f MB in the mean; blobs over 64 MiB are %s of the reads and %s of the bytes (published of the whole: %d, 14 MB, 6 %%, 65 %%).\n",
		reads, float64(bytes)/float64(reads)/1e6, percent(ratio(large, reads)), percent(ratio(largeBytes, bytes)),
		pulltrace.BlobReads)
	p.f("What is chosen and not published: clients, releases, popularity within the popular tenth, how layers are shared (`testkit/pulltrace/zone.go`, `model.go`).\n\n")
	p.chart("zones", "hit ratio of a shared LRU cache over its size, by zone")
}

func (s *study) writePolicies(p *page) {
	p.f("## The policies\n\nByte hit ratio of a shared cache, percent; the capacity is a share of the zone's distinct bytes.\n\n")
	head := []string{"zone", "policy"}
	for _, share := range studyShares {
		head = append(head, fmt.Sprintf("%g %%", 100*share))
	}
	p.head(head...)
	for _, z := range s.rounds[0].zones {
		for _, name := range policyNames() {
			cells := []string{z.zone.Name, "`" + name + "`"}
			for _, t := range z.result.of(name, 0) {
				cells = append(cells, fmt.Sprintf("%.2f", 100*t.ByteHitRatio))
			}
			p.row(cells...)
		}
		p.row(z.zone.Name, fmt.Sprintf("*all kept: %.2f*", 100*(1-ratio(z.result.UniqueBytes, z.result.BlobBytes))),
			strings.Repeat("| ", len(studyShares)-1))
	}
	p.f("\nThe same by requests:\n\n")
	p.head(head...)
	for _, z := range s.rounds[0].zones {
		for _, name := range policyNames() {
			cells := []string{z.zone.Name, "`" + name + "`"}
			for _, t := range z.result.of(name, 0) {
				cells = append(cells, fmt.Sprintf("%.2f", 100*t.HitRatio))
			}
			p.row(cells...)
		}
	}
	p.f("\n")
	for _, z := range s.rounds[0].zones {
		p.chart(z.zone.Name+"/byte-ratio", z.zone.Name+": byte hit ratio by policy")
	}
}

func (s *study) writeSharing(p *page) {
	p.f("## One cache, or one for each of %d nodes\n\nThe same capacity in all, policy `%s`; deployments go to the nodes in turn. Byte hit ratio, and mean deployment time.\n\n", studyNodes, evict.Default)
	p.head("zone", "capacity", "shared", "separate", "shared, s", "separate, s", "less time")
	for _, z := range s.rounds[0].zones {
		nodes := z.result.of(evict.Default, studyNodes)
		for i, t := range z.result.of(evict.Default, 0) {
			n := nodes[i]
			p.row(z.zone.Name, fmt.Sprintf("%g %%", 100*studyShares[i]), percent(t.ByteHitRatio),
				percent(n.ByteHitRatio),
				fmt.Sprintf("%.2f", t.DeploySeconds), fmt.Sprintf("%.2f", n.DeploySeconds),
				percent(1-t.DeploySeconds/n.DeploySeconds))
		}
	}
	p.f("\nA hit in the shared cache is read over the LAN, one in a node's own takes no transfer: where both hit always, separate caches are faster by that.\n\n")
	for _, z := range s.rounds[0].zones {
		p.chart(z.zone.Name+"/deployment", z.zone.Name+": deployment time, shared and separate")
	}
}

func (s *study) writeReplay(p *page) {
	p.f("## Figures 4.7 and 4.8: %d deployments\n\nThe beginning of the zones' traces at scale 1, with the thesis's ratios of capacity to working set, in turn on %d nodes. Settled: the last quarter.\n", studyDeployments, studyNodes)
	p.f("A deployment is a hit when all its layers were there.\n\n")
	p.head("zone", "working set", "policy", "shared: capacity", "hits", "layers", "s", "separate: each", "hits",
		"layers", "s", "less time", "thesis")
	for _, t := range thesis {
		r := s.replay[t.zone]
		for _, name := range []string{"lru", evict.Default} {
			a, b := r.of(name, 0)[0], r.of(name, studyNodes)[0]
			ah, al, as := a.settled()
			bh, bl, bs := b.settled()
			p.row(t.zone, gigabytes(r.UniqueBytes), "`"+name+"`", fmt.Sprintf("%.2f", t.shared), percent(ah),
				percent(al), fmt.Sprintf("%.2f", as),
				fmt.Sprintf("%.2f", t.node), percent(bh), percent(bl), fmt.Sprintf("%.2f", bs), percent(1-as/bs),
				percent(t.less))
		}
	}
	p.f("\nThe thesis has working sets of 31 and 54 GB for these deployments, and, for *fra*, hit ratios of %s shared and %s separate. Its times are of real deployments on its testbed.\n\n", percent(thesis[0].hits), percent(thesis[0].nodeHits))
	for _, t := range thesis {
		p.chart(t.zone+"/series-hits", t.zone+": hit ratio over the deployments")
		p.chart(t.zone+"/series-deployment", t.zone+": deployment time over the deployments")
	}
}

func (s *study) writeLimits(p *page) {
	p.f(`## What this does not show

* The generator's releases replace layers of images that are in steady use, and its pulls are independent of each other at any one popularity. Both suit a
  policy that notices when steady use ends. How much of the advantage real traces have is not known here.
* A real trace has what clients did not have; so do these. What a node would deploy again from its own disk is not in either.
* Deployment times are computed from sizes and links. Nothing is deployed, nothing starts before it is whole, and no two transfers share a link.
* The synthetic traces are kinder to small caches than the published ones: LRU hits more at the published size wherever the thesis gives a number (figure 4.1, the last two columns above), and where it says that a very small
  cache hits hardly anything (*prs*, *dev*) these hit nine times of ten at 32 GB. So what a policy gains here where all is small is more sure than how often it hits.
`)
}

func percent(r float64) string { return fmt.Sprintf("%.1f %%", 100*r) }
