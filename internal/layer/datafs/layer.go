package datafs

import (
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"dewpoint/internal/layer/presence"
)

// layer is one layer that datafs serves.
type layer struct {
	id     string
	number uint32 // upper half of its nodes' numbers; never given twice in one mount
	from   atomic.Pointer[content]
	index  atomic.Pointer[index] // nil while no tree was asked for
	// indexFile is index's, to be passed on.
	indexFile *os.File

	mu      sync.Mutex
	reads   map[uint64]*read // those that wait, by number
	wanted  spans            // absent, and told to dewd
	singles *atomic.Bool     // of the server
	refused [16]refusal      // the last ones
	oldest  int              // of refused
	failing []refusal        // what Fail was called for, not long ago
	early   spans            // to be stored in the kernel's page cache
	stored  int64            // bytes of that, so far
	open    bool             // the kernel has opened the file
	old     []*content       // in place of which another came; a read may still use them
	uses    [2]uses          // of the file's node and of the tree's top
	removed bool
	gone    bool // its files are closed
}

// The two names of a layer.
const (
	asFile = 0
	asTree = 1
)

// content is where a layer's bytes are.
type content struct {
	data    *os.File
	present *presence.Map
}

func (c *content) close() {
	c.data.Close()
	c.present.Close()
}

// refusal is what was refused, and when.
type refusal struct {
	span
	at time.Time
}

// comesAgain is how soon the kernel asks again for what it was refused.
const comesAgain = time.Second

// failsFor is how long absent bytes stay failed: the kernel's layers each try
// once more what failed in a read-ahead, and that must not wait again.
const failsFor = 250 * time.Millisecond

// uses says whether the kernel knows a node.
type uses struct {
	lookups int64
	// before says that the kernel knew the node before this process served it:
	// until it forgets it, the number of lookups tells nothing.
	before bool
}

func (u uses) held() bool { return u.lookups > 0 || u.before }

func (l *layer) held() bool { return l.uses[asFile].held() || l.uses[asTree].held() }

// read is one READ of the kernel.
type read struct {
	unique uint64 // as the kernel sent it
	pid    uint32 // of the thread that reads, in the mount's pid namespace; 0 is not visible
	parts  []part
	size   int
	sticky bool // the kernel will not ask for less
}

// lacks returns the absent bytes of data that r needs, whole pages.
func (l *layer) lacks(r *read) spans {
	var out spans
	for _, p := range r.parts {
		if p.from == fromData {
			out = absent(out, l.present(), span{p.off, p.off + int64(p.n)})
		}
	}
	return out
}

func (l *layer) present() *presence.Map { return l.from.Load().present }

// size is that of the data.
func (l *layer) size() int64 { return l.present().Size() }

// ready reports whether all that r needs is there.
func (l *layer) ready(r *read) bool {
	for _, p := range r.parts {
		if p.from == fromData && !l.present().HasRange(p.off, p.off+int64(p.n)) {
			return false
		}
	}
	return true
}

// whole returns the extent of what r needs of the data.
func (r *read) whole() span {
	s := span{-1, -1}
	for _, p := range r.parts {
		if p.from != fromData {
			continue
		}
		if s.from < 0 {
			s.from = p.off
		}
		s.from, s.to = min(s.from, p.off), max(s.to, p.off+int64(p.n))
	}
	return s
}

// wait decides what becomes of a read that lacks bytes. It is refused if the
// kernel will come again for less, which it says by refuse; done if the bytes
// have come meanwhile; else it waits, and wants are the absent pages that nobody
// has wanted before.
func (l *layer) wait(r *read) (wants spans, refuse, done bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.gone || l.failed(l.lacks(r)) {
		return nil, true, false
	}
	if r.size > page && !r.sticky && !l.again(r.whole()) {
		return nil, true, false
	}
	l.reads[r.unique] = r
	for _, s := range l.lacks(r) { // looked at after the read is on the list
		wants = append(wants, l.wanted.missing(s)...)
	}
	if l.ready(r) {
		delete(l.reads, r.unique)
		return nil, false, true
	}
	for _, s := range wants {
		l.wanted = l.wanted.add(s)
	}
	return wants, false, false
}

// again reports whether a request of several pages was refused before as a part
// of this or a larger one, and remembers it. Kernels whose page cache of this
// file system has large folios ask for whole ones even when one reader needs
// them: the second time is in earnest. Those that have been seen to come again
// for single pages never do that, and a read-ahead that is repeated must not
// be taken for it: readers of what is there would wait for its neighbours.
// l.mu is held.
func (l *layer) again(s span) bool {
	if l.singles.Load() {
		return false
	}
	if l.wasRefused(s) {
		return true
	}
	l.refused[l.oldest] = refusal{s, time.Now()}
	l.oldest = (l.oldest + 1) % len(l.refused)
	return false
}

// wasRefused reports whether s, or more, was refused a moment ago. l.mu is held.
func (l *layer) wasRefused(s span) bool {
	now := time.Now()
	return slices.ContainsFunc(l.refused[:], func(o refusal) bool {
		return o.from <= s.from && s.to <= o.to && now.Sub(o.at) < comesAgain
	})
}

// single learns from a request of one page whether it is what the kernel does
// after a refusal.
func (l *layer) single(r *read) {
	if l.singles.Load() {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if s := r.whole(); s.from >= 0 && l.wasRefused(s) {
		l.singles.Store(true)
	}
}

// takeReads removes and returns the waiting reads that pick chooses.
func (l *layer) takeReads(pick func(*read) bool) []*read {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.gone {
		return nil
	}
	var out []*read
	for id, r := range l.reads {
		if pick(r) {
			out = append(out, r)
			delete(l.reads, id)
		}
	}
	return out
}

// arrived returns the waiting reads that can be answered now that [from, to) may
// be there, and forgets wants that are fulfilled.
func (l *layer) arrived(s span) []*read {
	out := l.takeReads(l.ready)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.gone {
		return nil
	}
	l.wanted = settle(l.wanted, l.present(), s)
	return out
}

// failed reports whether any of the absent bytes are those of a failure that is
// not over. l.mu is held.
func (l *layer) failed(lacks spans) bool {
	now := time.Now()
	l.failing = slices.DeleteFunc(l.failing, func(f refusal) bool { return now.Sub(f.at) > failsFor })
	return slices.ContainsFunc(l.failing, func(f refusal) bool { return lacks.touches(f.span) })
}

// fail returns the waiting reads that need absent bytes of s, and has others of
// the next moment fail.
func (l *layer) fail(s span) []*read {
	l.mu.Lock()
	l.failed(nil) // forgets old ones
	l.failing = append(l.failing, refusal{s, time.Now()})
	l.mu.Unlock()
	out := l.takeReads(func(r *read) bool { return l.lacks(r).touches(s) })
	l.mu.Lock()
	l.wanted = l.wanted.without(s)
	l.mu.Unlock()
	return out
}

// everything is all bytes a layer can have.
var everything = span{0, 1 << 62}

// fill reads what r asks for into buf behind room for a header, and returns it
// cut to size.
func (l *layer) fill(buf []byte, r *read) ([]byte, error) {
	at := outHeaderSize
	for _, p := range r.parts {
		b := buf[at : at+p.n]
		switch p.from {
		case fromHole:
			clear(b)
		case fromIndex:
			if err := l.index.Load().read(b, p.off); err != nil {
				return nil, err
			}
		case fromData:
			if _, err := l.from.Load().data.ReadAt(b, p.off); err != nil {
				return nil, err
			}
		}
		at += p.n
	}
	return buf[:at], nil
}

// Node numbers: 1 is the root. A layer's number in the upper half, and below it
// 0 for its file, or the number of an inode of its index, none of which is 0.

func (l *layer) node(inode uint32) uint64 { return uint64(l.number)<<32 | uint64(inode) }

// fileAttr is what stat shows of the layer's file.
func (l *layer) fileAttr() attr {
	return attr{ino: l.node(0), size: l.size(), mode: unix.S_IFREG | 0o400, nlink: 1}
}

// treeAttr is what stat shows of an inode of the layer's tree.
func (l *layer) treeAttr(n *inode) attr {
	a := attr{ino: l.node(n.nid), size: n.size, sec: n.sec, nsec: n.nsec, mode: n.mode, nlink: n.nlink,
		uid: n.uid, gid: n.gid}
	if k := n.mode & unix.S_IFMT; k == unix.S_IFCHR || k == unix.S_IFBLK {
		a.rdev = n.union
	}
	return a
}

func (l *layer) close() {
	for _, c := range append(l.old, l.from.Load()) {
		c.close()
	}
	if l.indexFile != nil {
		l.indexFile.Close()
	}
}
