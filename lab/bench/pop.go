package bench

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"dewpoint/internal/api"
	"dewpoint/internal/pop/peer"
	"dewpoint/internal/spec"
	"dewpoint/testkit/demo"
	"dewpoint/testkit/popbed"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

// The experiments with a PoP: those of the thesis's chapter 4, on the bed of
// package popbed.
//
//	files   one image on one node: missed, from the store, from the node's own disk, for each kind of store
//	many    the same image on 1 to 10 nodes at once
//	replay  a trace of deployments, against one shared cache and against a cache for each node
//
// The nodes record nothing (pack.learn = "never"), so images without packs come
// whole, as in the thesis. Each measurement of files and each run of replay has a
// bed of its own; those of many have one, whose nodes forget the image in between.
type popBench struct {
	o              *options
	self           []string
	stores         []popbed.Kind
	counts         []int
	replay         replayOptions
	prepare        int     // images that nodes prewarm
	report         *report // of one part: its samples
	doc            *popReport
	figures        []figure
	stdout, stderr io.Writer
}

func comparePoP(ctx context.Context, args []string, stdout, stderr io.Writer, self []string) error {
	var o options
	b := &popBench{o: &o, self: self, stdout: stdout, stderr: stderr}
	var parts, stores, counts, file string
	err := o.parse("pop", args, stderr, "ubuntu:pi", func(f *flag.FlagSet) {
		f.StringVar(&file, "report", "",
			"Markdown `file` for the tables of all parts and what was held against targets; charts lie in a directory of its name")
		f.StringVar(&parts, "parts", "files,many,replay", "comma-separated `parts` of the experiment")
		f.StringVar(&stores, "stores", "none,dir,gluster,gluster3,ceph",
			"comma-separated `stores`; many and replay take the first that is shared, gluster if it is among them")
		f.StringVar(&counts, "nodes", "1,2,4,6,8,10", "comma-separated `numbers` of nodes that deploy at once")
		f.IntVar(&b.prepare, "prepare", 16,
			"`number` of images that nodes prewarm (pop.prepare); 0 is none, as in many unless it is given")
		b.replay.flags(f)
	})
	if err != nil {
		return err
	}
	if err := b.parse(stores, counts); err != nil {
		return err
	}
	b.doc = &popReport{out: stdout, file: file, command: commandLine("dewlab bench pop -report FILE", args),
		commit: commit()}
	if err := b.doc.check(); err != nil {
		return err
	}
	all := map[string]func(context.Context) error{"files": b.files, "many": b.many, "replay": b.replayAll}
	for _, name := range strings.Split(parts, ",") {
		if all[name] == nil {
			return fmt.Errorf("part %q: unknown", name)
		}
	}
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, unix.SIGTERM, unix.SIGHUP)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal does not wait for the bed to be taken down
	for _, name := range strings.Split(parts, ",") {
		b.report, b.figures = newReport(stdout, stderr, "pop "+name, o.out+"-"+name), nil
		b.doc.section(name)
		b.doc.prefix = b.report.prefix
		b.report.header(nil)
		err := all[name](ctx)
		if err = errors.Join(err, b.write(), b.doc.write()); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return b.doc.close()
}

func (b *popBench) parse(stores, counts string) error {
	known := map[string]popbed.Kind{"none": popbed.None}
	for _, k := range popbed.Kinds() {
		known[string(k)] = k
	}
	for _, name := range strings.Split(stores, ",") {
		kind, ok := known[name]
		if !ok {
			return fmt.Errorf("store %q: there are none and %v", name, popbed.Kinds())
		}
		b.stores = append(b.stores, kind)
	}
	for _, s := range strings.Split(counts, ",") {
		var n int
		if _, err := fmt.Sscanf(s, "%d", &n); err != nil || n < 1 || n > 10 {
			return fmt.Errorf("%q nodes: 1 to 10", s)
		}
		b.counts = append(b.counts, n)
	}
	return b.replay.check(b.o)
}

// shared is the store of the parts that have but one.
func (b *popBench) shared() (popbed.Kind, error) {
	var first popbed.Kind
	for _, k := range b.stores {
		if k == popbed.Gluster {
			return k, nil
		}
		if first == popbed.None {
			first = k
		}
	}
	if first == popbed.None {
		return "", errors.New("no shared store was asked for")
	}
	return first, nil
}

// write leaves what the part has measured, though it may have failed half way.
func (b *popBench) write() error {
	var err error
	if len(b.report.samples) > 0 {
		err = b.report.write()
	}
	if len(b.figures) > 0 {
		err = errors.Join(err, writeFigures(b.report.prefix, b.figures))
	}
	return err
}

func (b *popBench) figure(image, state, what, unit string, v float64) {
	b.figures = merge(b.figures,
		[]figure{{Image: image, State: state, What: what, Unit: unit, Values: []float64{v}}})
}

// pop is a bed whose nodes run, with a registry behind its WAN.
type pop struct {
	*popbed.Bed
	layout  string
	kind    popbed.Kind
	secrets string // directory
}

// Close takes the bed down.
func (p *pop) Close() error { return errors.Join(p.Bed.Close(), os.RemoveAll(p.secrets)) }

// popConfig is what the nodes of a bed are told beside their names.
type popConfig struct {
	kind   popbed.Kind
	nodes  int
	dewds  int // how many of them run dewd; 0 is all
	bytes  int64
	layout string
	cache  int64  // cache.max_bytes; 0 is none
	engine string // more of [engine]
	pop    string // more of [pop]
	// prepare is how many images nodes prewarm; 0 is none.
	prepare int
}

const popTemplate = `[pop]
node = "{{.Name}}"
redis = "{{.Redis}}"
listen = "{{.Address}}:7117"
key = "{{KEY}}"
store = "{{.Store}}"
`

// open makes a bed and starts its nodes.
func (b *popBench) open(ctx context.Context, c popConfig) (*pop, error) {
	cfg := popbed.Config{Nodes: c.nodes, Store: c.kind, StoreBytes: c.bytes, Redis: c.kind != popbed.None,
		Dewd: filepath.Join(b.o.bin, "dewd"),
		Log:  slog.New(slog.NewTextHandler(b.stderr, nil))}
	if b.o.asked("dir") {
		cfg.Dir = b.o.dir
	}
	if tools := b.o.containerd(); tools != "" {
		cfg.Containerd = filepath.Join(tools, "containerd")
	}
	secrets, err := os.MkdirTemp("", "dewpoint-key-")
	if err != nil {
		return nil, err
	}
	key := filepath.Join(secrets, "key")
	if err := peer.NewKey(key); err != nil {
		return nil, errors.Join(err, os.RemoveAll(secrets))
	}
	cfg.Template = strings.Replace(popbed.Basic, "[engine]\n", "[engine]\n"+c.engine, 1) + neverLearn
	if c.cache > 0 {
		cfg.Template += fmt.Sprintf("[cache]\nmax_bytes = \"%d\"\npolicy = \"lru\"\n", c.cache)
	}
	if c.kind != popbed.None {
		cfg.Template += strings.ReplaceAll(popTemplate, "{{KEY}}", key) +
			fmt.Sprintf("prepare = %d\n", cmp.Or(c.prepare, -1)) + c.pop
	}
	bed, err := popbed.New(ctx, cfg)
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(secrets))
	}
	p := &pop{Bed: bed, layout: c.layout, kind: c.kind, secrets: secrets}
	if err := b.start(ctx, p, c); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return p, nil
}

func (b *popBench) start(ctx context.Context, p *pop, c popConfig) error {
	args := append(b.self[1:len(b.self):len(b.self)], "registry", "-dir", c.layout, "-listen", popbed.Registry,
		"-pushed", filepath.Join(p.Dir(), "pushed"))
	if err := p.StartRegistry(ctx, b.self[0], args...); err != nil {
		return fmt.Errorf("registry: %w", err)
	}
	if c.dewds == 0 {
		c.dewds = len(p.Nodes)
	}
	return onNodes(c.dewds, func(i int) error { return p.StartDewd(ctx, i) })
}

// onNodes does something on the first n nodes at once.
func onNodes(n int, do func(i int) error) error {
	var all errgroup.Group
	for i := range n {
		all.Go(func() error { return do(i) })
	}
	return all.Wait()
}

const popName = "bench"

// run deploys an image on node i.
func (p *pop) run(ctx context.Context, i int, image, name string) (spec.Record, error) {
	req := spec.Request{Image: popbed.Registry + "/" + image, Name: name, Net: "host"}
	if app, err := applicationOf(image); err == nil {
		req.Ready = app.ready
	}
	return p.Deploy(ctx, i, req)
}

// once deploys an image on node i and removes the container.
func (p *pop) once(ctx context.Context, i int, image string) error {
	if _, err := p.run(ctx, i, image, popName); err != nil {
		return err
	}
	return p.Remove(ctx, i, popName)
}

// forget has the first n nodes let go of all images, and the store too if it is to.
func (p *pop) forget(ctx context.Context, n int, store bool) error {
	prune := func(i int, opt spec.PruneOptions) error {
		c, err := api.Dial(p.Nodes[i].Host())
		if err != nil {
			return err
		}
		defer c.Close()
		_, err = c.Prune(ctx, opt)
		return err
	}
	if err := onNodes(n, func(i int) error { return prune(i, spec.PruneOptions{Images: true}) }); err != nil ||
		!store {
		return err
	}
	return until(ctx, time.Minute, func() error {
		if err := prune(0, spec.PruneOptions{PoP: true}); err != nil {
			return err
		}
		if left := p.stored(); left > 0 {
			return fmt.Errorf("%d layers stay in the store", left)
		}
		return nil
	})
}

// stored is how many layers the store has.
func (p *pop) stored() int {
	found, _ := filepath.Glob(filepath.Join(p.Nodes[0].Store, "layers", "*.json"))
	return len(found)
}

// awaitReady returns when node i knows an image, which it was not asked for.
func (p *pop) awaitReady(ctx context.Context, i int, image string) error {
	c, err := api.Dial(p.Nodes[i].Host())
	if err != nil {
		return err
	}
	defer c.Close()
	return until(ctx, time.Minute, func() error {
		all, err := c.Images(ctx)
		if err == nil && !slices.ContainsFunc(all, func(m spec.Image) bool {
			return m.Name == popbed.Registry+"/"+image
		}) {
			err = fmt.Errorf("%s is not ready on %s", image, p.Nodes[i].Name)
		}
		return err
	})
}

// awaitStored returns when the store has so many layers.
func (p *pop) awaitStored(ctx context.Context, layers int) error {
	return until(ctx, 5*time.Minute, func() error {
		if n := p.stored(); n < layers {
			return fmt.Errorf("%d layers of %d are in the store", n, layers)
		}
		return nil
	})
}

func until(ctx context.Context, limit time.Duration, ask func() error) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for {
		err := ask()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("not within %s: %w", limit, err)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// cool empties the page caches, and reads the registry's copy of an image.
func (p *pop) cool(image string) error {
	unix.Sync()
	if err := os.WriteFile("/proc/sys/vm/drop_caches", []byte("3"), 0); err != nil {
		return err
	}
	m, err := demo.Manifest(p.layout, image)
	if err != nil {
		return err
	}
	for _, d := range append(m.Layers, m.Config) {
		if err := warm(demo.Blob(p.layout, d.Digest)); err != nil {
			return err
		}
	}
	return nil
}

func warm(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = io.Copy(struct{ io.Writer }{io.Discard}, f)
	return err
}
