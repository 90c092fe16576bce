package datafs

import (
	"net"
	"os"
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

// send queues a message. Its files stay the caller's.
func (l *link) send(m message) {
	m.files = dupAll(m.files)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.shut {
		closeFiles(m.files)
		return
	}
	if l.out = append(l.out, m); len(l.out) > maxQueue {
		l.end()
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
			err := sendMessage(l.conn, &batch[i])
			closeFiles(batch[i].files)
			if err != nil {
				closeMessages(batch[i+1:])
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

// end drops what is queued. l.mu is held.
func (l *link) end() {
	closeMessages(l.out)
	l.shut, l.out = true, nil
	l.conn.Close()
}

func closeMessages(ms []message) {
	for i := range ms {
		closeFiles(ms[i].files)
	}
}

// dupAll returns other descriptors of the open files. One that cannot be had is
// missing, and the receiver refuses the message.
func dupAll(files []*os.File) []*os.File {
	var out []*os.File
	for _, f := range files {
		if own, err := dup(f); err == nil {
			out = append(out, own)
		}
	}
	return out
}

// close ends run and the connection.
func (l *link) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.end()
	l.more.Signal()
}
