// Package server is dewd: it builds the node's parts in the order of their
// dependence, serves containerd and the API, and carries API calls to the
// parts.
//
//	store of layers ─ catalog ─ link ─ puller ──┐
//	registry client ─────────────┘              │
//	mount backend ─ snapshotter + diff plugin ──┤ STATE/snapshotter.sock
//	engine (containerd) ────────────────────────┤
//	deployer ───────────────────────────────────┘ STATE/dewd.sock
//
// A daemon may be killed at any moment: containers, shims and a private
// containerd live on, mounts stay, and the next daemon takes them over.
package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"net/netip"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"dewpoint/internal/api"
	"dewpoint/internal/checkpoint"
	"dewpoint/internal/checkpoint/criu"
	"dewpoint/internal/checkpoint/store"
	"dewpoint/internal/config"
	"dewpoint/internal/deploy"
	"dewpoint/internal/engine"
	"dewpoint/internal/engine/network"
	"dewpoint/internal/fetch"
	"dewpoint/internal/layer"
	"dewpoint/internal/layer/mount"
	"dewpoint/internal/pack/learn"
	"dewpoint/internal/registry"
	"dewpoint/internal/sched"
	"dewpoint/internal/server/metrics"
	"dewpoint/internal/snapshot"
	"dewpoint/internal/spec"
	"dewpoint/internal/trace"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

// Config is what dewd's command line says.
type Config struct {
	File       config.Config
	Root       string // what survives a reboot
	State      string // what need not
	Containerd string // "private", or the path of a containerd's socket
	HTTP       string // address of metrics; "" is none
	Version    string
	Log        *slog.Logger
}

// Daemon is a running dewd.
type Daemon struct {
	cfg         Config
	log         *slog.Logger
	name        string
	layers      *layer.Store
	registry    *registry.Client
	catalog     *fetch.Catalog
	link        *fetch.Link
	puller      *fetch.Puller
	backend     mount.Backend
	backends    []mount.Finding
	snaps       *snapshot.Snapshotter
	engine      *engine.Engine
	foreign     foreignImages // with engine
	pop         *popParts     // nil: this node is by itself
	learner     *learn.Learner
	saved       *store.Store        // of checkpoints; nil: there are to be none
	checkpoints *checkpoint.Manager // with saved
	deployer    *deploy.Deployer
	traces      *trace.Exporter // nil: nobody wants them
	metrics     *metrics.Set
	desk        *deploy.Desk
	events      *events
	lock        *os.File        // of State
	server      *server         // of partial layers; nil if there are to be none
	bg          sync.WaitGroup  // what close waits for
	opened      context.Context // ends when puller and snapshotter are there
	open        context.CancelFunc
	work        atomic.Int64 // counts what was done, to see when nothing is
}

// defaultMemory is what dewd's Go heap aims below.
const defaultMemory = 40 << 20

// Run runs a daemon until ctx ends. It closes started when the API answers.
func Run(ctx context.Context, cfg Config, started chan<- struct{}) error {
	if os.Geteuid() != 0 {
		return errors.New("dewd mounts file systems and runs containers, so it needs root: run it with sudo or as a system service")
	}
	limit := int64(cfg.File.Limits.Memory)
	if limit == 0 {
		limit = defaultMemory
	}
	debug.SetMemoryLimit(limit)
	paceHeap()
	if err := sched.Prompt(); err != nil { // calls are answered all the same
		cfg.Log.Warn("answers may wait for a processor", "err", err)
	}
	d, err := open(ctx, cfg)
	if err != nil {
		return err
	}
	defer d.close()
	return d.serve(ctx, started)
}

// open builds the parts that serve nothing yet.
func open(ctx context.Context, cfg Config) (*Daemon, error) {
	d := &Daemon{cfg: cfg, log: cfg.Log, name: cfg.File.Node.Name, events: newEvents(),
		metrics: metrics.New(cfg.Version)}
	if d.name == "" {
		d.name, _ = os.Hostname()
	}
	d.opened, d.open = context.WithCancel(context.Background())
	steps := []func(context.Context) error{d.makeDirs, d.openTraces, d.chooseBackend, d.openDatafs, d.openLayers,
		d.openRegistry, d.openSnapshotter, d.openLearner}
	for _, step := range steps {
		if err := step(ctx); err != nil {
			d.close()
			return nil, err
		}
	}
	d.open()
	d.failOrphans()
	d.puller.Revive()
	return d, nil
}

func (d *Daemon) openTraces(ctx context.Context) (err error) {
	d.traces, err = trace.NewExporter(ctx,
		trace.Config{Endpoint: d.cfg.File.Trace.Endpoint, Node: d.name, Version: d.cfg.Version, Log: d.log})
	return err
}

func (d *Daemon) makeDirs(context.Context) error {
	for _, dir := range []string{d.cfg.Root, d.cfg.State} {
		if !filepath.IsAbs(dir) {
			return fmt.Errorf("directory %q is not absolute", dir)
		}
		if err := os.MkdirAll(dir, 0o711); err != nil {
			return err
		}
	}
	return d.lockState()
}

// lockState keeps two dewds from sharing a state directory, whatever their
// roots: its sockets and its containerd are one's alone.
func (d *Daemon) lockState() error {
	f, err := os.OpenFile(filepath.Join(d.cfg.State, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return fmt.Errorf("%s is in use by another dewd: end that one, or give this one another --state and --root",
			d.cfg.State)
	}
	d.lock = f
	return nil
}

func (d *Daemon) chooseBackend(ctx context.Context) error {
	var err error
	d.backend, d.backends, err = mount.Probe(ctx,
		mount.Config{Dir: d.cfg.Root, Force: d.cfg.File.Node.Mount, Log: d.log})
	return err
}

func (d *Daemon) openLayers(context.Context) error {
	var err error
	d.layers, err = layer.Open(layer.Config{Dir: filepath.Join(d.cfg.Root, "layers"),
		Tree:     d.backend.Name() == mount.Tree,
		MaxBytes: int64(d.cfg.File.Limits.LayerBytes), Server: d.layerServer(), LazyTree: d.lazyTree(),
		Points: true, Lied: func(p *layer.Partial, why error) {
			d.onceOpen(func() { d.lied(p, why) })
		}, Log: d.log})
	return err
}

func (d *Daemon) openRegistry(context.Context) error {
	hosts := map[string]registry.Host{}
	for name, r := range d.cfg.File.Registry {
		hosts[name] = registry.Host{PlainHTTP: r.PlainHTTP}
	}
	var err error
	d.registry, err = registry.New(registry.Config{Hosts: hosts, HostsDirs: d.cfg.File.Registries.HostsDirs,
		DockerConfig: d.cfg.File.Registries.DockerConfig,
		StallTimeout: time.Duration(d.cfg.File.Registries.StallTimeout),
		UserAgent:    "dewpoint/" + d.cfg.Version, Log: d.log})
	if err != nil {
		return err
	}
	if d.catalog, err = fetch.OpenCatalog(filepath.Join(d.cfg.Root, "images"), d.log); err != nil {
		return err
	}
	d.link = fetch.NewLink(fetch.LinkConfig{Limit: int64(d.cfg.File.Link.Limit),
		Background: int64(d.cfg.File.Link.Background)})
	packs, err := d.packConfig()
	if err != nil {
		return err
	}
	cache, err := d.cacheConfig()
	if err != nil {
		return err
	}
	shared, err := d.joinPoP()
	if err != nil {
		return fmt.Errorf("pop: %w", err)
	}
	d.puller = fetch.NewPuller(fetch.Config{Registry: d.registry, Layers: d.layers, Catalog: d.catalog,
		Link:  d.link,
		Packs: packs, Lazy: d.lazyConfig(), PoP: shared, Cache: cache,
		Images: fetch.ImagesConfig{Idle: d.idleImages, Remove: d.removeImages}, Log: d.log})
	return nil
}

func (d *Daemon) openSnapshotter(ctx context.Context) error {
	var err error
	d.snaps, err = snapshot.New(ctx, snapshot.Config{Root: filepath.Join(d.cfg.Root, "snapshotter"),
		Layers: layers{d.puller, time.Now()}, Backend: d.backend, Prepared: d.prepared, Log: d.log})
	return err
}

// close gives up what open and serve made, last first. Parts that were not
// made are nil.
func (d *Daemon) close() {
	if d.desk != nil {
		if err := d.desk.Close(); err != nil {
			d.log.Error("close the journal of deployments", "err", err)
		}
	}
	if d.deployer != nil {
		d.deployer.Close()
	}
	if d.checkpoints != nil {
		d.checkpoints.Close()
	}
	if d.learner != nil {
		d.learner.Close()
	}
	if d.puller != nil {
		d.puller.Close()
	}
	if d.engine != nil {
		d.engine.Close()
	}
	if d.snaps != nil {
		d.snaps.Close()
	}
	d.leavePoP()
	if d.registry != nil {
		d.registry.Close()
	}
	if d.layers != nil {
		d.layers.Close()
	}
	if d.server != nil {
		d.server.rest(true)
	}
	d.bg.Wait()
	d.traces.Close()
	if d.lock != nil {
		d.lock.Close()
	}
}

// serve answers containerd first, since the engine needs the snapshotter, and
// then the API.
func (d *Daemon) serve(ctx context.Context, started chan<- struct{}) error {
	g, ctx := errgroup.WithContext(ctx)
	socket := filepath.Join(d.cfg.State, "snapshotter.sock")
	blobs := &blobs{}
	defer blobs.close()
	g.Go(func() error { return snapshot.Serve(ctx, socket, d.snaps, snapshot.NewDiff(d.snaps, blobs)) })
	g.Go(func() error {
		if err := d.startEngine(ctx, socket, blobs); err != nil {
			return err
		}
		h := trace.Handler(api.NewHandler(d, api.Config{Classify: classify, Observe: d.metrics.Call, Log: d.log}))
		if err := d.serveTCP(ctx, g, h); err != nil { // who finds the socket below finds this as well
			return err
		}
		l, err := api.Listen(filepath.Join(d.cfg.State, "dewd.sock"), 0o600)
		if err != nil {
			return err
		}
		if d.cfg.HTTP != "" {
			g.Go(func() error { return d.serveHTTP(ctx, d.cfg.HTTP) })
		}
		g.Go(func() error { return d.watchEngine(ctx) })
		g.Go(func() error { return d.keepHouse(ctx) })
		g.Go(func() error { return d.servePoP(ctx) })
		close(started)
		return api.Serve(ctx, l, h)
	})
	err := g.Wait()
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

func (d *Daemon) startEngine(ctx context.Context, socket string, b *blobs) error {
	f := d.cfg.File.Engine
	subnet, err := netip.ParsePrefix(f.Subnet)
	if f.Subnet != "" && err != nil {
		return fmt.Errorf("engine.subnet: %w", err)
	}
	program := criu.Find(ctx, d.cfg.File.Checkpoint.CRIU)
	d.engine, err = engine.Start(ctx,
		engine.Config{Address: d.cfg.Containerd, Root: filepath.Join(d.cfg.Root, "engine"),
			State: d.cfg.State, Namespace: f.Namespace, SnapshotterSocket: socket, DiffSocket: socket,
			Containerd: f.Containerd, Runtime: f.Runtime, Crun: f.Crun, PerShim: f.PerShim, SpareShim: !f.NoSpare,
			LogBytes: int64(f.LogBytes), Sync: f.Sync, CRIU: program, Unblock: d.unblock(),
			CNI: network.Config{Bin: pluginDirs(f.CNI), Subnet: subnet}, Log: d.log})
	if err != nil {
		return err
	}
	d.foreign.ask = d.engine.LocalImage
	b.dial(d.engine.Socket())
	if err := d.openCheckpoints(ctx, program); err != nil {
		return err
	}
	d.deployer = deploy.New(deploy.Config{Puller: d.puller, Engine: d.engine, Learner: d.learner,
		Checkpoints: d.checkpoints, Node: d.name, Log: d.log, Done: d.done,
		Admit: d.admitConfig(), Room: d.makeRoom, Ended: d.ended, Traces: d.traces})
	if err := d.deployer.TakeOver(ctx); err != nil {
		return err
	}
	return d.openDesk(ctx)
}

// done logs a deployment or pull and tells the event stream its record.
func (d *Daemon) done(r spec.Record) {
	d.work.Add(1)
	d.metrics.Settled(r)
	kind, what := spec.EventRecord, "deployment"
	if r.Name == "" {
		kind, what = spec.EventPulled, "pull"
	}
	d.log.LogAttrs(context.Background(), slog.LevelInfo, what, summary(r)...)
	d.events.add(spec.Event{Kind: kind, Name: r.Name, Image: r.Image, Record: &r})
}

// summary is what the log says of a record: its stages in seconds, in their order, and its
// compressed bytes. The steps of the work are left to traces and the event stream.
func summary(r spec.Record) []slog.Attr {
	var named []slog.Attr
	for _, f := range [][2]string{{"name", r.Name}, {"image", r.Image}, {"node", r.Node}, {"pull", r.Way.Pull},
		{"start", r.Way.Start}} {
		if f[1] != "" {
			named = append(named, slog.String(f[0], f[1]))
		}
	}
	var stages []slog.Attr
	for _, s := range slices.SortedFunc(maps.Keys(r.Stages), func(a, b string) int {
		return cmp.Compare(r.Stages[a], r.Stages[b])
	}) {
		stages = append(stages, slog.Float64(s, math.Round(r.Stages[s]*1000)/1000))
	}
	named = append(named, slog.GroupAttrs("stages", stages...),
		slog.Group("bytes", "registry", r.Bytes.Registry, "pop", r.Bytes.PoP, "local", r.Bytes.Local))
	if r.Error != "" {
		named = append(named, slog.String("error", r.Error))
	}
	return named
}
