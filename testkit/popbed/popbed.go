// Package popbed is a PoP on one machine: nodes that share a file system, a
// Redis and one slow link to a registry, and that fail on command.
//
// Each machine of the PoP is a network namespace, and all of them are plugged
// into one bridge, the LAN:
//
//	n1 … nN  10.77.0.11 …  a dewd each, with a containerd and the client of the shared file system
//	redis    10.77.0.2     a redis-server; RedisURL, and SlowRedisURL with the delay that SlowRedis sets
//	wan      10.77.0.1     the registry; what passes its one interface is shaped and counted: the WAN
//	ceph     10.77.0.3     monitor, manager and metadata server, if the store is Ceph's
//
// The store is one of four: a directory that all nodes see (Dir), a GlusterFS
// volume whose bricks are on n1, n2 and n3 (Gluster spreads files over them,
// Gluster3 keeps each on all three), or CephFS with its OSDs there (Ceph). What
// lies below is sparse files with file systems of their own, so a store can be
// filled to the last byte. Node i sees the store at Node.Store, a path of its
// own on this machine.
//
// Nodes are real: their dewd is started in its network namespace with a
// configuration that the caller's template makes, and each has its own root,
// state (in memory, as /run) and containerd namespace, and a mount namespace
// that outlives its dewd: a container's begins as a copy of it, which takes the
// longer the more is mounted, and five nodes' layers are more than one machine
// has. The bed sees their stores and their states, and not what dewd mounts.
// Killing a node ends everything it ran at once.
//
// Every program runs in a testbed.Group (a cgroup), all files are below one
// directory, and all names begin with the process's id and the bed's number, so
// beds can be beside each other, Close finds everything, and what a killed
// process left behind goes when the next bed is made. It needs root, cgroup
// v2 (mounted anywhere), iproute2, iptables and the programs of what is asked for.
package popbed

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"text/template"
	"time"

	"dewpoint/testkit/testbed"

	"golang.org/x/sync/errgroup"
)

// Kind is what the nodes share.
type Kind string

// The kinds of store.
const (
	None     Kind = ""         // nothing
	Dir      Kind = "dir"      // a directory of this machine, bound to each node
	Gluster  Kind = "gluster"  // GlusterFS, distributed: each file on one of three bricks
	Gluster3 Kind = "gluster3" // GlusterFS, replica 3
	Ceph     Kind = "ceph"     // CephFS by ceph-fuse, three OSDs, each file on two
)

// Kinds are the stores that there are.
func Kinds() []Kind { return []Kind{Dir, Gluster, Gluster3, Ceph} }

// Addresses of the bed.
const (
	Registry     = "10.77.0.1:5000" // over the WAN
	FarRegistry  = "10.77.0.1:5001" // over the WAN with Config.RTT, from who serves at Registry
	RedisURL     = "redis://10.77.0.2:6379/0"
	SlowRedisURL = "redis://10.77.0.2:6380/0" // with the delay of SlowRedis

	wanIP, redisIP, cephIP = "10.77.0.1", "10.77.0.2", "10.77.0.3"
)

const maxNodes, bricks = 10, 3

// Basic is a configuration of dewd without a PoP: the zero Config's template.
const Basic = `[node]
name = "{{.Name}}"
[engine]
namespace = "{{.Namespace}}"
{{with .Containerd}}containerd = "{{.}}"
{{end -}}
[registry."` + Registry + `"]
plain_http = true
[registry."` + FarRegistry + `"]
plain_http = true
`

// Config says what a bed is made of.
type Config struct {
	Nodes int  // 0 is 5; at most 10, and at least 3 with bricks
	Store Kind // "" is none
	// StoreBytes is the size of the directory, of each brick or of each OSD; 0 is 4 GiB.
	StoreBytes int64
	// MountOptions are added to the command line of the store's client.
	MountOptions  []string
	VolumeOptions []string // of GlusterFS: key, value, key, value, …
	Redis         bool

	Mbit float64       // of the WAN, each way; 0 is no limit
	RTT  time.Duration // of FarRegistry

	Dir        string // of the bed; "" is a new one below /var/tmp. It is short: sockets lie in it.
	Dewd       string // the program; "" if no node is to be started
	Containerd string // the program; "" is what dewd finds
	Template   string // text/template of dewd's configuration, given a NodeInfo; "" is Basic
	Args       []string
	Log        *slog.Logger
}

// Bed is one PoP. Its methods may be called side by side as long as they
// concern different nodes; Close comes alone and last.
type Bed struct {
	Nodes []*Node // n1 is Nodes[0]; the methods of Bed count from 0, too

	cfg    Config
	name   string // begins all that must differ between beds
	store  store
	redis  *redisServer
	wan    *testbed.Relay
	config *template.Template
	// registry is the group of StartRegistry's program, nil before.
	registry *testbed.Group

	mu     sync.Mutex
	groups []*testbed.Group // guarded by mu until New returns
}

var beds atomic.Int32

// New builds a bed: networks, store, Redis, and the store's mounts on all nodes.
// No dewd is started. What fails is taken down again.
func New(ctx context.Context, cfg Config) (*Bed, error) {
	b := &Bed{cfg: cfg, name: fmt.Sprintf("dwp%dp%d", os.Getpid(), beds.Add(1))}
	if err := b.check(); err != nil {
		return nil, err
	}
	testbed.RemoveStale(b.cfg.Log)
	removeStaleDirs(b.cfg.Log)
	if err := b.build(ctx); err != nil {
		return nil, errors.Join(err, b.Close())
	}
	return b, nil
}

// check completes the configuration.
func (b *Bed) check() (err error) {
	cfg := &b.cfg
	if os.Geteuid() != 0 {
		return errors.New("a PoP needs root: namespaces, mounts and containers are real")
	}
	if cfg.Nodes == 0 {
		cfg.Nodes = 5
	}
	if cfg.Nodes < 1 || cfg.Nodes > maxNodes || cfg.Nodes < bricks && cfg.Store != None && cfg.Store != Dir {
		return fmt.Errorf("a PoP of %d nodes: there are 1 to %d, and %d with bricks", cfg.Nodes, maxNodes, bricks)
	}
	if cfg.StoreBytes == 0 {
		cfg.StoreBytes = 4 << 30
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Template == "" {
		cfg.Template = Basic
	}
	if cfg.Dir == "" {
		cfg.Dir = filepath.Join("/var/tmp", b.name)
	}
	if b.config, err = template.New("dewd.toml").Option("missingkey=error").Parse(cfg.Template); err != nil {
		return err
	}
	b.store, err = newStore(b)
	return err
}

func (b *Bed) build(ctx context.Context) error {
	if err := os.Mkdir(b.cfg.Dir, 0o711); err != nil {
		return err
	}
	if err := b.shared(); err != nil {
		return err
	}
	for i := range b.cfg.Nodes {
		n, err := b.newNode(i)
		if err != nil {
			return err
		}
		b.Nodes = append(b.Nodes, n)
	}
	if err := b.connect(ctx); err != nil {
		return err
	}
	if err := b.Rate(ctx, b.cfg.Mbit); err != nil {
		return err
	}
	if err := b.far(); err != nil {
		return err
	}
	all, ctx := errgroup.WithContext(ctx)
	if b.cfg.Redis {
		all.Go(func() error { return b.newRedis(ctx) })
	}
	all.Go(func() error { return b.bringUp(ctx) })
	return all.Wait()
}

// bringUp starts the store and mounts it everywhere.
func (b *Bed) bringUp(ctx context.Context) error {
	if err := b.store.up(ctx); err != nil {
		return fmt.Errorf("store %s: %w", b.cfg.Store, err)
	}
	var all errgroup.Group
	for i := range b.Nodes {
		all.Go(func() error { return b.MountStore(ctx, i) })
	}
	return all.Wait()
}

// Dir is where the bed keeps everything, for the caller's files, too.
func (b *Bed) Dir() string { return b.cfg.Dir }

// Close ends all programs of the bed and takes away its mounts, namespaces and
// files, whatever state it is in. It may be called again.
func (b *Bed) Close() error {
	var errs []error
	if b.wan != nil {
		errs = append(errs, b.wan.Close())
		b.wan = nil
	}
	if b.redis != nil {
		errs = append(errs, b.redis.relay.Close())
		b.redis = nil
	}
	sockets := b.shimSockets()
	errs = append(errs, killAll(b.groups...))
	for _, g := range b.groups {
		errs = append(errs, g.Close())
	}
	for _, n := range b.Nodes {
		errs = append(errs, n.endContainers(), n.removeCgroups(), n.halt())
	}
	b.groups, b.Nodes = nil, nil
	errs = append(errs, b.disconnect(), removeDir(b.cfg.Dir))
	for _, s := range sockets {
		os.Remove(s)
	}
	// The kernel ends in its own time what was unmounted, and the loop device below it.
	return errors.Join(append(errs, until(context.Background(), 20*time.Second, func() error {
		if left := b.Leftovers(); len(left) > 0 {
			return fmt.Errorf("it left %q", left)
		}
		return nil
	}))...)
}

// group makes a cgroup that ends with the bed.
func (b *Bed) group(name string) (*testbed.Group, error) {
	g, err := testbed.NewGroup(b.name + "-" + name)
	if err == nil {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.groups = append(b.groups, g)
	}
	return g, err
}

// far starts the relay at FarRegistry.
func (b *Bed) far() error {
	l, err := b.Listen(wan, FarRegistry)
	if err != nil {
		return err
	}
	b.wan = testbed.NewRelay(l, func(ctx context.Context) (net.Conn, error) {
		return b.dial(ctx, wan, Registry)
	})
	b.wan.Delay(b.cfg.RTT)
	return nil
}

// until asks until the answer is nil or ctx ends, at most for limit.
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
		case <-time.After(20 * time.Millisecond):
		}
	}
}
