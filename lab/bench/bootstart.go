package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// The states of the machine in which a container starts.
const (
	coldStart = "cold" // page caches are empty
	// warmStart is declared beside the lazy starts.
)

const bootName = "bench"

// start compares the times to the first answer (table 6.2).
func (b *bootBench) start(ctx context.Context) (err error) {
	l, err := b.lineup(ctx, "", b.o.images...)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.close()) }()
	for _, image := range b.o.images {
		if err := b.startImage(ctx, l, image); err != nil {
			return err
		}
	}
	b.bootTable("boot against restore, seconds to the first answer", []string{warmStart, coldStart},
		b.startVerdict)
	return nil
}

// startImage times an image: in each round every way has its turn, cold and then warm.
func (b *bootBench) startImage(ctx context.Context, l *lineup, image string) error {
	like := instance{image: image, name: bootName}
	if _, err := b.prepare(ctx, l.dewd, like); err != nil {
		return err
	}
	ways := l.ways()
	if b.refused[image] != "" {
		ways = slices.DeleteFunc(ways, func(w way) bool { return w.name() == "restore" })
	}
	for round := range b.o.rounds {
		for i := range ways {
			w := ways[(i+round)%len(ways)]
			for _, state := range []string{coldStart, warmStart} {
				if state == coldStart {
					if err := dropCaches(); err != nil {
						return err
					}
				}
				s, err := b.together(ctx, w, like, 1)
				if b.gaveUp(w, image, err) {
					continue
				}
				if err != nil {
					return err
				}
				s.What, s.Round = state, round
				b.report.add(s)
			}
		}
	}
	return b.automatic(ctx, l, like)
}

// automatic lets dewd decide, now that it has seen boots and restores.
func (b *bootBench) automatic(ctx context.Context, l *lineup, like instance) error {
	s, err := b.together(ctx, l.dewd.with("auto"), like, 1)
	if err != nil {
		return err
	}
	s.What = warmStart
	b.report.add(s)
	return nil
}

// databases are the images whose restore may take a little longer.
var databases = []string{"mariadb:boot", "ferretdb:boot"}

// startVerdict holds a restore against its targets: of 0.35 s (databases 0.5)
// when warm, and of a fifth of a boot over 2 s, a tenth of one over 5 s, warm and cold.
func (b *bootBench) startVerdict(image, what string, boot, restore float64) string {
	var all []string
	limit := 0.35
	if slices.Contains(databases, image) {
		limit = 0.5
	}
	if what != coldStart {
		all = append(all, fmt.Sprintf("at most %.2f s: %s", limit, b.met(restore <= limit)))
	}
	switch {
	case boot > 5:
		all = append(all, "10 times faster: "+b.met(boot/restore >= 10))
	case boot > 2:
		all = append(all, "5 times faster: "+b.met(boot/restore >= 5))
	}
	return strings.Join(all, "; ")
}

func met(ok bool) string {
	if ok {
		return "met"
	}
	return "not met"
}
