// Package inflate turns a compressed layer into its tar as fast as one core
// can, and remembers places in the stream where it could begin again.
//
// A stream is a row of units: gzip members, zstd frames, or nothing at all for
// plain tars. Three readers know the units (gzip.go, zstd.go, plain.go); they
// check each unit's trailer and refuse what does not belong to one.
//
// Inside a gzip member lies a deflate stream, a row of blocks. It is decoded
// by an engine, of which there are two: ISA-L through cgo (build tag isal) and
// one in pure Go, which every build contains. An engine sees raw deflate data
// only: it takes a piece of input and a piece of output space, and stops when
// one of them is used up, when the stream ends, or, if asked, where a block
// ends. Engines write into the caller's memory; the 32 KiB that later matches
// may refer to are kept beside it.
//
// The decoder's whole state at a block's start is a bit position and those 32
// KiB. Point carries them, with the running checksum of the member, so that any
// engine on any machine goes on there. A zstd frame's start needs nothing but
// its position. Layers written by zstd are mostly one frame, which then offers
// no point.
//
// Memory: a gzip reader holds 256 KiB of input, 72 KiB (Go) or 120 KiB (ISA-L,
// C memory) of decoder, and 256 KiB more once a Read asks for less than 64 KiB;
// it stays under 1 MiB. A zstd reader holds the frame's window, which MaxWindow
// bounds, and about 1 MiB. A plain reader holds nothing.
package inflate

import (
	"errors"
	"fmt"
	"io"

	"dewpoint/internal/image"
)

// ErrCorrupt is wrapped by every error that means that the bytes are not what
// they claim to be: bad framing, impossible codes, wrong checksums, other
// bytes behind the end. Trying again with the same bytes cannot help.
var ErrCorrupt = errors.New("corrupt stream")

// ErrWindow is wrapped by the error of a zstd frame that wants more than
// MaxWindow bytes of memory. The frame may well be valid.
var ErrWindow = errors.New("window too large")

// MaxWindow is the largest window in bytes that a zstd frame may ask for.
const MaxWindow = 128 << 20

// Point is a place at which inflating can begin again: everything that a
// decoder needs but the compressed bytes from In on. Points are portable
// between decoders, processes and architectures.
type Point struct {
	In     int64  // compressed bytes before the byte that holds the next bit
	Bit    uint8  // bits of that byte already used, 0 to 7 (deflate); 0 for zstd and plain
	Out    int64  // uncompressed bytes before the point
	Window []byte // up to 32 KiB of output before the point (deflate); nil at a member's or frame's start
	// Member reports what a gzip member's trailer needs: CRC32 and length of
	// the member's output so far. Zero at the start of a member.
	CRC    uint32
	Length uint32
}

// check refuses points that no stream of compression c can have.
func (p *Point) check(c image.Compression) error {
	unit := p.Bit == 0 && p.CRC == 0 && p.Length == 0 && len(p.Window) == 0
	ok := p.In >= 0 && p.Out >= 0 && p.Bit < 8 && len(p.Window) <= windowSize && int64(len(p.Window)) <= p.Out
	switch {
	case !ok, !unit && (c != image.Gzip || p.startsUnit()), c == image.Plain && p.In != p.Out:
		return fmt.Errorf("restart at %d: impossible point: %w", p.In, ErrCorrupt)
	}
	return nil
}

// startsUnit reports whether p lies at the start of a member or frame.
func (p *Point) startsUnit() bool {
	return len(p.Window) == 0
}

// Reader inflates one stream. It is not safe for concurrent use.
type Reader interface {
	// Read reads uncompressed bytes. It never reads past a restart point that
	// was asked for by Mark: it returns the bytes up to it, and Point then
	// gives the point at exactly the bytes read so far. A stream that ends
	// early gives io.ErrUnexpectedEOF, a broken one an error that wraps ErrCorrupt.
	// Errors of src come back as they are. Every error is final.
	//
	// Read may return fewer bytes than fit; it returns what it has before it
	// waits for src. Buffers of 256 KiB and more avoid a copy and cost least.
	io.Reader
	// Mark asks for a restart point at the next place where the stream allows
	// one (a deflate block's start, a gzip member's or zstd frame's start) and
	// that the decoder has not passed yet: it works ahead of Read by up to 256
	// KiB. Mark may be called at any time, and again without harm.
	Mark()
	// Point returns the restart point at the current position, if the last
	// Read stopped at one that Mark asked for. The Window is the caller's.
	Point() (Point, bool)
	// In is the number of compressed bytes consumed so far: bytes before In
	// are not needed again, save the one that holds a Point's bits.
	In() int64
	// Close frees the decoder, not src. Reads after it fail.
	Close() error
}

// NewReader inflates src from its beginning, or from p if p is not nil; then
// src gives the compressed bytes from p.In on. Plain streams are passed
// through; every position of theirs is a restart point. The first Read reads
// the first byte of src. The reader must be closed.
func NewReader(src io.Reader, c image.Compression, p *Point) (Reader, error) {
	if p == nil {
		p = &Point{}
	}
	if err := p.check(c); err != nil {
		return nil, err
	}
	switch c {
	case image.Plain:
		return &plainReader{src: src, at: p.In}, nil
	case image.Gzip:
		return newGzip(src, newEngine(), p), nil
	case image.Zstd:
		return newZstd(src, p)
	}
	return nil, fmt.Errorf("inflate: unknown compression %q", c)
}

// Engine names the deflate engine in use: "isa-l 2.30" or "go".
func Engine() string {
	return engineName()
}

var errClosed = errors.New("inflate: reader is closed")

func corrupt(what string) error {
	return fmt.Errorf("%w: %s", ErrCorrupt, what)
}
