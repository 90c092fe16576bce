package bench

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"
)

// dump measures checkpoints of services (figure 6.7): their sizes, the time of
// the instruction, and for how long a client has no answer meanwhile.
func (b *bootBench) dump(ctx context.Context) (err error) {
	l, err := b.dewdAlone(ctx, "", b.o.images...)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.close()) }()
	for range b.o.rounds {
		for _, image := range b.o.images {
			if b.refused[image] != "" {
				continue
			}
			if _, err := b.dumpOnce(ctx, l, instance{image: image, name: bootName}, image); err != nil {
				return err
			}
		}
	}
	b.dumpTable(b.o.images)
	return nil
}

// dewdAlone is a lineup of one.
func (b *bootBench) dewdAlone(ctx context.Context, config string, images ...string) (*lineup, error) {
	all := b.o.engines
	b.o.engines = []string{"dewd"}
	defer func() { b.o.engines = all }()
	return b.lineup(ctx, config, images...)
}

// dumpOnce boots an instance, makes a checkpoint while a client asks, and removes the instance.
func (b *bootBench) dumpOnce(ctx context.Context, l *lineup, like instance, row string) (c checkpointed,
	err error) {
	boots := l.dewd.with("boot")
	if _, err := bring(ctx, b.bed, boots, like); err != nil {
		return c, err
	}
	defer func() { err = errors.Join(err, boots.remove(context.WithoutCancel(ctx), like.name)) }()
	address, err := boots.address(ctx, like.name)
	if err != nil {
		return c, err
	}
	ask := func(ctx context.Context) error { return answerAt(ctx, like.image, address, b.bed.Dial) }
	silence := longestSilence(ctx, ask)
	start := time.Now()
	c, err = boots.checkpoint(ctx, like.name)
	took := time.Since(start)
	quiet := silence()
	if err != nil {
		b.refuse(like.image, err)
		return c, nil
	}
	b.figure(row, "checkpoint", "memory", "MB", float64(c.Pages)/1e6)
	b.figure(row, "checkpoint", "stored", "MB", float64(c.Size)/1e6)
	b.figure(row, "checkpoint", "files", "MB", float64(c.Upper)/1e6)
	b.figure(row, "checkpoint", "time", "s", took.Seconds())
	b.figure(row, "checkpoint", "paused", "s", c.Paused)
	b.figure(row, "checkpoint", "silence", "s", quiet.Seconds())
	return c, nil
}

// longestSilence asks again and again until the function that it returns is
// called, which tells the longest time between two answers.
func longestSilence(ctx context.Context, ask func(context.Context) error) func() time.Duration {
	ctx, stop := context.WithCancel(ctx)
	var longest time.Duration
	var wait sync.WaitGroup
	wait.Go(func() {
		for last := time.Now(); ctx.Err() == nil; time.Sleep(time.Millisecond) {
			one, cancel := context.WithTimeout(ctx, 30*time.Second)
			err := ask(one)
			cancel()
			if err == nil || ctx.Err() != nil {
				now := time.Now()
				longest = max(longest, now.Sub(last))
				last = now
			}
		}
	})
	return func() time.Duration {
		stop()
		wait.Wait()
		return longest
	}
}

func (b *bootBench) dumpTable(names []string) {
	var rows [][]string
	for _, name := range names {
		of := func(what string) float64 {
			if f := find(b.figures, name, "checkpoint", what); f != nil {
				return f.median()
			}
			return math.NaN()
		}
		if math.IsNaN(of("memory")) {
			if why := b.refused[name]; why != "" {
				rows = append(rows, append(slices.Repeat([]string{""}, 7), why))
				rows[len(rows)-1][0] = name
			}
			continue
		}
		limit := 0.5 * max(1, (of("memory")+of("files"))/100)
		rows = append(rows, []string{name, number(of("memory")), number(of("stored")), number(of("files")),
			number(of("time")), number(of("paused")),
			number(of("silence")), fmt.Sprintf("paused under %.2f s: %s", limit, b.met(of("paused") < limit))})
	}
	b.markdown("checkpoints",
		[]string{"what", "memory, MB", "stored, MB", "files, MB", "time, s", "paused, s", "longest silence, s",
			"target"}, rows)
}

const memoryImage = "memory:boot"

// memory measures a service of much memory: its checkpoint, and restores whose
// memory comes as it is touched (as dewd has it above [checkpoint] lazy_above), or before.
func (b *bootBench) memory(ctx context.Context) error {
	b.o.images = []string{memoryImage}
	if err := b.o.build(ctx, b.stderr); err != nil {
		return err
	}
	var names []string
	for _, mb := range b.megabytes {
		name := fmt.Sprintf("%d MB", mb)
		names = append(names, name)
		for _, kind := range []struct{ name, config string }{{"lazy", "[checkpoint]\nlazy_above = \"1MiB\"\n"},
			{"eager", "[checkpoint]\nlazy_above = \"1TiB\"\n"}} {
			if err := b.memoryOf(ctx, kind.name, kind.config, name, mb); err != nil {
				return err
			}
		}
	}
	b.dumpTable(names)
	b.memoryTable(names)
	return nil
}

func (b *bootBench) memoryOf(ctx context.Context, kind, config, name string, mb int) (err error) {
	l, err := b.lineup(ctx, config, memoryImage)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.close()) }()
	like := instance{image: memoryImage, name: bootName, env: []string{fmt.Sprintf("MEMORY_MB=%d", mb)}}
	if _, err := b.dumpOnce(ctx, l, like, name); err != nil || b.refused[memoryImage] != "" {
		return err
	}
	for round := range b.o.rounds {
		for _, w := range l.ways() {
			for _, state := range []string{coldStart, warmStart} {
				if state == coldStart {
					if err := dropCaches(); err != nil {
						return err
					}
				}
				s, err := b.together(ctx, w, like, 1)
				if b.gaveUp(w, name, err) {
					continue
				}
				if err != nil {
					return err
				}
				s.Image, s.What, s.Round = name, state, round
				if w.name() == "restore" {
					s.Engine = kind
				}
				b.report.add(s)
			}
		}
	}
	return nil
}

func (b *bootBench) memoryTable(names []string) {
	var rows [][]string
	for _, name := range names {
		for _, state := range []string{warmStart, coldStart} {
			row := []string{name, state}
			var lazy float64
			for _, engine := range []string{"docker", "boot", "eager", "lazy"} {
				cell := ""
				if all := b.report.of(key{name, 0, state}, engine); len(all) > 0 {
					lazy = median(values(all, seconds))
					cell = number(lazy)
				}
				row = append(row, cell)
			}
			verdict := ""
			if state == warmStart && row[5] != "" {
				verdict = "under 0.6 s: " + b.met(lazy < 0.6)
			}
			rows = append(rows, append(row, verdict))
		}
	}
	b.markdown("a service of much memory, seconds to the first answer",
		[]string{"memory", "", "docker", "boot", "eager", "lazy", "target"}, rows)
}
