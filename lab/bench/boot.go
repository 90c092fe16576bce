package bench

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"time"

	"dewpoint/testkit/demo"
	"dewpoint/testkit/popbed"
	"dewpoint/testkit/testbed"

	"golang.org/x/sys/unix"
)

// The experiments with checkpoints: those of the thesis's chapter 6, on services
// that stand for its fourteen (demo.BootNames).
//
//	start     boot against restore, to the first answer, cold and warm (table 6.2)
//	clones    the same, 1 to 16 at once
//	dump      sizes, times and pauses of checkpoints (figure 6.7)
//	memory    a service that holds 1 GB, its memory fetched as it is touched and before
//	overhead  requests per second of a booted and a restored server (table 6.3)
//	pop       boot against restore from the PoP's store on another node
//	traffic   of the store's nodes: idle, at a checkpoint, at a restore (figure 6.8)
//
// Every image is whole on the engine before anything is timed, so what differs
// is how processes come to be. The ways:
//
//	docker   docker run
//	boot     dew run --restore never
//	restore  dew run --restore always
//	auto     dew run, which decides itself (start only)
type bootBench struct {
	o              *options
	self           []string
	bed            *testbed.Bed // nil in the parts with a PoP
	ways           []string     // of start and clones; empty is all
	clones         []int
	connections    []int
	megabytes      []int
	load           time.Duration
	store          popbed.Kind
	refused        map[string]string
	failed         []string // what refused was told, of every part
	targets        int      // that were missed
	report         *report
	figures        []figure
	stdout, stderr io.Writer
}

const bootParts = "start,clones,dump,memory,overhead,pop,traffic"

func compareBoot(ctx context.Context, args []string, stdout, stderr io.Writer, self []string) error {
	o := options{}
	b := &bootBench{o: &o, self: self, refused: map[string]string{}, stdout: stdout, stderr: stderr}
	var parts, clones, connections, megabytes, store, ways string
	err := o.parse("boot", args, stderr, strings.Join(demo.BootNames(), ","), func(f *flag.FlagSet) {
		f.StringVar(&parts, "parts", bootParts, "comma-separated `parts` of the experiment")
		f.StringVar(&ways, "ways", "",
			"comma-separated `ways` of start and clones: boot, restore, docker; all that the engines have")
		f.StringVar(&clones, "clones", "1,2,4,8,16", "comma-separated `numbers` of clones at once")
		f.StringVar(&connections, "connections", "10,100,1000",
			"comma-separated `numbers` of connections of the load")
		f.StringVar(&megabytes, "memory", "100,1024",
			"comma-separated `MB` that the service of the part memory holds")
		f.DurationVar(&b.load, "load", 5*time.Second, "`time` of each load")
		f.StringVar(&store, "store", "gluster", "`store` of the parts with a PoP: dir, gluster, gluster3, ceph")
	})
	if err != nil {
		return err
	}
	if !o.asked("engines") {
		o.engines = []string{"dewd", "docker"}
	}
	if !slices.Contains(o.engines, "dewd") {
		return errors.New("engines: dewd is what docker is compared with")
	}
	if ways != "" {
		b.ways = strings.Split(ways, ",")
	}
	for _, w := range b.ways {
		if !slices.Contains([]string{"boot", "restore", "docker"}, w) {
			return fmt.Errorf("way %q: there are boot, restore, docker", w)
		}
	}
	b.store = popbed.Kind(store)
	if !slices.Contains(popbed.Kinds(), b.store) {
		return fmt.Errorf("store %q: there are %v", store, popbed.Kinds())
	}
	for text, numbers := range map[string]*[]int{clones: &b.clones, connections: &b.connections,
		megabytes: &b.megabytes} {
		if *numbers, err = positive(text); err != nil {
			return err
		}
	}
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, unix.SIGTERM, unix.SIGHUP)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal does not wait for the bed to be taken down
	return b.run(ctx, strings.Split(parts, ","))
}

func positive(text string) (numbers []int, err error) {
	for _, s := range strings.Split(text, ",") {
		n, err := strconv.Atoi(s)
		if err != nil || n < 1 {
			return nil, fmt.Errorf("%q: not a number above zero", s)
		}
		numbers = append(numbers, n)
	}
	return numbers, nil
}

func (b *bootBench) run(ctx context.Context, parts []string) error {
	all := map[string]func(context.Context) error{
		"start": b.onBed(b.start), "clones": b.onBed(b.clone), "dump": b.onBed(b.dump), "memory": b.onBed(b.memory),
		"overhead": b.onBed(b.overhead), "pop": b.fromPoP, "traffic": b.traffic}
	for _, name := range parts {
		if all[name] == nil {
			return fmt.Errorf("part %q: there are %s", name, bootParts)
		}
	}
	for _, name := range parts {
		b.report, b.figures = newReport(b.stdout, b.stderr, "boot "+name, b.o.out+"-"+name), nil
		fmt.Fprintf(b.stdout, "\n== %s\n", name)
		b.report.header(nil)
		err := all[name](ctx)
		if err = errors.Join(err, b.write()); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return b.verdict()
}

// verdict is an error if a trial failed, an image had to be left out, or a target was missed.
func (b *bootBench) verdict() error {
	var errs []error
	if b.targets > 0 {
		errs = append(errs, fmt.Errorf("targets that are not met: %d", b.targets))
	}
	for _, f := range b.failed {
		errs = append(errs, errors.New("left out: "+f))
	}
	return errors.Join(errs...)
}

// met is met, and remembers what is not.
func (b *bootBench) met(ok bool) string {
	if !ok {
		b.targets++
	}
	return met(ok)
}

// onBed gives a part a testbed of its own.
func (b *bootBench) onBed(part func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) (err error) {
		if b.bed, err = b.o.bed(ctx, b.stderr, b.self); err != nil {
			return err
		}
		defer func() {
			err = errors.Join(err, b.bed.Close())
			b.bed = nil
		}()
		return part(ctx)
	}
}

// write leaves what the part has measured, though it may have failed half way.
func (b *bootBench) write() error {
	var err error
	if len(b.report.samples) > 0 {
		err = b.report.write()
	}
	if len(b.figures) > 0 {
		err = errors.Join(err, writeFigures(b.report.prefix, b.figures))
	}
	return err
}

func (b *bootBench) figure(image, state, what, unit string, v float64) {
	b.figures = merge(b.figures,
		[]figure{{Image: image, State: state, What: what, Unit: unit, Values: []float64{v}}})
	fmt.Fprintf(b.stderr, "%-10s %-16s %s %.4g %s\n", state, image, what, v, unit)
}
