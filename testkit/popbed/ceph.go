package popbed

import (
	"context"
	"crypto/rand"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"dewpoint/testkit/testbed"

	"golang.org/x/sync/errgroup"
)

// cephfs is a CephFS: a monitor, a manager and a metadata server on a machine of
// their own, an OSD on each of the first three nodes.
type cephfs struct {
	bed     *Bed
	servers *testbed.Group // but for the OSDs
	osds    [bricks]*testbed.Group
}

func (c *cephfs) dir() string  { return filepath.Join(c.bed.cfg.Dir, "ceph") }
func (c *cephfs) conf() string { return filepath.Join(c.dir(), "ceph.conf") }

// cephConf has every path that Ceph would take elsewhere. Two copies of each
// file, and one when an OSD is lost, as small clusters have it.
const cephConf = `[global]
fsid = %[2]s
mon host = [v2:%[3]s:3300,v1:%[3]s:6789]
keyring = %[1]s/keyring
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
auth allow insecure global id reclaim = false
run dir = %[1]s
admin socket = %[1]s/$name.asok
pid file =
log file = %[1]s/$name.log
mon cluster log file = %[1]s/cluster.log
crash dir = %[1]s/crash
mon data = %[1]s/mon
mgr data = %[1]s/mgr
mds data = %[1]s/mds
osd data = %[1]s/osd$id
mon allow pool size one = true
osd pool default size = 2
osd pool default min size = 1
osd crush chooseleaf type = 0
osd pool default pg num = 16
osd pool default pg autoscale mode = off
osd objectstore = bluestore
bluestore block size = %[4]d
bluestore block wal create = false
bluestore block db create = false
osd memory target = 939524096
osd heartbeat grace = 5
osd heartbeat interval = 1
mon osd down out interval = 3600
mon osd min down reporters = 1
mon data avail warn = 1
mon data avail crit = 1
mgr modules =
`

func (c *cephfs) up(ctx context.Context) error {
	if err := missing("ceph", "ceph-mon", "ceph-mgr", "ceph-osd", "ceph-mds", "ceph-fuse", "ceph-authtool",
		"monmaptool"); err != nil {
		return err
	}
	if err := c.prepare(ctx); err != nil {
		return err
	}
	if err := c.start(ctx, c.servers, ceph, "ceph-mon", "a"); err != nil {
		return err
	}
	if err := c.start(ctx, c.servers, ceph, "ceph-mgr", "a"); err != nil {
		return err
	}
	if err := c.startOSDs(ctx); err != nil {
		return err
	}
	if _, err := c.ask(ctx,
		"osd pool create data 16\nosd pool create meta 16\nfs new pop meta data\n"); err != nil {
		return err
	}
	if err := c.start(ctx, c.servers, ceph, "ceph-mds", "a"); err != nil {
		return err
	}
	return until(ctx, time.Minute, func() error {
		said, err := c.ask(ctx, "mds stat\n")
		if err == nil && !strings.Contains(said, "up:active") {
			err = fmt.Errorf("ceph-mds: %s", said)
		}
		return err
	})
}

// prepare writes the configuration, one keyring that all share, and the
// monitor's first state.
func (c *cephfs) prepare(ctx context.Context) (err error) {
	for _, sub := range []string{"mon", "mgr", "mds", "crash"} {
		if err := os.MkdirAll(filepath.Join(c.dir(), sub), 0o700); err != nil {
			return err
		}
	}
	fsid := uuid()
	conf := fmt.Sprintf(cephConf, c.dir(), fsid, cephIP, c.bed.cfg.StoreBytes)
	if err := os.WriteFile(c.conf(), []byte(conf), 0o600); err != nil {
		return err
	}
	keyring, monmap := filepath.Join(c.dir(), "keyring"), filepath.Join(c.dir(), "monmap")
	for i, who := range []string{"mon.", "client.admin", "mgr.a", "mds.a", "osd.0", "osd.1", "osd.2"} {
		args := []string{keyring, "--gen-key", "-n", who, "--cap", "mon", "allow *", "--cap", "osd", "allow *",
			"--cap", "mds", "allow *", "--cap", "mgr", "allow *"}
		if i == 0 {
			args = append(args, "--create-keyring")
		}
		if err := testbed.Run(ctx, "ceph-authtool", args...); err != nil {
			return err
		}
	}
	addresses := fmt.Sprintf("[v2:%s:3300,v1:%[1]s:6789]", cephIP)
	if err := testbed.Run(ctx, "monmaptool", "--create", "--fsid", fsid, "--addv", "a", addresses,
		monmap); err != nil {
		return err
	}
	if err := testbed.Run(ctx, "ceph-mon", "-c", c.conf(), "--mkfs", "-i", "a", "--monmap", monmap, "--keyring",
		keyring); err != nil {
		return err
	}
	if c.servers, err = c.bed.group(ceph); err != nil {
		return err
	}
	for i := range c.osds {
		if c.osds[i], err = c.bed.group(fmt.Sprintf("osd%d", i)); err != nil {
			return err
		}
	}
	return nil
}

// start starts a daemon on a machine. It stays in the foreground, its words go
// to a file.
func (c *cephfs) start(ctx context.Context, g *testbed.Group, machine, program, id string,
	args ...string) error {
	said, err := os.OpenFile(filepath.Join(c.dir(), program+id+".said"), os.O_CREATE|os.O_APPEND|os.O_WRONLY,
		0o600)
	if err != nil {
		return err
	}
	defer said.Close()
	cmd := c.bed.Command(context.WithoutCancel(ctx), machine, program,
		append([]string{"-c", c.conf(), "-f", "-i", id}, args...)...)
	cmd.Stdout, cmd.Stderr = said, said
	return g.Start(cmd)
}

// startOSDs makes and starts the OSDs.
func (c *cephfs) startOSDs(ctx context.Context) error {
	var ids [bricks]string
	var commands strings.Builder
	for i := range ids {
		ids[i] = uuid()
		fmt.Fprintf(&commands, "osd new %s %d\n", ids[i], i)
	}
	if _, err := c.ask(ctx, commands.String()); err != nil {
		return err
	}
	var all errgroup.Group
	for i, id := range ids {
		all.Go(func() error {
			if err := os.MkdirAll(filepath.Join(c.dir(), fmt.Sprintf("osd%d", i)), 0o700); err != nil {
				return err
			}
			cmd := c.bed.Command(ctx, c.bed.Nodes[i].Name, "ceph-osd", "-c", c.conf(), "-i", fmt.Sprint(i), "--mkfs",
				"--osd-uuid", id)
			if out, err := cmd.CombinedOutput(); err != nil {
				return fmt.Errorf("ceph-osd --mkfs: %w: %s", err, out)
			}
			return c.restoreBrick(ctx, i)
		})
	}
	return all.Wait()
}

func (c *cephfs) groups() []*testbed.Group { return append([]*testbed.Group{c.servers}, c.osds[:]...) }

// ask gives the monitor commands, a line each.
func (c *cephfs) ask(ctx context.Context, lines string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	cmd := c.bed.Command(ctx, ceph, "ceph", "-c", c.conf(), "--connect-timeout", "50")
	cmd.Stdin = strings.NewReader(lines)
	out, err := cmd.CombinedOutput()
	if err != nil || strings.Contains(string(out), "Error E") {
		return "", fmt.Errorf("ceph %q: %v: %s", lines, err, strings.TrimSpace(string(out)))
	}
	return string(out), nil
}

func (c *cephfs) mount(ctx context.Context, n *Node) error {
	args := append([]string{"-c", c.conf(), "-f", "-n", "client.admin", "--admin-socket=",
		"--log-file=" + n.clientLog()}, c.bed.cfg.MountOptions...)
	return n.startClient(ctx, "ceph-fuse", append(args, n.Store)...)
}

func (c *cephfs) killBrick(i int) error { return c.osds[i].Kill() }

func (c *cephfs) restoreBrick(ctx context.Context, i int) error {
	return c.start(ctx, c.osds[i], c.bed.Nodes[i].Name, "ceph-osd", fmt.Sprint(i))
}

// fill declares the OSDs full, at less than what they hold from the start.
func (c *cephfs) fill(ctx context.Context) error { return c.full(ctx, "0.001", "0.001", "0.001") }
func (c *cephfs) free(ctx context.Context) error { return c.full(ctx, "0.95", "0.90", "0.85") }

func (c *cephfs) crowd(context.Context, float64) error { return errNoSuch }

func (c *cephfs) full(ctx context.Context, full, backfill, near string) error {
	_, err := c.ask(ctx,
		fmt.Sprintf("osd set-full-ratio %s\nosd set-backfillfull-ratio %s\nosd set-nearfull-ratio %s\n", full,
			backfill, near))
	return err
}

func (c *cephfs) copies(name string) ([]string, error) {
	return []string{filepath.Join(c.bed.Nodes[0].Store, name)}, nil
}

func uuid() string {
	b := make([]byte, 16)
	rand.Read(b)
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}
