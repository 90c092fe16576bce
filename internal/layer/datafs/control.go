package datafs

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"

	"golang.org/x/sys/unix"

	"dewpoint/internal/layer/presence"
)

// maxNumber bounds layers' numbers, so that inode numbers stay below 2^52.
const maxNumber = 1 << 20

// converse tells a dewd what there is, and does what it says until it goes. An
// error says why it was cut off.
func (s *server) converse(k *link) error {
	s.greet(k)
	var buf []byte // for reads that are answered here
	for {
		m, err := receiveMessage(k.conn)
		if err != nil {
			if errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed) || errors.Is(err, unix.ECONNRESET) {
				return nil
			}
			return err
		}
		buf, err = s.obey(k, &m, buf)
		closeFiles(m.files) // those that were not taken
		if err != nil {
			return err
		}
	}
}

// greet tells a new dewd of the connection, the layers and the wants.
func (s *server) greet(k *link) {
	hello := message{kind: kindHello, from: int64(os.Getpid()), files: []*os.File{s.cfg.Device}}
	if s.canResend.Load() {
		hello.flags |= flagResend
	}
	if !s.begun() {
		hello.flags |= flagIdle
	}
	k.send(hello)
	for _, l := range s.all() {
		l.mu.Lock()
		have := message{kind: kindHave, id: l.id, number: l.number, flags: l.flags(),
			files: []*os.File{l.from.Load().data, l.present().File()}}
		if l.indexFile != nil {
			have.flags |= flagTree
			have.files = append(have.files, l.indexFile)
		}
		k.send(have)
		for _, w := range l.wanted {
			k.send(message{kind: kindWant, id: l.id, from: w.from, to: w.to})
		}
		l.mu.Unlock()
	}
	k.send(message{kind: kindReady})
}

// obey does what one message says. An error means that dewd is to be cut off.
func (s *server) obey(k *link, m *message, buf []byte) ([]byte, error) {
	switch m.kind {
	case kindAdd:
		l, err := s.add(m)
		if err == nil { // other files may have what waits
			for _, r := range l.arrived(everything) {
				buf = s.answer(l, r, buf)
			}
			s.drop(l)
		}
		k.send(message{kind: kindAdd, id: m.id, number: m.number, from: errnoOf(err)})
		return buf, nil
	case kindShutdown:
		return buf, s.shutdown(k)
	case kindResend:
		return buf, s.resume()
	case kindUnblock:
		s.unblock(m.number)
		return buf, nil
	case kindTree, kindPresent, kindFail, kindRemove, kindWarm:
	default:
		return buf, fmt.Errorf("%w: kind %d", errMessage, m.kind)
	}
	l := s.byID(m.id)
	if l == nil { // it went meanwhile
		if m.kind == kindTree {
			k.send(message{kind: kindTree, id: m.id, from: int64(unix.ENOENT)})
		}
		return buf, nil
	}
	switch m.kind {
	case kindTree:
		k.send(message{kind: kindTree, id: m.id, from: errnoOf(l.grow(m))})
	case kindPresent:
		for _, r := range l.arrived(span{m.from, m.to}) {
			buf = s.answer(l, r, buf)
		}
	case kindFail:
		for _, r := range l.fail(span{m.from, m.to}) {
			s.dev.fail(r.unique, unix.EIO)
		}
	case kindRemove:
		s.remove(l)
	case kindWarm:
		if m.from < 0 || m.from >= m.to || m.to > l.size() || m.from%page != 0 {
			return buf, fmt.Errorf("%w: warm %d to %d", errMessage, m.from, m.to)
		}
		s.warm(l, span{m.from, m.to})
	}
	return buf, nil
}

// unblock gives an I/O error to the reads that a thread waits for.
func (s *server) unblock(thread uint32) {
	for _, l := range s.all() {
		for _, r := range l.takeReads(func(r *read) bool { return r.pid == thread }) {
			s.dev.fail(r.unique, unix.EIO)
		}
	}
}

// shutdown ends datafs if nothing uses it. dewd is told before the process can
// end, which it does when the mount has gone.
func (s *server) shutdown(k *link) error {
	s.leaving.Store(true)
	err := s.leave()
	if err != nil {
		s.leaving.Store(false)
		k.send(message{kind: kindShutdown, from: errnoOf(err)})
		return nil
	}
	defer s.end.Do(func() { close(s.ending) })
	return sendMessage(k.conn, &message{kind: kindShutdown})
}

// add begins to serve a layer, or takes other files for one that is there.
func (s *server) add(m *message) (*layer, error) {
	if m.id == "" || m.number == 0 || m.number > maxNumber || len(m.files) != 2 {
		return nil, unix.EINVAL
	}
	present, err := presence.View(m.files[1])
	if err != nil {
		s.log.Error("presence of a layer", "layer", m.id, "error", err)
		return nil, err
	}
	c := &content{m.files[0], present}
	m.files = nil
	s.mu.Lock()
	defer s.mu.Unlock()
	if l := s.ids[m.id]; l != nil {
		return l, l.replace(c, m.flags&flagRemoved != 0)
	}
	if s.layers[m.number] != nil {
		c.close()
		return nil, unix.EEXIST
	}
	l := &layer{id: m.id, number: m.number, reads: map[uint64]*read{}, singles: &s.singles,
		removed: m.flags&flagRemoved != 0}
	l.from.Store(c)
	l.uses[asFile].before = m.flags&flagHeldFile != 0
	l.uses[asTree].before = m.flags&flagHeldTree != 0
	s.layers[l.number], s.ids[l.id] = l, l
	return l, nil
}

// replace gives the layer other files of the same bytes.
func (l *layer) replace(c *content, removed bool) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	was := l.from.Load()
	if was.present.Size() != c.present.Size() {
		c.close()
		return unix.EINVAL
	}
	l.removed = removed
	if sameOpen(was.data, c.data) && sameOpen(was.present.File(), c.present.File()) {
		c.close()
		return nil
	}
	l.old = append(l.old, was)
	l.from.Store(c)
	return nil
}

// grow gives the layer a tree.
func (l *layer) grow(m *message) error {
	if len(m.files) != 1 {
		return unix.EINVAL
	}
	if l.index.Load() != nil {
		return nil
	}
	fi, err := m.files[0].Stat()
	if err != nil {
		return err
	}
	x, err := openIndex(m.files[0], fi.Size())
	if err != nil {
		return err
	}
	l.mu.Lock()
	l.indexFile = m.files[0]
	l.mu.Unlock()
	l.index.Store(x)
	m.files = nil
	return nil
}

// remove ends a layer: now, or when the kernel has forgotten it.
func (s *server) remove(l *layer) {
	l.mu.Lock()
	l.removed = true
	l.mu.Unlock()
	s.dev.forgetName(rootNode, l.id)
	s.dev.forgetName(rootNode, l.id+treeSuffix)
	s.drop(l)
}
