package pack

import (
	"fmt"
	"io"

	"github.com/opencontainers/go-digest"
)

// Kind says what a part of a pack is.
type Kind int

const (
	KindTable   Kind = iota // a layer's table, decoded: Header.ParseTable reads it
	KindChunk               // a chunk's data: Chunk.Each places it
	KindPoints              // a layer's points, decoded: Header.ParsePoints reads them
	KindWindows             // some of a layer's windows, as stored and unchecked
	KindFiles               // of no use: digests of a layer's files, which Build made once
)

var kindNames = [...]string{"table", "chunk", "points", "windows", "files"}

func (k Kind) String() string {
	if k >= 0 && int(k) < len(kindNames) {
		return kindNames[k]
	}
	return "unknown"
}

// Item is one part of a pack that has passed, or a piece of windows.
type Item struct {
	Kind   Kind
	Layer  int   // of all but chunks
	Chunk  int   // of a chunk
	Offset int64 // of Data in the layer's windows
	// Data is verified, but for windows, which the segments that they help to
	// inflate prove. It is valid until the next call of Next; a table's is the
	// caller's to keep.
	Data []byte
}

// maxWindows is how many bytes of windows come at once.
const maxWindows = 256 << 10

// Stream reads a pack from its beginning to its end. It is not safe for
// concurrent use, but for Header.
type Stream struct {
	Header       *Header
	HeaderDigest digest.Digest

	r      io.Reader
	todo   []Item // what comes, in order
	stored []byte // reused
	data   []byte // reused
	err    error  // sticky
}

// Open reads the header of the pack in r. An error that does not wrap ErrInvalid
// is r's, io.ErrUnexpectedEOF at its end.
func Open(r io.Reader) (*Stream, error) {
	h, d, err := ReadHeader(r)
	if err != nil {
		return nil, err
	}
	return &Stream{Header: h, HeaderDigest: d, r: r, todo: h.items()}, nil
}

// items lists the parts in the order of the file.
func (h *Header) items() []Item {
	var out []Item
	layers := func(k Kind, has func(l *Layer) bool) {
		for i := range h.Layers {
			if has(&h.Layers[i]) {
				out = append(out, Item{Kind: k, Layer: i})
			}
		}
	}
	layers(KindTable, func(l *Layer) bool { return l.Table != nil })
	for k := range h.Chunks {
		out = append(out, Item{Kind: KindChunk, Chunk: k})
	}
	layers(KindPoints, func(l *Layer) bool { return l.Points != nil })
	layers(KindWindows, func(l *Layer) bool { return l.Windows > 0 })
	layers(KindFiles, func(l *Layer) bool { return l.Files != nil })
	return out
}

// Next returns the next part, as soon as it has passed and its digest is right,
// or io.EOF when the pack is complete. Every error is final; they are like
// those of Open.
func (s *Stream) Next() (Item, error) {
	if s.err != nil {
		return Item{}, s.err
	}
	it, err := s.next()
	s.err = err
	return it, err
}

func (s *Stream) next() (Item, error) {
	if len(s.todo) == 0 {
		return Item{}, s.end()
	}
	it := s.todo[0]
	if it.Kind == KindWindows {
		return s.windows()
	}
	s.todo = s.todo[1:]
	part := s.Header.part(it)
	stored, err := s.read(part.Length)
	if err != nil {
		return Item{}, fmt.Errorf("read pack: %s: %w", it.name(), err)
	}
	if it.Kind == KindTable {
		it.Data, err = part.decode(stored, nil)
		s.stored = nil // may be large
	} else {
		s.data, err = part.decode(stored, s.data)
		it.Data = s.data
	}
	if err != nil {
		return Item{}, fmt.Errorf("%s: %w", it.name(), err)
	}
	return it, nil
}

func (it *Item) name() string {
	if it.Kind == KindChunk {
		return fmt.Sprintf("chunk %d", it.Chunk)
	}
	return fmt.Sprintf("%s of layer %d", it.Kind, it.Layer)
}

// part is the part that an item is made of; windows have none.
func (h *Header) part(it Item) *Part {
	switch it.Kind {
	case KindTable:
		return h.Layers[it.Layer].Table
	case KindPoints:
		return h.Layers[it.Layer].Points
	case KindFiles:
		return h.Layers[it.Layer].Files
	}
	return &h.Chunks[it.Chunk].Part
}

// windows returns the next piece of the windows at the head of todo.
func (s *Stream) windows() (Item, error) {
	it := &s.todo[0]
	left := s.Header.Layers[it.Layer].Windows - it.Offset
	data, err := s.read(min(left, maxWindows))
	if err != nil {
		return Item{}, fmt.Errorf("read pack: %s: %w", it.name(), err)
	}
	out := *it
	out.Data = data
	if it.Offset += int64(len(data)); int64(len(data)) == left {
		s.todo = s.todo[1:]
	}
	return out, nil
}

// readStep is how much memory a length that someone claims is worth before
// bytes have arrived.
const readStep = 1 << 20

// read reads n bytes into the reused buffer, which grows with what arrives.
func (s *Stream) read(n int64) ([]byte, error) {
	b := s.stored[:0]
	for int64(len(b)) < n {
		if len(b) == cap(b) {
			b = append(make([]byte, 0, min(n, max(2*int64(cap(b)), readStep))), b...)
		}
		from := len(b)
		b = b[:min(int64(cap(b)), n)]
		if _, err := io.ReadFull(s.r, b[from:]); err != nil {
			return nil, early(err)
		}
	}
	s.stored = b
	return b, nil
}

// end sees to it that nothing follows the last part.
func (s *Stream) end() error {
	var one [1]byte
	_, err := io.ReadFull(s.r, one[:])
	if err == nil {
		return invalid("bytes behind its end")
	}
	if err != io.EOF {
		return fmt.Errorf("read pack: %w", err)
	}
	return io.EOF
}
