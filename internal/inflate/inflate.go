// Package inflate turns a compressed layer into its tar as fast as one core
// can, and remembers places in the stream where it could begin again.
package inflate

import (
	"io"

	"dewpoint/internal/image"
)

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

// Reader inflates one stream. It is not safe for concurrent use.
type Reader interface {
	// Read reads uncompressed bytes. It never reads past a restart point that
	// was asked for by Mark: it returns the bytes up to it, and Point then
	// gives the point at exactly the bytes read so far. A stream that ends
	// early gives io.ErrUnexpectedEOF, a broken one an error that wraps ErrCorrupt.
	io.Reader
	// Mark asks for a restart point at the next place where the stream allows
	// one (a deflate block's start, a gzip member's or zstd frame's start).
	Mark()
	// Point returns the restart point at the current position, if the last
	// Read stopped at one that Mark asked for.
	Point() (Point, bool)
	// In is the number of compressed bytes consumed so far: bytes before In
	// are not needed again, save the one that holds a Point's bits.
	In() int64
	Close() error
}

// NewReader inflates src from its beginning, or from p if p is not nil; then
// src gives the compressed bytes from p.In on. Plain streams are passed
// through; every position of theirs is a restart point.
func NewReader(src io.Reader, c image.Compression, p *Point) (Reader, error) {
	panic("to be written")
}
