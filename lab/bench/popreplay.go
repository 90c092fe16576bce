package bench

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/containerd/continuity/fs"
	"golang.org/x/sync/errgroup"
)

const replayNodes = 5

// The traces of figures 4.7 and 4.8: capacities over the working set, of the shared cache and of each node's
// own, and what the thesis found: by how much the shared cache shortens deployments.
var thesisReplay = map[string]struct{ shared, node, less float64 }{
	"fra": {1.39, 0.32, 0.78},
	"dal": {0.80, 0.19, 0.37},
}

type replayOptions struct {
	zones       string
	plan        []replayPlan
	rounds      int
	trace       string
	deployments int
	working     float64
	scale       float64
	seed        uint64
	policy      string
	parallel    int
	bin         int
}

// replayPlan is one replay: how much of a zone's trace, of which size, over which link.
type replayPlan struct {
	zone        string
	deployments int
	working     float64
	mbit        float64
}

// name is what its results are called.
func (p replayPlan) name() string {
	return fmt.Sprintf("%s %d %s", p.zone, p.deployments, rate(p.mbit))
}

func parsePlan(zone, rest string) (p replayPlan, err error) {
	p.zone = zone
	f := strings.Split(rest, ":")
	if len(f) != 3 {
		return p, errors.New("there are four parts")
	}
	var errs [3]error
	p.deployments, errs[0] = strconv.Atoi(f[0])
	p.working, errs[1] = strconv.ParseFloat(f[1], 64)
	p.mbit, errs[2] = strconv.ParseFloat(f[2], 64)
	return p, errors.Join(errs[:]...)
}

// The default replays of fra and dal have layers large enough that a miss takes seconds, and fra once more so
// many deployments that layers have to be small.
const defaultReplays = "fra:200:1.5e9:20,dal:160:0.9e9:20,fra:1500:0.3e9:4"

func (r *replayOptions) flags(f *flag.FlagSet) {
	f.StringVar(&r.zones, "zones", defaultReplays,
		"comma-separated `replays`: ZONE:DEPLOYMENTS:BYTES:MBIT, or ZONE with -deployments, -working and -rates. The zone (fra, dal) gives capacities over the working set, and a synthetic trace")
	f.IntVar(&r.rounds, "replays", 1, "`times` that each trace is replayed in both ways")
	f.StringVar(&r.trace, "trace", "",
		"`file` or directory of a trace in the IBM format, instead of synthetic ones")
	f.IntVar(&r.deployments, "deployments", 4000, "`number` of deployments to replay")
	f.Float64Var(&r.working, "working", 2e9, "`bytes` that the working set is scaled to, uncompressed")
	f.Float64Var(&r.scale, "scale", 1,
		"of the zone's synthetic trace: `part` of its pulls and images that it has")
	f.Uint64Var(&r.seed, "seed", 1, "of synthetic traces and contents")
	f.StringVar(&r.policy, "policy", "lru", "the shared store's `policy`; nodes' own caches are LRU")
	f.IntVar(&r.parallel, "parallel", 1, "`number` of deployments that are under way at once")
	f.IntVar(&r.bin, "window", 0, "`number` of deployments for each point of the charts (default an eightieth)")
}

func (r *replayOptions) check(o *options) error {
	if r.zones == defaultReplays && (o.asked("deployments") || o.asked("working")) {
		return errors.New("-deployments and -working are of -zones that name none of their own: add -zones fra")
	}
	rates := o.mbit
	if !o.asked("rates") {
		rates = []float64{20}
	}
	for _, text := range strings.Split(r.zones, ",") {
		zone, rest, own := strings.Cut(text, ":")
		if _, ok := thesisReplay[zone]; !ok {
			return fmt.Errorf("zone %q: there are fra and dal", zone)
		}
		if own {
			p, err := parsePlan(zone, rest)
			if err != nil {
				return fmt.Errorf("replay %q: want ZONE:DEPLOYMENTS:BYTES:MBIT: %w", text, err)
			}
			r.plan = append(r.plan, p)
			continue
		}
		for _, mbit := range rates {
			r.plan = append(r.plan, replayPlan{zone, r.deployments, r.working, mbit})
		}
	}
	if r.parallel < 1 || r.bin < 0 || r.rounds < 1 {
		return errors.New("a replay has one deployment at once at least, and is played once")
	}
	for i, p := range r.plan {
		if slices.ContainsFunc(r.plan[:i], func(o replayPlan) bool { return o.name() == p.name() }) {
			return fmt.Errorf("two replays of %s: their results would have one name", p.name())
		}
		if p.deployments < 8 || p.working < 1e6 || p.mbit < 0 {
			return fmt.Errorf("replay of %s: it has at least 8 deployments, and a working set of a megabyte", p.zone)
		}
	}
	return nil
}

// zoneReplay is a trace prepared: the images are in a layout.
type zoneReplay struct {
	replayPlan
	b      *popBench
	bin    int // deployments for each point of the charts
	dir    string
	script *script
	names  []string // of each deployment's image
	layers []madeLayer
	runs   map[string][]*replayed // by shared and separate
}

// The two ways to cache.
const (
	sharedCache   = "shared"
	separateCache = "separate"
)

// replayAll replays each trace, shared and separate caches in turn.
func (b *popBench) replayAll(ctx context.Context) error {
	for _, plan := range b.replay.plan {
		if err := b.replayOne(ctx, plan); err != nil {
			return fmt.Errorf("%s: %w", plan.zone, err)
		}
	}
	fmt.Fprintln(b.stdout)
	tabulate(b.stdout, b.figures, separateCache)
	return nil
}

func (b *popBench) replayOne(ctx context.Context, plan replayPlan) (err error) {
	z := &zoneReplay{replayPlan: plan, b: b, bin: cmp.Or(b.replay.bin, max(1, plan.deployments/80)),
		runs: map[string][]*replayed{}}
	if z.dir, err = os.MkdirTemp("/var/tmp", "dewpoint-replay-"); err != nil {
		return err
	}
	defer os.RemoveAll(z.dir)
	if err := z.prepare(ctx); err != nil {
		return err
	}
	for round := range b.replay.rounds {
		ways := []string{sharedCache, separateCache}
		for i := range ways {
			way := ways[(i+round)%2]
			run, err := z.run(ctx, way, round)
			if err != nil {
				return fmt.Errorf("%s: %w", way, err)
			}
			z.runs[way] = append(z.runs[way], run)
		}
	}
	z.compare()
	return z.chart()
}

func (z *zoneReplay) prepare(ctx context.Context) error {
	o := z.b.replay
	var err error
	if o.trace != "" {
		z.script, err = readScript(z.deployments, o.trace)
	} else {
		z.script, err = synthesize(z.zone, o.scale, o.seed, z.deployments, z.dir)
	}
	if err != nil {
		return err
	}
	scale := z.working / float64(z.script.bytes())
	if z.names, z.layers, err = makeLayout(ctx, z.dir, z.script, scale, o.seed); err != nil {
		return err
	}
	z.b.doc.note("### %s\n\n%s of %s, %d deployments one after the other to five nodes in turn, %d layers; the working set of %.1f MB is scaled by %.3g to %.1f MB, %.1f MB compressed; link: %s Mbit/s.", z.name(), z.kind(), z.zone,
		len(z.script.deployments), len(z.layers), float64(z.script.bytes())/1e6, scale,
		float64(sum(z.sizes(0)))/1e6, float64(sum(z.blobs()))/1e6, rate(z.mbit))
	return nil
}

// kind says what kind of trace it is.
func (z *zoneReplay) kind() string {
	if z.script.synthetic {
		return "A synthetic trace"
	}
	return "A trace"
}

// sizes is what each layer counts in a cache that takes extra bytes beside the tar.
func (z *zoneReplay) sizes(extra int64) (v []int64) {
	for _, l := range z.layers {
		v = append(v, l.size+extra)
	}
	return v
}

func (z *zoneReplay) blobs() (v []int64) {
	for _, l := range z.layers {
		v = append(v, l.desc.Size)
	}
	return v
}

func sum(v []int64) (n int64) {
	for _, x := range v {
		n += x
	}
	return n
}

// ownExtra is what a node's own cache takes on disk for a layer beside its tar: the index of its
// file system, what is known of it, and the rest of its last block.
const ownExtra = 16 << 10

// capacity is the bytes of a cache, as that cache counts them: the shared store counts tars, a node's
// own cache what its files take on disk.
func (z *zoneReplay) capacity(way string) (bytes int64, sizes []int64) {
	t := thesisReplay[z.zone]
	if way == sharedCache {
		sizes = z.sizes(0)
		return int64(t.shared * float64(sum(sizes))), sizes
	}
	sizes = z.sizes(ownExtra)
	return int64(t.node * float64(sum(sizes))), sizes
}

// expect is what the simulator says of a way.
func (z *zoneReplay) expect(ctx context.Context, way string) (*expectation, error) {
	size, sizes := z.capacity(way)
	if way == sharedCache {
		return z.script.expect(ctx, sizes, z.b.replay.policy, size, 0)
	}
	return z.script.expect(ctx, sizes, "lru", size, replayNodes)
}

// replayed is what came of one run.
type replayed struct {
	Deployed []deployed `json:"deployments"`

	usage    popUsage
	expected *expectation
	// the most that a node's own layers take on disk at the end, over their bound; NaN if it has none to speak
	// of
	full float64
}

// deployed is one deployment of a run.
type deployed struct {
	Seconds  float64 `json:"seconds"`
	Mounted  float64 `json:"mounted"`         // of these, until the image was mounted
	Registry int64   `json:"registry"`        // bytes from there, compressed
	Image    int64   `json:"image"`           // and of all layers
	Again    bool    `json:"again,omitempty"` // this node has deployed the image before
	Failed   bool    `json:"failed,omitempty"`
}

// hit reports whether all layers were in the cache.
func (d deployed) hit() bool { return d.Registry == 0 }

func (z *zoneReplay) config(way string) (popConfig, error) {
	size, _ := z.capacity(way)
	c := popConfig{nodes: replayNodes, layout: z.dir, cache: size, prepare: z.b.prepare}
	if way == separateCache {
		return c, nil
	}
	kind, err := z.b.shared()
	// All that the PoP keeps is in the store: a node lets its own copy go when the store has it.
	c.kind, c.cache, c.bytes = kind, 1, max(1<<30, 2*size)
	c.pop = fmt.Sprintf("capacity = \"%d\"\nhigh = 1.0\nlow = 0.98\npolicy = %q\nlease = \"5s\"\ngrace = \"15s\"\n", size, z.b.replay.policy)
	return c, err
}

// run replays the trace on a bed of its own.
func (z *zoneReplay) run(ctx context.Context, way string, round int) (*replayed, error) {
	expected, err := z.expect(ctx, way)
	if err != nil {
		return nil, err
	}
	c, err := z.config(way)
	if err != nil {
		return nil, err
	}
	p, err := z.b.open(ctx, c)
	if err != nil {
		return nil, err
	}
	r := &replayed{expected: expected}
	err = z.drive(ctx, p, r)
	if r.full = math.NaN(); err == nil && way == separateCache {
		r.full, err = p.fullest(ctx, c.cache)
	}
	if said := z.keepLogs(p, way); said != nil {
		err = errors.Join(err, said)
	}
	if err = errors.Join(err, p.Close()); err != nil {
		return nil, err
	}
	z.add(r, way, round)
	return r, nil
}

// fullest waits until the nodes keep their bound, ten seconds at most, and tells how much of it the fullest
// one takes.
func (p *pop) fullest(ctx context.Context, bound int64) (most float64, err error) {
	over := errors.New("a cache is above its bound")
	err = until(ctx, 10*time.Second, func() error {
		most = 0
		for _, n := range p.Nodes {
			use, err := fs.DiskUsage(ctx, filepath.Join(n.Root(), "layers"))
			if err != nil { // something went meanwhile
				return err
			}
			most = max(most, float64(use.Size)/float64(bound))
		}
		if most > 1 {
			return over
		}
		return nil
	})
	if errors.Is(err, over) { // which is a result
		err = nil
	}
	return most, err
}

// keepLogs leaves what the nodes said beside the results, if the run was not clean.
func (z *zoneReplay) keepLogs(p *pop, way string) error {
	if os.Getenv("DEWPOINT_KEEP_LOGS") == "" {
		return nil
	}
	for _, n := range p.Nodes {
		raw, err := os.ReadFile(n.Log())
		if err == nil {
			err = os.WriteFile(fmt.Sprintf("%s-%s-%s-%s.log", z.b.report.prefix, z.zone, way, n.Name), raw, 0o644)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// drive deploys in the trace's order, to the nodes in turn.
func (z *zoneReplay) drive(ctx context.Context, p *pop, r *replayed) error {
	for _, l := range z.layers { // the registry's copies are hot
		if err := warm(filepath.Join(z.dir, "blobs", "sha256", l.desc.Digest.Encoded())); err != nil {
			return err
		}
	}
	if err := p.Rate(ctx, z.mbit); err != nil {
		return err
	}
	w, err := p.watch(0, replayNodes)
	if err != nil {
		return err
	}
	r.Deployed = make([]deployed, len(z.names))
	var mu sync.Mutex
	all, ctx := errgroup.WithContext(ctx)
	next, began := 0, time.Now()
	for range z.b.replay.parallel {
		all.Go(func() error {
			for {
				mu.Lock()
				i := next
				next++
				if i > 0 && i%(10*z.bin) == 0 && i < len(z.names) {
					fmt.Fprintf(z.b.stderr, "%s: %d deployments in %.0f s\n", z.zone, i, time.Since(began).Seconds())
				}
				mu.Unlock()
				if i >= len(z.names) {
					return nil
				}
				if err := z.one(ctx, p, i, &r.Deployed[i]); err != nil {
					if ctx.Err() != nil {
						return context.Cause(ctx)
					}
					mu.Lock()
					fmt.Fprintf(z.b.stderr, "deployment %d of %s: %v\n", i, z.names[i], err)
					mu.Unlock()
				}
			}
		})
	}
	err = all.Wait()
	u, werr := w.stop()
	r.usage = u
	return errors.Join(err, werr)
}

// one deploys, and removes the container when it runs.
func (z *zoneReplay) one(ctx context.Context, p *pop, i int, d *deployed) error {
	node, name := i%replayNodes, fmt.Sprintf("d%d", i)
	for _, l := range z.script.deployments[i].layers {
		d.Image += z.layers[l].desc.Size
	}
	for j := i - replayNodes; j >= 0; j -= replayNodes {
		d.Again = d.Again || z.names[j] == z.names[i]
	}
	start := time.Now()
	rec, err := p.run(ctx, node, z.names[i], name)
	if err != nil {
		d.Failed = true
		return err
	}
	d.Seconds = time.Since(start).Seconds()
	d.Registry, d.Mounted = rec.Bytes.Registry, rec.Stages["mounted"]
	return p.Remove(ctx, node, name)
}
