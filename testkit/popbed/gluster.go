package popbed

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"dewpoint/testkit/testbed"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

// gluster is a GlusterFS volume with bricks on the first three nodes.
//
// Glusterd and its command line have paths of their own, so each glusterd is
// in a mount namespace where the directories at these paths are the bed's.
type gluster struct {
	bed     *Bed
	servers *testbed.Group
	daemons [bricks]int // process ids of glusterd
}

// patience is how long a client waits for a brick that does not answer
// (network.ping-timeout, 42 seconds by default): tests have less of it.
const patience = 3

// glusterdScript enters what glusterd believes to be its machine. Mounts of
// others are let go, so that they end when their owners end them. Geo-replication
// is not there: setting it up takes half a minute of processor time. Its
// arguments are the node's directory and its brick.
const glusterdScript = `set -e
while read -r _ at type _; do
	case $at in "$2" | /) continue ;; esac
	case $type in erofs | overlay | fuse* | ext4 | xfs | squashfs) echo "$at" ;; esac
done </proc/self/mounts | while read -r at; do
	case "$1/" in "$at"/*) continue ;; esac
	case /usr/ in "$at"/*) continue ;; esac
	case /var/lib/ in "$at"/*) continue ;; esac
	umount -l "$at" 2>/dev/null || true
done
mkdir -p "$1/lib" "$1/log" /var/lib/glusterd /var/log/glusterfs
mount --bind "$1/lib" /var/lib/glusterd
mount --bind "$1/log" /var/log/glusterfs
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/gluster
printf '#!/none\n' >"$1/none"
chmod 755 "$1/none"
for f in /usr/lib/*/glusterfs/gsyncd /usr/libexec/glusterfs/gsyncd /usr/lib/glusterfs/gsyncd; do
	[ ! -e "$f" ] || mount --bind "$1/none" "$f"
done
exec glusterd -N -p /run/glusterd.pid -L WARNING
`

func (g *gluster) dir(i int) string {
	return filepath.Join(g.bed.cfg.Dir, fmt.Sprintf("gluster%d", i+1))
}
func (g *gluster) volume(i int) volume      { return volume{filepath.Join(g.dir(i), "brick")} }
func (g *gluster) brick(i int) string       { return filepath.Join(g.volume(i).dir, "pop") }
func (g *gluster) groups() []*testbed.Group { return []*testbed.Group{g.servers} }

func (g *gluster) up(ctx context.Context) (err error) {
	if err := missing("glusterd", "gluster", "glusterfs", "mkfs.ext4"); err != nil {
		return err
	}
	if g.servers, err = g.bed.group("gluster"); err != nil {
		return err
	}
	var all errgroup.Group
	for i := range bricks {
		all.Go(func() error { return g.volume(i).make(ctx, g.bed.cfg.StoreBytes) })
	}
	if err := all.Wait(); err != nil {
		return err
	}
	for i := range bricks {
		if err := g.start(ctx, i); err != nil {
			return err
		}
	}
	for i := range bricks {
		all.Go(func() error { return g.ready(ctx, i) })
	}
	if err := all.Wait(); err != nil {
		return err
	}
	return g.create(ctx)
}

// start starts the glusterd of node i.
func (g *gluster) start(ctx context.Context, i int) error {
	cmd := g.bed.Command(context.WithoutCancel(ctx), g.bed.Nodes[i].Name, "unshare", "-m", "--propagation",
		"slave",
		"sh", "-c", glusterdScript, "glusterd", g.dir(i), g.volume(i).dir)
	said, err := os.Create(g.dir(i) + ".said")
	if err != nil {
		return err
	}
	defer said.Close()
	cmd.Stdout, cmd.Stderr = said, said
	if err := g.servers.Start(cmd); err != nil {
		return err
	}
	g.daemons[i] = cmd.Process.Pid
	return nil
}

// ready waits until the glusterd of node i answers.
func (g *gluster) ready(ctx context.Context, i int) error {
	return until(ctx, 60*time.Second, func() error {
		// Before that it may still be where the machine's own glusterd would be asked.
		name, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", g.daemons[i]))
		if _, err := os.Stat(fmt.Sprintf("/proc/%d/root/run/glusterd.socket", g.daemons[i])); err != nil ||
			strings.TrimSpace(string(name)) != "glusterd" {
			out, _ := os.ReadFile(g.dir(i) + ".said")
			return fmt.Errorf("glusterd does not listen: %s", out)
		}
		_, err := g.cli(ctx, i, "pool", "list")
		return err
	})
}

// cli is gluster's command line on node i.
func (g *gluster) cli(ctx context.Context, i int, args ...string) (string, error) {
	cmd := testbed.EnterProcess(ctx, g.daemons[i], "gluster", append([]string{"--mode=script"}, args...)...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		err = fmt.Errorf("gluster %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(string(out)))
	}
	return string(out), err
}

// create joins the glusterds, and makes and starts the volume.
func (g *gluster) create(ctx context.Context) error {
	for i := 1; i < bricks; i++ {
		if _, err := g.cli(ctx, 0, "peer", "probe", g.bed.Nodes[i].Address); err != nil {
			return err
		}
	}
	for i := range bricks {
		if err := g.joined(ctx, i); err != nil {
			return err
		}
	}
	create := []string{"volume", "create", "pop"}
	if g.bed.cfg.Store == Gluster3 {
		create = append(create, "replica", strconv.Itoa(bricks))
	}
	for i := range bricks {
		create = append(create, g.bed.Nodes[i].Address+":"+g.brick(i))
	}
	if _, err := g.cli(ctx, 0, append(create, "force")...); err != nil {
		return err
	}
	set := append([]string{"volume", "set", "pop", "network.ping-timeout", strconv.Itoa(patience)},
		g.bed.cfg.VolumeOptions...)
	if _, err := g.cli(ctx, 0, set...); err != nil {
		return err
	}
	_, err := g.cli(ctx, 0, "volume", "start", "pop")
	return err
}

// joined waits until the glusterd of node i has all others in its cluster. One that is asked for a volume
// before may answer no request any more: "Request timed out", for good.
func (g *gluster) joined(ctx context.Context, i int) error {
	return until(ctx, 60*time.Second, func() error {
		peers, err := g.cli(ctx, i, "peer", "status")
		if n := strings.Count(peers, "Peer in Cluster (Connected)"); err == nil && n != bricks-1 {
			err = fmt.Errorf("%d of %d other glusterds have joined %s: %s", n, bricks-1, g.bed.Nodes[i].Name, peers)
		}
		return err
	})
}

func (g *gluster) mount(ctx context.Context, n *Node) error {
	args := []string{"-N", "-l", n.clientLog(), "-L", "WARNING", "--process-name", "fuse", "--volfile-id=pop"}
	for i := range bricks {
		args = append(args, "--volfile-server="+g.bed.Nodes[i].Address)
	}
	args = append(append(args, g.bed.cfg.MountOptions...), n.Store)
	return n.startClient(ctx, "glusterfs", args...)
}

// Volume runs gluster's command line on n1: "volume", "heal", "pop", "info".
func (b *Bed) Volume(ctx context.Context, args ...string) (string, error) {
	g, ok := b.store.(*gluster)
	if !ok {
		return "", errNoSuch
	}
	return g.cli(ctx, 0, args...)
}

// Bricks are the directories below the volume, in the order of the nodes.
func (b *Bed) Bricks() (dirs []string) {
	if g, ok := b.store.(*gluster); ok {
		for i := range bricks {
			dirs = append(dirs, g.brick(i))
		}
	}
	return dirs
}

// server is the process that serves brick i, 0 if there is none.
func (g *gluster) server(i int) int {
	for _, pid := range g.servers.Processes("glusterfsd") {
		line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if strings.Contains(string(line), "\x00"+g.brick(i)+"\x00") {
			return pid
		}
	}
	return 0
}

func (g *gluster) killBrick(i int) error {
	pid := g.server(i)
	if pid == 0 {
		return fmt.Errorf("brick %d is not served", i)
	}
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		return err
	}
	return until(context.Background(), 10*time.Second, func() error {
		if g.server(i) == pid {
			return errors.New("the brick's server does not end")
		}
		return nil
	})
}

func (g *gluster) restoreBrick(ctx context.Context, i int) error {
	return until(ctx, 30*time.Second, func() error {
		// glusterd does not start what it has not yet seen end.
		if _, err := g.cli(ctx, i, "volume", "start", "pop", "force"); err != nil {
			return err
		}
		if g.server(i) == 0 {
			return fmt.Errorf("brick %d is not served", i)
		}
		return nil
	})
}

func (g *gluster) fill(context.Context) error { return g.each(volume.fill) }
func (g *gluster) free(context.Context) error { return g.each(volume.free) }

func (g *gluster) crowd(_ context.Context, share float64) error {
	return g.each(func(v volume) error { return v.crowd(share) })
}

func (g *gluster) each(do func(volume) error) error {
	var errs []error
	for i := range bricks {
		errs = append(errs, do(g.volume(i)))
	}
	return errors.Join(errs...)
}

func (g *gluster) copies(name string) (paths []string, err error) {
	for i := range bricks {
		path := filepath.Join(g.brick(i), name)
		// which is a pointer to another brick
		if info, err := os.Lstat(path); err == nil && info.Mode() != os.ModeSticky {
			paths = append(paths, path)
		}
	}
	return paths, nil
}
