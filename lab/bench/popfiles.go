package bench

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"dewpoint/testkit/demo"
	"dewpoint/testkit/popbed"
)

// What is timed of one image, in this order. Page caches are empty before each but warmHit.
const (
	miss   = "miss"     // on n1: nobody has it
	stored = "stored"   // from the same instruction until the store has every layer; with a store only
	ownHit = "own copy" // on n1, which has fetched it; without a store that is the hit
	// without a store only: on n1, whose containerd was made to forget the image; its layers are here
	freshHit = "hit, fresh"
	storeHit = "hit"         // on n2, from the store
	againHit = "hit again"   // on n2 once more
	warmHit  = "hit, cached" // and once more, page caches as they are
)

const filesWarmup = "goweb:1"

// files compares stores (table 4.4, figures 4.4 and 4.5).
func (b *popBench) files(ctx context.Context) error {
	if !b.o.asked("rates") {
		b.o.mbit = []float64{100, 0}
	}
	if err := demo.Build(ctx,
		demo.Config{Dir: b.o.layout, Names: append(b.o.images[:len(b.o.images):len(b.o.images)], filesWarmup),
			Log: b.stderr}); err != nil {
		return err
	}
	lines := map[string][]timeline{}
	for _, mbit := range b.o.mbit {
		for round := range b.o.rounds {
			for _, image := range b.o.images {
				for i := range b.stores {
					kind := b.stores[(i+round)%len(b.stores)]
					if err := b.filesOne(ctx, kind, image, mbit, round, lines); err != nil {
						return fmt.Errorf("%s, %s: %w", storeName(kind), image, err)
					}
				}
			}
		}
	}
	b.report.table("none")
	fmt.Fprintln(b.stdout)
	tabulate(b.stdout, b.figures, "none")
	b.filesTable()
	for _, what := range slices.Sorted(maps.Keys(lines)) {
		title := fmt.Sprintf("%s: one node and its file system's client", what)
		if err := b.doc.chart(what, title+" (figures 4.4, 4.5)",
			plotPanels(title, "%.1f s", filePanels, lines[what])); err != nil {
			return err
		}
	}
	return nil
}

var filePanels = []panel{
	{"download, Mbit/s", func(i instant) float64 { return i.network }},
	{"upload, Mbit/s", func(i instant) float64 { return i.upload }},
	{"processors", func(i instant) float64 { return i.cpu }},
	{"memory, MB", func(i instant) float64 { return i.memory }},
}

func storeName(k popbed.Kind) string {
	if k == popbed.None {
		return "none"
	}
	return string(k)
}

// filesOne deploys an image in all ways with one kind of store, on a bed of its own.
func (b *popBench) filesOne(ctx context.Context, kind popbed.Kind, image string, mbit float64, round int,
	lines map[string][]timeline) error {
	p, err := b.open(ctx, popConfig{kind: kind, nodes: 3, dewds: 2, layout: b.o.layout, prepare: b.prepare,
		pop: shortLeases})
	if err != nil {
		return err
	}
	f := &filesRun{b: b, p: p, image: image, mbit: mbit, round: round, lines: lines,
		settled: time.Now().Add(filesSettle)}
	return errors.Join(f.run(ctx), p.Close())
}

type filesRun struct {
	b     *popBench
	p     *pop
	image string
	mbit  float64
	round int
	lines map[string][]timeline // of the first round, by what

	settled time.Time // the nodes are not new in their PoP any more
}

// filesSettle is how long after it has come into its PoP a node looks for checkpoints at each deployment:
// half of the grace, until it must see what others have done before; and a look, behind deployments, that
// holds from then on.
const filesSettle = shortGrace/2 + 2*time.Second

const shortGrace = 10 * time.Second

var shortLeases = fmt.Sprintf("lease = \"5s\"\ngrace = %q\n", shortGrace)

func (f *filesRun) run(ctx context.Context) error {
	// What a node does once in its life is no part of a deployment.
	if err := onNodes(2, func(i int) error { return f.p.once(ctx, i, filesWarmup) }); err != nil {
		return err
	}
	if err := f.p.Rate(ctx, f.mbit); err != nil {
		return err
	}
	if err := f.one(ctx, 0, miss, true); err != nil {
		return err
	}
	own := ownHit
	if f.p.kind == popbed.None {
		own = storeHit
	}
	steps := []struct {
		node int
		what string
	}{{0, own}, {1, storeHit}, {1, againHit}, {1, warmHit}}
	if f.p.kind == popbed.None {
		steps = []struct {
			node int
			what string
		}{{0, own}, {0, againHit}, {0, warmHit}, {0, freshHit}}
	}
	for _, s := range steps {
		if s.what == freshHit {
			if err := f.p.RemoveImage(ctx, s.node, popbed.Registry+"/"+f.image); err != nil {
				return err
			}
		}
		if s.what == storeHit && f.p.kind != popbed.None {
			if f.b.prepare > 0 {
				if err := f.ready(ctx, s.node); err != nil {
					return err
				}
			}
			select {
			case <-time.After(time.Until(f.settled)):
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}
		if err := f.one(ctx, s.node, s.what, s.what != warmHit); err != nil {
			return err
		}
	}
	return nil
}

// ready deploys once more on the first node, and waits until node i has made the image ready.
func (f *filesRun) ready(ctx context.Context, i int) error {
	_, err := f.p.run(ctx, 0, f.image, popName)
	if err == nil {
		err = f.p.Remove(ctx, 0, popName)
	}
	if err != nil {
		return err
	}
	return f.p.awaitReady(ctx, i, f.image)
}

// one measures one deployment on node i.
func (f *filesRun) one(ctx context.Context, i int, what string, cold bool) error {
	before := f.p.storedNow()
	if cold {
		if err := f.p.cool(f.image); err != nil {
			return err
		}
	}
	w, err := f.p.watch(i, 1)
	if err != nil {
		return err
	}
	var whole *popWatch
	if what == miss && f.p.kind != popbed.None {
		if whole, err = f.p.watch(i, 1); err != nil {
			return err
		}
	}
	rec, err := f.p.run(ctx, i, f.image, popName)
	u, werr := w.stop()
	if err = errors.Join(err, werr); err != nil {
		if whole != nil {
			whole.stop()
		}
		return err
	}
	f.add(what, u, rec.Way.Pull)
	for stage, at := range rec.Stages {
		f.b.figure(f.at(what), storeName(f.p.kind), "stage "+stage, "s", at)
	}
	if whole != nil {
		if err := f.fill(ctx, whole, before); err != nil {
			return err
		}
	}
	return f.p.Remove(ctx, i, popName)
}

func (p *pop) storedNow() int {
	if p.kind == popbed.None {
		return 0
	}
	return p.stored()
}

// fill waits until the store has the image.
func (f *filesRun) fill(ctx context.Context, w *popWatch, before int) error {
	m, err := demo.Manifest(f.b.o.layout, f.image)
	if err == nil {
		err = f.p.awaitStored(ctx, before+len(m.Layers))
	}
	u, werr := w.stop()
	if err = errors.Join(err, werr); err == nil {
		f.add(stored, u, "")
	}
	return err
}

func (f *filesRun) at(what string) string {
	return fmt.Sprintf("%s %s: %s", f.image, rate(f.mbit), what)
}

func (f *filesRun) add(what string, u popUsage, way string) {
	store := storeName(f.p.kind)
	f.b.report.add(Sample{Engine: store, Image: f.image, Mbit: f.mbit, Round: f.round, What: what,
		Seconds: u.Seconds, CPU: u.Nodes.CPU,
		Peak: u.Nodes.Peak, Wire: u.WAN.In, Way: way})
	for _, v := range []struct {
		what, unit string
		value      float64
	}{
		{"dewd peak", "MiB", float64(u.Nodes.Dewd) / (1 << 20)},
		{"client CPU", "s", u.Client.CPU}, {"client peak", "MiB", float64(u.Client.Peak) / (1 << 20)},
		{"servers CPU", "s", u.Servers.CPU}, {"servers peak", "MiB", float64(u.Servers.Peak) / (1 << 20)},
		{"LAN in", "MB", float64(u.LAN.In) / 1e6}, {"LAN out", "MB", float64(u.LAN.Out) / 1e6},
	} {
		if v.value > 0 {
			f.b.figure(f.at(what), store, v.what, v.unit, v.value)
		}
	}
	if f.round == 0 && (what == stored || what == miss && f.p.kind == popbed.None || what == storeHit) {
		name := fmt.Sprintf("%s-%s-%s", map[string]string{stored: miss, miss: miss, storeHit: storeHit}[what],
			f.image, rate(f.mbit))
		f.lines[name] = append(f.lines[name], u.Line)
	}
}

// filesTable holds the medians against those without sharing.
func (b *popBench) filesTable() {
	var rows [][]string
	for _, mbit := range b.o.mbit {
		for _, image := range b.o.images {
			for _, kind := range b.stores {
				of := func(what, store string) []float64 {
					return values(b.report.of(key{image, mbit, what}, store), seconds)
				}
				row := []string{image, rate(mbit), storeName(kind)}
				over := func(what, base string) float64 {
					mine, theirs := of(what, storeName(kind)), of(base, "none")
					if len(mine) == 0 || len(theirs) == 0 {
						return math.NaN()
					}
					return median(mine) / median(theirs)
				}
				for _, what := range []string{miss, stored, storeHit, againHit, warmHit} {
					row = append(row, medianOr(of(what, storeName(kind))))
					if what != stored {
						row = append(row, number(over(what, what)))
					}
					if what == storeHit {
						row = append(row, number(over(what, freshHit)))
					}
				}
				rows = append(rows, row)
				if kind == popbed.Gluster && mbit > 0 && mbit <= 100 {
					at := fmt.Sprintf("%s, %g Mbit/s, GlusterFS distributed: ", image, mbit)
					b.doc.atMost(at+"a miss that fills the store, over one without sharing", "", 1.15, over(miss, miss))
					b.doc.atMost(at+"a node's first hit, over a fresh local one", "", 1.25, over(storeHit, freshHit))
					b.doc.atMost(at+"a node's first hit, over a local one that containerd knows", "", 1.25,
						over(storeHit, storeHit))
					b.doc.atMost(at+"a hit again, over a local one", "", 1.25, over(againHit, againHit))
				}
			}
		}
	}
	b.doc.table(fmt.Sprintf("Seconds, medians of %d, and over those of no sharing (table 4.4).", b.o.rounds),
		[]string{"image", "Mbit/s", "store", "miss", "/ none", "in the store after", "first hit",
			"/ local hit", "/ fresh local hit", "hit again", "/ local again", "cached", "/ local cached"}, rows)
}
