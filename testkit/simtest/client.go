package simtest

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"io/fs"
	"math/rand/v2"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"dewpoint/internal/pop"
)

// Faults are how likely a call goes wrong, each between 0 and 1.
type Faults struct {
	Before float64       // an error, and nothing has happened
	After  float64       // an error, and it has happened
	Late   float64       // an error, and it happens later
	Pause  float64       // the node stands still in the middle of it
	Still  time.Duration // for about how long
	Stale  float64       // what was seen once is believed for a while
}

// ErrDead is what calls return to a process that was killed.
var ErrDead = errors.New("this process was killed")

// A Client is a process's view of a Disk; the Disk's lock guards its fields. Safe
// for concurrent use.
type Client struct {
	disk   *Disk
	node   string
	seed   uint64
	rng    *rand.Rand // of what is seen, in the order in which it is
	faults Faults
	dead   bool
	off    bool // the power is: not even late effects come
	cut    bool
	still  time.Time // until when the node stands still
	names  map[string]belief
	lists  map[string]list
}

// belief is what a client takes a name to be; nil is nothing.
type belief struct {
	ino   *inode
	until time.Time
}

type list struct {
	of    []fs.FileInfo
	until time.Time
}

var _ pop.FS = (*Client)(nil)

// Client is a view of the disk for a process on node. Whatever it draws follows from seed.
func (d *Disk) Client(node string, seed uint64, f Faults) *Client {
	return &Client{disk: d, node: node, seed: seed, rng: rand.New(rand.NewPCG(seed, 1)), faults: f,
		names: map[string]belief{}, lists: map[string]list{}}
}

func (c *Client) set(f func()) {
	c.disk.mu.Lock()
	defer c.disk.mu.Unlock()
	f()
}

// Kill ends the process: what it does from now on has no effect. With off, what
// it did and is still to come has none either.
func (c *Client) Kill(off bool) { c.set(func() { c.dead, c.off = true, off }) }

// Cut keeps the node from reaching the disk, or lets it again.
func (c *Client) Cut(cut bool) { c.set(func() { c.cut = cut }) }

// Heal makes calls fail no more. Views stay late.
func (c *Client) Heal() {
	c.set(func() { c.faults, c.cut, c.still = Faults{Stale: c.faults.Stale}, false, time.Time{} })
}

// Stand has the node stand still for d.
func (c *Client) Stand(d time.Duration) { c.set(func() { c.still = time.Now().Add(d) }) }

// Gate returns when the node does not stand still. Those that wait go on one after
// another if their turns differ.
func (c *Client) Gate(turn time.Duration) {
	for {
		var d time.Duration
		c.set(func() { d = time.Until(c.still) })
		if d <= 0 {
			return
		}
		time.Sleep(d + turn)
	}
}

// A plan is what becomes of a call.
type plan struct {
	before, after time.Duration // how long it takes until its effect, and then
	fate          int
	later         time.Duration
	still         [2]time.Duration // before and after its effect
	turn          time.Duration    // after the node stood still
}

const (
	well = iota
	failsBefore
	failsAfter
	comesLate
)

const patience = 5 * time.Second // after which a call is given up

// lasting is a call without the nonces in its names, which are not of the seed: a dot and at least eight of A
// to Z and 2 to 7.
func lasting(what string) []byte {
	out := make([]byte, 0, len(what)+20)
	for {
		dot := strings.IndexByte(what, '.')
		if dot < 0 {
			return append(out, what...)
		}
		end := dot + 1
		for end < len(what) && (what[end] >= 'A' && what[end] <= 'Z' || what[end] >= '2' && what[end] <= '7') {
			end++
		}
		if end-dot > 8 {
			out = append(out, what[:dot]...)
		} else {
			out = append(out, what[:end]...)
		}
		what = what[end:]
	}
}

// plan draws what becomes of a call. It depends on what is asked when, not on what
// was asked before: several calls may begin at one instant.
func (c *Client) plan(mutates bool, what string) plan {
	h := fnv.New64a()
	h.Write(strconv.AppendInt(lasting(what), time.Now().UnixNano(), 10))
	f, r := &c.faults, rand.New(rand.NewPCG(c.seed, h.Sum64()))
	p := plan{before: time.Duration(100 + r.IntN(5e6)), after: time.Duration(100 + r.IntN(5e6))}
	if r.IntN(16) == 0 { // a slow one
		p.before += time.Duration(r.IntN(1e9))
	}
	switch x := r.Float64(); {
	case x < f.Before:
		p.fate = failsBefore
	case x < f.Before+f.After:
		p.fate = failsAfter
	case x < f.Before+f.After+f.Late && mutates:
		p.fate = comesLate
	}
	p.turn = time.Duration(r.IntN(1e6))
	p.later = time.Duration(r.Int64N(int64(120 * time.Second)))
	if r.Float64() < f.Pause {
		p.still[r.IntN(2)] = time.Duration(float64(f.Still) * (0.5 + r.Float64()))
	}
	return p
}

// call does effect, which runs with the disk locked, as the plan says.
func (c *Client) call(mutates bool, what string, effect func() error) error {
	var p plan
	c.set(func() { p = c.plan(mutates, what) })
	c.rest(p.before, p.still[0], p.turn)
	d := c.disk
	d.mu.Lock()
	var err error
	switch {
	case c.dead:
		err = ErrDead
	case c.cut:
		p.after, err = patience, away(what, "cut off")
		if mutates && p.later%3 == 0 {
			c.later(p.later, effect)
		}
	case p.fate == failsBefore:
		err = away(what, "nothing has happened")
	case p.fate == comesLate:
		err = away(what, "it happens later")
		c.later(p.later, effect)
	default:
		err = effect()
	}
	d.mu.Unlock()
	c.rest(p.after, p.still[1], p.turn)
	c.set(func() {
		if c.dead {
			err = ErrDead
		} else if err == nil && p.fate == failsAfter {
			err = away(what, "it has happened")
		}
	})
	return err
}

func away(what, why string) error {
	return fmt.Errorf("%s: %w: %s", what, pop.ErrStoreAway, why)
}

func (c *Client) rest(d, still, turn time.Duration) {
	time.Sleep(d)
	if still > 0 {
		c.Stand(still)
	}
	c.Gate(turn)
}

// later has an effect after d, and when the node reaches the disk; the disk is locked.
func (c *Client) later(d time.Duration, effect func() error) {
	c.disk.late.Go(func() {
		for again := true; again; d = time.Second + d%1e9 {
			time.Sleep(d)
			c.set(func() {
				if again = c.cut && !c.dead; !again && !c.off {
					_ = effect()
				}
			})
		}
	})
}

// lookup is what the client takes name to be; the disk is locked.
func (c *Client) lookup(name string) *inode {
	if b, ok := c.names[name]; ok && time.Now().Before(b.until) {
		return b.ino
	}
	ino := c.disk.names[name]
	delete(c.names, name)
	if c.rng.Float64() < c.faults.Stale {
		c.names[name] = belief{ino, time.Now().Add(time.Duration(c.rng.Int64N(int64(c.disk.Lag))))}
	}
	return ino
}

// forget is for what the client has changed itself; the disk is locked.
func (c *Client) forget(names ...string) {
	for _, name := range names {
		delete(c.names, name)
		delete(c.lists, path.Dir(name))
	}
}

func (c *Client) gone(name string) error {
	if c.lookup(name) == nil {
		return fmt.Errorf("%s: %w", name, fs.ErrNotExist)
	}
	return nil
}

// ReadFile implements pop.FS.
func (c *Client) ReadFile(_ context.Context, name string) (b []byte, err error) {
	err = c.call(false, "read "+name, func() error {
		ino := c.lookup(name)
		if ino == nil {
			return fmt.Errorf("%s: %w", name, fs.ErrNotExist)
		}
		b = slices.Clone(ino.bytes(c.node))
		return nil
	})
	return b, err
}

// WriteFile implements pop.FS.
func (c *Client) WriteFile(_ context.Context, name string, b []byte) error {
	n := 0
	err := c.call(true, "write "+name, func() error {
		c.forget(name)
		n = c.rng.IntN(2)
		return c.disk.write(name, c.node, b)
	})
	if err != nil && n == 0 { // what it was written to first stays
		c.set(func() {
			if !c.off {
				_ = c.disk.write(path.Join(path.Dir(name), fmt.Sprintf(".%s.%d", path.Base(name), c.rng.Uint32())),
					c.node, b[:len(b)/2])
			}
		})
	}
	return err
}

// ReadDir implements pop.FS.
func (c *Client) ReadDir(_ context.Context, name string) (all []fs.FileInfo, err error) {
	err = c.call(false, "list "+name, func() (err error) {
		if l, ok := c.lists[name]; ok && time.Now().Before(l.until) {
			all = l.of
			return nil
		}
		all, err = c.disk.list(name, c.node)
		delete(c.lists, name)
		if c.rng.Float64() < c.faults.Stale {
			c.lists[name] = list{all, time.Now().Add(time.Duration(c.rng.Int64N(int64(c.disk.Lag))))}
		}
		return err
	})
	return all, err
}

// Names implements pop.FS.
func (c *Client) Names(ctx context.Context, name string) ([]string, error) {
	all, err := c.ReadDir(ctx, name)
	names := make([]string, len(all))
	for i, fi := range all {
		names[i] = fi.Name()
	}
	return names, err
}

// Stat implements pop.FS.
func (c *Client) Stat(_ context.Context, name string) (fi fs.FileInfo, err error) {
	err = c.call(false, "stat "+name, func() error {
		ino := c.lookup(name)
		if ino == nil {
			return fmt.Errorf("%s: %w", name, fs.ErrNotExist)
		}
		fi = info{path.Base(name), ino.seen(c.node), ino.dir, ino.seq, ino.made}
		return nil
	})
	return fi, err
}

// Mkdir implements pop.FS.
func (c *Client) Mkdir(_ context.Context, name string) error {
	return c.call(true, "mkdir "+name, func() error {
		c.forget(name)
		return c.disk.mkdir(name)
	})
}

// Rename implements pop.FS.
func (c *Client) Rename(_ context.Context, from, to string) error {
	return c.call(true, "rename "+from+" to "+to, func() error {
		if err := c.gone(from); err != nil {
			return err
		}
		c.forget(from, to)
		return c.disk.rename(from, to)
	})
}

// Link implements pop.FS.
func (c *Client) Link(_ context.Context, from, to string) error {
	return c.call(true, "link "+from+" to "+to, func() error {
		c.forget(from, to)
		return c.disk.link(from, to)
	})
}

// Remove implements pop.FS.
func (c *Client) Remove(_ context.Context, name string) error {
	return c.call(true, "remove "+name, func() error {
		if err := c.gone(name); err != nil {
			return err
		}
		c.forget(name)
		return c.disk.remove(name)
	})
}

// SyncDir implements pop.FS.
func (c *Client) SyncDir(_ context.Context, name string) error {
	return c.call(true, "sync "+name, func() error { return c.disk.syncDir(name) })
}

// Open implements pop.FS.
func (c *Client) Open(_ context.Context, name string) (pop.File, error) {
	return c.open("open", name, func() (*inode, error) {
		ino := c.lookup(name)
		if ino == nil || ino.links == 0 { // the server knows better
			return nil, fmt.Errorf("%s: %w", name, fs.ErrNotExist)
		}
		return ino, nil
	})
}

// Append implements pop.FS.
func (c *Client) Append(_ context.Context, name string) (pop.File, error) {
	return c.open("open for writing", name, func() (*inode, error) {
		c.forget(name)
		if ino := c.disk.names[name]; ino != nil {
			return ino, nil
		}
		ino, err := c.disk.create(name, c.node, false)
		if err == nil {
			c.disk.changed("create", name)
		}
		return ino, err
	})
}

// Make implements pop.FS.
func (c *Client) Make(ctx context.Context, name string) error {
	f, err := c.Append(ctx, name)
	if err == nil {
		err = f.Close()
	}
	return err
}

func (c *Client) open(op, name string, effect func() (*inode, error)) (pop.File, error) {
	f := &file{c: c, name: name}
	err := c.call(true, op+" "+name, func() (err error) {
		f.ino, err = effect()
		return err
	})
	if err != nil {
		return nil, err
	}
	return f, nil
}

// Space implements pop.FS.
func (c *Client) Space(context.Context) (total, free int64, err error) {
	err = c.call(false, "space", func() error {
		total, free = c.disk.Total, c.disk.Total
		for _, ino := range c.disk.names {
			free -= int64(len(ino.data))
		}
		return nil
	})
	return total, free, err
}

type file struct {
	c    *Client
	name string
	ino  *inode
}

func (f *file) ReadAt(b []byte, off int64) (n int, err error) {
	err = f.c.call(false, "read of "+f.name, func() error {
		if f.ino.links == 0 {
			return fmt.Errorf("%s: stale: %w", f.name, pop.ErrStoreAway)
		}
		have := f.ino.bytes(f.c.node)
		n = copy(b, have[min(off, int64(len(have))):])
		return nil
	})
	if err == nil && n < len(b) {
		err = io.EOF
	}
	return n, err
}

func (f *file) WriteAt(b []byte, off int64) (int, error) {
	own := slices.Clone(b)
	err := f.c.call(true, "write to "+f.name, func() error {
		ino, end := f.ino, int(off)+len(own)
		ino.data = padded(ino.data, end)
		copy(ino.data[off:], own)
		ino.dirty = true
		ino.writers[f] = true
		f.c.disk.changed("write to", f.name)
		return nil
	})
	if err != nil {
		return 0, err
	}
	return len(b), nil
}

func (f *file) Sync() error {
	return f.c.call(true, "sync "+f.name, func() error {
		f.ino.synced, f.ino.dirty = f.ino.data, false
		return nil
	})
}

func (f *file) Size() (n int64, err error) {
	err = f.c.call(false, "size of "+f.name, func() error {
		n = f.ino.seen(f.c.node)
		return nil
	})
	return n, err
}

func (f *file) Close() error { return f.c.call(false, "close "+f.name, func() error { return nil }) }
