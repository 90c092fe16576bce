package bench

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"dewpoint/internal/spec"
	"dewpoint/testkit/demo"
	"dewpoint/testkit/testbed"
)

// The experiments with lazy starts: the FogDocker paper's, and round trips.
//
// A first dewd profiles each image, and pushes the pack beside it; then it is
// gone, and every measurement starts on a node that has nothing. The engines:
//
//	dewd          lazily, by the pack in the registry
//	dewd-nopack   from a repository that has the image and no pack; dewd decides
//	dewd-whole    the same dewd, told to pull the whole image first
//
// Measured nodes record nothing (pack.learn = "never"): a recording is an
// experiment of its own.
type lazy struct {
	o              *options
	tools          string
	runs           int // that a pack is learned from
	rtts           []time.Duration
	bed            *testbed.Bed
	packs          map[string]spec.Pack // by image
	samples        map[string][]Sample  // by part
	report         *report
	figures        []figure
	stdout, stderr io.Writer
}

const neverLearn = "[pack]\nlearn = \"never\"\n"

// lazyImages are the images that are measured when nothing else is said.
const lazyImages = "nginx-official:1,redis:1,httpd:1,python:1,goweb:1,node:1,java:1,mariadb:1"

// The bandwidth at which round trips are measured: one at which they show.
const rttMbit = 100

func compareLazy(ctx context.Context, args []string, stdout, stderr io.Writer, self []string) error {
	var o options
	var parts, rtts string
	var runs int
	err := o.parse("lazy", args, stderr, lazyImages, func(f *flag.FlagSet) {
		f.StringVar(&parts, "parts", "sizes,start,rtt,opens,pages,after",
			"comma-separated `parts` of the experiment")
		f.IntVar(&runs, "runs", 1, "`runs` of each image that its pack is learned from")
		f.StringVar(&rtts, "rtts", "0,50,150,300", "comma-separated round trips in `ms`")
	})
	if err != nil {
		return err
	}
	if !o.asked("rates") {
		o.mbit = []float64{0, 100, 20, 5}
	}
	if !o.asked("what") {
		o.what = []string{firstAnswer, wholeImage}
	}
	l := &lazy{o: &o, runs: runs, tools: o.containerd(), packs: map[string]spec.Pack{},
		samples: map[string][]Sample{}, stdout: stdout, stderr: stderr}
	for _, s := range strings.Split(rtts, ",") {
		ms, err := strconv.ParseFloat(s, 64)
		if err != nil || ms < 0 {
			return fmt.Errorf("round trip %q: not a number of milliseconds", s)
		}
		l.rtts = append(l.rtts, time.Duration(ms*float64(time.Millisecond)))
	}
	if l.bed, err = o.bed(ctx, stderr, self); err != nil {
		return err
	}
	defer l.bed.Close()
	if err := l.learn(ctx); err != nil {
		return fmt.Errorf("make packs: %w", err)
	}
	return l.run(ctx, strings.Split(parts, ","))
}

func (l *lazy) run(ctx context.Context, parts []string) error {
	all := map[string]func(context.Context) error{"sizes": l.sizes, "start": l.start, "rtt": l.roundTrips,
		"opens": l.opens, "pages": l.pages, "after": l.after}
	for _, name := range parts {
		run := all[name]
		if run == nil {
			return fmt.Errorf("part %q: unknown", name)
		}
		l.report = newReport(l.stdout, l.stderr, "lazy "+name, l.o.out+"-"+name)
		l.figures = nil
		fmt.Fprintf(l.stdout, "\n== %s\n", name)
		err := run(ctx)
		l.samples[name] = l.report.samples
		if err = errors.Join(err, l.write()); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}

// write leaves what the part has measured, though it may have failed half way.
func (l *lazy) write() error {
	var err error
	if len(l.report.samples) > 0 {
		err = l.report.write()
	}
	if len(l.figures) > 0 {
		err = errors.Join(err, writeFigures(l.report.prefix, l.figures))
	}
	return err
}

// dewd is dewd as its user has it, but for the recordings.
func (l *lazy) dewd(variant, config string, bare bool, flags ...string) dewd {
	return dewd{bin: l.o.bin, tools: l.tools, variant: variant, flags: flags, config: neverLearn + config,
		bare: bare}
}

// contenders keeps of the engines those that were asked for, or all.
func (l *lazy) contenders(some ...engine) ([]engine, error) {
	if !l.o.asked("engines") {
		l.o.engines = nil
		for _, e := range some {
			l.o.engines = append(l.o.engines, e.name())
		}
	}
	engines, err := l.o.chosen(some, l.stdout)
	if err == nil {
		l.report.header(engines)
	}
	return engines, err
}

// engines are those whose starts are timed.
func (l *lazy) engines() ([]engine, error) {
	return l.contenders(l.dewd("", "", false), l.dewd("-nopack", "", true),
		l.dewd("-whole", "", false, "--lazy", "never"),
		containerd{tools: l.tools, snapshotter: "overlayfs"}, docker{})
}

// reference names an image as an engine is told it.
func reference(e engine, address, image string) string {
	if d, ok := e.(dewd); ok && d.bare {
		return address + "/" + testbed.Bare + image
	}
	return address + "/" + image
}

// imageSize is the compressed bytes of an image's layers.
func (l *lazy) imageSize(image string) (size int64, err error) {
	m, err := demo.Manifest(l.o.layout, image)
	for _, d := range m.Layers {
		size += d.Size
	}
	return size, err
}
