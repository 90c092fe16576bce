package bench

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
)

const replayNodes = 5

// The traces of figures 4.7 and 4.8: capacities over the working set, of the shared cache and of each node's own,
// and what the thesis found: by how much the shared cache shortens deployments.
var thesisReplay = map[string]struct{ shared, node, less float64 }{
	"fra": {1.39, 0.32, 0.78},
	"dal": {0.80, 0.19, 0.37},
}

type replayOptions struct {
	zones       string
	trace       string
	deployments int
	working     float64
	scale       float64
	seed        uint64
	policy      string
	parallel    int
	bin         int
}

func (r *replayOptions) flags(f *flag.FlagSet) {
	f.StringVar(&r.zones, "zones", "fra,dal", "comma-separated `zones` to replay: their capacities over the working set, and their synthetic traces")
	f.StringVar(&r.trace, "trace", "", "`file` or directory of a trace in the IBM format, instead of synthetic ones")
	f.IntVar(&r.deployments, "deployments", 4000, "`number` of deployments to replay")
	f.Float64Var(&r.working, "working", 2e9, "`bytes` that the working set is scaled to, uncompressed")
	f.Float64Var(&r.scale, "scale", 1, "of the zone's synthetic trace: `part` of its pulls and images that it has")
	f.Uint64Var(&r.seed, "seed", 1, "of synthetic traces and contents")
	f.StringVar(&r.policy, "policy", "lru", "the shared store's `policy`; nodes' own caches are LRU")
	f.IntVar(&r.parallel, "parallel", 1, "`number` of deployments that are under way at once")
	f.IntVar(&r.bin, "window", 0, "`number` of deployments for each point of the charts (default an eightieth)")
}

func (r *replayOptions) check() error {
	if r.deployments < 8 || r.parallel < 1 || r.working < 1e6 || r.bin < 0 {
		return errors.New("a replay has at least 8 deployments, one of them at once, and a working set of a megabyte")
	}
	for _, z := range strings.Split(r.zones, ",") {
		if _, ok := thesisReplay[z]; !ok {
			return fmt.Errorf("zone %q: there are fra and dal", z)
		}
	}
	if r.bin == 0 {
		r.bin = max(1, r.deployments/80)
	}
	return nil
}

// zoneReplay is a trace made ready: the images are in a layout.
type zoneReplay struct {
	b      *popBench
	zone   string
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

// replayAll replays each zone's trace, shared and separate caches in turn.
func (b *popBench) replayAll(ctx context.Context) error {
	if !b.o.asked("rates") {
		b.o.mbit = []float64{20}
	}
	if !b.o.asked("rounds") {
		b.o.rounds = 1
	}
	for _, zone := range strings.Split(b.replay.zones, ",") {
		if err := b.replayZone(ctx, zone); err != nil {
			return fmt.Errorf("%s: %w", zone, err)
		}
	}
	fmt.Fprintln(b.stdout)
	tabulate(b.stdout, b.figures, separateCache)
	return nil
}

func (b *popBench) replayZone(ctx context.Context, zone string) (err error) {
	z := &zoneReplay{b: b, zone: zone, runs: map[string][]*replayed{}}
	if z.dir, err = os.MkdirTemp("/var/tmp", "dewpoint-replay-"); err != nil {
		return err
	}
	defer os.RemoveAll(z.dir)
	if err := z.prepare(ctx); err != nil {
		return err
	}
	for _, mbit := range b.o.mbit {
		clear(z.runs)
		for round := range b.o.rounds {
			ways := []string{sharedCache, separateCache}
			for i := range ways {
				way := ways[(i+round)%2]
				run, err := z.run(ctx, way, mbit, round)
				if err != nil {
					return fmt.Errorf("%s: %w", way, err)
				}
				z.runs[way] = append(z.runs[way], run)
			}
		}
		z.compare(mbit)
		if err := z.chart(mbit); err != nil {
			return err
		}
	}
	return nil
}

func (z *zoneReplay) prepare(ctx context.Context) error {
	o := z.b.replay
	var err error
	if o.trace != "" {
		z.script, err = readScript(o.deployments, o.trace)
	} else {
		z.script, err = synthesize(z.zone, o.scale, o.seed, o.deployments, z.dir)
	}
	if err != nil {
		return err
	}
	scale := o.working / float64(z.script.bytes())
	if z.names, z.layers, err = makeLayout(ctx, z.dir, z.script, scale, o.seed); err != nil {
		return err
	}
	label := "trace"
	if z.script.synthetic {
		label = "synthetic trace"
	}
	fmt.Fprintf(z.b.stdout, "%s: %s, %d deployments, %d layers, working set %.1f MB scaled by %.3g to %.1f MB (%.1f MB compressed)\n", z.zone, label,
		len(z.script.deployments), len(z.layers), float64(z.script.bytes())/1e6, scale, float64(sum(z.sizes(0)))/1e6, float64(sum(z.blobs()))/1e6)
	return nil
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
func (z *zoneReplay) run(ctx context.Context, way string, mbit float64, round int) (*replayed, error) {
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
	err = z.drive(ctx, p, mbit, r)
	if said := z.keepLogs(p, way); said != nil {
		err = errors.Join(err, said)
	}
	if err = errors.Join(err, p.Close()); err != nil {
		return nil, err
	}
	z.add(r, way, mbit, round)
	return r, nil
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
func (z *zoneReplay) drive(ctx context.Context, p *pop, mbit float64, r *replayed) error {
	for _, l := range z.layers { // the registry's copies are hot
		if err := warm(filepath.Join(z.dir, "blobs", "sha256", l.desc.Digest.Encoded())); err != nil {
			return err
		}
	}
	if err := p.Rate(ctx, mbit); err != nil {
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
				if i > 0 && i%(10*z.b.replay.bin) == 0 && i < len(z.names) {
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
