package inflate

// The margins of the fast loop: while at least fastIn bytes of input and
// fastOut bytes of output space are left, a round needs no further checks.
//
//   - A round refills the bit buffer twice. A refill reads 8 bytes and moves on
//     by at most 7, so a round reads less than 16 bytes behind its start.
//   - A round writes at most three literal entries of 3 bytes each, the last by
//     a store of 4, and one copy of at most 258 bytes, in stores of up to 16
//     bytes that begin before its end: less than 9+258+16 bytes.
const (
	fastIn  = 16
	fastOut = 9 + 258 + 16
)

// verdict says why a loop ended.
type verdict int

const (
	edge verdict = iota // a margin is reached
	blockEnd
	badCode
	badDistance
	short // the input holds no whole code (step)
)

// fast decodes symbols until a margin or the block's end is reached. It needs
// the tables and d.bits, d.n; it returns the new positions.
//
// The bit buffer holds n&63 valid bits. Bits above them may be set, if so to
// what the stream holds there, so that a refill may or them in again.
func (d *decoder) fast(in []byte, ip int, out []byte, op int) (int, int, verdict) {
	var (
		bb    = d.bits
		n     = d.n
		inEnd = len(in) - fastIn
		opEnd = len(out) - fastOut
		v     = edge
	)
	for ip <= inEnd && op <= opEnd {
		bb |= load64(in, ip) << (n & 63)
		ip += 7 - int(n>>3&7)
		n |= 56
		e := d.lit[bb&(1<<litBits-1)]
		if e&entryCount != 0 { // 56 bits
			store32(out, op, e>>8)
			op += int(e >> 6 & 3)
			bb >>= e & 63
			n -= uint64(e)
			e = d.lit[bb&(1<<litBits-1)]
			if e&entryCount != 0 { // 44 bits
				store32(out, op, e>>8)
				op += int(e >> 6 & 3)
				bb >>= e & 63
				n -= uint64(e)
				e = d.lit[bb&(1<<litBits-1)]
				if e&entryCount != 0 { // 32 bits
					store32(out, op, e>>8)
					op += int(e >> 6 & 3)
					bb >>= e & 63
					n -= uint64(e)
					continue
				}
			}
		}
		// At least 32 bits, of which a length takes up to 20.
		if e&entrySpecial != 0 {
			if e&entrySub != 0 {
				bb >>= litBits
				n -= litBits
				e = d.lit[(uint64(e>>16)+bb&(1<<(e>>8&15)-1))&(litSize-1)]
				if e&entryCount != 0 {
					store32(out, op, e>>8)
					op++
					bb >>= e & 63
					n -= uint64(e)
					continue
				}
			}
			if e&entrySpecial != 0 {
				v = badCode
				if e&entryEnd != 0 {
					v = blockEnd
					bb >>= e & 63
					n -= uint64(e)
				}
				break
			}
		}
		length := int(e>>16) + int(bb&(1<<(e&63)-1)>>(e>>8&15))
		bb >>= e & 63
		n -= uint64(e)

		bb |= load64(in, ip) << (n & 63)
		ip += 7 - int(n>>3&7)
		n |= 56
		e = d.dist[bb&(1<<distBits-1)]
		if e&entrySpecial != 0 {
			if e&entrySub == 0 {
				v = badCode
				break
			}
			bb >>= distBits
			n -= distBits
			e = d.dist[(uint64(e>>16)+bb&(1<<(e>>8&15)-1))&(distSize-1)]
			if e&entrySpecial != 0 {
				v = badCode
				break
			}
		}
		dist := int(e>>16) + int(bb&(1<<(e&63)-1)>>(e>>8&15))
		bb >>= e & 63
		n -= uint64(e)

		from := op - dist
		end := op + length
		if from < 0 {
			if !d.copyOld(out, op, dist, length) {
				v = badDistance
				break
			}
			op = end
			continue
		}
		if dist >= 16 {
			copy16(out, op, from)
			for op += 16; op < end; op += 16 {
				from += 16
				copy16(out, op, from)
			}
		} else {
			copyNear(out, op, end, dist)
		}
		op = end
	}
	d.bits, d.n = bb, n
	return ip, op, v
}

// copyNear repeats the dist bytes before op up to end, and writes up to 15
// bytes behind it. dist is 1 to 15.
func copyNear(out []byte, op, end, dist int) {
	if dist == 1 {
		v := uint64(out[op-1]) * 0x0101010101010101
		for ; op < end; op += 8 {
			store64(out, op, v)
		}
		return
	}
	step := min(dist, 8)
	for ; op < end; op += step {
		store64(out, op, load64(out, op-dist))
	}
}

// copyOld copies a match that begins before out, in the window.
func (d *decoder) copyOld(out []byte, op, dist, length int) bool {
	back := dist - op
	if back > d.histLen {
		return false
	}
	old := d.hist[d.histLen-back : d.histLen]
	n := copy(out[op:op+length], old)
	for i := op + n; i < op+length; i++ {
		out[i] = out[i-dist]
	}
	return true
}
