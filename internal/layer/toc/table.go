package toc

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
	"sort"
)

// Limits of a Table. A layer beyond them has no table; an encoding beyond them
// is refused, before memory is taken for it.
const (
	MaxTable     = 128 << 20 // bytes of an encoded table
	MaxTableRuns = 4 << 20   // pieces of the tar that a table holds
	MaxTableSize = 1 << 44   // bytes of the tar
)

// Span is Length bytes of a tar from Offset on.
type Span struct{ Offset, Length int64 }

// Table is what of a tar its table of contents is made of: the bytes that
// headers take, with zeros in place of everything else. Read gives the same for
// a Table as for the tar. It is safe for concurrent use.
type Table struct {
	size int64
	runs []run
	data []byte // of all runs, one after the other
}

// run is a piece of the tar: its bytes end where the next run's begin.
type run struct {
	off int64
	at  uint32 // in Table.data
}

// MakeTable reads the headers of the tar of size bytes in r, and the extra
// bytes, which may overlap with each other and with headers. The error of a tar
// that Read refuses is Read's; ErrLimit says that the table would be too large.
func MakeTable(r io.ReaderAt, size int64, extra []Span) (*Table, error) {
	if size < 0 || size > MaxTableSize {
		return nil, limitError(fmt.Sprintf("tar of %d bytes", size))
	}
	r = io.NewSectionReader(r, 0, size)
	spans, err := headerSpans(r)
	if err != nil {
		return nil, err
	}
	spans, err = joinSpans(append(spans, extra...), size)
	if err != nil {
		return nil, err
	}
	return readTable(r, size, spans)
}

func limitError(why string) error { return &Error{Offset: -1, Err: ErrLimit, Why: why} }

// headerSpans finds the blocks that headers lie in. Padding belongs to them, so
// that an extended header and its entry's are one span.
func headerSpans(r io.ReaderAt) ([]Span, error) {
	var spans []Span
	s := NewScanner(r)
	s.seen = func(from, to int64) {
		to = (to + blockSize - 1) &^ (blockSize - 1)
		if n := len(spans); n > 0 && spans[n-1].Offset+spans[n-1].Length == from {
			spans[n-1].Length += to - from
			return
		}
		spans = append(spans, Span{from, to - from})
	}
	for {
		if _, err := s.Next(); err == io.EOF {
			return spans, nil
		} else if err != nil {
			return nil, err
		}
	}
}

// joinSpans sorts the spans, joins those that touch and cuts what lies beyond
// the tar, which is padding.
func joinSpans(spans []Span, size int64) ([]Span, error) {
	slices.SortFunc(spans, func(a, b Span) int { return cmp.Compare(a.Offset, b.Offset) })
	out := spans[:0]
	for _, s := range spans {
		if s.Offset < 0 || s.Length < 0 {
			return nil, fmt.Errorf("table: impossible span of %d bytes at %d", s.Length, s.Offset)
		}
		s.Length = min(s.Length, size-s.Offset)
		if s.Length <= 0 {
			continue
		}
		if n := len(out); n > 0 && out[n-1].Offset+out[n-1].Length >= s.Offset {
			last := &out[n-1]
			last.Length = max(last.Length, s.Offset+s.Length-last.Offset)
			continue
		}
		out = append(out, s)
	}
	return out, nil
}

func readTable(r io.ReaderAt, size int64, spans []Span) (*Table, error) {
	var total int64
	for _, s := range spans {
		total += s.Length
	}
	if total > MaxTable || len(spans) > MaxTableRuns {
		return nil, limitError(fmt.Sprintf("table of %d bytes in %d pieces", total, len(spans)))
	}
	t := &Table{size: size, runs: make([]run, len(spans)), data: make([]byte, total)}
	at := int64(0)
	for i, s := range spans {
		t.runs[i] = run{s.Offset, uint32(at)}
		if n, err := r.ReadAt(t.data[at:at+s.Length], s.Offset); int64(n) < s.Length {
			return nil, fmt.Errorf("read headers at byte %d: %w", s.Offset, unexpected(err))
		}
		at += s.Length
	}
	if n := t.encodedSize(); n > MaxTable {
		return nil, limitError(fmt.Sprintf("table of %d bytes", n))
	}
	return t, nil
}

func unexpected(err error) error {
	if err == nil || err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

// Size is the number of bytes of the tar.
func (t *Table) Size() int64 { return t.size }

// Runs calls f with each piece of the tar that the table holds, in order. The
// bytes are the table's.
func (t *Table) Runs(f func(off int64, b []byte)) {
	for i := range t.runs {
		f(t.runs[i].off, t.bytes(i))
	}
}

func (t *Table) bytes(i int) []byte {
	if i+1 < len(t.runs) {
		return t.data[t.runs[i].at:t.runs[i+1].at]
	}
	return t.data[t.runs[i].at:]
}

// ReadAt reads the tar with zeros where the table holds nothing.
func (t *Table) ReadAt(p []byte, off int64) (int, error) {
	if off < 0 {
		return 0, errors.New("read table: negative offset")
	}
	if off >= t.size {
		return 0, io.EOF
	}
	n := int(min(int64(len(p)), t.size-off))
	b := p[:n]
	clear(b)
	i := sort.Search(len(t.runs), func(i int) bool { return t.runs[i].off+int64(len(t.bytes(i))) > off })
	for ; i < len(t.runs) && t.runs[i].off < off+int64(n); i++ {
		if skip := t.runs[i].off - off; skip >= 0 {
			copy(b[skip:], t.bytes(i))
		} else {
			copy(b, t.bytes(i)[-skip:])
		}
	}
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

// MarshalBinary encodes the table as docs/design/formats.md has it. There is no error.
func (t *Table) MarshalBinary() ([]byte, error) {
	return append(t.appendRuns(make([]byte, 0, t.encodedSize())), t.data...), nil
}

func (t *Table) appendRuns(b []byte) []byte {
	b = binary.AppendUvarint(b, uint64(t.size))
	b = binary.AppendUvarint(b, uint64(len(t.runs)))
	end := int64(0)
	for i := range t.runs {
		n := int64(len(t.bytes(i)))
		b = binary.AppendUvarint(b, uint64(t.runs[i].off-end))
		b = binary.AppendUvarint(b, uint64(n))
		end = t.runs[i].off + n
	}
	return b
}

func (t *Table) encodedSize() int {
	n := uvarintLen(t.size) + uvarintLen(int64(len(t.runs))) + len(t.data)
	end := int64(0)
	for i := range t.runs {
		k := int64(len(t.bytes(i)))
		n += uvarintLen(t.runs[i].off-end) + uvarintLen(k)
		end = t.runs[i].off + k
	}
	return n
}

func uvarintLen(v int64) int {
	n := 1
	for ; v >= 0x80; v >>= 7 {
		n++
	}
	return n
}

// ParseTable reads an encoded table, which may be hostile. It keeps b. Its
// errors wrap ErrCorrupt or ErrLimit.
func ParseTable(b []byte) (*Table, error) {
	if len(b) > MaxTable {
		return nil, limitError(fmt.Sprintf("table of %d bytes", len(b)))
	}
	d := tableDecoder{b}
	size, ok1 := d.number(MaxTableSize)
	count, ok2 := d.number(MaxTableRuns)
	if !ok1 || !ok2 || count > int64(len(d.b)/3) { // a run takes three bytes and more
		return nil, tableError("bad size or number of runs")
	}
	t := &Table{size: size, runs: make([]run, count)}
	var off, at int64
	for i := range t.runs {
		skip, ok1 := d.number(size - off)
		off += skip
		n, ok2 := d.number(size - off)
		if !ok1 || !ok2 || n == 0 || skip == 0 && i > 0 {
			return nil, tableError(fmt.Sprintf("bad run %d", i))
		}
		t.runs[i] = run{off, uint32(at)}
		off += n
		if at += n; at > int64(len(d.b)) {
			return nil, tableError("runs longer than their bytes")
		}
	}
	if at != int64(len(d.b)) {
		return nil, tableError("runs and bytes differ in length")
	}
	t.data = d.b
	return t, nil
}

func tableError(why string) error {
	return &Error{Offset: -1, Err: ErrCorrupt, Why: "table: " + why}
}

type tableDecoder struct{ b []byte }

// number takes a number from 0 to most.
func (d *tableDecoder) number(most int64) (int64, bool) {
	v, n := binary.Uvarint(d.b)
	if n <= 0 || v > uint64(most) {
		return 0, false
	}
	d.b = d.b[n:]
	return int64(v), true
}
