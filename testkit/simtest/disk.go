// Package simtest is a file system that several nodes share, in memory, which is as
// bad as those that a PoP's store may lie on: it is for the simulation of the store's
// protocol in virtual time (testing/synctest), which is this package's test.
//
// A Disk is what the servers hold. Each node reaches it by a Client, a pop.FS
// whose calls take their time and may fail:
//
//   - before they have done anything, or after they have done it;
//   - with an error first and the effect later, as when a process gives up
//     a call that a hanging file system does in the end;
//   - for as long as the node is cut off;
//   - and the node may stand still in the middle of one, for minutes, and go on.
//
// What other nodes have done a client may see late, by up to Lag: names that are gone, names that are not
// there yet, old lists. The nodes' clocks differ by any amount, and so do the times of files. What a node has
// written and not synced, others read as zeros, and a power cut (Crash) may take it, or a part of it.
//
// The seed decides everything. All durations are drawn to the nanosecond, so hardly
// ever do two things happen at one instant, whose order would be the scheduler's.
package simtest

import (
	"errors"
	"io/fs"
	"math/rand/v2"
	"path"
	"slices"
	"strings"
	"sync"
	"time"
)

// A Disk is what the servers of a file system hold. Safe for concurrent use.
type Disk struct {
	// Lag is how long a client may see what was.
	Lag time.Duration
	// Total is the size of the file system in bytes.
	Total int64
	// Clocks are by how much the clocks of nodes are wrong, and Tick is how fine the times of files
	// are. A file has the time of the node that made it, by its clock.
	Clocks map[string]time.Duration
	Tick   time.Duration
	// Changed is told of every change, with the disk locked: it must use
	// Peek only. May be nil.
	Changed func(op, name string)

	mu    sync.Mutex
	names map[string]*inode
	seq   int
	late  sync.WaitGroup // effects that are still to come
}

// inode is a file or a directory; its Disk's lock guards it.
type inode struct {
	seq     int // when it was made, among others
	dir     bool
	data    []byte
	synced  []byte // what a power cut leaves
	dirty   bool   // data differ from synced
	durable bool   // its name survives a power cut
	links   int
	writer  string // the node that made it
	made    time.Time
	writers map[*file]bool
}

// NewDisk is an empty disk.
func NewDisk(total int64, lag time.Duration) *Disk {
	return &Disk{Lag: lag, Total: total, names: map[string]*inode{".": {dir: true, links: 1}}}
}

// Wait returns when all that was begun has had its effect.
func (d *Disk) Wait() { d.late.Wait() }

// A Truth is a file as the servers have it.
type Truth struct {
	Data   []byte // not to be changed
	Synced bool   // all of it
	ID     int    // of the file, whatever its name
	// Writers is how many times it was opened and then written to.
	Writers int
}

// Peek is the truth about a name; ok is false if nothing has it. For use within Changed.
func (d *Disk) Peek(name string) (t Truth, ok bool) {
	ino := d.names[name]
	if ino == nil {
		return Truth{}, false
	}
	return Truth{ino.data, !ino.dirty, ino.seq, len(ino.writers)}, true
}

// Look calls f, which may use Peek, with the disk locked.
func (d *Disk) Look(f func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	f()
}

// Names are all names of files, in the order in which they were made.
func (d *Disk) Names() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	var all []string
	for name, ino := range d.names {
		if !ino.dir {
			all = append(all, name)
		}
	}
	slices.SortFunc(all, func(a, b string) int { return d.names[a].seq - d.names[b].seq })
	return all
}

// flip damages a file that nobody writes to, if there is one; the disk is locked.
func (d *Disk) flip(name string, at int) bool {
	ino := d.names[name]
	if ino == nil || ino.dirty || at >= len(ino.data) {
		return false
	}
	ino.data = slices.Clone(ino.data)
	ino.data[at] ^= 1
	ino.synced = ino.data
	return true
}

// Crash is a power cut on a node: what it wrote and did not sync is lost, or a
// part of it, and so may be names that it made and did nothing more with.
func (d *Disk) Crash(node string, rng *rand.Rand) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var hurt []string
	for name, ino := range d.names {
		if !ino.dir && ino.writer == node && (ino.dirty || !ino.durable) {
			hurt = append(hurt, name)
		}
	}
	slices.SortFunc(hurt, func(a, b string) int { return d.names[a].seq - d.names[b].seq })
	for _, name := range hurt {
		ino := d.names[name]
		if !ino.durable && rng.IntN(2) == 0 {
			d.unlink(name)
			continue
		}
		if ino.dirty {
			ino.data = torn(ino, rng)
			ino.synced, ino.dirty = ino.data, false
		}
	}
	d.changed("crash", node)
}

// PowerCut is a power cut on the servers, which are back at once: each name below dir that nobody has made
// durable is lost, a directory's with all that is below it, if lose says so. What was written to files stays.
func (d *Disk) PowerCut(dir string, lose func() bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var names []string
	for name, ino := range d.names {
		if strings.HasPrefix(name, dir+"/") && !ino.durable {
			names = append(names, name)
		}
	}
	slices.SortFunc(names, func(a, b string) int { return d.names[a].seq - d.names[b].seq })
	names = slices.DeleteFunc(names, func(string) bool { return !lose() })
	for _, gone := range names {
		for name := range d.names {
			if name == gone || strings.HasPrefix(name, gone+"/") {
				d.unlink(name)
			}
		}
	}
	d.changed("power cut", dir)
}

// torn is what a power cut leaves of a file.
func torn(ino *inode, rng *rand.Rand) []byte {
	switch n := len(ino.synced) + rng.IntN(max(1, len(ino.data)-len(ino.synced)+1)); rng.IntN(3) {
	case 0:
		return ino.synced
	case 1:
		return ino.data[:min(n, len(ino.data))]
	default:
		return padded(ino.synced, n)
	}
}

func padded(b []byte, n int) []byte {
	return append(slices.Clone(b), make([]byte, max(0, n-len(b)))...)
}

func (d *Disk) changed(op, name string) {
	if d.Changed != nil {
		d.Changed(op, name)
	}
}

// The rest are the servers' steps; the disk is locked.

func (d *Disk) create(name, node string, dir bool) (*inode, error) {
	if parent := d.names[path.Dir(name)]; parent == nil || !parent.dir {
		return nil, fs.ErrNotExist
	}
	d.seq++
	ino := &inode{seq: d.seq, dir: dir, links: 1, writer: node,
		made: time.Now().Add(d.Clocks[node]).Truncate(d.Tick), writers: map[*file]bool{}}
	d.names[name] = ino
	return ino, nil
}

func (d *Disk) unlink(name string) {
	if ino := d.names[name]; ino != nil {
		ino.links--
		delete(d.names, name)
	}
}

func (d *Disk) write(name, node string, b []byte) error {
	if old := d.names[name]; old != nil && old.dir {
		return errors.New("is a directory")
	}
	if d.names[path.Dir(name)] == nil {
		return fs.ErrNotExist
	}
	d.unlink(name)
	ino, err := d.create(name, node, false)
	if err == nil {
		ino.data, ino.synced, ino.durable = slices.Clone(b), b, true
		d.changed("write", name)
	}
	return err
}

func (d *Disk) mkdir(name string) error {
	for at, rest := ".", strings.Split(name, "/"); len(rest) > 0; rest = rest[1:] {
		at = path.Join(at, rest[0])
		if d.names[at] != nil {
			continue
		}
		if _, err := d.create(at, "", true); err != nil {
			return err
		}
	}
	return nil
}

func (d *Disk) rename(from, to string) error {
	ino := d.names[from]
	if ino == nil || d.names[path.Dir(to)] == nil {
		return fs.ErrNotExist
	}
	d.unlink(to)
	delete(d.names, from)
	d.names[to] = ino
	ino.durable = true
	d.changed("rename to "+to, from)
	return nil
}

func (d *Disk) link(from, to string) error {
	ino := d.names[from]
	switch {
	case ino == nil || d.names[path.Dir(to)] == nil:
		return fs.ErrNotExist
	case d.names[to] != nil:
		return fs.ErrExist
	}
	ino.links++
	ino.durable = true
	d.names[to] = ino
	d.changed("link to "+to, from)
	return nil
}

func (d *Disk) remove(name string) error {
	if d.names[name] == nil {
		return fs.ErrNotExist
	}
	d.unlink(name)
	d.changed("remove", name)
	return nil
}

func (d *Disk) syncDir(dir string) error {
	if ino := d.names[dir]; ino == nil || !ino.dir {
		return fs.ErrNotExist
	}
	for name, ino := range d.names {
		if in(dir, name) {
			ino.durable = true
		}
	}
	return nil
}

// in reports whether path.Dir(name) is dir; most of what a schedule does is to list.
func in(dir, name string) bool {
	if dir != "." {
		var under bool
		if name, under = strings.CutPrefix(name, dir); !under || name == "" || name[0] != '/' {
			return false
		}
		name = name[1:]
	}
	return strings.IndexByte(name, '/') < 0
}

// list is the directory as the servers have it.
func (d *Disk) list(dir, node string) ([]fs.FileInfo, error) {
	if ino := d.names[dir]; ino == nil || !ino.dir {
		return nil, fs.ErrNotExist
	}
	var all []info
	for name, ino := range d.names {
		if name != "." && in(dir, name) {
			all = append(all, info{path.Base(name), ino.seen(node), ino.dir, ino.seq, ino.made})
		}
	}
	slices.SortFunc(all, func(a, b info) int { return a.seq - b.seq })
	out := make([]fs.FileInfo, len(all))
	for i := range all {
		out[i] = all[i]
	}
	return out, nil
}

// seen is the length that a node sees.
func (ino *inode) seen(string) int64 { return int64(len(ino.data)) }

// bytes are what a node reads: what another has not synced reads as zeros.
func (ino *inode) bytes(node string) []byte {
	if ino.dirty && ino.writer != node {
		return padded(ino.synced, len(ino.data))[:len(ino.data)]
	}
	return ino.data
}

type info struct {
	name string
	size int64
	dir  bool
	seq  int
	made time.Time
}

func (i info) Name() string       { return i.name }
func (i info) Size() int64        { return i.size }
func (i info) ModTime() time.Time { return i.made }
func (i info) IsDir() bool        { return i.dir }
func (i info) Sys() any           { return nil }
func (i info) Mode() fs.FileMode {
	if i.dir {
		return fs.ModeDir | 0o700
	}
	return 0o600
}
