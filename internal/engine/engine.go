// Package engine runs containers through containerd.
//
// # The model
//
// An Engine is one containerd and the part of it that is ours: one containerd namespace, one snapshotter, one
// state directory of crun's and runc's, one parent cgroup, one bridge. Package containerd reaches it, package
// state knows what it has without asking it. crun makes the containers where it was seen to work, runc
// restores them (runtime.go). Close lets go of all, Shutdown also stops a private containerd; neither touches
// a container.
//
// An Engine is composed of parts: images and roots hold what containers are made of, runtimes says what makes
// them, tasks has it make them in shared shims, restores has CRIU do it, containers puts a container together
// and takes it apart, dumps saves one, execs and outputs are what happens in one that runs.
//
// A container is known by its name, which is containerd's ID. It consists of
//
//   - a containerd record (labels "dewpoint.…", OCI spec),
//   - a snapshot whose key is the name,
//   - a directory ROOT/containers/NAME: hosts, hostname, resolv.conf and the output files stdout.log and
//     stderr.log, which the shim writes itself,
//   - unless it uses the host's network, a network namespace at STATE/netns/NAME and, for the bridge, an
//     address,
//   - a task, from Create until Remove.
//
// The record is the truth: Create makes the snapshot first, so that its key reserves the name, and the record
// next; Remove takes the record away last. Start, or the next Create of that name, removes what has no
// record. So every step may be repeated.
//
// All methods are safe for concurrent use. Those that change a container are serialised by its name. Errors
// wrap ErrExists, ErrNotFound, ErrRunning, ErrNotRunning or ErrPortTaken where these apply.
package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"sync"
	"time"

	"dewpoint/internal/engine/cgroup"
	"dewpoint/internal/engine/containerd"
	"dewpoint/internal/engine/network"
	"dewpoint/internal/engine/program"
	"dewpoint/internal/engine/state"
	"dewpoint/internal/engine/tool"
	"dewpoint/internal/engine/volumes"
	"dewpoint/internal/sched"
)

// Private as an address asks for a containerd of the engine's own.
const Private = "private"

var (
	ErrExists     = errors.New("container name is taken")
	ErrNotFound   = state.ErrNotFound
	ErrRunning    = errors.New("container is running")
	ErrNotRunning = errors.New("container is not running")
	ErrPortTaken  = errors.New("port is taken")
	// ErrNoCommand and ErrNotExecutable say that the container has no such
	// program, or cannot run it.
	ErrNoCommand     = program.ErrNoCommand
	ErrNotExecutable = program.ErrNotExecutable
	// ErrMissing says that a program the engine needs is not installed.
	ErrMissing = tool.ErrMissing
	// ErrOption says that a container cannot be given what it was to be given.
	ErrOption = errors.New("option")
)

// Config says which containerd to use and where the engine's files lie.
type Config struct {
	Address string // Private (default), or the path of a containerd's socket
	Root    string // kept over a reboot; default /var/lib/dewpoint
	State   string // gone after a reboot; default /run/dewpoint
	// state directory of a containerd that is not private; default where its socket is, as containerd and k3s
	// have it
	ContainerdState   string
	Namespace         string // containerd's; default "dewpoint"
	Snapshotter       string // default "dewpoint"
	SnapshotterSocket string // of the proxy plugin Snapshotter; default STATE/snapshotter.sock
	DiffSocket        string // of the diff proxy plugin, used where containerd has those; "" is none
	Containerd        string // private containerd's program; default beside this program, then in PATH
	Runtime           string // what makes containers: auto, crun, runc; default auto
	Runc              string // default "runc" in containerd's PATH
	// default beside this program, then in the directory of scripts/install, then in PATH
	Crun string
	// that lets containers share shims; default beside this program, then in PATH, else none share
	ShimProgram string
	// containers in a shim, which end when it is killed; default 32, 1 is a shim for each
	PerShim int
	// a shim is started ahead where the next container would need one; of a private containerd only
	SpareShim    bool
	CRIU         string // program that runc is to use; default what it finds in PATH
	CgroupParent string // default /dewpoint, with a suffix when State is not the default
	Unconfined   bool   // no seccomp filter
	LogBytes     int64  // that each stream of a container's output may take on the disk; default 16 MiB
	CNI          network.Config
	// Unblock, unless nil, is called with the threads of a container that was told
	// to end and has not: what keeps them from it is to be given up. More than once.
	Unblock func(threads []int)
	Log     *slog.Logger
}

const defaultRoot = "/var/lib/dewpoint"

func (c *Config) defaults() error {
	c.Address = cmp.Or(c.Address, Private)
	c.Root = cmp.Or(c.Root, defaultRoot)
	c.State = cmp.Or(c.State, state.Default)
	c.Namespace = cmp.Or(c.Namespace, "dewpoint")
	c.Snapshotter = cmp.Or(c.Snapshotter, "dewpoint")
	c.PerShim = cmp.Or(c.PerShim, defaultPerShim)
	c.LogBytes = cmp.Or(c.LogBytes, defaultLogBytes)
	c.SnapshotterSocket = cmp.Or(c.SnapshotterSocket, filepath.Join(c.State, "snapshotter.sock"))
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	for _, d := range []string{c.Root, c.State} {
		if !filepath.IsAbs(d) {
			return fmt.Errorf("engine directory %q is not absolute", d)
		}
	}
	c.CgroupParent = cmp.Or(c.CgroupParent, state.CgroupParent(c.State))
	if c.CNI.Bridge == "" {
		c.CNI.Bridge = "dewpoint0"
		if suffix := state.Suffix(c.State); suffix != "" {
			c.CNI.Bridge = "dew-" + suffix
		}
	}
	c.CNI.Dir = cmp.Or(c.CNI.Dir, filepath.Join(c.State, "cni"))
	c.CNI.Log = c.Log
	return nil
}

// containerd is what of the configuration says which containerd is meant.
func (c *Config) containerd() containerd.Config {
	return containerd.Config{Address: c.Address, Root: c.Root, State: c.State, Program: c.Containerd,
		Snapshotter: c.Snapshotter, SnapshotterSocket: c.SnapshotterSocket, DiffSocket: c.DiffSocket,
		Log: c.Log}
}

// core is what all parts of an engine share.
type core struct {
	cfg    Config
	log    *slog.Logger
	c      *containerd.Client
	state  *state.State
	socket string // containerd's
	runc   string // what shims execute for a restore; "" is "runc" in their PATH
	names  keyed  // the locks of containers: see change
	// records are held while a record goes, and while what it names is acted on
	records keyed

	life context.Context    // of work
	end  context.CancelFunc // ends work
	work sync.WaitGroup     // what goes on in the background
}

// Engine is a connection to one containerd. See the package comment. It starts and ends its parts, whose
// exported methods are its own.
type Engine struct {
	*core
	*roots
	*images
	*runtimes
	*tasks
	*restores
	*containers
	*dumps
	*execs
	*outputs

	private *containerd.Private // nil when containerd is not ours
	version string
}

// The parts, each with those that it works with.
type (
	// roots are the snapshots that containers have as their root file systems.
	roots struct{ *core }
	// images registers images with containerd, and reads them back.
	images struct {
		*core
		*roots
	}
	// runtimes finds out what makes containers.
	runtimes struct {
		*core
		maker maker
	}
	// tasks makes, ends and deletes containers' tasks, in shims that they share.
	tasks struct {
		*core
		*runtimes
		shims *shims
		spare *spareShims // nil where none is kept
	}
	// restores makes the processes of containers of dumped ones.
	restores struct {
		*core
		*tasks
	}
	// containers makes, starts, stops and removes containers, each with all that belongs to it.
	containers struct {
		*core
		*roots
		*runtimes
		*tasks
		*restores
		bridge  *network.Bridge
		ports   network.Ports
		volumes *volumes.Store
	}
	// dumps writes containers' processes to files, also those that crun has made.
	dumps struct {
		*core
		thaws thaws
	}
	// execs runs further processes in containers.
	execs struct {
		*core
		*tasks
	}
	// outputs reads and bounds what containers write.
	outputs struct {
		*core
		*tasks
		telling sync.Mutex // of what Unexecuted adds to containers' output
	}
)

// compose builds an engine that is not connected.
func compose(cfg Config) *Engine {
	c := &core{cfg: cfg, log: cfg.Log}
	c.life, c.end = context.WithCancel(context.Background())
	r, rt := &roots{c}, &runtimes{core: c}
	t := &tasks{core: c, runtimes: rt, shims: newShims(cfg)}
	re := &restores{c, t}
	return &Engine{core: c, roots: r, images: &images{c, r}, runtimes: rt, tasks: t, restores: re,
		containers: &containers{core: c, roots: r, runtimes: rt, tasks: t, restores: re,
			bridge: network.NewBridge(cfg.CNI), volumes: volumes.New(cfg.volumesDir())},
		dumps: &dumps{core: c}, execs: &execs{c, t}, outputs: &outputs{core: c, tasks: t}}
}

// Start connects to containerd, starting or adopting a private one where the
// configuration asks for it, and removes what crashed creations have left. The
// snapshotter must be serving already, since containerd asks it then. Start
// needs root. The engine does not depend on ctx once Start has returned.
func Start(ctx context.Context, cfg Config) (*Engine, error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("engine needs root: run the daemon with sudo or as a system service")
	}
	if err := cfg.defaults(); err != nil {
		return nil, err
	}
	for _, d := range []string{cfg.containersDir(), cfg.netnsDir(), cfg.execDir(), cfg.restoreDir(),
		cfg.shimsDir(), cfg.standInsDir()} {
		if err := os.MkdirAll(d, 0o711); err != nil {
			return nil, err
		}
	}
	e := compose(cfg)
	var err error
	if e.runc, err = cfg.wrapRunc(); err != nil {
		return nil, err
	}
	if err := e.chooseRuntime(ctx); err != nil {
		return nil, err
	}
	if err := e.connect(ctx); err != nil {
		e.Close()
		return nil, err
	}
	e.state = state.Follow(e.c, state.Config{Namespace: cfg.Namespace, Socket: e.Socket(), Places: cfg.places(),
		Log: e.log})
	e.work.Go(func() { e.boundOutput(e.life) })
	if err := e.awaitSnapshotter(ctx); err != nil {
		e.Close()
		return nil, err
	}
	if err := e.reconcile(ctx); err != nil {
		e.Close()
		return nil, fmt.Errorf("reconcile containers: %w", err)
	}
	if cfg.SpareShim && e.private != nil && e.shims.program != "" {
		e.spare = keepSpare(e.shims, e.log)
	}
	if err := e.state.SettleBut(ctx, func(name string) bool {
		return e.isRestore(name) || e.thaws.pendingThaw(name) != nil
	}); err != nil {
		if ctx.Err() != nil {
			e.Close()
			return nil, err
		}
		e.log.Warn("the state of some containers is not known yet", "err", err)
	}
	return e, nil
}

func (e *Engine) connect(ctx context.Context) error {
	socket := e.cfg.Address
	if socket == Private {
		p, err := containerd.StartPrivate(ctx, e.cfg.containerd())
		if err != nil {
			return err
		}
		e.private, socket = p, p.Socket()
		e.cfg.ContainerdState = p.StateDir()
	}
	e.socket = socket
	c, err := containerd.Dial(socket, e.cfg.Namespace)
	if err != nil {
		return err
	}
	e.c = c
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	if e.version, err = c.Alive(ctx); err != nil {
		return fmt.Errorf("containerd at %s does not answer (is it running? is this its socket?): %w", socket, err)
	}
	e.shims.serve(socket, e.version)
	if e.private == nil {
		return c.RequireSnapshotter(ctx, e.cfg.containerd())
	}
	return nil
}

// awaitSnapshotter waits until containerd has found the snapshotter again: a
// containerd that outlived the daemon tries its socket seconds apart. Only a
// listing is certain to ask the snapshotter itself, and containerd 1.6 gives
// its errors no code, so any error is worth another try.
func (e *Engine) awaitSnapshotter(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	for {
		err := e.strandedSnapshots(ctx, map[string]bool{})
		if err == nil || !sched.Sleep(ctx, 20*time.Millisecond) {
			return wrap(err, "ask the snapshotter %s through containerd", e.cfg.Snapshotter)
		}
	}
}

// Check reports whether containerd answers and reaches the snapshotter.
func (e *Engine) Check(ctx context.Context) error {
	if _, err := e.c.Alive(ctx); err != nil {
		return fmt.Errorf("containerd at %s does not answer: %w", e.Socket(), err)
	}
	return wrap(e.strandedSnapshots(ctx, map[string]bool{}), "ask the snapshotter %s through containerd",
		e.cfg.Snapshotter)
}

// Close ends the connection. containerd, private or not, and all containers
// go on. Where there are none, their parent cgroup and the bridge go.
func (e *Engine) Close() error {
	if e.spare != nil {
		e.spare.close()
		e.spare = nil
	}
	cgroup.Remove(e.cfg.CgroupParent) // not beside Create
	if err := e.bridge.Release(); err != nil {
		e.log.Warn("the bridge stays", "err", err)
	}
	if e.private != nil {
		e.private.Release()
	}
	e.end()
	e.work.Wait()
	e.shims.ending.Wait()
	if e.state != nil {
		e.state.Close()
	}
	if e.c != nil {
		return e.c.Conn.Close()
	}
	return nil
}

// Shutdown is Close, and stops a private containerd. Containers go on.
func (e *Engine) Shutdown(ctx context.Context) error {
	var err error
	if e.private != nil {
		err = e.private.Stop(ctx)
	}
	return errors.Join(err, e.Close())
}

// Version is containerd's.
func (e *Engine) Version() string { return e.version }

// Socket is the path of containerd's socket, for other clients.
func (e *Engine) Socket() string { return e.socket }

func (c *Config) places() state.Places {
	return state.Places{Root: c.Root, State: c.State, CgroupParent: c.CgroupParent}
}

func (c *Config) containersDir() string { return filepath.Dir(c.places().Dir("x")) }
func (c *Config) netnsDir() string      { return filepath.Dir(c.places().NetNS("x")) }
func (c *Config) execDir() string       { return filepath.Join(c.State, "exec") }
func (c *Config) shimsDir() string      { return filepath.Join(c.State, "shims") }
func (c *Config) runcRoot() string      { return filepath.Join(c.State, "runc") }

func (c *Config) restoreDir() string { return filepath.Join(c.State, "restore") }

func (c *Config) dir(name string) string   { return c.places().Dir(name) }
func (c *Config) netns(name string) string { return c.places().NetNS(name) }

var nameRE = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9_.-]{0,62}$`)

// ValidName says whether a container may bear the name: 1 to 63 letters,
// digits, '_', '.' and '-', the first a letter or a digit.
func ValidName(s string) error {
	if !nameRE.MatchString(s) {
		return fmt.Errorf("container name %q: want 1 to 63 of a-z A-Z 0-9 _ . -, beginning with a letter or digit",
			s)
	}
	return nil
}

// keyed is a set of locks by name. The zero value is ready.
type keyed struct {
	mu sync.Mutex
	m  map[string]*keyedLock // guarded by mu
}

type keyedLock struct {
	sync.Mutex
	users int // guarded by keyed.mu
}

// lock takes the lock of key and returns what releases it.
func (k *keyed) lock(key string) func() {
	k.mu.Lock()
	if k.m == nil {
		k.m = make(map[string]*keyedLock)
	}
	l := k.m[key]
	if l == nil {
		l = new(keyedLock)
		k.m[key] = l
	}
	l.users++
	k.mu.Unlock()
	l.Lock()
	return func() {
		l.Unlock()
		k.mu.Lock()
		defer k.mu.Unlock()
		if l.users--; l.users == 0 {
			delete(k.m, key)
		}
	}
}

// change takes a container's lock, and keeps what is said of it meanwhile in order, until done.
func (e *core) change(name string) (done func()) {
	unlock := e.names.lock(name)
	e.state.Hold(name)
	return func() {
		e.state.Release(name)
		unlock()
	}
}
