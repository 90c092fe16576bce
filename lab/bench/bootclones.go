package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"
)

// clone compares clones that start at once: seconds until the last has
// answered, and CPU seconds of all that the engine and the containers did.
func (b *bootBench) clone(ctx context.Context) (err error) {
	l, err := b.lineup(ctx, "", b.o.images...)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.close()) }()
	for _, image := range b.o.images {
		like := instance{image: image, name: bootName}
		if _, err := b.prepare(ctx, l.dewd, like); err != nil {
			return err
		}
		if b.refused[image] != "" {
			continue
		}
		if err := b.cloneImage(ctx, l, like); err != nil {
			return err
		}
	}
	var what []string
	for _, n := range b.clones {
		what = append(what, clonesOf(n))
	}
	b.bootTable("clones at once, seconds until all have answered", what, b.cloneVerdict)
	return nil
}

func clonesOf(n int) string { return fmt.Sprintf("%d clones", n) }

func (b *bootBench) cloneImage(ctx context.Context, l *lineup, like instance) error {
	for round := range b.o.rounds {
		for _, n := range b.clones {
			ways := l.ways()
			for i := range ways {
				w := ways[(i+round)%len(ways)]
				s, err := b.together(ctx, w, like, n)
				if b.gaveUp(w, like.image, err) {
					continue
				}
				if err != nil {
					return err
				}
				s.What, s.Round = clonesOf(n), round
				b.report.add(s)
			}
		}
	}
	return nil
}

// cloneVerdict holds 8 clones against their targets, where one boot takes over a second.
func (b *bootBench) cloneVerdict(image, what string, _, restore float64) string {
	one := b.report.of(key{image, 0, clonesOf(1)}, "boot")
	if what != clonesOf(8) || len(one) == 0 || median(values(one, seconds)) <= 1 ||
		!slices.Contains(b.clones, 8) {
		return ""
	}
	cpu := func(engine string) float64 {
		return median(values(b.report.of(key{image, 0, what}, engine), cpuSeconds))
	}
	share := cpu("restore") / cpu("boot")
	single := restore / median(values(b.report.of(key{image, 0, clonesOf(1)}, "restore"), seconds))
	return fmt.Sprintf("at most 0.6 of the CPU seconds (%.2f): %s; within 4.5 times one (%.1f): %s", share,
		b.met(share <= 0.6), single, b.met(single <= 4.5))
}

func cpuSeconds(s Sample) float64 { return s.CPU }
