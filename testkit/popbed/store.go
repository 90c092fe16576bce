package popbed

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"dewpoint/testkit/testbed"

	"golang.org/x/sys/unix"
)

// store is one kind of shared file system.
type store interface {
	up(ctx context.Context) error
	// mount begins to show the store to a node; it need not wait until it does.
	mount(ctx context.Context, n *Node) error
	killBrick(i int) error
	restoreBrick(ctx context.Context, i int) error
	// fill leaves no byte free, and crowd that share of each file system; free undoes either.
	fill(ctx context.Context) error
	crowd(ctx context.Context, share float64) error
	free(ctx context.Context) error
	// copies are the files below the store that hold name's bytes.
	copies(name string) ([]string, error)
	// groups are those of the servers.
	groups() []*testbed.Group
}

func newStore(b *Bed) (store, error) {
	switch b.cfg.Store {
	case None:
		return &nothing{}, nil
	case Dir:
		return &directory{bed: b, volume: volume{filepath.Join(b.cfg.Dir, "store")}}, nil
	case Gluster, Gluster3:
		return &gluster{bed: b}, nil
	case Ceph:
		return &cephfs{bed: b}, nil
	}
	return nil, fmt.Errorf("store %q: there are %v", b.cfg.Store, Kinds())
}

// MountStore shows the store to node i, and waits until it does. A client that
// is there already is replaced.
func (b *Bed) MountStore(ctx context.Context, i int) error {
	if b.cfg.Store == None {
		return nil
	}
	n := b.Nodes[i]
	if err := errors.Join(n.endClient(ctx), unmountBelow(n.Store)); err != nil {
		return err
	}
	if err := b.store.mount(ctx, n); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	err := until(ctx, 60*time.Second, func() error {
		var below, here unix.Stat_t
		if err := errors.Join(unix.Stat(n.Dir, &below), unix.Stat(n.Store, &here)); err != nil {
			return err
		}
		if below.Dev != here.Dev {
			return nil
		}
		select {
		case <-n.client.Ended():
			cancel()
			return errors.New("the client has ended")
		default:
			return errors.New("nothing is mounted")
		}
	})
	if err != nil {
		said, _ := os.ReadFile(n.clientLog())
		return fmt.Errorf("mount %s on %s: %w: %s", b.cfg.Store, n.Name, err, said[max(0, len(said)-1000):])
	}
	return nil
}

// startClient starts the store's client in the foreground; what it says goes to
// its log.
func (n *Node) startClient(ctx context.Context, name string, args ...string) error {
	out, err := os.OpenFile(n.clientLog(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer out.Close()
	cmd := n.bed.Command(context.WithoutCancel(ctx), n.Name, name, args...)
	cmd.Stdout, cmd.Stderr = out, out
	return n.client.Start(cmd)
}

// endClient ends the store's client with leave, if it takes it: Ceph's servers
// wait a minute for one that has gone without.
func (n *Node) endClient(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	if n.client.Freeze(false) == nil {
		n.client.Stop(ctx, unix.SIGTERM)
	}
	return n.client.Kill()
}

func (n *Node) clientLog() string { return filepath.Join(n.Dir, "client.log") }

// LoseStore takes the store from node i: its client ends, and what is read
// there gives an error. MountStore brings it back.
func (b *Bed) LoseStore(i int) error {
	n := b.Nodes[i]
	if b.cfg.Store == Dir { // which has no client that could end
		return unmountBelow(n.Store)
	}
	return n.client.Kill()
}

// HangStore lets what node i reads from the store wait, or go on.
func (b *Bed) HangStore(i int, hang bool) error {
	if b.cfg.Store == Dir {
		return errNoSuch
	}
	return b.Nodes[i].client.Freeze(hang)
}

// KillBrick ends the server of brick (or OSD) i, as a crash does.
func (b *Bed) KillBrick(i int) error { return b.store.killBrick(i) }

// RestoreBrick starts it again.
func (b *Bed) RestoreBrick(ctx context.Context, i int) error { return b.store.restoreBrick(ctx, i) }

// FillStore fills the store until the last byte; FreeStore frees what it took.
// Ceph's is declared full.
func (b *Bed) FillStore(ctx context.Context) error { return b.store.fill(ctx) }

// CrowdStore leaves that share of the store free, of GlusterFS on each brick: something else takes the rest.
// FreeStore gives it back.
func (b *Bed) CrowdStore(ctx context.Context, share float64) error { return b.store.crowd(ctx, share) }

// FreeStore undoes FillStore or CrowdStore.
func (b *Bed) FreeStore(ctx context.Context) error { return b.store.free(ctx) }

// FlipBytes inverts n bytes of a file in the store at offset, in all copies and
// below the file system, as a bad disk does: neither times nor sizes tell. On
// Ceph it writes through node 0. What is in page caches stays.
func (b *Bed) FlipBytes(name string, offset int64, n int) error {
	paths, err := b.store.copies(name)
	if err == nil && len(paths) == 0 {
		err = fmt.Errorf("%s: %w", name, os.ErrNotExist)
	}
	for _, p := range paths {
		err = errors.Join(err, flip(p, offset, n))
	}
	return err
}

func flip(path string, offset int64, n int) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	buf := make([]byte, n)
	if _, err := f.ReadAt(buf, offset); err != nil {
		return err
	}
	for i := range buf {
		buf[i] ^= 0xff
	}
	if _, err := f.WriteAt(buf, offset); err != nil {
		return err
	}
	return errors.Join(f.Sync(), os.Chtimes(path, info.ModTime(), info.ModTime()))
}

// StoreServers are the cgroups of the store's servers: none, one for all of
// GlusterFS, or one for Ceph's management and one for each OSD.
func (b *Bed) StoreServers() []*testbed.Group { return b.store.groups() }

// volume is a directory with a file system of its own, in a sparse file beside it.
type volume struct{ dir string }

func (v volume) make(ctx context.Context, size int64) error {
	if err := os.MkdirAll(v.dir, 0o755); err != nil {
		return err
	}
	f, err := os.Create(v.dir + ".img")
	if err != nil {
		return err
	}
	if err := errors.Join(f.Truncate(size), f.Close()); err != nil {
		return err
	}
	if err := testbed.Run(ctx, "mkfs.ext4", "-q", "-m", "0", "-E",
		"lazy_itable_init=1,lazy_journal_init=1,nodiscard", v.dir+".img"); err != nil {
		return err
	}
	return testbed.Run(ctx, "mount", "-t", "ext4", "-o", "loop,nodiratime", v.dir+".img", v.dir)
}

func (v volume) filler() string { return filepath.Join(v.dir, ".fill") }

// fill takes what is free.
func (v volume) fill() error {
	f, err := os.OpenFile(v.filler(), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	for size := int64(64 << 20); size > 0; size /= 2 {
		for at, _ := f.Seek(0, io.SeekEnd); unix.Fallocate(int(f.Fd()), 0, at, size) == nil; {
			at += size
		}
	}
	return f.Sync()
}

// crowd takes what is free but for that share of the volume, beside what it has taken already.
func (v volume) crowd(share float64) error {
	var st unix.Statfs_t
	if err := unix.Statfs(v.dir, &st); err != nil {
		return err
	}
	f, err := os.OpenFile(v.filler(), os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	bytes := (int64(st.Bavail) - int64(share*float64(st.Blocks))) * st.Bsize
	if bytes <= 0 {
		return nil
	}
	at, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return err
	}
	return unix.Fallocate(int(f.Fd()), 0, at, bytes)
}

func (v volume) free() error { return os.Remove(v.filler()) }

// nothing is no store.
type nothing struct{}

func (nothing) up(context.Context) error                { return nil }
func (nothing) mount(context.Context, *Node) error      { return nil }
func (nothing) killBrick(int) error                     { return errNoSuch }
func (nothing) restoreBrick(context.Context, int) error { return errNoSuch }
func (nothing) fill(context.Context) error              { return errNoSuch }
func (nothing) crowd(context.Context, float64) error    { return errNoSuch }
func (nothing) free(context.Context) error              { return errNoSuch }
func (nothing) copies(string) ([]string, error)         { return nil, errNoSuch }
func (nothing) groups() []*testbed.Group                { return nil }

// directory is a file system of this machine, bound to each node.
type directory struct {
	nothing
	bed    *Bed
	volume volume
}

func (d *directory) up(ctx context.Context) error {
	if err := d.volume.make(ctx, d.bed.cfg.StoreBytes); err != nil {
		return err
	}
	return os.Mkdir(filepath.Join(d.volume.dir, "pop"), 0o755)
}

func (d *directory) mount(_ context.Context, n *Node) error {
	return unix.Mount(filepath.Join(d.volume.dir, "pop"), n.Store, "", unix.MS_BIND, "")
}

func (d *directory) fill(context.Context) error { return d.volume.fill() }
func (d *directory) free(context.Context) error { return d.volume.free() }

func (d *directory) crowd(_ context.Context, share float64) error { return d.volume.crowd(share) }

func (d *directory) copies(name string) ([]string, error) {
	return []string{filepath.Join(d.volume.dir, "pop", name)}, nil
}

// missing says which programs are not there.
func missing(programs ...string) error {
	var errs []error
	for _, p := range programs {
		if _, err := exec.LookPath(p); err != nil {
			errs = append(errs, fmt.Errorf("%w: scripts/install test", err))
		}
	}
	return errors.Join(errs...)
}
