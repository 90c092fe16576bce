package inflate

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"io"
)

// directRead is the least read that is decoded straight into the reader's
// memory; smaller ones go through a buffer.
const directRead = 64 << 10

// stage says what the bytes at the input position are.
type stage int

const (
	inHeader  stage = iota // a member must start here
	resumed                // inside a body, at bit resume.Bit of the next byte
	inBody                 //
	inTrailer              //
	between                // a member, zeros or the end
)

// gzipReader reads a row of gzip members (RFC 1952).
type gzipReader struct {
	in     input
	eng    engine
	stage  stage
	resume *Point // until the first byte is there
	crc    uint32 // of the member's output so far
	length uint32 // of the member's output so far, mod 2^32
	out    int64  // bytes decoded

	marked  bool
	atPoint bool   // decoding stopped where Mark wanted
	ahead   []byte // decoded and not yet read, a part of buf
	buf     []byte // for small reads, made when needed
	err     error  // what comes after ahead
}

func newGzip(src io.Reader, eng engine, p *Point) *gzipReader {
	z := &gzipReader{in: newInput(src, p.In), eng: eng, out: p.Out}
	if !p.startsUnit() {
		z.stage, z.resume, z.crc, z.length = resumed, p, p.CRC, p.Length
	}
	return z
}

func (z *gzipReader) Mark() { z.marked = true }

func (z *gzipReader) In() int64 { return z.in.pos() }

func (z *gzipReader) Close() error {
	if z.err != errClosed {
		z.eng.close()
		z.in.close()
		putBuffer(z.buf)
		z.buf, z.ahead = nil, nil
		z.err, z.atPoint = errClosed, false
	}
	return nil
}

func (z *gzipReader) Point() (Point, bool) {
	if !z.atPoint || len(z.ahead) > 0 {
		return Point{}, false
	}
	p := Point{In: z.in.pos(), Out: z.out}
	if z.stage == inBody {
		p.CRC, p.Length, p.Window = z.crc, z.length, z.eng.window()
		if held := z.eng.held(); held > 0 {
			p.In--
			p.Bit = 8 - held
		}
	}
	return p, true
}

func (z *gzipReader) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	if len(z.ahead) == 0 {
		if z.err != nil {
			return 0, z.err
		}
		if len(p) >= directRead {
			return z.direct(p)
		}
		if z.buf == nil {
			z.buf = getBuffer()
		}
		n, err := z.direct(z.buf)
		if n == 0 {
			return 0, err
		}
		z.ahead = z.buf[:n]
	}
	n := copy(p, z.ahead)
	z.ahead = z.ahead[n:]
	return n, nil
}

// direct decodes into dst until it is full, input would have to be waited for,
// a point is reached or there is an error. It returns bytes or the error.
func (z *gzipReader) direct(dst []byte) (int, error) {
	z.atPoint = false
	n := 0
	for z.err == nil && !z.atPoint && len(dst)-n >= minOut {
		more, wait := z.step(dst[n:], n > 0)
		n += more
		if wait && n > 0 {
			break
		}
		if wait {
			z.err = z.wait()
		}
	}
	if n > 0 {
		return n, nil
	}
	return 0, z.err
}

// wait waits for input. The end of the input is no error between members only.
func (z *gzipReader) wait() error {
	err := z.in.fill()
	if z.stage != between {
		return early(err)
	}
	return err
}

// step goes one stage on. It returns the bytes written to dst and whether the
// input has to be waited for. got says that dst is not the Read's first piece.
func (z *gzipReader) step(dst []byte, got bool) (n int, wait bool) {
	switch z.stage {
	case inBody:
		return z.body(dst, got)
	case resumed:
		if len(z.in.unread()) == 0 {
			return 0, true
		}
		z.begin()
	case inHeader:
		if z.err = z.header(); z.err == nil {
			z.stage = inBody
			z.crc, z.length = 0, 0
			z.eng.reset(nil, 0, 0)
		}
	case inTrailer:
		if z.err = z.trailer(); z.err == nil {
			z.stage = between
		}
	case between:
		if len(z.in.unread()) == 0 {
			return 0, true
		}
		z.err = z.nextMember(got)
	}
	return 0, false
}

// begin gives the engine the state of the point to resume at.
func (z *gzipReader) begin() {
	p := z.resume
	var bits, n uint8
	if p.Bit > 0 {
		bits, n = z.in.unread()[0]>>p.Bit, 8-p.Bit
		z.in.r++
	}
	z.eng.reset(p.Window, bits, n)
	z.resume, z.stage = nil, inBody
}

func (z *gzipReader) body(dst []byte, got bool) (n int, wait bool) {
	used, n, st, err := z.eng.inflate(z.in.unread(), dst, z.marked)
	z.in.r += used
	z.crc = crc32.Update(z.crc, crc32.IEEETable, dst[:n])
	z.length += uint32(n)
	z.out += int64(n)
	switch {
	case err != nil:
		z.err = fmt.Errorf("gzip: %w at byte %d", err, z.in.pos())
	case st == atEnd:
		z.stage = inTrailer
	case st == atBlock && (got || n > 0) && z.started():
		z.stop()
	}
	return n, err == nil && st == needInput
}

// started reports whether the member has output, without which a point inside
// it could not be told from one at its start.
func (z *gzipReader) started() bool { return z.length != 0 || z.crc != 0 }

// stop makes the current position the point that Mark asked for.
func (z *gzipReader) stop() {
	if z.marked {
		z.marked, z.atPoint = false, true
	}
}

// nextMember looks at what follows a member: another one, or zeros that fill
// up a block of some medium, which gzip(1) ignores too.
func (z *gzipReader) nextMember(got bool) error {
	if z.in.unread()[0] != 0 {
		z.stage = inHeader
		if b, err := z.in.peek(2); got && err == nil && b[0] == gzipID1 && b[1] == gzipID2 {
			z.stop()
		}
		return nil
	}
	for {
		for _, c := range z.in.unread() {
			if c != 0 {
				return z.refuse("garbage after the last member")
			}
		}
		z.in.r = z.in.w
		if err := z.in.fill(); err != nil {
			return err
		}
	}
}

const (
	gzipID1, gzipID2 = 0x1f, 0x8b
	gzipDeflate      = 8

	flagHeaderCRC = 1 << 1
	flagExtra     = 1 << 2
	flagName      = 1 << 3
	flagComment   = 1 << 4
	flagReserved  = 7 << 5
)

func (z *gzipReader) refuse(what string) error {
	return fmt.Errorf("gzip: %w at byte %d", corrupt(what), z.in.pos())
}

// header consumes a member's header and checks its checksum if it has one.
func (z *gzipReader) header() error {
	h, err := z.in.next(10)
	if err != nil {
		if err == io.ErrUnexpectedEOF && len(z.in.unread()) > 0 && z.in.unread()[0] != gzipID1 {
			return z.refuse("no gzip member")
		}
		return err
	}
	if h[0] != gzipID1 || h[1] != gzipID2 {
		return z.refuse("no gzip member")
	}
	if h[2] != gzipDeflate || h[3]&flagReserved != 0 {
		return z.refuse("unknown gzip method or flags")
	}
	flags, sum := h[3], crc32.ChecksumIEEE(h)
	if flags&flagExtra != 0 {
		err = z.extra(&sum)
	}
	for _, f := range []byte{flagName, flagComment} {
		if err == nil && flags&f != 0 {
			err = z.text(&sum)
		}
	}
	if err == nil && flags&flagHeaderCRC != 0 {
		err = z.headerCRC(sum)
	}
	return err
}

func (z *gzipReader) headerCRC(sum uint32) error {
	b, err := z.in.next(2)
	if err == nil && binary.LittleEndian.Uint16(b) != uint16(sum) {
		err = z.refuse("header checksum mismatch")
	}
	return err
}

func (z *gzipReader) extra(sum *uint32) error {
	b, err := z.in.next(2)
	if err != nil {
		return err
	}
	*sum = crc32.Update(*sum, crc32.IEEETable, b)
	b, err = z.in.next(int(binary.LittleEndian.Uint16(b)))
	*sum = crc32.Update(*sum, crc32.IEEETable, b)
	return err
}

// maxText bounds the file name and the comment, which have no bound of their own.
const maxText = 64 << 10

// text consumes a string that ends with a zero byte.
func (z *gzipReader) text(sum *uint32) error {
	for range maxText {
		b, err := z.in.next(1)
		if err != nil {
			return err
		}
		*sum = crc32.Update(*sum, crc32.IEEETable, b)
		if b[0] == 0 {
			return nil
		}
	}
	return z.refuse("header text too long")
}

func (z *gzipReader) trailer() error {
	b, err := z.in.next(8)
	if err != nil {
		return err
	}
	if binary.LittleEndian.Uint32(b) != z.crc {
		return z.refuse("checksum mismatch")
	}
	if binary.LittleEndian.Uint32(b[4:]) != z.length {
		return z.refuse("length mismatch")
	}
	return nil
}
