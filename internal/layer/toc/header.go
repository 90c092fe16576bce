package toc

import "bytes"

const blockSize = 512

// format is the family of a header block, which decides where its fields lie.
type format uint8

const (
	formatUnknown format = iota
	formatV7
	formatUstar
	formatStar
	formatGNU
)

// block is one 512-byte block of the archive.
type block []byte

func (b block) name() []byte     { return b[0:100] }
func (b block) mode() []byte     { return b[100:108] }
func (b block) uid() []byte      { return b[108:116] }
func (b block) gid() []byte      { return b[116:124] }
func (b block) size() []byte     { return b[124:136] }
func (b block) mtime() []byte    { return b[136:148] }
func (b block) checksum() []byte { return b[148:156] }
func (b block) typeflag() byte   { return b[156] }
func (b block) linkname() []byte { return b[157:257] }
func (b block) devmajor() []byte { return b[329:337] }
func (b block) devminor() []byte { return b[337:345] }

func (b block) zero() bool {
	for _, c := range b {
		if c != 0 {
			return false
		}
	}
	return true
}

// format checks the header's sum, which old writers made of signed bytes, and
// tells the formats apart by their magic.
func (b block) format() format {
	want, ok := parseOctal(b.checksum())
	if !ok {
		return formatUnknown
	}
	var unsigned, signed int64
	for _, c := range b {
		unsigned += int64(c)
		signed += int64(int8(c))
	}
	for _, c := range b.checksum() {
		unsigned += ' ' - int64(c)
		signed += ' ' - int64(int8(c))
	}
	switch {
	case want != unsigned && want != signed:
		return formatUnknown
	case string(b[257:263]) == "ustar\x00" && string(b[508:512]) == "tar\x00":
		return formatStar
	case string(b[257:263]) == "ustar\x00":
		return formatUstar
	case string(b[257:265]) == "ustar  \x00":
		return formatGNU
	}
	return formatV7
}

// header is what a header block and the extensions before it say.
type header struct {
	format       format
	typeflag     byte
	name, link   []byte
	size         int64 // of the data that follows
	mode         int64
	uid, gid     int64
	sec          int64
	nsec         int64
	major, minor int64
}

// parse reads a header block. Names alias b or h's scratch.
func (h *header) parse(b block, scratch *[]byte) bool {
	f := b.format()
	if f == formatUnknown {
		return false
	}
	ok := true
	num := func(field []byte) int64 {
		n, good := parseNumber(field)
		ok = ok && good
		return n
	}
	*h = header{
		format: f, typeflag: b.typeflag(),
		name: cString(b.name()), link: cString(b.linkname()),
		size: num(b.size()), mode: num(b.mode()), uid: num(b.uid()), gid: num(b.gid()), sec: num(b.mtime()),
	}
	if f == formatV7 {
		return ok
	}
	h.major, h.minor = num(b.devmajor()), num(b.devminor())
	var prefix []byte
	switch f {
	case formatUstar:
		prefix = cString(b[345:500])
	case formatStar:
		prefix = cString(b[345:476])
		num(b[476:488])
		num(b[488:500])
	case formatGNU:
		prefix = gnuPrefix(b)
	}
	if len(prefix) > 0 {
		*scratch = append(append(append((*scratch)[:0], prefix...), '/'), h.name...)
		h.name = *scratch
	}
	return ok
}

// gnuPrefix returns the name prefix that one old writer put where GNU keeps the
// access and change times: only if those times cannot be read as such.
func gnuPrefix(b block) []byte {
	good := true
	for _, f := range [][]byte{b[345:357], b[357:369]} {
		if f[0] != 0 {
			_, ok := parseNumber(f)
			good = good && ok
		}
	}
	if good {
		return nil
	}
	p := cString(b[345:500])
	for _, c := range p {
		if c >= 0x80 {
			return nil
		}
	}
	return p
}

func cString(b []byte) []byte {
	if i := bytes.IndexByte(b, 0); i >= 0 {
		return b[:i]
	}
	return b
}

// parseNumber reads a numeric field: octal digits, or GNU's base-256 two's
// complement if the first bit is set.
func parseNumber(b []byte) (int64, bool) {
	if b[0]&0x80 == 0 {
		return parseOctal(b)
	}
	var inv byte
	if b[0]&0x40 != 0 {
		inv = 0xff
	}
	var x uint64
	for i, c := range b {
		c ^= inv
		if i == 0 {
			c &= 0x7f
		}
		if x>>56 > 0 {
			return 0, false
		}
		x = x<<8 | uint64(c)
	}
	if x>>63 > 0 {
		return 0, false
	}
	if inv != 0 {
		return ^int64(x), true
	}
	return int64(x), true
}

// parseOctal reads octal digits between spaces and NULs; an empty field is 0.
func parseOctal(b []byte) (int64, bool) {
	pad := func(c byte) bool { return c == ' ' || c == 0 }
	for len(b) > 0 && pad(b[0]) {
		b = b[1:]
	}
	for len(b) > 0 && pad(b[len(b)-1]) {
		b = b[:len(b)-1]
	}
	var x uint64
	for _, c := range cString(b) {
		if c < '0' || c > '7' || x>>61 != 0 {
			return 0, false
		}
		x = x<<3 | uint64(c-'0')
	}
	return int64(x), true
}
