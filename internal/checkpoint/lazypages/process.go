package lazypages

import (
	"errors"
	"fmt"
	"os"
	"sync"
)

// process is one address space that is being filled: one that CRIU restores, or
// a child that such a one forked since.
type process struct {
	id   uint32 // for the guard
	name string // of its file of pages
	file *os.File
	fd   int // of file, as long as it is open

	// mu is held from reading the kernel's messages until mem agrees with them,
	// and from looking into mem until the pages are copied: a page that was
	// given back meanwhile must not come again.
	mu     sync.Mutex
	mem    *memory
	gone   bool
	unsure []uint64 // faults that came before the messages that explain them
	buf    [16]message
}

func newProcess(name string, fd int, mem *memory) *process {
	return &process{name: name, file: os.NewFile(uintptr(fd), "userfaultfd"), fd: fd, mem: mem}
}

// news is what the kernel said: faults on pages that are not in, by chunk and
// offset in the file, and children.
type news struct {
	faults   []int64
	children []*process
	zeroed   int
	forget   uint64 // bytes that were given back before they were in
}

// listen reads messages until there are none. Callers hold mu.
func (p *process) listen(n *news) error {
	for !p.gone {
		msgs, err := readMessages(p.fd, p.buf[:])
		if err != nil {
			return err
		}
		if len(msgs) == 0 {
			break
		}
		for i := range msgs {
			if err := p.handle(&msgs[i], n); err != nil {
				return err
			}
		}
	}
	return p.retry(n)
}

func (p *process) handle(m *message, n *news) error {
	before := p.mem.left
	switch m.event() {
	case eventFault:
		return p.fault(m.arg(1)&^(pageSize-1), n)
	case eventFork:
		n.children = append(n.children, newProcess(p.name, m.fd(), p.mem.clone()))
	case eventRemap:
		p.mem.move(m.arg(0), m.arg(1), m.arg(2))
		wake(p.fd, m.arg(0), m.arg(2))
	case eventRemove, eventUnmap:
		p.mem.cut(m.arg(0), m.arg(1))
		wake(p.fd, m.arg(0), m.arg(1)-m.arg(0)) // who waits there asks again
	default:
		return fmt.Errorf("userfaultfd says %#x, which was not asked for", m.event())
	}
	n.forget += before - p.mem.left
	return nil
}

// fault notes a missing page, or gives an empty one where the image has none.
func (p *process) fault(addr uint64, n *news) error {
	if s := p.mem.find(addr); s != nil {
		n.faults = append(n.faults, s.offset+int64(addr-s.addr))
		return nil
	}
	err := zeroPage(p.fd, addr)
	switch {
	case err == nil:
		n.zeroed++
	case errors.Is(err, errAgain):
		p.unsure = append(p.unsure, addr)
	case errors.Is(err, errGone):
		p.end()
	default:
		return fmt.Errorf("empty page at %#x: %w", addr, err)
	}
	return nil
}

// retry looks again at faults that met a change of the address space.
func (p *process) retry(n *news) error {
	again := p.unsure
	p.unsure = nil
	for _, addr := range again {
		if p.gone {
			break
		}
		if err := p.fault(addr, n); err != nil {
			return err
		}
	}
	return nil
}

// push copies what is missing of a chunk, the page at offset first. With sure
// unset, what is not registered is kept: CRIU may not have come to it yet.
// Callers hold mu. It returns the bytes that were copied, and errAgain if
// messages must be read before it can go on.
func (p *process) push(chunk int, data []byte, first int64, sure bool) (int64, error) {
	base := int64(chunk) * ChunkSize
	var copied int64
	for _, s := range inOrder(p.mem.chunks[chunk], first) {
		at := s.offset - base
		if at+int64(s.size) > int64(len(data)) {
			return copied, fmt.Errorf("chunk %d of %s is too short: %d bytes", chunk, p.name, len(data))
		}
		n, err := p.fill(s, data[at:at+int64(s.size)], sure)
		copied += n
		if errors.Is(err, errGone) {
			p.end()
			return copied, nil
		}
		if err != nil {
			return copied, err
		}
	}
	return copied, nil
}

// fill copies one span. Pages that are in, or that are nowhere, leave mem.
func (p *process) fill(s *span, b []byte, sure bool) (copied int64, err error) {
	at, end := s.addr, s.end()
	for at < end {
		n, err := copyPages(p.fd, at, b)
		p.mem.cut(at, at+uint64(n))
		at, b, copied = at+uint64(n), b[n:], copied+int64(n)
		switch {
		case err == nil:
		case errors.Is(err, errAbsent) && !sure:
			return copied, nil
		case errors.Is(err, errAbsent):
			p.mem.cut(at, at+pageSize)
			wake(p.fd, at, pageSize)
			at, b = at+pageSize, b[pageSize:]
		case errors.Is(err, errAgain), errors.Is(err, errGone):
			return copied, err
		default:
			return copied, fmt.Errorf("page at %#x: %w", at, err)
		}
	}
	return copied, nil
}

// inOrder puts the span that holds offset first.
func inOrder(spans []*span, first int64) []*span {
	out := make([]*span, 0, len(spans))
	for _, s := range spans {
		if first >= s.offset && first < s.offset+int64(s.size) {
			out = append([]*span{s}, out...)
			continue
		}
		out = append(out, s)
	}
	return out
}

func (p *process) end() {
	p.gone = true
	p.mem.clear()
}
