package bench

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"time"

	"dewpoint/testkit/demo"
	"dewpoint/testkit/testbed"

	"golang.org/x/sys/unix"
)

// The experiments of the Foglets evaluation: how many containers a deployer gets
// started, by commands that it spawns and by the engines' APIs.
//
//	table       24 containers at 24 threads, of each image with each command (the paper's first tables)
//	throughput  24 containers at 1 to 24 threads, the smallest image, ls (its other tables and figures)
//	api         calls of the API while 200 containers are alive and 24 deployments under way at all times
//	alive       1000 deployments in a row and 200 containers alive: what stays of them
//
// Every image is on every engine before anything is timed. A deployment is timed
// from its instruction until the engine says that the container runs; what the
// container does then goes on, and it is removed behind the trial. The engines
// run beside each other and take turns, in another order in each trial; before
// each turn all of them are idle. CPU seconds are those of the engine with its
// shims and runc, of its clients, and of this program, which is one of them; not
// of what runs in the containers' own cgroups.
type deployBench struct {
	o              *options
	self           []string
	bed            *testbed.Bed
	net            string
	ways           []string // asked for; nil is all
	threads        []int
	containers     int
	trials         int
	commands       []string
	inARow, alive  int
	seconds        time.Duration // of the load of the part api
	report         *report
	verdicts       []string // of the part api, below its table
	figures        []figure
	samples        []deploySample
	stdout, stderr io.Writer
}

const deployParts = "table,throughput,api,alive"

func compareDeploy(ctx context.Context, args []string, stdout, stderr io.Writer, self []string) error {
	o := options{}
	b := &deployBench{o: &o, self: self, stdout: stdout, stderr: stderr}
	var parts, ways, threads, commands string
	err := o.parse("deploy", args, stderr, strings.Join(demo.ManyNames(), ","), func(f *flag.FlagSet) {
		f.StringVar(&parts, "parts", deployParts, "comma-separated `parts` of the experiment")
		f.StringVar(&ways, "ways", "",
			"comma-separated `ways` to deploy, of those of the engines (default all): dewd-cli, dewd-api, dewd-many, docker-cli, …")
		f.StringVar(&b.net, "net", "none",
			"`network` of the containers: none (a namespace of their own with lo), host, bridge (dewd and docker)")
		f.StringVar(&threads, "threads", "1,2,4,8,12,16,24", "comma-separated `numbers` of deployments at once")
		f.IntVar(&b.containers, "containers", 24, "`containers` of one trial")
		f.IntVar(&b.trials, "trials", 10, "`trials`, in each of which every way has its turn")
		f.StringVar(&commands, "commands", "ls;ping localhost -c 100;watch -n 1 ls",
			"semicolon-separated `commands` that the containers run")
		f.IntVar(&b.inARow, "in-a-row", 1000, "`deployments` in a row of the part alive")
		f.IntVar(&b.alive, "alive", 200, "`containers` alive at once in the parts alive and api")
		f.DurationVar(&b.seconds, "load", 10*time.Second, "`time` of the load of the part api")
	})
	if err != nil {
		return err
	}
	if !o.asked("engines") {
		o.engines = []string{"dewd", "docker", "containerd-overlayfs"}
	}
	if !slices.Contains([]string{"none", "host", "bridge"}, b.net) {
		return fmt.Errorf("net %q: none, host or bridge", b.net)
	}
	if b.threads, err = positive(threads); err != nil {
		return err
	}
	if min(b.containers, b.trials, b.inARow, b.alive) < 1 {
		return errors.New("containers, trials, in-a-row and alive are at least 1")
	}
	if ways != "" {
		b.ways = strings.Split(ways, ",")
	}
	b.commands = strings.Split(commands, ";")
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, unix.SIGTERM, unix.SIGHUP)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal does not wait for the bed to be taken down
	return b.run(ctx, strings.Split(parts, ","))
}

func (b *deployBench) run(ctx context.Context, parts []string) (err error) {
	all := map[string]func(context.Context, *deployLineup) error{
		"table": b.table, "throughput": b.throughput, "api": b.underLoad, "alive": b.leaks}
	for _, name := range parts {
		if all[name] == nil {
			return fmt.Errorf("part %q: there are %s", name, deployParts)
		}
	}
	if b.bed, err = b.o.bed(ctx, b.stderr, b.self); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.bed.Close()) }()
	for _, name := range parts {
		if err := b.part(ctx, name, all[name]); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}

// part runs one part on engines of its own, and writes what it has measured though it may fail half way.
func (b *deployBench) part(ctx context.Context, name string,
	measure func(context.Context, *deployLineup) error) (err error) {
	b.report, b.figures, b.samples, b.verdicts = newReport(b.stdout, b.stderr, "deploy "+name, b.o.out+"-"+name),
		nil, nil, nil
	os.Remove(b.report.prefix + ".md") // of an earlier run
	fmt.Fprintf(b.stdout, "\n== %s\n", name)
	b.report.header(nil)
	l, err := b.lineup(ctx, name)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.close()) }()
	for _, e := range l.engines {
		fmt.Fprintf(b.stdout, "%s: %s\n", e.name(), e.setting(b.net))
	}
	err = measure(ctx, l)
	return errors.Join(err, b.write())
}

func (b *deployBench) write() error {
	var err error
	if len(b.samples) > 0 {
		err = b.writeSamples()
	}
	if len(b.figures) > 0 {
		err = errors.Join(err, writeFigures(b.report.prefix, b.figures))
	}
	return err
}

// writeSamples leaves every deployment's time in PREFIX.json, and a row for each trial in PREFIX.csv.
func (b *deployBench) writeSamples() error {
	raw, err := json.MarshalIndent(map[string]any{"commit": commit(), "machine": machine(), "net": b.net,
		"samples": b.samples}, "", " ")
	if err != nil {
		return err
	}
	rows := [][]string{{"way", "image", "command", "threads", "trial", "containers", "seconds", "per_second",
		"latency_median", "latency_p90", "cpu", "client_cpu", "failed"}}
	for _, s := range b.samples {
		rows = append(rows, []string{s.Way, s.Image, s.Command, fmt.Sprint(s.Threads), fmt.Sprint(s.Trial),
			fmt.Sprint(len(s.Latencies)), fmt.Sprint(s.Seconds),
			fmt.Sprint(s.rate()), fmt.Sprint(quantile(s.Latencies, 0.5)), fmt.Sprint(quantile(s.Latencies, 0.9)),
			fmt.Sprint(s.CPU), fmt.Sprint(s.ClientCPU), fmt.Sprint(s.Failed)})
	}
	return errors.Join(os.WriteFile(b.report.prefix+".json", raw, 0o644), writeCSV(b.report.prefix+".csv", rows))
}

func (b *deployBench) figure(state, what, unit string, v ...float64) {
	b.figures = merge(b.figures, []figure{{State: state, What: what, Unit: unit, Values: v}})
}

// table is each image with each command, at as many threads as there are containers.
func (b *deployBench) table(ctx context.Context, l *deployLineup) error {
	for trial := range b.trials {
		for _, image := range b.o.images {
			for _, command := range b.commands {
				if err := b.turns(ctx, l, trial, image, command, b.containers); err != nil {
					return err
				}
			}
		}
	}
	b.tableReport(l)
	return nil
}

// throughput is the smallest image at each number of threads.
func (b *deployBench) throughput(ctx context.Context, l *deployLineup) error {
	for trial := range b.trials {
		for _, n := range b.threads {
			if err := b.turns(ctx, l, trial, b.o.images[0], b.commands[0], n); err != nil {
				return err
			}
		}
	}
	starts, err := b.starts(ctx, l)
	if err != nil {
		return err
	}
	b.throughputReport(l)
	b.gapReport(l, starts)
	return b.chart(l)
}

// turns gives each way its turn in one trial.
func (b *deployBench) turns(ctx context.Context, l *deployLineup, trial int, image, command string,
	threads int) error {
	for i := range l.ways {
		w := l.ways[(i+trial)%len(l.ways)]
		s, err := l.trial(ctx, w, image, command, threads, b.containers)
		if err != nil {
			return err
		}
		s.Trial = trial
		b.samples = append(b.samples, s)
		fmt.Fprintf(b.stderr,
			"%-26s %-9s %-24s %2d threads  %6.2f s  %6.1f/s  median %6.3f s  p90 %6.3f s  cpu %6.2f s, clients %5.2f s  %s\n", s.Way, s.Image, s.Command,
			s.Threads, s.Seconds, s.rate(), quantile(s.Latencies, 0.5), quantile(s.Latencies, 0.9), s.CPU, s.ClientCPU,
			s.Error)
	}
	return nil
}
