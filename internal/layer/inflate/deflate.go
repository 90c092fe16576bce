package inflate

import (
	"bytes"
	"sync"
)

// decoder is the engine in pure Go (RFC 1951).
type decoder struct {
	bits uint64 // the next n&63 bits of the stream; between calls n is 0 to 7
	n    uint64

	block  blockKind
	last   bool // the block is the stream's last
	stored int  // bytes left of a stored block
	fixed  bool // the tables are those of fixed blocks

	lit  [litSize]uint32
	dist [distSize]uint32

	hist    [windowSize]byte // hist[:histLen] is the output before the next
	histLen int
}

type blockKind int

const (
	noBlock blockKind = iota // a block's header comes next
	storedBlock
	codedBlock
)

// span is the memory that one call of inflate works on.
type span struct {
	in, out []byte
	ip, op  int
}

// decoders keeps what Close gave back: tables, mostly.
var decoders = sync.Pool{New: func() any { return new(decoder) }}

func newDecoder() *decoder {
	d := decoders.Get().(*decoder)
	d.reset(nil, 0, 0)
	return d
}

func (d *decoder) close() { decoders.Put(d) }

func (d *decoder) reset(window []byte, bits, n uint8) {
	d.bits, d.n = uint64(bits), uint64(n)
	d.block, d.last = noBlock, false
	d.histLen = copy(d.hist[:], window)
}

func (d *decoder) held() uint8 { return uint8(d.n) }

func (d *decoder) window() []byte { return bytes.Clone(d.hist[:d.histLen]) }

func (d *decoder) inflate(in, out []byte, stop bool) (nIn, nOut int, st status, err error) {
	s := span{in: in, out: out}
	st, err = d.run(&s, stop)
	d.remember(out[:s.op])
	return s.ip, s.op, st, err
}

// remember keeps the last windowSize bytes of the old window and out.
func (d *decoder) remember(out []byte) {
	if len(out) >= windowSize {
		d.histLen = copy(d.hist[:], out[len(out)-windowSize:])
		return
	}
	if over := d.histLen + len(out) - windowSize; over > 0 {
		d.histLen = copy(d.hist[:], d.hist[over:d.histLen])
	}
	d.histLen += copy(d.hist[d.histLen:], out)
}

func (d *decoder) run(s *span, stop bool) (status, error) {
	for {
		if d.block == noBlock {
			if whole, err := d.header(s); err != nil || !whole {
				return needInput, err
			}
		}
		st, err := d.body(s)
		if err != nil || st != atBlock {
			return st, err
		}
		d.block = noBlock
		if d.last {
			d.bits, d.n = 0, 0
			return atEnd, nil
		}
		if stop {
			return atBlock, nil
		}
	}
}

// body decodes the block; atBlock says that it has ended.
func (d *decoder) body(s *span) (status, error) {
	if d.block == storedBlock {
		return d.copyStored(s), nil
	}
	st, err := d.coded(s)
	d.n &= 63
	s.ip -= int(d.n >> 3) // whole bytes go back to the input
	d.n &= 7
	d.bits &= 1<<d.n - 1
	return st, err
}

func (d *decoder) copyStored(s *span) status {
	want := min(d.stored, len(s.in)-s.ip)
	n := copy(s.out[s.op:], s.in[s.ip:s.ip+want])
	s.ip += n
	s.op += n
	d.stored -= n
	switch {
	case d.stored == 0:
		return atBlock
	case n < want:
		return outFull
	}
	return needInput
}

// coded decodes a block of codes: by fast while the margins allow it, else by step.
func (d *decoder) coded(s *span) (status, error) {
	for {
		v := edge
		if len(s.in)-s.ip >= fastIn {
			s.ip, s.op, v = d.fast(s.in, s.ip, s.out, s.op)
		}
		if v == edge && len(s.out)-s.op < fastOut {
			return outFull, nil
		}
		if v == edge {
			v = d.step(s)
		}
		switch v {
		case blockEnd:
			return atBlock, nil
		case short:
			return needInput, nil
		case badCode:
			return needInput, corrupt("invalid deflate code")
		case badDistance:
			return needInput, corrupt("deflate distance too far back")
		}
	}
}

// step decodes one entry of the literal table, and the distance after a
// length, if the input has all of its bits; if not, it changes nothing. The
// output has room for fastOut bytes.
func (d *decoder) step(s *span) verdict {
	d.n &= 63
	for d.n <= 55 && s.ip < len(s.in) {
		d.bits |= uint64(s.in[s.ip]) << d.n
		s.ip++
		d.n += 8
	}
	c := cursor{bits: d.bits, left: int(d.n)}
	e, length := c.lookup(d.lit[:], litBits)
	switch {
	case c.left < 0:
		return short
	case e&entryCount != 0:
		store32(s.out, s.op, e>>8)
		s.op += int(e >> 6 & 3)
	case e&entrySpecial == 0:
		e, dist := c.lookup(d.dist[:], distBits)
		switch {
		case c.left < 0:
			return short
		case e&entrySpecial != 0:
			return badCode
		case !d.copySlow(s.out, s.op, dist, length):
			return badDistance
		}
		s.op += length
	case e&entryEnd == 0:
		return badCode
	}
	d.bits, d.n = c.bits, uint64(c.left)
	if e&entryCount == 0 && e&entryEnd != 0 {
		return blockEnd
	}
	return edge
}

// cursor reads codes from a number of bits; left is negative once it has read
// more than there were.
type cursor struct {
	bits uint64
	left int
}

// lookup reads a code and its extra bits. An invalid code of fewer bits than a
// code may have is one that has not arrived whole.
func (c *cursor) lookup(t []uint32, primary int) (e uint32, value int) {
	e = t[c.bits&(1<<primary-1)]
	if e&entryCount == 0 && e&entrySub != 0 {
		c.skip(e)
		e = t[uint64(e>>16)+c.bits&(1<<(e>>8&15)-1)]
	}
	if e&entryCount == 0 && e&(entrySpecial|entryEnd) == entrySpecial && c.left < maxBits {
		c.left = -1
	}
	value = int(e>>16) + int(c.bits&(1<<(e&entryLen)-1)>>(e>>8&15))
	c.skip(e)
	return e, value
}

func (c *cursor) skip(e uint32) {
	c.bits >>= e & entryLen
	c.left -= int(e & entryLen)
}

// copySlow copies a match and writes nothing behind it.
func (d *decoder) copySlow(out []byte, op, dist, length int) bool {
	if dist > op {
		return d.copyOld(out, op, dist, length)
	}
	for i := op; i < op+length; i++ {
		out[i] = out[i-dist]
	}
	return true
}
