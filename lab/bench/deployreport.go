package bench

import (
	"context"
	"fmt"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
)

// of are the trials of a way with an image, a command and a number of threads, in order.
func (b *deployBench) of(way, image, command string, threads int) (rows []deploySample) {
	for _, s := range b.samples {
		if s.Way == way && s.Image == image && s.Command == command && s.Threads == threads {
			rows = append(rows, s)
		}
	}
	return rows
}

// deployFigures are what trials come to.
type deployFigures struct {
	median, p90 float64 // seconds, of all deployments of all trials
	rate        float64 // containers a second, median of the trials
	cpu         float64 // seconds for each container, median of the trials
	client      float64 // of these the client's
	failed      int
}

func figuresOf(rows []deploySample) (f deployFigures) {
	var all []float64
	for _, s := range rows {
		all = append(all, s.Latencies...)
		f.failed += s.Failed
	}
	each := func(of func(deploySample) float64) float64 {
		var v []float64
		for _, s := range rows {
			if len(s.Latencies) > 0 {
				v = append(v, of(s))
			}
		}
		return middle(v)
	}
	f.median, f.p90 = quantile(all, 0.5), quantile(all, 0.9)
	f.rate = each(deploySample.rate)
	f.cpu = each(func(s deploySample) float64 { return s.CPU / float64(len(s.Latencies)) })
	f.client = each(func(s deploySample) float64 { return s.ClientCPU / float64(len(s.Latencies)) })
	return f
}

// shares is the CPU time of a container, in milliseconds: the client's, and all.
func (f deployFigures) shares() string {
	if math.IsNaN(f.cpu) {
		return ""
	}
	return fmt.Sprintf("%.1f / %.1f", f.client*1e3, f.cpu*1e3)
}

func (f deployFigures) failures() string {
	if f.failed == 0 {
		return ""
	}
	return fmt.Sprintf(", **%d failed**", f.failed)
}

func (b *deployBench) title(what string) string {
	return fmt.Sprintf("%s (commit %s, %s; network %s)", what, commit(), machine(), b.net)
}

// tableReport is the paper's first tables: latency over throughput, by image and command.
func (b *deployBench) tableReport(l *deployLineup) {
	head := append([]string{"way", "command"}, b.o.images...)
	var rows [][]string
	for _, w := range l.ways {
		for _, command := range b.commands {
			row := []string{w.name(), "`" + command + "`"}
			for _, image := range b.o.images {
				f := figuresOf(b.of(w.name(), image, command, b.containers))
				row = append(row, fmt.Sprintf("%.3f s (p90 %.3f), %.1f/s%s", f.median, f.p90, f.rate, f.failures()))
			}
			rows = append(rows, row)
		}
	}
	b.report.markdown(b.title(fmt.Sprintf("Latency, median, and containers a second, %d containers at as many threads, %d trials", b.containers, b.trials)), head, rows)
}

// throughputReport is latency and throughput over threads, and the verdicts.
func (b *deployBench) throughputReport(l *deployLineup) {
	image, command := b.o.images[0], b.commands[0]
	head := []string{"threads", "way", "containers/s", "latency, median, s", "p90, s", "CPU s a container",
		"of these its client", "containers/s over docker-api", "latency over docker-api"}
	var rows [][]string
	for _, n := range b.threads {
		docker := figuresOf(b.of("docker-api", image, command, n))
		for _, w := range l.ways {
			f := figuresOf(b.of(w.name(), image, command, n))
			rows = append(rows, []string{strconv.Itoa(n), w.name(), fmt.Sprintf("%.1f%s", f.rate, f.failures()),
				fmt.Sprintf("%.3f", f.median), fmt.Sprintf("%.3f", f.p90),
				fmt.Sprintf("%.3f", f.cpu), fmt.Sprintf("%.3f", f.client), number(f.rate / docker.rate),
				number(f.median / docker.median)})
		}
	}
	b.report.markdown(b.title(fmt.Sprintf("%s, `%s`, %d containers over threads, %d trials", image, command,
		b.containers, b.trials)), head, rows)
	n := slices.Max(b.threads)
	rate := func(s deploySample) float64 { return s.rate() }
	latency := func(s deploySample) float64 { return quantile(s.Latencies, 0.5) }
	b.versus(n, "dewd-api", "docker-api", "containers a second", rate, func(r float64) bool {
		return r >= 4
	}, "at least 4 times")
	b.versus(n, "dewd-api", "containerd-api", "containers a second", rate, func(r float64) bool {
		return r >= 2
	}, "at least 2 times")
	b.versus(n, "dewd-api", "docker-api", "median latency", latency, func(r float64) bool {
		return r <= 0.25
	}, "at most 1/4 of")
	cpu := func(s deploySample) float64 { return s.CPU / float64(len(s.Latencies)) }
	b.versus(n, "dewd-api", "docker-api", "CPU seconds a container", cpu, nil, "")
	b.versus(n, "dewd-api", "containerd-api", "CPU seconds a container", cpu, nil, "")
}

// versus prints how one way compares with another, trial by trial, and whether that is enough if there is a
// target.
func (b *deployBench) versus(threads int, way, other, what string, of func(deploySample) float64,
	enough func(float64) bool, target string) {
	ours, theirs := b.of(way, b.o.images[0], b.commands[0], threads),
		b.of(other, b.o.images[0], b.commands[0], threads)
	var ratios []float64
	for i := range min(len(ours), len(theirs)) {
		ratios = append(ratios, of(ours[i])/of(theirs[i]))
	}
	if len(ratios) == 0 {
		return
	}
	r := median(ratios)
	b.figure(way+" / "+other, what, "ratio", ratios...)
	said := fmt.Sprintf("\n%s at %d threads, %s over %s: %.2f, trial by trial (%.2f to %.2f)", what, threads,
		way, other, r, slices.Min(ratios), slices.Max(ratios))
	if enough != nil {
		said += fmt.Sprintf("; target %s: %s", target, met(enough(r)))
	}
	b.report.note(said + "\n")
}

// clientStart is what it costs to start a command line client that does nothing.
type clientStart struct {
	wall, cpu float64 // seconds of one, alone; medians
	together  float64 // seconds until as many as threads have ended
}

// starts measures it for each engine's client.
func (b *deployBench) starts(ctx context.Context, l *deployLineup) (map[string]clientStart, error) {
	all := map[string]clientStart{}
	for _, m := range l.engines {
		if err := l.settle(ctx); err != nil {
			return nil, err
		}
		var wall, cpu []float64
		for range 15 {
			start := time.Now()
			used, err := spawn(m.session(), m.client())
			if err != nil {
				return nil, err
			}
			wall, cpu = append(wall, time.Since(start).Seconds()), append(cpu, used.Seconds())
		}
		start := time.Now()
		var g errgroup.Group
		for range b.containers {
			g.Go(func() error { _, err := spawn(m.session(), m.client()); return err })
		}
		if err := g.Wait(); err != nil {
			return nil, err
		}
		all[m.name()] = clientStart{wall: median(wall), cpu: median(cpu), together: time.Since(start).Seconds()}
		b.figure(m.name(), "start of the client, alone", "s", wall...)
		b.figure(m.name(), "start of the client, CPU", "s", cpu...)
		b.figure(m.name(), fmt.Sprintf("start of %d clients at once", b.containers), "s", all[m.name()].together)
	}
	return all, nil
}

// gapReport explains what spawned commands cost beside the API.
func (b *deployBench) gapReport(l *deployLineup, starts map[string]clientStart) {
	n := slices.Max(b.threads)
	head := []string{"engine", fmt.Sprintf("CLI, s for %d containers", b.containers), "API, s", "gap, s",
		fmt.Sprintf("%d idle clients at once, s", b.containers),
		"CPU a container, CLI: client / all, ms", "API: client / all, ms", "an idle client alone: wall / CPU, ms"}
	var rows [][]string
	for _, m := range l.engines {
		seconds := func(way string) float64 {
			var v []float64
			for _, s := range b.of(way, b.o.images[0], b.commands[0], n) {
				v = append(v, s.Seconds)
			}
			return middle(v)
		}
		of := func(way string) deployFigures { return figuresOf(b.of(way, b.o.images[0], b.commands[0], n)) }
		cli, call, s := m.name()+"-cli", m.name()+"-api", starts[m.name()]
		rows = append(rows, []string{m.name(), number(seconds(cli)), number(seconds(call)),
			number(seconds(cli) - seconds(call)), number(s.together),
			of(cli).shares(), of(call).shares(),
			fmt.Sprintf("%.1f / %.1f", s.wall*1e3, s.cpu*1e3)})
	}
	b.report.markdown(fmt.Sprintf("The gap between spawned commands and the API, at %d threads", n), head, rows)
	b.report.note("\nA command line client is a process for each container: it is started, reads itself in, connects, and ends. The idle clients do only the first and the last of it. " +
		"What they take of the processors the containers lack.\n")
}

// middle is the median, of nothing NaN.
func middle(v []float64) float64 {
	if len(v) == 0 {
		return math.NaN()
	}
	return median(v)
}

var deployPanels = []panel{
	{"containers a second", func(i instant) float64 { return i.rate }},
	{"median latency, s", func(i instant) float64 { return i.seconds }},
}

// chart draws both over threads.
func (b *deployBench) chart(l *deployLineup) error {
	var lines []timeline
	for _, w := range l.ways {
		line := timeline{engine: w.name()}
		for _, n := range b.threads {
			if rows := b.of(w.name(), b.o.images[0], b.commands[0], n); len(rows) > 0 {
				f := figuresOf(rows)
				line.instants = append(line.instants, instant{t: float64(n), rate: f.rate, seconds: f.median})
			}
		}
		lines = append(lines, line)
	}
	title := fmt.Sprintf("%s, %s, %d containers", b.o.images[0], b.commands[0], b.containers)
	return os.WriteFile(b.report.prefix+".svg", []byte(plotPanels(title, "%.0f threads", deployPanels, lines)),
		0o644)
}

// processCPU is the CPU time of one process so far, in the kernel's ticks of 10 ms; 0 if it is gone.
func processCPU(pid int) time.Duration {
	raw, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	_, rest, _ := strings.Cut(string(raw), ") ")
	f := strings.Fields(rest)
	if len(f) < 13 {
		return 0
	}
	user, _ := strconv.Atoi(f[11])
	system, _ := strconv.Atoi(f[12])
	return time.Duration(user+system) * 10 * time.Millisecond
}
