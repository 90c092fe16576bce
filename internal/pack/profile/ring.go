package profile

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
)

// event is pages that have entered the page cache: 1<<order of them from page on.
type event struct {
	at    int64 // monotonic nanoseconds
	ino   uint64
	page  int64
	dev   uint32
	order uint8
}

// layout is how the kernel writes a buffer's pages and the event in them. It
// is read from the kernel, for it differs between versions.
type layout struct {
	page   int // bytes of a page, header included
	commit field
	data   int // where the events begin in a page

	id                     uint16
	ino, index, dev, order field // order has size 0 before Linux 6.2
	size                   int   // bytes of an event that hold all of these
}

type field struct{ at, size int }

var errLayout = errors.New("layout of the kernel's trace buffers not understood")

// parseLayout reads an event's format and events/header_page.
func parseLayout(format, page string) (layout, error) {
	var l layout
	header := fields(page)
	l.commit, l.data = header["commit"], header["data"].at
	l.page = l.data + header["data"].size
	for line := range strings.Lines(format) {
		fmt.Sscanf(line, "ID: %d", &l.id)
	}
	f := fields(format)
	l.ino, l.index, l.dev, l.order = f["i_ino"], f["index"], f["s_dev"], f["order"]
	for _, f := range []field{l.ino, l.index, l.dev, l.commit} {
		if f.size != 4 && f.size != 8 {
			return l, errLayout
		}
	}
	if l.id == 0 || l.data < 16 || l.page < 512 || l.page > 1<<20 || l.order.size > 1 {
		return l, errLayout
	}
	for _, f := range []field{l.ino, l.index, l.dev, l.order} {
		l.size = max(l.size, f.at+f.size)
	}
	return l, nil
}

// fields reads lines such as "field:dev_t s_dev; offset:32; size:4; signed:0;".
func fields(format string) map[string]field {
	out := map[string]field{}
	for line := range strings.Lines(format) {
		decl, rest, ok := strings.Cut(strings.TrimSpace(line), ";")
		if !ok || !strings.HasPrefix(decl, "field:") {
			continue
		}
		words := strings.Fields(decl)
		var f field
		rest = strings.Join(strings.Fields(rest), "")
		if _, err := fmt.Sscanf(rest, "offset:%d;size:%d;", &f.at, &f.size); err == nil && f.at >= 0 &&
			f.size >= 0 {
			out[words[len(words)-1]] = f
		}
	}
	return out
}

func (f field) uint(b []byte) uint64 {
	switch f.size {
	case 1:
		return uint64(b[f.at])
	case 4:
		return uint64(binary.NativeEndian.Uint32(b[f.at:]))
	case 8:
		return binary.NativeEndian.Uint64(b[f.at:])
	}
	return 0
}

// Kinds of entries in a page; less is an event of that many words.
const (
	typePadding = 29
	typeExtend  = 30
	typeStamp   = 31
)

// each calls use with the events of one page of a buffer, in order. What does
// not make sense ends the page.
//
// A page is the time of its first event, the length of what follows, and
// entries of whole 32-bit words: in the first of them 5 bits say of which
// kind or how long it is, 27 how many nanoseconds after the last it was.
func (l *layout) each(b []byte, use func(event)) {
	if len(b) < l.data {
		return
	}
	at := binary.NativeEndian.Uint64(b)
	const length = 1<<20 - 1 // flags above
	n := int(l.commit.uint(b) & length)
	for b = b[l.data:min(l.data+n, len(b))]; len(b) >= 4; {
		word := binary.NativeEndian.Uint32(b)
		kind, delta := word&31, uint64(word>>5)
		var next uint32
		if len(b) >= 8 {
			next = binary.NativeEndian.Uint32(b[4:])
		}
		body, size := 4, 4+int(kind)*4
		switch kind {
		case typePadding:
			if delta == 0 {
				return
			}
			body, size = 0, 4+int(next)
		case typeExtend:
			at += delta + uint64(next)<<27
			body, size = 0, 8
		case typeStamp: // lacks the uppermost five bits
			at = at&^(1<<59-1) | delta | uint64(next)<<27
			body, size = 0, 8
		case 0:
			at += delta
			body, size = 8, 4+int(next)
		default:
			at += delta
		}
		if size < 4 || size > len(b) {
			return
		}
		if body > 0 && body <= size {
			l.event(b[body:size], at, use)
		}
		b = b[size:]
	}
}

func (l *layout) event(b []byte, at uint64, use func(event)) {
	if len(b) < l.size || binary.NativeEndian.Uint16(b) != l.id {
		return
	}
	use(event{
		at:    int64(at),
		ino:   l.ino.uint(b),
		page:  int64(l.index.uint(b)),
		dev:   uint32(l.dev.uint(b)),
		order: uint8(min(l.order.uint(b), 20)),
	})
}
