package inflate

import "math/bits"

// Decoding tables. A code is looked up by the next bits of the stream, the
// first bit lowest. A primary table is indexed by primary bits; the entry of a
// longer code's prefix names a subtable indexed by the bits that follow.
//
// An entry's low six bits are the number of stream bits that it stands for,
// extra bits included, so that one shift passes over all of them. Its kinds:
//
//	literals   bits 6-7: how many, 1 to 3; bits 8-31: the bytes, first lowest
//	copies     bits 8-11: the code's own length; bits 16-30: length or distance
//	           to which the extra bits are added
//	subtable   entrySpecial and entrySub; bits 8-11: index bits; bits 16-31: start
//	end        entrySpecial and entryEnd
//	invalid    entrySpecial alone
const (
	entryCount   = 3 << 6
	entryOne     = 1 << 6
	entrySpecial = 1 << 15
	entrySub     = 1 << 14
	entryEnd     = 1 << 13
	entryLen     = 1<<6 - 1

	litBits  = 12
	distBits = 10
	preBits  = 7
	maxBits  = 15

	maxLit  = 288
	maxDist = 32

	// A subtable holds at least two codes, so there are at most half as many as
	// codes, each with 1<<(maxBits-primary) entries. Sizes are powers of two,
	// because an index masked to one needs no check.
	litSize  = 8192 // at least 1<<litBits + maxLit/2<<(maxBits-litBits)
	distSize = 2048 // at least 1<<distBits + maxDist/2<<(maxBits-distBits)
)

// litProto, distProto and preProto are the entries of each symbol without the
// code's length (RFC 1951, 3.2.5).
var litProto, distProto, preProto = protos()

func protos() (lit, dist, pre [maxLit]uint32) {
	for i := range lit {
		lit[i], dist[i] = entrySpecial, entrySpecial
	}
	for i := range 256 {
		lit[i] = uint32(i)<<8 | entryOne
	}
	lit[256] |= entryEnd
	base := uint32(3)
	for i := range 28 {
		extra := uint32(max(0, i/4-1))
		lit[257+i] = base<<16 | extra
		base += 1 << extra
	}
	lit[285] = 258 << 16
	base = 1
	for i := range 30 {
		extra := uint32(max(0, i/2-1))
		dist[i] = base<<16 | extra
		base += 1 << extra
	}
	for i := range 19 {
		pre[i] = uint32(i) << 16
	}
	return lit, dist, pre
}

func withLen(proto uint32, n int) uint32 {
	if proto&entryCount != 0 {
		return proto + uint32(n)
	}
	return proto + uint32(n)*0x101
}

// build fills table from the code lengths of the symbols and returns the
// longest one. It refuses codes that are oversubscribed, and incomplete ones
// save a single code of one bit or none at all, like zlib.
func build(table []uint32, primary int, lens []uint8, proto *[maxLit]uint32) (longest int, ok bool) {
	var count [maxBits + 1]int
	for _, l := range lens {
		count[l]++
	}
	count[0] = 0
	left, at := 1, 0
	var offs [maxBits + 2]int
	for l := 1; l <= maxBits; l++ {
		left = left<<1 - count[l]
		if left < 0 {
			return 0, false
		}
		if count[l] > 0 {
			longest = l
		}
		offs[l] = at
		at += count[l]
	}
	if left > 0 && longest > 1 {
		return 0, false
	}
	var sorted [maxLit + maxDist]uint16
	for s, l := range lens {
		if l > 0 {
			sorted[offs[l]] = uint16(s)
			offs[l]++
		}
	}
	b := builder{table: table, primary: primary, longest: longest, proto: proto}
	b.fill(sorted[:at], &count)
	return longest, true
}

type builder struct {
	table            []uint32
	primary, longest int
	proto            *[maxLit]uint32
}

// fill enters the symbols, which are sorted by code. Codes of one length fill
// the table of that size; doubling it repeats them for the next length.
func (b *builder) fill(sorted []uint16, count *[maxBits + 1]int) {
	t := b.table
	t[0] = entrySpecial
	code, size := uint32(0), 1
	for l := 1; l <= b.primary; l++ {
		copy(t[size:2*size], t[:size])
		size *= 2
		for _, s := range sorted[:count[l]] {
			t[code] = withLen(b.proto[s], l)
			code = nextCode(code, l)
		}
		sorted = sorted[count[l]:]
	}
	if len(sorted) > 0 {
		b.fillSub(code, sorted, count)
	}
}

// fillSub enters the codes that are longer than the primary table's index.
func (b *builder) fillSub(code uint32, sorted []uint16, count *[maxBits + 1]int) {
	sub := b.longest - b.primary
	prefix, start, end := ^uint32(0), 0, 1<<b.primary
	for l := b.primary + 1; l <= b.longest; l++ {
		for _, s := range sorted[:count[l]] {
			if p := code & (1<<b.primary - 1); p != prefix {
				prefix, start = p, end
				end += 1 << sub
				b.table[p] = uint32(start)<<16 | entrySpecial | entrySub | uint32(sub)<<8 | uint32(b.primary)
			}
			e := withLen(b.proto[s], l-b.primary)
			for i := int(code >> b.primary); i < 1<<sub; i += 1 << (l - b.primary) {
				b.table[start+i] = e
			}
			code = nextCode(code, l)
		}
		sorted = sorted[count[l]:]
	}
}

// nextCode adds one to a code of n bits whose first bit is lowest. The last
// code's successor is 0.
func nextCode(code uint32, n int) uint32 {
	free := ^code & (1<<n - 1)
	if free == 0 {
		return 0
	}
	top := uint32(1) << (bits.Len32(free) - 1)
	return code&(top-1) | top
}

// pack joins literals that follow each other within one index of the primary
// literal table into one entry.
func pack(t *[litSize]uint32, shortest int) {
	if 2*shortest > litBits {
		return
	}
	for i := 1<<litBits - 1; i >= 0; i-- {
		e := t[i]
		if e&entryCount == 0 || int(e&entryLen)+shortest > litBits {
			continue
		}
		n := e & entryLen
		second := t[i>>n]
		if second&entryCount == 0 || n+second&entryLen > litBits {
			continue
		}
		n += second & entryLen
		e = e&0xff00 | second&0xff00<<8 | 2*entryOne | n
		third := t[i>>n]
		if third&entryCount != 0 && n+third&entryLen <= litBits {
			e = e&0xffff00 | third&0xff00<<16 | 3*entryOne | (n + third&entryLen)
		}
		t[i] = e
	}
}
