package inflate

import (
	"encoding/binary"
	"fmt"
	"io"

	"github.com/klauspost/compress/zstd"
)

const (
	// smallWindow is the largest window for which a decoder may hold twice its
	// size, which saves it from moving the window down often.
	smallWindow = 2 << 20
	// zstdRead bounds a read, so that bytes do not wait for many more blocks.
	zstdRead = 128 << 10
)

// zstdReader reads a row of zstd frames (RFC 8878). It hands each to the
// decoder as a stream of its own, so that it knows where frames meet.
type zstdReader struct {
	in      input
	frame   *frame // the frame being decoded, nil between frames
	dec     *zstd.Decoder
	low     bool    // dec saves memory
	carry   [1]byte // decoded and not yet read, if carried
	carried bool
	out     int64
	began   bool // a frame has been seen
	marked  bool
	atPoint bool
	err     error
}

func newZstd(src io.Reader, p *Point) (*zstdReader, error) {
	return &zstdReader{in: newInput(src, p.In), out: p.Out}, nil
}

func (z *zstdReader) Mark() { z.marked = true }

func (z *zstdReader) In() int64 { return z.in.pos() }

func (z *zstdReader) Point() (Point, bool) {
	return Point{In: z.in.pos(), Out: z.out}, z.atPoint
}

func (z *zstdReader) Close() error {
	if z.dec != nil {
		z.dec.Close()
	}
	z.dec, z.frame = nil, nil
	z.in.close()
	z.err, z.atPoint = errClosed, false
	return nil
}

func (z *zstdReader) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	z.atPoint = false
	n := 0
	for n == 0 && z.err == nil {
		if z.frame == nil {
			z.err = z.begin()
			continue
		}
		n, z.err = z.decode(p[:min(len(p), zstdRead)])
	}
	if n == 0 {
		return 0, z.err
	}
	z.out += int64(n)
	if z.marked && z.frame == nil && z.err == nil {
		z.err = z.stopAtFrame()
	}
	return n, nil
}

// begin skips to the next frame and sets the decoder to it. io.EOF is the end
// of the stream.
func (z *zstdReader) begin() error {
	if err := z.skip(); err != nil {
		if !z.began {
			return early(err)
		}
		return err
	}
	f := &frame{in: &z.in}
	window, err := f.header()
	if err != nil {
		return err
	}
	if err := z.decoder(window > smallWindow); err != nil {
		return err
	}
	z.began, z.frame = true, f
	return z.dec.Reset(f)
}

// decoder sees to it that there is a decoder, one that saves memory if low.
func (z *zstdReader) decoder(low bool) (err error) {
	if z.dec != nil && z.low == low {
		return nil
	}
	if z.dec != nil {
		z.dec.Close()
	}
	z.low = low
	z.dec, err = zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(low),
		zstd.WithDecoderMaxWindow(MaxWindow), zstd.WithDecoderMaxMemory(1<<62))
	return err
}

// decode reads output of the frame. Once the frame's bytes are used up, it
// reads until the decoder says so too, if need be one byte more than fits, so
// that the frame's last bytes come with its end. Then frame becomes nil.
func (z *zstdReader) decode(p []byte) (n int, err error) {
	if z.carried {
		n, z.carried = copy(p, z.carry[:]), false
	}
	for err == nil && n < len(p) && (n == 0 || z.frame.done()) {
		var k int
		k, err = z.dec.Read(p[n:])
		n += k
	}
	if err == nil && n == len(p) && z.frame.done() {
		var k int
		k, err = z.dec.Read(z.carry[:])
		z.carried = k > 0
	}
	if err == io.EOF && z.carried {
		err = nil // comes again
	}
	return n, z.verdict(err)
}

// verdict makes of the decoder's error the reader's.
func (z *zstdReader) verdict(err error) error {
	switch {
	case err == nil:
		return nil
	case z.frame.err != nil:
		return z.frame.err
	case err == io.EOF && z.frame.done():
		z.frame = nil
		return nil
	case err == io.EOF:
		return z.refuse("frame goes on behind its end")
	}
	return z.refuse(err.Error())
}

// stopAtFrame makes the current position the point that Mark asked for, if
// another frame follows.
func (z *zstdReader) stopAtFrame() error {
	err := z.skip()
	if err == nil {
		z.marked, z.atPoint = false, true
	}
	return err
}

const (
	zstdMagic     = 0xfd2fb528
	zstdSkipMagic = 0x184d2a50 // to ...5f
)

// skip passes over skippable frames to the magic number of a data frame.
func (z *zstdReader) skip() error {
	for {
		b, err := z.in.peek(4)
		if err == io.EOF && len(b) > 0 {
			err = io.ErrUnexpectedEOF
			if b[0] != zstdMagic&0xff && b[0]&0xf0 != zstdSkipMagic&0xf0 {
				err = z.refuse("no zstd frame")
			}
		}
		if err != nil {
			return err
		}
		switch magic := binary.LittleEndian.Uint32(b); {
		case magic == zstdMagic:
			return nil
		case magic&^0xf != zstdSkipMagic:
			return z.refuse("no zstd frame")
		}
		b, err = z.in.next(8)
		if err != nil {
			return err
		}
		if err := z.discard(int64(binary.LittleEndian.Uint32(b[4:]))); err != nil {
			return err
		}
		z.began = true
	}
}

func (z *zstdReader) refuse(what string) error {
	return fmt.Errorf("zstd: %w at byte %d", corrupt(what), z.in.pos())
}

func (z *zstdReader) discard(n int64) error {
	for n > 0 {
		if len(z.in.unread()) == 0 {
			if err := z.in.fill(); err != nil {
				return early(err)
			}
		}
		k := min(n, int64(len(z.in.unread())))
		z.in.r += int(k)
		n -= k
	}
	return nil
}

// frame reads the compressed bytes of one frame and then gives io.EOF.
type frame struct {
	in       *input
	checksum bool
	state    frameState
	left     int64 // bytes of the current part that are still to be read
	err      error // of the source, or of the frame's shape
}

// frameState says what the current part is.
type frameState int

const (
	frameHeader frameState = iota
	frameBlock             // a block with its header, more will follow
	frameLast              // the last block
	frameSum               // the checksum
)

// header looks at the frame's header without consuming it, and returns the
// window that decoding the frame takes. It refuses windows over MaxWindow.
func (f *frame) header() (window uint64, err error) {
	b, err := f.in.peek(5)
	if err != nil {
		return 0, early(err)
	}
	desc := b[4]
	single := desc&(1<<5) != 0
	f.checksum = desc&(1<<2) != 0
	size := 5 + [4]int{0, 1, 2, 4}[desc&3] + [4]int{0, 2, 4, 8}[desc>>6]
	if !single || desc>>6 == 0 {
		size++ // window descriptor, or content size of one byte
	}
	if b, err = f.in.peek(size); err != nil {
		return 0, early(err)
	}
	f.left = int64(size)
	if single {
		window = contentSize(b[size-max(1, [4]int{0, 2, 4, 8}[desc>>6]) : size])
	} else {
		window = 1 << (10 + b[5]>>3)
		window += window / 8 * uint64(b[5]&7)
	}
	if window > MaxWindow {
		return 0, fmt.Errorf("zstd: frame at byte %d needs %d MiB, more than %d MiB are not given: %w",
			f.in.pos(), window>>20, MaxWindow>>20, ErrWindow)
	}
	return window, nil
}

func contentSize(b []byte) uint64 {
	switch len(b) {
	case 1:
		return uint64(b[0])
	case 2:
		return uint64(binary.LittleEndian.Uint16(b)) + 256
	case 4:
		return uint64(binary.LittleEndian.Uint32(b))
	}
	return binary.LittleEndian.Uint64(b)
}

// done reports whether the whole frame has been read.
func (f *frame) done() bool {
	return f.left == 0 && (f.state == frameSum || f.state == frameLast && !f.checksum)
}

func (f *frame) Read(p []byte) (int, error) {
	if f.err != nil {
		return 0, f.err
	}
	if f.left == 0 {
		if f.done() {
			return 0, io.EOF
		}
		f.err = f.nextPart()
	}
	if f.err == nil && len(f.in.unread()) == 0 {
		f.err = early(f.in.fill())
	}
	if f.err != nil {
		return 0, f.err
	}
	b := f.in.unread()
	n := copy(p, b[:min(f.left, int64(len(b)))])
	f.in.r += n
	f.left -= int64(n)
	return n, nil
}

// nextPart finds the next part's length.
func (f *frame) nextPart() error {
	if f.state == frameLast {
		f.state, f.left = frameSum, 4
		return nil
	}
	b, err := f.in.peek(3)
	if err != nil {
		return early(err)
	}
	h := uint32(b[0]) | uint32(b[1])<<8 | uint32(b[2])<<16
	f.state, f.left = frameBlock, 3+int64(h>>3)
	if h&1 != 0 {
		f.state = frameLast
	}
	switch h >> 1 & 3 {
	case 1: // one byte, repeated
		f.left = 3 + 1
	case 3:
		return fmt.Errorf("zstd: %w at byte %d", corrupt("reserved block type"), f.in.pos())
	}
	return nil
}
