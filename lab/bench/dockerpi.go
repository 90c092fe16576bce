package bench

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"

	"dewpoint/testkit/testbed"
)

// The experiments of the Docker-pi paper. Its three optimizations are:
//
//	sequential   layers are downloaded one after the other
//	threads      several processors inflate
//	pipeline     a layer is inflated and stored while it is downloaded
//
// Docker has the first as a setting, and the second as far as unpigz in PATH
// gives it; it has no pipeline. Dewpoint has nothing but a pipeline, and its
// hidden flags switch the first two, so that the third alone is dewd with
// parallel layers and one inflater.
func variants(o *options, tools string) []engine {
	cores := fmt.Sprint(runtime.NumCPU())
	d := func(variant, order, inflaters string) engine {
		return dewd{bin: o.bin, tools: tools, variant: variant,
			flags: []string{"--order", order, "--inflaters", inflaters}}
	}
	return []engine{
		docker{variant: "-plain", env: []string{noPigz}},
		docker{variant: "-sequential", downloads: 1, env: []string{noPigz}},
		docker{variant: "-threads"},
		docker{variant: "-sequential-threads", downloads: 1},
		docker{variant: "-4", downloads: 4, env: []string{noPigz}},
		containerd{tools: tools, snapshotter: "overlayfs"},
		d("-pipeline", "parallel", "1"),
		d("-pipeline-sequential", "layers", "1"),
		d("-pipeline-threads", "parallel", cores),
		d("-all", "layers", cores),
		dewd{bin: o.bin, tools: tools},
	}
}

// dockerPi runs the parts that were asked for.
func dockerPi(ctx context.Context, args []string, stdout, stderr io.Writer, self []string) error {
	var o options
	var parts string
	err := o.parse("docker-pi", args, stderr, "ubuntu:pi,mubuntu:pi,biglayers:pi", func(f *flag.FlagSet) {
		f.StringVar(&parts, "parts", "structures,flat,threads,timeline,interference",
			"comma-separated `parts` of the experiment")
	})
	if err != nil {
		return err
	}
	p := &pi{o: &o, tools: o.containerd(), stdout: stdout, stderr: stderr}
	if o.asked("engines") {
		p.only = o.engines
	}
	o.what = []string{pullImage}
	if p.bed, err = o.bed(ctx, stderr, self); err != nil {
		return err
	}
	defer p.bed.Close()
	all := map[string]func(context.Context) error{"structures": p.structures, "flat": p.flat,
		"threads":  p.threads,
		"timeline": p.timelines, "interference": p.interference}
	for _, name := range strings.Split(parts, ",") {
		run := all[name]
		if run == nil {
			return fmt.Errorf("part %q: unknown", name)
		}
		p.report = newReport(stdout, stderr, "docker-pi "+name, o.out+"-"+name)
		fmt.Fprintf(stdout, "\n== %s\n", name)
		if err := run(ctx); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		if err := p.report.write(); err != nil {
			return err
		}
	}
	return nil
}

// pi is one run of the experiments.
type pi struct {
	o              *options
	only           []string // engines; nil is all
	tools          string
	bed            *testbed.Bed
	report         *report
	stdout, stderr io.Writer
}

// engines keeps what can run here.
func (p *pi) engines(all ...engine) ([]engine, error) {
	p.o.engines = p.only
	if p.only == nil {
		for _, e := range all {
			p.o.engines = append(p.o.engines, e.name())
		}
	}
	engines, err := p.o.chosen(all, p.stdout)
	if err == nil {
		p.report.header(engines)
	}
	return engines, err
}

func (p *pi) compare(ctx context.Context, base string, all ...engine) error {
	engines, err := p.engines(all...)
	if err != nil {
		return err
	}
	if err := p.o.measureAll(ctx, p.bed, engines, p.report); err != nil {
		return err
	}
	p.report.table(base)
	return nil
}

// structures compares each optimization on each image structure and bandwidth (figures 3, 4, 6).
func (p *pi) structures(ctx context.Context) error {
	return p.compare(ctx, "docker-plain", variants(p.o, p.tools)...)
}

// flat compares the same content in many layers and in one (discussion A).
func (p *pi) flat(ctx context.Context) error {
	images := p.o.images
	defer func() { p.o.images = images }()
	for _, image := range images {
		name, _, _ := strings.Cut(image, ":")
		if flat := name + ":flat"; !slices.Contains(p.o.images, flat) {
			p.o.images = append(slices.Clone(p.o.images), flat)
		}
	}
	if err := p.o.build(ctx, p.stderr); err != nil {
		return err
	}
	if err := p.bed.Reload(ctx); err != nil {
		return err
	}
	return p.compare(ctx, "docker-plain", docker{variant: "-plain", env: []string{noPigz}},
		containerd{tools: p.tools, snapshotter: "overlayfs"}, dewd{bin: p.o.bin, tools: p.tools})
}

// threads gives dewd from 1 to 12 inflaters (figure 4a).
func (p *pi) threads(ctx context.Context) error {
	var all []engine
	for _, n := range []int{1, 2, 3, 4, 6, 8, 12} {
		all = append(all, dewd{bin: p.o.bin, tools: p.tools, variant: fmt.Sprintf("-%d", n),
			flags: []string{"--inflaters", fmt.Sprint(n)}})
	}
	return p.compare(ctx, "dewd-1", all...)
}

func (p *pi) trio() []engine {
	return []engine{docker{}, containerd{tools: p.tools, snapshotter: "overlayfs"},
		dewd{bin: p.o.bin, tools: p.tools}}
}

// timelines draws network, processors, disk and memory over time (figures 1, 3a, 6a).
func (p *pi) timelines(ctx context.Context) error {
	engines, err := p.engines(p.trio()...)
	if err != nil {
		return err
	}
	for _, mbit := range p.o.mbit {
		if err := p.bed.Rate(ctx, mbit); err != nil {
			return err
		}
		for _, image := range p.o.images {
			var lines []timeline
			for _, e := range engines {
				l := timeline{engine: e.name()}
				s, err := measure(ctx, p.bed, e, image, pullImage, l.watch)
				if err != nil {
					return err
				}
				s.Mbit = mbit
				p.report.add(s)
				lines = append(lines, l)
			}
			if err := p.draw(image, mbit, lines); err != nil {
				return err
			}
		}
	}
	return nil
}

func (p *pi) draw(image string, mbit float64, lines []timeline) error {
	prefix := fmt.Sprintf("%s-timeline-%s-%s", p.o.out, strings.ReplaceAll(image, ":", "-"), rate(mbit))
	rows := [][]string{{"engine", "seconds", "network_mbit", "processors", "disk_mb", "memory_mb"}}
	for _, l := range lines {
		for _, i := range l.instants {
			rows = append(rows, []string{l.engine, fmt.Sprint(i.t), fmt.Sprint(i.network), fmt.Sprint(i.cpu),
				fmt.Sprint(i.disk), fmt.Sprint(i.memory)})
		}
	}
	if err := writeCSV(prefix+".csv", rows); err != nil {
		return err
	}
	title := fmt.Sprintf("Pulling %s, cold; link: %s Mbit/s", image, rate(mbit))
	fmt.Fprintln(p.stdout, "plot", prefix+".svg")
	return os.WriteFile(prefix+".svg", []byte(plot(title, lines)), 0o644)
}

// interference asks a web server on the node for pages while an image is pulled.
func (p *pi) interference(ctx context.Context) error {
	engines, err := p.engines(p.trio()...)
	if err != nil {
		return err
	}
	web, err := startWeb(ctx, p.bed)
	if err != nil {
		return err
	}
	defer web.Close()
	stop := load(ctx, p.bed)
	select {
	case <-time.After(5 * time.Second):
	case <-ctx.Done():
	}
	p.printWeb("nothing", "-", stop())
	image := p.o.images[len(p.o.images)-1]
	for range p.o.rounds {
		for _, e := range engines {
			var seen *Latency
			s, err := measure(ctx, p.bed, e, image, pullImage, func(*session) func() {
				stop := load(ctx, p.bed)
				return func() { seen = stop() }
			})
			if err != nil {
				return err
			}
			s.Web = seen
			p.report.add(s)
			p.printWeb(e.name(), fmt.Sprintf("%.2f", s.Seconds), seen)
		}
	}
	return nil
}

func (p *pi) printWeb(engine, seconds string, l *Latency) {
	fmt.Fprintf(p.stdout,
		"%-24s pull %5s s; web: %5d requests, %d failed, median %.1f ms, 99th percentile %.1f ms\n",
		engine, seconds, l.Requests, l.Failed, l.P50*1e3, l.P99*1e3)
}
