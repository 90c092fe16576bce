package datafs

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// signals deals with readers that get a signal while they wait.
//
// The kernel sends INTERRUPT for the first signal, whichever it is, and nothing
// for those after it; a reader whose request is being served sleeps until it is
// answered, even if it is to be killed. An answer with EINTR would make an I/O
// error of a harmless signal. So after an INTERRUPT datafs looks, again and again
// while the read waits, whether the reader has SIGKILL pending (which the kernel
// also sets for other signals that end a process, and for a group that exits),
// and only then gives up. Readers whose page was being read ahead get no
// INTERRUPT and need none: the kernel lets them be killed, and their read is
// answered when its bytes come.
type signals struct {
	mu      sync.Mutex
	early   [256]uint64 // interrupted requests, the last ones: they may come before what they interrupt
	next    int
	watched map[uint64]*layer // reads whose readers have got a signal
	more    chan struct{}
}

// lookEvery is how often readers that have got a signal are looked at.
const lookEvery = 50 * time.Millisecond

func (g *signals) init() {
	g.watched = map[uint64]*layer{}
	g.more = make(chan struct{}, 1)
}

// interrupt answers INTERRUPT.
func (w *worker) interrupt(r *request) {
	if len(r.body) < 8 {
		return
	}
	unique := native.Uint64(r.body)
	w.signals.note(unique)
	for _, l := range w.all() {
		l.mu.Lock()
		_, waits := l.reads[unique]
		l.mu.Unlock()
		if waits {
			w.signals.waiting(l, unique)
			return
		}
	}
}

func (g *signals) note(unique uint64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.early[g.next] = unique
	g.next = (g.next + 1) % len(g.early)
}

// waiting is called when a read has begun to wait and when it was interrupted;
// whichever is later finds the other.
func (g *signals) waiting(l *layer, unique uint64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, u := range g.early {
		if u != unique {
			continue
		}
		g.watched[unique] = l
		select {
		case g.more <- struct{}{}:
		default:
		}
		return
	}
}

// watch looks at the watched readers until ctx ends.
func (g *signals) watch(ctx context.Context, s *server) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-g.more:
		}
		for g.look(s) && ctx.Err() == nil {
			time.Sleep(lookEvery)
		}
	}
}

// look answers the reads of readers that are being killed. It reports whether
// any are left to be watched.
func (g *signals) look(s *server) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	for unique, l := range g.watched {
		l.mu.Lock()
		r := l.reads[unique]
		if r != nil && dying(r.pid) {
			delete(l.reads, unique)
			s.dev.fail(unique, unix.EINTR)
			r = nil
		}
		l.mu.Unlock()
		if r == nil || r.pid == 0 {
			delete(g.watched, unique)
		}
	}
	return len(g.watched) > 0
}

// dying reports whether a thread is about to be killed or gone. One that cannot
// be seen from here is not known to be.
func dying(pid uint32) bool {
	if pid == 0 {
		return false
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return os.IsNotExist(err)
	}
	_, rest, _ := bytes.Cut(b, []byte("\nSigPnd:\t"))
	mask, _, _ := bytes.Cut(rest, []byte("\n"))
	pending, err := strconv.ParseUint(string(mask), 16, 64)
	return err == nil && pending&(1<<(unix.SIGKILL-1)) != 0
}
