package popbed

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"dewpoint/internal/api"
	"dewpoint/internal/spec"
	"dewpoint/testkit/testbed"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

// NodeInfo is what the template of a node's configuration can name.
type NodeInfo struct {
	Index      int    // from 0
	Name       string // n1, n2, …
	Address    string // on the LAN
	Dir        string // the node's own, with all that it keeps
	Store      string // where it sees the shared file system
	Namespace  string // for its containerd
	Containerd string // Config.Containerd
	Redis      string // RedisURL
	SlowRedis  string // SlowRedisURL
}

// Node is one machine of the PoP.
type Node struct {
	NodeInfo

	bed    *Bed
	group  *testbed.Group // of dewd and what it starts
	client *testbed.Group // of the store's client
	mounts *os.File       // the mount namespace of dewd and what it starts, nil while the node is down
}

func (b *Bed) newNode(i int) (*Node, error) {
	n := &Node{bed: b}
	n.NodeInfo = NodeInfo{Index: i, Name: fmt.Sprintf("n%d", i+1), Address: fmt.Sprintf("10.77.0.%d", 11+i),
		Containerd: b.cfg.Containerd, Redis: RedisURL, SlowRedis: SlowRedisURL}
	n.Namespace = b.name + n.Name
	n.Dir = filepath.Join(b.cfg.Dir, n.Name)
	n.Store = filepath.Join(n.Dir, "pop")
	if err := os.MkdirAll(n.Store, 0o711); err != nil {
		return nil, err
	}
	var err error
	if n.group, err = b.group(n.Name); err != nil {
		return nil, err
	}
	n.client, err = b.group(n.Name + "fs")
	return n, err
}

// Root and State are dewd's directories, the second in memory; Log is what it said.
func (n *Node) Root() string  { return filepath.Join(n.Dir, "r") }
func (n *Node) State() string { return filepath.Join(n.Dir, "s") }
func (n *Node) Log() string   { return filepath.Join(n.Dir, "dewd.log") }

// Host is where the node's dewd listens, as clients want it.
func (n *Node) Host() string { return "unix://" + n.socket() }

func (n *Node) socket() string { return filepath.Join(n.State(), "dewd.sock") }

// Group is the cgroup of dewd, its containerd, shims and datafs. Containers
// have cgroups of their own.
func (n *Node) Group() *testbed.Group { return n.group }

// StoreClient is the cgroup of the store's client.
func (n *Node) StoreClient() *testbed.Group { return n.client }

// volatile has dewd's state in memory, as it is in /run: on ext4 whoever makes a file pays for
// those that were removed shortly before.
func (n *Node) volatile() error {
	if at, err := mountsBelow(n.State()); err != nil || slices.Contains(at, n.State()) {
		return err
	}
	if err := os.MkdirAll(n.State(), 0o711); err != nil {
		return err
	}
	if err := unix.Mount("tmpfs", n.State(), "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=711"); err != nil {
		return &os.PathError{Op: "mount", Path: n.State(), Err: err}
	}
	return nil
}

// StartDewd writes the configuration of node i and starts its dewd, until it answers.
func (b *Bed) StartDewd(ctx context.Context, i int) error {
	n := b.Nodes[i]
	if err := errors.Join(n.volatile(), n.boot()); err != nil {
		return err
	}
	var text bytes.Buffer
	if err := b.config.Execute(&text, n.NodeInfo); err != nil {
		return err
	}
	file := filepath.Join(n.Dir, "dewd.toml")
	if err := os.WriteFile(file, text.Bytes(), 0o600); err != nil {
		return err
	}
	out, err := os.OpenFile(n.Log(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer out.Close()
	cmd := b.Command(context.WithoutCancel(ctx), n.Name, "nsenter",
		append([]string{"--mount=" + n.mountsPath(), b.cfg.Dewd, "--config", file, "--root", n.Root(), "--state",
			n.State()}, b.cfg.Args...)...)
	cmd.Stdout, cmd.Stderr = out, out
	if err := n.group.Start(cmd); err != nil {
		return err
	}
	return until(ctx, 60*time.Second, n.answers)
}

func (n *Node) answers() error {
	select {
	case <-n.group.Ended():
		said, _ := os.ReadFile(n.Log())
		return fmt.Errorf("dewd of %s has ended: %s", n.Name, said[max(0, len(said)-1000):])
	default:
	}
	c, err := net.Dial("unix", n.socket())
	if err != nil {
		return err
	}
	return c.Close()
}

// StopDewd ends the dewd of node i as an operator does. Containers and
// containerd go on.
func (b *Bed) StopDewd(ctx context.Context, i int) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	return b.Nodes[i].group.Stop(ctx, unix.SIGTERM)
}

// KillDewd ends it as a crash does.
func (b *Bed) KillDewd(ctx context.Context, i int) error {
	return b.Nodes[i].group.Stop(ctx, unix.SIGKILL)
}

// KillNode is a power cut of node i: dewd, containerd, datafs and containers
// end at once, the store's client with them, and what a reboot takes is gone:
// mounts and dewd's state. A brick on the node goes on; see KillBrick.
// RebootNode brings the node back.
func (b *Bed) KillNode(i int) error {
	n := b.Nodes[i]
	sockets := n.shimSockets()
	if err := errors.Join(killAll(n.group, n.client), n.endContainers()); err != nil {
		return err
	}
	if err := errors.Join(n.halt(), unmountBelow(n.Dir), n.removeCgroups(),
		os.RemoveAll(n.State())); err != nil {
		return err
	}
	for _, s := range sockets {
		os.Remove(s)
	}
	return nil
}

// RebootNode mounts the store on a node that was killed, and starts its dewd.
func (b *Bed) RebootNode(ctx context.Context, i int) error {
	if err := b.MountStore(ctx, i); err != nil {
		return err
	}
	return b.StartDewd(ctx, i)
}

// killAll kills groups together: who waits for a file system that does not
// answer ends only when its client does.
func killAll(groups ...*testbed.Group) error {
	var all errgroup.Group
	for _, g := range groups {
		all.Go(g.Kill)
	}
	return all.Wait()
}

// FreezeNode stops node i in its tracks, with all it knows and all connections,
// as a machine that is suspended; ThawNode lets it go on with stale knowledge.
// The store's client and the containers go on meanwhile.
func (b *Bed) FreezeNode(i int) error { return b.Nodes[i].group.Freeze(true) }

// ThawNode undoes FreezeNode.
func (b *Bed) ThawNode(i int) error { return b.Nodes[i].group.Freeze(false) }

// Deploy asks node i to deploy, and returns when it has.
func (b *Bed) Deploy(ctx context.Context, i int, req spec.Request) (spec.Record, error) {
	c, err := api.Dial(b.Nodes[i].Host())
	if err != nil {
		return spec.Record{}, err
	}
	defer c.Close()
	return c.Deploy(ctx, req, spec.Watch{})
}

// RemoveImage has node i forget an image that no container uses: its layers stay until
// they are pruned.
func (b *Bed) RemoveImage(ctx context.Context, i int, ref string) error {
	c, err := api.Dial(b.Nodes[i].Host())
	if err != nil {
		return err
	}
	defer c.Close()
	return c.RemoveImage(ctx, ref)
}

// Remove removes a container of node i, running or not.
func (b *Bed) Remove(ctx context.Context, i int, name string) error {
	c, err := api.Dial(b.Nodes[i].Host())
	if err != nil {
		return err
	}
	defer c.Close()
	return c.Remove(ctx, name, true)
}

// ParentCgroup is the name of the parent cgroup of a dewd's containers, which
// comes from its state directory.
func ParentCgroup(state string) string {
	h := sha256.Sum256([]byte(state))
	return "dewpoint-" + hex.EncodeToString(h[:4])
}

// cgroups are the directories of the parent cgroup of the node's containers,
// or of what is below, in every hierarchy.
func (n *Node) cgroups(below string) (dirs []string) {
	for _, root := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/*"} {
		all, _ := filepath.Glob(root + "/" + ParentCgroup(n.State()) + below)
		for _, d := range all {
			if st, err := os.Stat(d); err == nil && st.IsDir() {
				dirs = append(dirs, d)
			}
		}
	}
	return dirs
}

// endContainers kills what runs in the node's containers.
func (n *Node) endContainers() error {
	return until(context.Background(), 20*time.Second, func() error {
		left := 0
		for _, below := range []string{"/*/*", "/*", ""} {
			for _, d := range n.cgroups(below) {
				raw, _ := os.ReadFile(filepath.Join(d, "cgroup.procs"))
				for _, f := range strings.Fields(string(raw)) {
					if pid, _ := strconv.Atoi(f); pid > 1 && unix.Kill(pid, unix.SIGKILL) == nil {
						left++
					}
				}
			}
		}
		if left > 0 {
			return fmt.Errorf("%d processes of containers of %s are left", left, n.Name)
		}
		return nil
	})
}

func (n *Node) removeCgroups() error {
	return until(context.Background(), 10*time.Second, func() error {
		var errs []error
		for _, below := range []string{"/*/*", "/*", ""} {
			for _, d := range n.cgroups(below) {
				if err := unix.Rmdir(d); err != nil && !errors.Is(err, fs.ErrNotExist) {
					errs = append(errs, fmt.Errorf("remove %s: %w", d, err))
				}
			}
		}
		return errors.Join(errs...)
	})
}

// shimSocket is what shims leave outside of the bed's directory when they are killed.
var shimSocket = regexp.MustCompile(`/run/containerd/s/[0-9a-f]{64}`)

func (n *Node) shimSockets() (paths []string) {
	for _, name := range []string{"address", "bootstrap.json"} {
		files, _ := filepath.Glob(filepath.Join(n.State(), "containerd", "state", "io.containerd.runtime.v2.task",
			"*", "*", name))
		for _, f := range files {
			raw, _ := os.ReadFile(f)
			paths = append(paths, shimSocket.FindAllString(string(raw), -1)...)
		}
	}
	return paths
}

func (b *Bed) shimSockets() (paths []string) {
	for _, n := range b.Nodes {
		paths = append(paths, n.shimSockets()...)
	}
	return paths
}
