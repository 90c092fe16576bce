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
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"dewpoint/internal/adopt"
	"dewpoint/internal/api"
	"dewpoint/internal/checkpoint"
	"dewpoint/internal/checkpoint/criu"
	"dewpoint/internal/checkpoint/store"
	"dewpoint/internal/config"
	"dewpoint/internal/deploy"
	"dewpoint/internal/deploy/admit"
	"dewpoint/internal/engine"
	engineapi "dewpoint/internal/engine/containerd"
	"dewpoint/internal/engine/network"
	"dewpoint/internal/fetch"
	"dewpoint/internal/fetch/link"
	"dewpoint/internal/health"
	"dewpoint/internal/layer"
	"dewpoint/internal/layer/mount"
	"dewpoint/internal/pack/learn"
	"dewpoint/internal/pop/member"
	"dewpoint/internal/pop/peer"
	"dewpoint/internal/registry"
	"dewpoint/internal/restart"
	"dewpoint/internal/sched"
	"dewpoint/internal/server/doctor"
	"dewpoint/internal/server/metrics"
	"dewpoint/internal/snapshot"
	"dewpoint/internal/spec"
	"dewpoint/internal/trace"

	"github.com/opencontainers/go-digest"
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
	Reload     <-chan config.Config // configurations that are to come into force; nil: none
	Snapshots  net.Listener         // where containerd asks for snapshots; nil: dewd makes the socket in State
}

// daemon is the parts of a dewd. Its methods make them, each of those before it.
type daemon struct {
	Config
	name    string
	closers []func()       // of what there is to be closed, the last first
	bg      sync.WaitGroup // what goes on in the background of all parts

	traces   *trace.Exporter // nil: nobody wants them
	news     *news
	usage    *usage
	room     *room
	mounts   mounts
	partials *partials
	layers   *layer.Store
	registry *registry.Client
	catalog  *fetch.Catalog
	pop      *popParts
	link     *link.Link
	puller   *fetch.Puller
	snaps    *snapshot.Snapshotter
	learner  *late[*learn.Learner]

	blobs       *blobs
	criu        string // the program
	engine      *engine.Engine
	documents   *documents
	checkpoints *checkpoints
	deployments *deployments
	supervisor  *restart.Supervisor
	health      *health.Monitor
	adopter     *adopt.Adopter
}

// defaultMemory is what dewd's Go heap aims below.
const defaultMemory = 40 << 20

// Run runs a daemon until ctx ends. It closes started when the API answers.
func Run(ctx context.Context, cfg Config, started chan<- struct{}) error {
	if os.Geteuid() != 0 {
		return errors.New("dewd mounts file systems and runs containers, so it needs root: run it with sudo or as a system service")
	}
	debug.SetMemoryLimit(memoryLimit(cfg.File))
	paceHeap()
	if err := sched.Prompt(); err != nil { // calls are answered all the same
		cfg.Log.Warn("answers may wait for a processor", "err", err)
	}
	return newDaemon(cfg).run(ctx, started)
}

func newDaemon(cfg Config) *daemon {
	d := &daemon{Config: cfg, name: cfg.File.Node.Name, blobs: &blobs{}, learner: newLate[*learn.Learner]()}
	if d.name == "" {
		d.name, _ = os.Hostname()
	}
	events := newEvents()
	d.news = &news{events: events, metrics: metrics.New(cfg.Version), log: cfg.Log}
	d.usage = &usage{engine: newLate[*engine.Engine](), snaps: newLate[*snapshot.Snapshotter](),
		checkpoints: newLate[*checkpoint.Manager](), events: events, log: cfg.Log}
	d.room = &room{root: cfg.Root, reserve: reserve{cfg.Root, cfg.Log}, puller: newLate[*fetch.Puller](),
		usage: d.usage, metrics: d.news.metrics, log: cfg.Log}
	d.room.maxBytes.Store(int64(cfg.File.Cache.MaxBytes))
	d.partials = &partials{engine: d.usage.engine, events: events, log: cfg.Log, bg: &d.bg}
	d.pop = &popParts{cfg: cfg, node: d.name, saved: newLate[*store.Store](), usage: d.usage, room: d.room,
		partials: d.partials, log: cfg.Log, bg: &d.bg}
	return d
}

// run makes the parts and serves until ctx ends. containerd is answered first, since the engine needs the
// snapshotter, and then the API.
func (d *daemon) run(ctx context.Context, started chan<- struct{}) error {
	defer d.close()
	err := d.make(ctx, d.makeDirs, d.openTraces, d.chooseBackend, d.openPartials, d.openLayers, d.openRegistry,
		d.openPuller, d.openSnapshotter, d.openLearner)
	if err != nil {
		return d.room.reserve.fullAtStart(err)
	}
	d.partials.join(d.layers, d.catalog, d.puller, d.snaps)

	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		diff := snapshot.NewDiff(d.snaps, d.blobs)
		if d.Snapshots != nil {
			return snapshot.ServeOn(ctx, d.Snapshots, d.snaps, diff)
		}
		return snapshot.Serve(ctx, d.socket(), d.snaps, diff)
	})
	settings := &reloader{link: d.link, peers: d.pop.auth, room: d.room, inForce: d.File, log: d.Log}
	g.Go(func() error { return settings.follow(ctx, d.Reload) })
	g.Go(func() error {
		if err := d.make(ctx, d.startEngine, d.openHealth, d.openCheckpoints, d.openDeployer, d.openQueue,
			d.openSupervisor); err != nil {
			return d.room.reserve.fullAtStart(err)
		}
		d.room.reserve.keep()
		return d.serve(ctx, g, started)
	})
	err = g.Wait()
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

func (d *daemon) make(ctx context.Context, steps ...func(context.Context) error) error {
	for _, step := range steps {
		if err := step(ctx); err != nil {
			return err
		}
	}
	return nil
}

// atClose has f called by close, before all that was given to it earlier.
func (d *daemon) atClose(f func()) { d.closers = append(d.closers, f) }

func (d *daemon) close() {
	for _, f := range slices.Backward(d.closers) {
		f()
	}
}

// socket is where the snapshotter answers containerd.
func (d *daemon) socket() string { return filepath.Join(d.State, "snapshotter.sock") }

func (d *daemon) makeDirs(context.Context) error {
	for _, dir := range []string{d.Root, d.State} {
		if !filepath.IsAbs(dir) {
			return fmt.Errorf("directory %q is not absolute", dir)
		}
		if err := os.MkdirAll(dir, 0o711); err != nil {
			return err
		}
	}
	if err := d.lockState(); err != nil {
		return err
	}
	return d.room.reserve.use()
}

// lockState keeps two dewds from sharing a state directory, whatever their
// roots: its sockets and its containerd are one's alone.
func (d *daemon) lockState() error {
	f, err := os.OpenFile(filepath.Join(d.State, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return fmt.Errorf("%s is in use by another dewd: end that one, or give this one another --state and --root",
			d.State)
	}
	d.atClose(func() { f.Close() })
	return nil
}

func (d *daemon) openTraces(ctx context.Context) (err error) {
	d.traces, err = trace.NewExporter(ctx,
		trace.Config{Endpoint: d.File.Trace.Endpoint, Node: d.name, Version: d.Version, Log: d.Log})
	d.atClose(d.traces.Close)
	d.atClose(d.bg.Wait)
	return err
}

func (d *daemon) chooseBackend(ctx context.Context) (err error) {
	d.mounts.forced = d.File.Node.Mount != ""
	d.mounts.backend, d.mounts.tried, err = mount.Probe(ctx,
		mount.Config{Dir: d.Root, Force: d.File.Node.Mount, Log: d.Log})
	return err
}

// lazyTree reports whether partial layers are shown as trees: EROFS reads them
// from a file only with the file-backed mount.
func (d *daemon) lazyTree() bool { return d.mounts.backend.Name() != mount.EROFS }

func (d *daemon) openPartials(ctx context.Context) error {
	if err := openPartials(ctx, d.Config, d.lazyTree(), d.partials); err != nil {
		return err
	}
	d.atClose(func() { d.partials.rest(true) })
	return nil
}

func (d *daemon) openLayers(context.Context) (err error) {
	d.layers, err = layer.Open(layer.Config{Dir: filepath.Join(d.Root, "layers"),
		Tree:   d.mounts.backend.Name() == mount.Tree,
		Server: d.partials.layerServer(), LazyTree: d.lazyTree(),
		Points: true, Mismatched: d.partials.mismatched, Log: d.Log})
	if err == nil {
		d.atClose(func() { d.layers.Close() })
	}
	return err
}

func (d *daemon) openRegistry(context.Context) (err error) {
	hosts := map[string]registry.Host{}
	for name, r := range d.File.Registry {
		hosts[name] = registry.Host{PlainHTTP: r.PlainHTTP}
	}
	d.registry, err = registry.New(registry.Config{Hosts: hosts, HostsDirs: d.File.Registries.HostsDirs,
		StallTimeout: time.Duration(d.File.Registries.StallTimeout),
		UserAgent:    "dewpoint/" + d.Version, Log: d.Log})
	if err == nil {
		d.atClose(func() { d.registry.Close() })
	}
	return err
}

// openPuller makes the puller, and this node's part of the PoP.
func (d *daemon) openPuller(context.Context) (err error) {
	if d.catalog, err = fetch.OpenCatalog(filepath.Join(d.Root, "images"), d.Log); err != nil {
		return err
	}
	d.usage.catalog = d.catalog
	d.link = link.New(link.Config{Limit: int64(d.File.Link.Limit),
		Background: int64(d.File.Link.Background)})
	packs, err := packConfig(d.Root, d.File.Pack)
	if err != nil {
		return err
	}
	cache, err := cacheConfig(d.Root, d.File.Cache)
	if err != nil {
		return err
	}
	d.atClose(d.pop.leave)
	shared, err := d.pop.join()
	if err != nil {
		return fmt.Errorf("pop: %w", err)
	}
	d.puller = fetch.NewPuller(fetch.Config{Registry: d.registry, Layers: d.layers, Catalog: d.catalog,
		Link:  d.link,
		Packs: packs, Lazy: d.lazyConfig(), Cache: cache,
		Images: containerdImages{d.usage}, Stored: d.blobs, Log: d.Log})
	d.room.puller.set(d.puller)
	if shared.Coord != nil {
		shared.Layers, shared.Catalog, shared.Link = d.layers, d.catalog, d.link
		shared.PackDir, shared.Capacity = packs.Dir, cache.Capacity
		d.pop.member = member.New(shared, d.puller)
		d.puller.Join(d.pop.member)
	}
	d.atClose(d.closePuller)
	return nil
}

func (d *daemon) lazyConfig() fetch.LazyConfig {
	l := d.File.Lazy
	c := fetch.LazyConfig{Never: d.partials.server == nil, Wait: time.Duration(l.Wait),
		Delay: time.Duration(l.Delay), Off: l.Mode == "on-demand", Audience: partialsAudience{d.partials, d.news.metrics},
		Disk: runningDisk{d.room}}
	if l.Hours != "" {
		c.Hours = l
	}
	return c
}

// closePuller may be called again: the puller ends before each of the parts that it calls.
func (d *daemon) closePuller() {
	if err := d.puller.Close(); err != nil {
		d.Log.Debug("end pulls", "err", err)
	}
	d.pop.member.Close()
}

func (d *daemon) openSnapshotter(ctx context.Context) (err error) {
	d.snaps, err = snapshot.New(ctx, snapshot.Config{Root: filepath.Join(d.Root, "snapshotter"),
		Layers: layers{d.puller, time.Now()}, Backend: d.mounts.backend, Prepared: d.prepared, Log: d.Log})
	if err != nil {
		return err
	}
	d.usage.snaps.set(d.snaps)
	d.atClose(func() { d.snaps.Close() })
	d.atClose(d.closePuller)
	return nil
}

// prepared is told by the snapshotter of containers that anyone makes.
func (d *daemon) prepared(layers []digest.Digest, gone <-chan struct{}) {
	if l, ok := d.learner.get(); ok {
		l.Prepared(layers, gone)
	}
}

// openLearner makes the part that records starts and builds packs of them.
func (d *daemon) openLearner(context.Context) error {
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	p := d.File.Pack
	l := learn.New(learn.Config{Mounts: d.snaps, Layers: d.layers, Packs: d.puller, Registry: d.registry,
		Published: d.puller, Images: d.catalog, Shared: d.pop.member,
		Exec: []string{exe, PackBuilder}, Dir: d.recordings(), Node: d.name,
		Never: p.Learn == "never", After: time.Duration(p.After), Log: d.Log})
	d.learner.set(l)
	d.atClose(l.Close)
	return nil
}

// recordings is the directory of the recordings' state.
func (d *daemon) recordings() string { return filepath.Join(d.State, "profile") }

func (d *daemon) startEngine(ctx context.Context) error {
	f := d.File.Engine
	subnet, err := netip.ParsePrefix(f.Subnet)
	if f.Subnet != "" && err != nil {
		return fmt.Errorf("engine.subnet: %w", err)
	}
	d.criu = criu.Find(ctx, d.File.Checkpoint.CRIU)
	d.engine, err = engine.Start(ctx,
		engine.Config{Address: d.Containerd, Root: filepath.Join(d.Root, "engine"),
			State: d.State, Namespace: f.Namespace, SnapshotterSocket: d.socket(), DiffSocket: d.socket(),
			Containerd: f.Containerd, Runtime: f.Runtime, SpareShim: true,
			LogBytes: int64(f.LogBytes), CRIU: d.criu,
			Unblock: d.partials.unblock(), CNI: network.Config{Bin: pluginDirs, Subnet: subnet}, Log: d.Log})
	if err != nil {
		return err
	}
	d.atClose(func() { d.engine.Close() })
	d.atClose(d.closePuller)
	d.atClose(func() { l, _ := d.learner.get(); l.Close() }) // as the puller, before what it calls
	d.usage.engine.set(d.engine)
	d.documents = &documents{catalog: d.catalog, local: d.engine}
	d.atClose(d.blobs.close)
	if err := d.blobs.dial(d.engine.Socket()); err != nil {
		return err
	}
	return d.openAdopter(ctx)
}

// openAdopter makes the part that finds what containerd's other clients have, in all namespaces.
func (d *daemon) openAdopter(ctx context.Context) error {
	c, err := engineapi.Dial(d.engine.Socket(), d.File.Engine.Namespace)
	if err != nil {
		return err
	}
	d.atClose(func() { c.Conn.Close() })
	d.adopter = adopt.New(adopt.Config{Containerd: c, Stored: d.blobs, Puller: d.puller, Catalog: d.catalog,
		Layers: d.layers, Engine: d.engine})
	if err := d.blobs.find(ctx, c); err != nil {
		d.Log.Warn("layers do not come from containerd's content store", "err", err)
	}
	return nil
}

// openHealth makes the part that checks containers, which begins when all parts are there.
func (d *daemon) openHealth(context.Context) error {
	d.health = health.New(health.Config{Engine: d.engine, Deploying: d.deploying, Told: d.news.healthy,
		Log: d.Log, Unhealthy: func(ctx context.Context, i *engine.Info) {
			err := d.supervisor.Unhealthy(ctx, i, defaultStop)
			if err != nil && ctx.Err() == nil && !errors.Is(err, engine.ErrNotFound) {
				d.Log.Error("a container that is not healthy is not started again", "container", i.Name, "err", err)
			}
		}})
	return nil
}

// deploying reports whether the deployment that made a container goes on.
func (d *daemon) deploying(i *engine.Info) bool {
	return d.deployments.queue.GoesOn(i.Labels[deploy.LabelDeployment])
}

// openCheckpoints makes the part by which containers start from others' memory.
// What it lacks is found out in the background, and said by doctor.
func (d *daemon) openCheckpoints(ctx context.Context) (err error) {
	c := &checkpoints{engine: d.engine, catalog: d.catalog, documents: d.documents, news: d.news, log: d.Log,
		life: ctx, bg: &d.bg}
	d.checkpoints = c
	f := d.File.Checkpoint
	if f.Mode == "off" {
		d.pop.saved.set(nil)
		d.usage.checkpoints.set(nil)
		return nil
	}
	dir := filepath.Join(d.Root, "checkpoints")
	cfg := store.Config{Dir: filepath.Join(dir, "store"), Node: d.name,
		MaxBytes: int64(f.MaxBytes), Log: d.Log}
	if d.pop.member != nil {
		cfg.Peers = d.pop.member.Savers()
	}
	if d.File.PoP.Redis != "" {
		cfg.Told = d.pop.member.Hears
	}
	if d.File.PoP.Store != "" {
		cfg.PoP = d.pop.member.Store
	}
	if c.saved, err = store.Open(cfg); err != nil {
		return err
	}
	c.manager = checkpoint.New(checkpoint.Config{
		Engines: checkpointEngines(f, d.engine, d.criu, d.State, d.Log), Containers: d.engine,
		Layers: saved{d.puller, d.layers, d.pop.member}, Store: c.saved, Dir: dir,
		Restore: criu.RestoreConfig(false), RestoreLazy: criu.RestoreConfig(true), LazyAbove: int64(f.LazyAbove),
		Guard: []string{"/proc/self/exe", PageGuard}, Node: d.name, Auto: f.Mode, Images: d.documents,
		Hold: d.health.Hold, Audience: c, Log: d.Log})
	d.atClose(c.manager.Close)
	d.pop.saved.set(c.saved)
	d.usage.checkpoints.set(c.manager)
	c.begin(ctx, cfg.PoP != nil)
	return nil
}

func (d *daemon) openDeployer(ctx context.Context) error {
	learner, _ := d.learner.get()
	deployer := deploy.New(deploy.Config{Puller: d.puller, Engine: d.engine, Learner: learner,
		Checkpoints: d.checkpoints.manager, Node: d.name, Log: d.Log,
		Admit: d.admitConfig(), Disk: d.room, Audience: d.news, Traces: d.traces})
	d.atClose(deployer.Close)
	d.deployments = &deployments{deployer: deployer, news: d.news, mount: d.mounts.backend.Name()}
	return deployer.TakeOver(ctx)
}

func (d *daemon) admitConfig() admit.Config {
	f := d.File.Deploy
	return admit.Config{Max: f.Max, Fetch: f.Fetch, Queue: f.Queue,
		Reserve: int64(f.Reserve), Overcommit: f.Overcommit, Log: d.Log}
}

// openQueue takes up what an earlier daemon had accepted.
func (d *daemon) openQueue(ctx context.Context) error {
	queue, err := deploy.NewQueue(deploy.QueueConfig{Deployer: d.deployments.deployer,
		Path: filepath.Join(d.Root, "deployments"), Log: d.Log,
		Failure: func(err error) *spec.Failure { return classify(err).Failure() }})
	if err != nil {
		return err
	}
	d.atClose(func() {
		if err := queue.Close(); err != nil {
			d.Log.Error("close the journal of deployments", "err", err)
		}
	})
	d.deployments.queue = queue
	d.checkpoints.startAbandoned(ctx, queue.Unended())
	return queue.Recover(ctx)
}

// openSupervisor makes the part that starts containers again.
func (d *daemon) openSupervisor(context.Context) error {
	d.supervisor = restart.New(restart.Config{Engine: d.engine, Start: d.startAgain, Told: d.news.restarted,
		Deploying: d.deploying, Log: d.Log})
	d.atClose(d.supervisor.Close)
	d.atClose(d.health.Close) // before the supervisor: it has that stop what is not well
	return nil
}

// startAgain starts a container that has ended.
func (d *daemon) startAgain(ctx context.Context, i *engine.Info, labels map[string]string) error {
	err := d.checkpoints.startAnew(ctx, i, labels)
	if err == nil {
		d.deployments.deployer.Runs(i)
	}
	return err
}

// node implements api.Node, and web.Node: each part of the API is a service of its own.
type node struct {
	*deployments
	*containers
	*volumes
	*images
	*packs
	*checkpoints
	*pops
	*observer
}

func (d *daemon) node() node {
	learner, _ := d.learner.get()
	r := &reads{puller: d.puller, catalog: d.catalog, never: d.partials.server == nil}
	n := node{
		deployments: d.deployments,
		containers: &containers{engine: d.engine, queue: d.deployments.queue, reads: r, node: d.name,
			supervisor: d.supervisor, health: d.health, limited: d.deployments.deployer.Runs},
		volumes: &volumes{d.engine},
		packs: &packs{learner: learner, catalog: d.catalog, recordings: d.recordings(),
			mount: d.mounts.backend.Name()},
		checkpoints: d.checkpoints,
		pops: &pops{member: d.pop.member, cfg: d.File.PoP, peers: d.pop.peers, dir: d.pop.dir,
			log: d.Log},
	}
	n.images = &images{engine: d.engine, catalog: d.catalog, layers: d.layers, puller: d.puller,
		documents: d.documents, usage: d.usage, reserve: d.room.reserve, events: d.news.events,
		checkpoints: n.checkpoints, pops: n.pops, adopter: d.adopter}
	engine := containerd{d.engine, d.State}
	n.observer = &observer{events: d.news.events, version: d.Version, node: d.name, engine: engine,
		doctor: doctor.Config{Root: d.Root, CNI: pluginDirs}, mounts: d.mounts,
		parts: []finder{engine, n.deployments, d.partials, n.packs, r, n.pops, n.checkpoints, d.mounts}}
	return n
}

// serve answers the API, and keeps up what has to be.
func (d *daemon) serve(ctx context.Context, g *errgroup.Group, started chan<- struct{}) error {
	n := d.node()
	h := trace.Handler(api.NewHandler(n,
		api.Config{Classify: classify, Observe: d.news.metrics.Call, Log: d.Log}))
	// Whoever finds the socket below finds this as well.
	if err := serveTCP(ctx, g, d.File.API, h, d.Log); err != nil {
		return err
	}
	l, err := api.Listen(filepath.Join(d.State, "dewd.sock"), 0o600)
	if err != nil {
		return err
	}
	if d.HTTP != "" {
		m := &meters{set: d.news.metrics, registry: d.registry, layers: d.layers, traces: d.traces,
			puller: d.puller, member: d.pop.member, checkpoints: d.checkpoints.manager}
		m.measure(d.deployments.deployer.Admission)
		g.Go(func() error { return serveHTTP(ctx, d.HTTP, d.news.metrics, n, d.engine.Check) })
	}
	g.Go(func() error { return d.news.events.watchEngine(ctx, d.engine) })
	g.Go(func() error { return d.supervisor.Run(ctx) })
	g.Go(func() error { return d.health.Run(ctx) })
	collector := &collector{engine: d.engine, room: d.room, news: d.news, checkpoints: d.checkpoints}
	g.Go(func() error { collector.run(ctx); return nil })
	g.Go(func() error { return d.pop.serve(ctx, d.given()) })
	close(started)
	return api.Serve(ctx, l, h)
}

// given is what other nodes of the PoP get of this node's checkpoints; nil if it makes none.
func (d *daemon) given() peer.Checkpoints {
	if d.checkpoints.saved == nil {
		return nil
	}
	return given{d.checkpoints.saved, d.layers}
}
