package pack

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sort"

	"dewpoint/internal/image"
	"dewpoint/internal/layer/inflate"

	"github.com/opencontainers/go-digest"
)

// Points are the places at which a layer's blob can be entered. They cut its
// tar into segments, numbered from 0, each of which can be had from a range of
// the blob and, for most of gzip's, a window of the pack. A plain layer has
// points too, for the digests of its segments. Points are not changed once
// made, and safe for concurrent use.
type Points struct {
	layer *Layer
	list  []point
}

// point is an inflate.Point without its window, and the segment behind it.
type point struct {
	in, out     int64
	crc, length uint32
	bit         uint8
	window      int64 // where the window lies in the layer's windows
	windowLen   uint16
	sum         [sha256.Size]byte
}

// DecodePoints reads the points of layer i as the pack stores them.
func (h *Header) DecodePoints(i int, stored []byte) (*Points, error) {
	raw, err := h.decode("points", i, h.Layers[i].Points, stored)
	if err != nil {
		return nil, err
	}
	return h.ParsePoints(i, raw)
}

// ParsePoints reads the points of layer i as a Stream gives them.
func (h *Header) ParsePoints(i int, raw []byte) (*Points, error) {
	p := &Points{layer: &h.Layers[i]}
	if err := p.parse(raw); err != nil {
		return nil, fmt.Errorf("points of layer %d: %w", i, err)
	}
	return p, nil
}

// numbers takes varints off b. After one that is out of range, ok is false and
// all are 0.
type numbers struct {
	b   []byte
	bad bool
}

// next takes a number from 0 to most.
func (d *numbers) next(most int64) int64 {
	v, n := binary.Uvarint(d.b)
	if d.bad || n <= 0 || most < 0 || v > uint64(most) {
		d.bad = true
		return 0
	}
	d.b = d.b[n:]
	return int64(v)
}

func (d *numbers) sum() (s [sha256.Size]byte) {
	if d.bad || len(d.b) < len(s) {
		d.bad = true
		return s
	}
	d.b = d.b[copy(s[:], d.b):]
	return s
}

const leastPoint = 6 + sha256.Size // bytes of an encoded point

func (p *Points) parse(raw []byte) error {
	d := numbers{b: raw}
	n := d.next(MaxPoints)
	if d.bad || n == 0 || n > int64(len(d.b)/leastPoint) {
		return invalid("bad number")
	}
	p.list = make([]point, n)
	var last point
	for i := range p.list {
		q := &p.list[i]
		*q = d.point(&last, p.layer)
		if d.bad || !p.follows(i, q) {
			return invalid("point %d is impossible", i)
		}
		last = *q
	}
	switch {
	case len(d.b) != 0:
		return invalid("bytes behind the last point")
	case last.window+int64(last.windowLen) != p.layer.Windows:
		return invalid("windows of %d bytes, the header says %d", last.window+int64(last.windowLen),
			p.layer.Windows)
	case p.layer.Size-last.out > MaxSegment:
		return invalid("the last segment has %d bytes", p.layer.Size-last.out)
	}
	return nil
}

func (d *numbers) point(last *point, l *Layer) point {
	q := point{window: last.window + int64(last.windowLen)}
	q.in = last.in + d.next(l.BlobSize-last.in)
	q.bit = uint8(d.next(7))
	q.out = last.out + d.next(l.Size-last.out)
	q.crc = uint32(d.next(1<<32 - 1))
	q.length = uint32(d.next(1<<32 - 1))
	q.windowLen = uint16(d.next(mostStored(deflateReach)))
	q.sum = d.sum()
	return q
}

// follows reports whether q may be point number i, after those before it.
func (p *Points) follows(i int, q *point) bool {
	unit := q.windowLen == 0
	c := p.layer.Compression
	switch {
	case q.in >= p.layer.BlobSize, q.out >= p.layer.Size:
		return false
	case unit && (q.bit != 0 || q.crc != 0 || q.length != 0), !unit && c != image.Gzip:
		return false
	case c == image.Plain && q.in != q.out:
		return false
	case i == 0:
		return unit && q.in == 0 && q.out == 0
	}
	last := &p.list[i-1]
	forward := q.in > last.in || q.in == last.in && q.bit > last.bit
	if q.in == 0 || i > 1 && p.list[1].in == 0 { // digests alone: no point but the start
		forward = unit && q.in == 0 && c != image.Plain
	}
	return forward && q.in-last.in <= mostStored(q.out-last.out)+pointSlack && q.out > last.out &&
		q.out-last.out <= MaxSegment
}

// appendPoint encodes q, whose predecessor is last.
func appendPoint(b []byte, last, q *point) []byte {
	for _, v := range []uint64{
		uint64(q.in - last.in), uint64(q.bit), uint64(q.out - last.out),
		uint64(q.crc), uint64(q.length), uint64(q.windowLen),
	} {
		b = binary.AppendUvarint(b, v)
	}
	return append(b, q.sum[:]...)
}

// Len is the number of segments, at least 1.
func (p *Points) Len() int { return len(p.list) }

// pointSlack is how many bytes more than its data a segment's compressed form may
// have: headers of members, and blocks without any.
const pointSlack = 64 << 10

// Enterable reports whether the blob can be entered at the points. If not, they
// have the digests of the segments and nothing else.
func (p *Points) Enterable() bool { return len(p.list) == 1 || p.list[1].in > 0 }

// Segment is the number of the segment that holds byte off of the tar, -1 if
// the tar has no such byte.
func (p *Points) Segment(off int64) int {
	if off < 0 || off >= p.layer.Size {
		return -1
	}
	return sort.Search(len(p.list), func(i int) bool { return p.list[i].out > off }) - 1
}

// Data is where segment i lies in the tar: at most MaxSegment bytes.
func (p *Points) Data(i int) (from, to int64) {
	if i+1 < len(p.list) {
		return p.list[i].out, p.list[i+1].out
	}
	return p.list[i].out, p.layer.Size
}

// Sum is what segment i hashes to.
func (p *Points) Sum(i int) digest.Digest {
	return digest.NewDigestFromBytes(digest.SHA256, p.list[i].sum[:])
}

// Blob is the range of the blob that segment i is inflated from.
func (p *Points) Blob(i int) (from, to int64) {
	if i+1 == len(p.list) {
		return p.list[i].in, p.layer.BlobSize
	}
	next := &p.list[i+1]
	if to = next.in; next.bit > 0 {
		to++
	}
	return p.list[i].in, to
}

// Window is where the window that segment i needs lies in the layer's windows
// (Header.WindowsSpan). Its Length is 0 if none is needed.
func (p *Points) Window(i int) Span {
	return Span{p.list[i].window, int64(p.list[i].windowLen)}
}

// DecodeWindow decompresses a window as stored. What it is worth shows when a
// segment is inflated with it.
func DecodeWindow(stored []byte) ([]byte, error) {
	if int64(len(stored)) > mostStored(deflateReach) {
		return nil, invalid("window of %d bytes, stored", len(stored))
	}
	w, err := inflateFrame(stored, make([]byte, 0, deflateReach))
	if err != nil {
		return nil, fmt.Errorf("window: %w", err)
	}
	if len(w) == 0 {
		return nil, invalid("empty window")
	}
	return w, nil
}

// Inflate fills dst with segment i, exactly its length, from the bytes of
// Blob(i) and the window of Window(i) as stored (nil if it needs none). Until it
// returns nil, dst is not to be used. ErrInvalid says that pack and blob do not
// fit together; a blob that ends early gives io.ErrUnexpectedEOF, and its errors
// come back wrapped. It may read blob beyond what it needs.
func (p *Points) Inflate(i int, blob io.Reader, storedWindow, dst []byte) error {
	from, to := p.Data(i)
	if i > 0 && !p.Enterable() {
		return invalid("layer %s cannot be entered", p.layer.DiffID)
	}
	if int64(len(dst)) != to-from {
		return fmt.Errorf("inflate segment %d: room for %d bytes, not %d", i, len(dst), to-from)
	}
	if err := p.inflate(&p.list[i], blob, storedWindow, dst); err != nil {
		return fmt.Errorf("inflate segment %d of layer %s: %w", i, p.layer.DiffID, err)
	}
	if sum(dst) != p.list[i].sum {
		return invalid("segment %d of layer %s is not what the pack says: bytes %d to %d of its tar", i,
			p.layer.DiffID, from, to)
	}
	return nil
}

func (p *Points) inflate(q *point, blob io.Reader, storedWindow, dst []byte) error {
	at := inflate.Point{In: q.in, Bit: q.bit, Out: q.out, CRC: q.crc, Length: q.length}
	if int(q.windowLen) != len(storedWindow) {
		return invalid("window of %d bytes, not %d", len(storedWindow), q.windowLen)
	}
	if len(storedWindow) > 0 {
		w, err := DecodeWindow(storedWindow)
		if err != nil {
			return err
		}
		at.Window = w
	}
	r, err := inflate.NewReader(blob, p.layer.Compression, &at)
	if err != nil {
		return unfit(err)
	}
	defer r.Close()
	if _, err := io.ReadFull(r, dst); err != nil {
		return unfit(early(err))
	}
	return nil
}

// unfit marks the errors that mean that the bytes are wrong.
func unfit(err error) error {
	if errors.Is(err, inflate.ErrCorrupt) || errors.Is(err, inflate.ErrWindow) {
		return invalid("%w", err)
	}
	return err
}

func encodePoints(list []point) []byte {
	b := binary.AppendUvarint(nil, uint64(len(list)))
	last := &point{}
	for i := range list {
		b = appendPoint(b, last, &list[i])
		last = &list[i]
	}
	return b
}
