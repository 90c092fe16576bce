package simulate

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/klauspost/compress/gzip"
	"github.com/spf13/pflag"

	"dewpoint/internal/api"
	"dewpoint/internal/config"
	"dewpoint/internal/evict"

	"dewpoint/testkit/pulltrace"
)

// options is the command line.
type options struct {
	policies, sizes, plot string
	assign, bandwidth     string
	lan                   string
	nodes                 int
	json                  bool
	cfg                   Config

	generate, out string
	scale         float64
	seed          uint64

	study bool
}

func (o *options) flags(stdout io.Writer) *pflag.FlagSet {
	f := pflag.NewFlagSet("simulate", pflag.ContinueOnError)
	f.SortFlags = false
	f.SetOutput(io.Discard)
	f.Usage = func() { fmt.Fprintf(stdout, usage, f.FlagUsages()) }
	f.StringVar(&o.policies, "policies", strings.Join(policyNames(), ","), "the `list` of policies")
	f.StringVar(&o.sizes, "sizes", "0.5%,1%,2%,5%,10%,20%,40%,80%",
		"the caches' sizes, a `list` of bytes or shares of the trace's distinct bytes")
	f.IntVar(&o.nodes, "nodes", 0, "also divide each size between `N` nodes with a cache each")
	f.StringVar(&o.assign, "assign", "turn", "deployments go to the nodes in `turn`, or by their client")
	f.StringVar(&o.bandwidth, "bandwidth", "100Mbit", "of the link to the registry: a `rate`")
	f.DurationVar(&o.cfg.WAN.RTT, "rtt", 40*time.Millisecond, "its round trip, once per layer")
	f.StringVar(&o.lan, "lan-bandwidth", "1Gbit", "of the link to the shared cache: a `rate`")
	f.DurationVar(&o.cfg.LAN.RTT, "lan-rtt", time.Millisecond, "its round trip, once per layer")
	f.DurationVar(&o.cfg.Start, "start", time.Second, "what a deployment takes that moves nothing")
	f.Float64Var(&o.cfg.Reads, "reads", 0.13, "the `share` of a layer that a start reads from the shared cache")
	f.StringVar(&o.cfg.Cost, "cost", "bytes", "what a refetch costs, in `bytes` or seconds")
	f.IntVar(&o.cfg.Deployments, "deployments", 0, "end after `N`")
	f.IntVar(&o.cfg.Bin, "bin", 0, "record a series with a point for every `N` deployments")
	f.StringVar(&o.plot, "plot", "", "write SVG charts into `DIR`")
	f.BoolVar(&o.json, "json", false, "print JSON")
	f.StringVar(&o.generate, "generate", "",
		"write a synthetic trace of an availability `ZONE` (fra, syd, lon, dal, prs, stg, dev) instead")
	f.StringVarP(&o.out, "out", "o", "", "where to: a trace's `FILE` (.gz compresses), or the study's report")
	f.Float64Var(&o.scale, "scale", 0,
		"of synthetic traces: 0.01 has a hundredth of the zone's pulls and bytes (1 to generate, 0.05 in the study)")
	f.Uint64Var(&o.seed, "seed", 0,
		"of synthetic traces (1 to generate; the study is of 2, 3 and 4, or of as many others from N)")
	f.BoolVar(&o.study, "study", false,
		"generate traces of all zones, replay them, and write a report with charts")
	return f
}

const usage = `Usage: dewlab simulate [FLAGS] TRACE…
       dewlab simulate --generate ZONE -o FILE [--scale S] [--seed N]
       dewlab simulate --study [-o FILE] [--scale S] [--seed N]

Replay registry traces against the policies that a full cache evicts by. A TRACE is a file of a JSON
array, as the IBM traces have, plain or .gz, or a directory of them. It needs no daemon.

Flags:
%s`

// Program is the command dewlab simulate.
type Program struct {
	Version string // of the program, which the study names
}

// Main runs the command.
func (p Program) Main(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	var o options
	f := o.flags(stdout)
	if err := f.Parse(args); err != nil {
		if errors.Is(err, pflag.ErrHelp) {
			return err
		}
		return misuse(err)
	}
	if err := o.links(); err != nil {
		return misuse(err)
	}
	switch {
	case o.study && o.generate == "" && f.NArg() == 0:
		return runStudy(ctx, &o, p.Version, args, stderr)
	case o.generate != "" && !o.study && f.NArg() == 0:
		return o.runGenerate(stdout)
	case o.study || o.generate != "" || f.NArg() == 0:
		return misuse(errors.New("give traces, or one of --generate and --study"))
	}
	return o.runSweep(f.Args(), stdout)
}

func misuse(err error) error {
	e := api.New(api.BadRequest, err.Error())
	e.Remedy = "see \"dewlab simulate --help\""
	return e
}

func (o *options) links() (err error) {
	if o.cfg.WAN.Bandwidth, err = parseBandwidth(o.bandwidth); err != nil {
		return err
	}
	if o.cfg.LAN.Bandwidth, err = parseBandwidth(o.lan); err != nil {
		return err
	}
	switch o.assign {
	case "turn":
	case "client":
		o.cfg.ByClient = true
	default:
		return fmt.Errorf("nodes are assigned in turn or by client, not by %q", o.assign)
	}
	if o.nodes < 0 {
		return fmt.Errorf("%d nodes", o.nodes)
	}
	_, err = o.cfg.withDefaults()
	return err
}

// parseBandwidth reads a rate, as "20Mbit", into bits per second.
func parseBandwidth(s string) (float64, error) {
	var r config.Rate
	if err := r.UnmarshalText([]byte(s)); err != nil {
		return 0, err
	}
	if r <= 0 {
		return 0, fmt.Errorf("%q carries nothing", s)
	}
	return 8 * float64(r), nil
}

func (o *options) runGenerate(stdout io.Writer) (err error) {
	zone, err := pulltrace.ZoneNamed(o.generate)
	if err != nil {
		return misuse(err)
	}
	if o.scale == 0 {
		o.scale = 1
	}
	if o.seed == 0 {
		o.seed = 1
	}
	if o.out == "" {
		return misuse(errors.New("a generated trace needs -o FILE, or -o - for standard output"))
	}
	if o.out == "-" {
		return pulltrace.Generate(stdout, zone, o.scale, o.seed)
	}
	return writeFile(o.out, func(w io.Writer) error { return pulltrace.Generate(w, zone, o.scale, o.seed) })
}

// writeFile writes name, compressed if its name ends in .gz. What is unfinished is removed.
func writeFile(name string, write func(io.Writer) error) (err error) {
	f, err := os.Create(name)
	if err != nil {
		return err
	}
	defer func() {
		if e := f.Close(); err == nil {
			err = e
		}
		if err != nil {
			os.Remove(name)
		}
	}()
	if !strings.HasSuffix(name, ".gz") {
		return write(f)
	}
	z := gzip.NewWriter(f)
	if err := write(z); err != nil {
		return err
	}
	return z.Close()
}

func (o *options) runSweep(files []string, stdout io.Writer) error {
	policies := strings.Split(o.policies, ",")
	for _, p := range policies {
		if !knownPolicy(p) {
			return misuse(fmt.Errorf("%w %q: there are %s", evict.ErrUnknown, p, strings.Join(policyNames(), ", ")))
		}
	}
	capacities, err := parseCapacities(o.sizes)
	if err != nil {
		return misuse(err)
	}
	res, err := sweepFiles(o.cfg, policies, capacities, o.nodes, files...)
	if err != nil {
		return err
	}
	if o.plot != "" {
		if err := res.plot(filepath.Clean(o.plot), "", 1); err != nil {
			return err
		}
	}
	if o.json {
		return json.NewEncoder(stdout).Encode(res)
	}
	res.printTrace(stdout)
	return res.printTable(stdout)
}

func (r *Result) printTable(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "\nPOLICY\tCACHES\tEACH\tHITS\tBYTES\tWHOLE\tDEPLOYMENT")
	for _, s := range r.Setups {
		caches := "shared"
		if s.Nodes > 0 {
			caches = fmt.Sprintf("%d nodes", s.Nodes)
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%.1f %%\t%.1f %%\t%.1f %%\t%.1f s ± %.1f\n", s.Policy, caches,
			gigabytes(s.Size),
			100*s.HitRatio, 100*s.ByteHitRatio, 100*s.WholeHitRatio, s.DeploySeconds, s.DeployDeviation)
	}
	return t.Flush()
}
