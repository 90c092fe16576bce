package inflate

// bitReader reads a block's header. It reads no further than in; short says
// that it wanted to.
type bitReader struct {
	in    []byte
	ip    int
	bits  uint64
	n     uint
	short bool
}

func (r *bitReader) fill() {
	for r.n <= 55 && r.ip < len(r.in) {
		r.bits |= uint64(r.in[r.ip]) << r.n
		r.ip++
		r.n += 8
	}
}

// take reads k bits, at most 16, the first bit lowest.
func (r *bitReader) take(k uint) int {
	if r.n < k {
		r.fill()
	}
	if r.n < k {
		r.short = true
		return 0
	}
	v := r.bits & (1<<k - 1)
	r.bits >>= k
	r.n -= k
	return int(v)
}

func (r *bitReader) align() {
	r.bits >>= r.n & 7
	r.n &^= 7
}

// header reads a block's header and makes the block's tables. If the input
// ends within the header, header returns false and has consumed nothing.
func (d *decoder) header(s *span) (whole bool, err error) {
	r := bitReader{in: s.in, ip: s.ip, bits: d.bits, n: uint(d.n)}
	last, block := r.take(1) == 1, codedBlock
	switch kind := r.take(2); {
	case r.short:
	case kind == 0:
		block = storedBlock
		err = d.storedHeader(&r)
	case kind == 1:
		d.fixedHeader()
	case kind == 2:
		err = d.dynamicHeader(&r)
	default:
		err = corrupt("invalid deflate block type")
	}
	if r.short || err != nil {
		return false, err
	}
	d.last, d.block = last, block
	s.ip = r.ip - int(r.n>>3)
	d.n = uint64(r.n & 7)
	d.bits = r.bits & (1<<d.n - 1)
	return true, nil
}

func (d *decoder) storedHeader(r *bitReader) error {
	r.align()
	n, check := r.take(16), r.take(16)
	if r.short {
		return nil
	}
	if n != check^0xffff {
		return corrupt("invalid stored block length")
	}
	d.stored = n
	return nil
}

func (d *decoder) fixedHeader() {
	if d.fixed {
		return
	}
	var lens [maxLit]uint8
	for i := range lens {
		switch {
		case i < 144:
			lens[i] = 8
		case i < 256:
			lens[i] = 9
		case i < 280:
			lens[i] = 7
		default:
			lens[i] = 8
		}
	}
	build(d.lit[:], litBits, lens[:], &litProto)
	for i := range maxDist {
		lens[i] = 5
	}
	build(d.dist[:], distBits, lens[:maxDist], &distProto)
	d.fixed = true
}

// preOrder is the order in which the lengths of the code length code come.
var preOrder = [19]uint8{16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15}

func (d *decoder) dynamicHeader(r *bitReader) error {
	lits, dists, pres := r.take(5)+257, r.take(5)+1, r.take(4)+4
	if r.short {
		return nil
	}
	if lits > 286 || dists > 30 {
		return corrupt("too many deflate codes")
	}
	var pre [19]uint8
	for _, s := range preOrder[:pres] {
		pre[s] = uint8(r.take(3))
	}
	if r.short {
		return nil
	}
	var table [1 << preBits]uint32
	if _, ok := build(table[:], preBits, pre[:], &preProto); !ok {
		return corrupt("invalid code length code")
	}
	var lens [maxLit + maxDist]uint8
	if err := readLengths(r, &table, lens[:lits+dists]); err != nil || r.short {
		return err
	}
	return d.makeTables(lens[:lits], lens[lits:lits+dists])
}

// readLengths reads the code lengths of both alphabets, which are one list.
func readLengths(r *bitReader, table *[1 << preBits]uint32, lens []uint8) error {
	for i := 0; i < len(lens); {
		r.fill()
		e := table[r.bits&(1<<preBits-1)]
		use := uint(e & entryLen)
		if r.n < use || e&entrySpecial != 0 && r.n < preBits {
			r.short = true
			return nil
		}
		if e&entrySpecial != 0 {
			return corrupt("invalid code length")
		}
		r.bits >>= use
		r.n -= use
		sym, n, v := e>>16, 1, uint8(e>>16)
		switch {
		case sym == 16 && i == 0:
			return corrupt("invalid code length repeat")
		case sym == 16:
			n, v = 3+r.take(2), lens[max(i, 1)-1]
		case sym == 17:
			n, v = 3+r.take(3), 0
		case sym == 18:
			n, v = 11+r.take(7), 0
		}
		if r.short {
			return nil
		}
		if n > len(lens)-i {
			return corrupt("too many code lengths")
		}
		for range n {
			lens[i] = v
			i++
		}
	}
	return nil
}

func (d *decoder) makeTables(lits, dists []uint8) error {
	if lits[256] == 0 {
		return corrupt("deflate block without an end")
	}
	d.fixed = false
	if _, ok := build(d.lit[:], litBits, lits, &litProto); !ok {
		return corrupt("invalid literal code")
	}
	if _, ok := build(d.dist[:], distBits, dists, &distProto); !ok {
		return corrupt("invalid distance code")
	}
	shortest := uint8(maxBits)
	for _, l := range lits[:256] {
		if l > 0 {
			shortest = min(shortest, l)
		}
	}
	pack(&d.lit, int(shortest))
	return nil
}
