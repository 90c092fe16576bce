package bench

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"dewpoint/testkit/demo"
)

// many deploys one image on several nodes at once (figure 4.6), when nobody has it, from the store, and
// where they have it: what that costs more on many nodes than on one is not the store's.
func (b *popBench) many(ctx context.Context) error {
	kind, err := b.shared()
	if err != nil {
		return err
	}
	if !b.o.asked("rates") {
		b.o.mbit = []float64{100}
	}
	if err := demo.Build(ctx, demo.Config{Dir: b.o.layout, Names: b.o.images, Log: b.stderr}); err != nil {
		return err
	}
	prepare := 0
	if b.o.asked("prepare") {
		prepare = b.prepare
	}
	// Nothing is copied near: each deployment is from the store, as the first one of a node.
	p, err := b.open(ctx,
		popConfig{kind: kind, nodes: slices.Max(append(slices.Clone(b.counts), 3)), layout: b.o.layout, cache: 1,
			prepare: prepare,
			pop:     shortLeases})
	if err != nil {
		return err
	}
	m := &manyRun{b: b, p: p}
	return errors.Join(m.run(ctx), p.Close())
}

type manyRun struct {
	b *popBench
	p *pop
}

func (m *manyRun) run(ctx context.Context) error {
	for _, mbit := range m.b.o.mbit {
		if err := m.p.Rate(ctx, mbit); err != nil {
			return err
		}
		for _, image := range m.b.o.images {
			if err := m.warmUp(ctx, image); err != nil {
				return err
			}
			if err := m.rest(ctx); err != nil {
				return err
			}
			for round := range m.b.o.rounds {
				for i := range m.b.counts {
					n := m.b.counts[(i+round)%len(m.b.counts)]
					for _, what := range []string{miss, storeHit, warmHit} {
						if err := m.one(ctx, image, mbit, round, n, what); err != nil {
							return fmt.Errorf("%s on %d nodes: %w", what, n, err)
						}
					}
				}
			}
		}
	}
	m.b.report.table(nodes(m.b.counts[0]))
	fmt.Fprintln(m.b.stdout)
	tabulate(m.b.stdout, m.b.figures, nodes(m.b.counts[0]))
	m.compare()
	return nil
}

func nodes(n int) string { return fmt.Sprintf("%d nodes", n) }

// warmUp lets each node do what it does once in its life.
func (m *manyRun) warmUp(ctx context.Context, image string) error {
	return onNodes(len(m.p.Nodes), func(i int) error { return m.p.once(ctx, i, image) })
}

// rest is what nodes cost that nobody asks for anything.
func (m *manyRun) rest(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(restTime):
	}
	w, err := m.p.watch(0, len(m.p.Nodes))
	if err != nil {
		return err
	}
	select {
	case <-ctx.Done():
	case <-time.After(restTime):
	}
	u, err := w.stop()
	n := float64(len(m.p.Nodes)) * restTime.Seconds()
	f := func(what string, cpu float64) { m.b.figure("idle", nodes(len(m.p.Nodes)), what, "ms", 1000*cpu/n) }
	f("CPU of a node / second", u.Nodes.CPU)
	f("CPU of a client / second", u.Client.CPU)
	f("CPU of the servers / second and node", u.Servers.CPU)
	m.b.doc.note("A node that nobody asks for anything takes %.1f ms of a processor in a second, its client of the store %.1f ms.", 1000*u.Nodes.CPU/n, 1000*u.Client.CPU/n)
	return errors.Join(err, ctx.Err())
}

const restTime = 10 * time.Second

// one deploys on n nodes at once; of a miss, what the store then has serves the hits that follow.
func (m *manyRun) one(ctx context.Context, image string, mbit float64, round, n int, what string) error {
	if what != warmHit {
		if err := errors.Join(m.p.forget(ctx, len(m.p.Nodes), what == miss), m.p.cool(image)); err != nil {
			return err
		}
	}
	w, err := m.p.watch(0, n)
	if err != nil {
		return err
	}
	took := make([]float64, n)
	err = onNodes(n, func(i int) error {
		start := time.Now()
		_, err := m.p.run(ctx, i, image, popName)
		took[i] = time.Since(start).Seconds()
		return err
	})
	u, werr := w.stop()
	if err = errors.Join(err, werr); err != nil {
		return err
	}
	layers, unique, err := m.unique(image)
	if err != nil {
		return err
	}
	m.add(image, mbit, round, n, what, took, u, unique)
	if err := onNodes(n, func(i int) error { return m.p.Remove(ctx, i, popName) }); err != nil || what != miss {
		return err
	}
	return m.p.awaitStored(ctx, layers)
}

// unique is what one node has to fetch, compressed.
func (m *manyRun) unique(image string) (layers int, bytes int64, err error) {
	man, err := demo.Manifest(m.b.o.layout, image)
	for _, l := range man.Layers {
		bytes += l.Size
	}
	return len(man.Layers), bytes + man.Config.Size, err
}

func (m *manyRun) add(image string, mbit float64, round, n int, what string, took []float64, u popUsage,
	unique int64) {
	m.b.report.add(Sample{Engine: nodes(n), Image: image, Mbit: mbit, Round: round, What: what,
		Seconds: mean(took), CPU: u.Nodes.CPU / float64(n),
		Peak: u.Nodes.Peak, Wire: u.WAN.In})
	at := fmt.Sprintf("%s %s: %s", image, rate(mbit), what)
	all := u.Nodes.CPU + u.Client.CPU + u.Servers.CPU
	f := func(what, unit string, v float64) { m.b.figure(at, nodes(n), what, unit, v) }
	f("slowest", "s", slices.Max(took))
	f("CPU of nodes / deployment", "s", u.Nodes.CPU/float64(n))
	f("CPU of clients / deployment", "s", u.Client.CPU/float64(n))
	f("CPU of servers / deployment", "s", u.Servers.CPU/float64(n))
	f("CPU of all / deployment", "s", all/float64(n))
	f("processors busy", "", u.Busy)
	f("dewd peak", "MiB", float64(u.Nodes.Dewd)/(1<<20))
	f("LAN in / deployment", "MB", float64(u.LAN.In)/1e6/float64(n))
	if what == miss {
		f("WAN / unique bytes", "", float64(u.WAN.In)/float64(unique))
	}
}

func mean(v []float64) (sum float64) {
	for _, x := range v {
		sum += x
	}
	return sum / float64(len(v))
}

// compare holds many nodes against the first number of them (figure 4.6).
func (m *manyRun) compare() {
	var rows [][]string
	for _, k := range m.b.report.keys() {
		at := fmt.Sprintf("%s %s: %s", k.image, rate(k.mbit), k.what)
		wan := math.NaN()
		for _, n := range m.b.counts {
			row := []string{k.image, rate(k.mbit), k.what, fmt.Sprint(n),
				medianOr(values(m.b.report.of(k, nodes(n)), seconds))}
			for _, what := range []string{"CPU of nodes / deployment", "CPU of all / deployment"} {
				row = append(row, figureOr(m.b.figures, at, nodes(n), what), number(m.overFirst(at, n, what)))
			}
			rows = append(rows, append(row, figureOr(m.b.figures, at, nodes(n), "processors busy"),
				figureOr(m.b.figures, at, nodes(n), "WAN / unique bytes")))
			if f := find(m.b.figures, at, nodes(n), "WAN / unique bytes"); f != nil && !(f.median() < wan) {
				wan = f.median()
			}
		}
		if first, last := slices.Min(m.b.counts),
			slices.Max(m.b.counts); first < last && k.what != warmHit && m.b.counts[0] == first {
			m.b.doc.atMost(fmt.Sprintf("%s, %d nodes at once: processor seconds of the nodes a deployment, over %d",
				at, last, first), "", 1.1, m.overFirst(at, last, "CPU of nodes / deployment"))
		}
		if k.what == miss {
			m.b.doc.atMost(at+": WAN bytes over unique bytes, the most of any number of nodes", "", 1.02, wan)
		}
	}
	m.b.doc.table(fmt.Sprintf("One image on several nodes at once, medians of %d; seconds are a deployment's mean (figure 4.6).", m.b.o.rounds), []string{"image", "Mbit/s", "what", "nodes", "mean, s",
		"CPU of nodes, s", "/ first", "CPU of all, s", "/ first", "processors busy", "WAN / unique"}, rows)
}

func figureOr(all []figure, image, state, what string) string {
	f := find(all, image, state, what)
	if f == nil {
		return "-"
	}
	return fmt.Sprintf("%.3f", f.median())
}

func (m *manyRun) overFirst(at string, n int, what string) float64 {
	f, base := find(m.b.figures, at, nodes(n), what), find(m.b.figures, at, nodes(m.b.counts[0]), what)
	if f == nil || base == nil || base.median() == 0 {
		return math.NaN()
	}
	return f.median() / base.median()
}
