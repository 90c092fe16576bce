package datafs

import (
	"net"
	"sync"
)

// maxQueue bounds the messages that wait for a dewd which does not read them.
// It is cut off then; the next one is told everything anew.
const maxQueue = 1 << 16

// link sends messages to one peer without making the sender wait. Its methods
// are safe for concurrent use.
type link struct {
	conn *net.UnixConn
	mu   sync.Mutex
	more sync.Cond
	out  []message
	shut bool
}

func newLink(c *net.UnixConn) *link {
	l := &link{conn: c}
	l.more.L = &l.mu
	return l
}

// send queues a message. Its files must stay open until the link has ended.
func (l *link) send(m message) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.shut {
		return
	}
	if l.out = append(l.out, m); len(l.out) > maxQueue {
		l.shut, l.out = true, nil
		l.conn.Close()
	}
	l.more.Signal()
}

// run writes what is queued until the link is closed or the peer is gone.
func (l *link) run() {
	for {
		batch, ok := l.next()
		if !ok {
			return
		}
		for i := range batch {
			if sendMessage(l.conn, &batch[i]) != nil {
				l.close()
				return
			}
		}
	}
}

func (l *link) next() ([]message, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for len(l.out) == 0 && !l.shut {
		l.more.Wait()
	}
	batch := l.out
	l.out = nil
	return batch, !l.shut
}

// close ends run and the connection.
func (l *link) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.shut, l.out = true, nil
	l.conn.Close()
	l.more.Signal()
}
