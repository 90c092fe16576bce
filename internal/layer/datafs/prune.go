package datafs

import (
	"context"
	"time"
)

// The kernel keeps names that nobody uses, and each keeps the directory that it
// is in. So a tree that was removed is not forgotten when its last user goes: the
// kernel has to be told to drop what it has of it, name by name. A directory in
// use loses its name thereby and is not found by it again, but by its number: all
// directories are gone through every time.

const (
	pruneFirst = time.Second // between the first two attempts; doubles each time
	pruneMost  = time.Minute
	// maxDirectories bounds a walk through an index that is not well formed.
	maxDirectories = 1 << 20
)

// forgetNames makes the kernel forget a layer as far as it is not in use.
func (s *server) forgetNames(l *layer) {
	s.dev.forgetName(rootNode, l.id)
	s.dev.forgetName(rootNode, l.id+treeSuffix)
	s.prune(l)
}

// prune makes the kernel forget what it keeps below a tree's top.
func (s *server) prune(l *layer) {
	x := l.index.Load()
	if x == nil {
		return
	}
	dirs := []uint32{x.root}
	for seen := 0; len(dirs) > 0 && seen < maxDirectories; seen++ {
		nid := dirs[len(dirs)-1]
		dirs = dirs[:len(dirs)-1]
		dir, err := x.inode(nid)
		if err != nil || !dir.isDir() {
			continue
		}
		x.list(&dir, 0, func(child uint32, _ uint64, typ byte, name string) bool {
			if name == "." || name == ".." {
				return true
			}
			s.dev.forgetName(l.node(nid), name)
			if typ == erofsDir {
				dirs = append(dirs, child)
			}
			return true
		})
	}
}

// erofsDir is a directory's type in an EROFS directory.
const erofsDir = 2

// pruneRemoved has removed trees forgotten as they get out of use, until ctx ends.
func (s *server) pruneRemoved(ctx context.Context) {
	tick := time.NewTicker(pruneFirst)
	defer tick.Stop()
	next := map[*layer]attempt{}
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			next = s.pruneDue(now, next)
		}
	}
}

// attempt is when a tree is tried next, and how long after the last time.
type attempt struct {
	at    time.Time
	after time.Duration
}

// pruneDue tries the trees whose time has come, and returns when to try next.
func (s *server) pruneDue(now time.Time, next map[*layer]attempt) map[*layer]attempt {
	out := map[*layer]attempt{}
	for _, l := range s.all() {
		l.mu.Lock()
		held := l.removed && l.uses[asTree].held()
		l.mu.Unlock()
		if !held {
			continue
		}
		a := next[l]
		if !now.Before(a.at) {
			s.prune(l)
			a.after = min(max(2*a.after, pruneFirst), pruneMost)
			a.at = now.Add(a.after)
		}
		out[l] = a
	}
	return out
}
