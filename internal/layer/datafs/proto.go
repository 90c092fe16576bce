package datafs

import (
	"encoding/binary"
	"math"

	"golang.org/x/sys/unix"
)

// The kernel's FUSE protocol (linux/fuse.h), as much of it as a read-only file
// system needs. All numbers are in the machine's byte order.

var native = binary.NativeEndian

const (
	protoMajor = 7
	protoMinor = 38 // of which this file speaks; the kernel speaks the lower of both
	protoLeast = 23 // Linux 4.2: sizes of replies as below

	inHeaderSize  = 40
	outHeaderSize = 16
	attrSize      = 88
	// inBuffer holds the largest request: the kernel insists on 8 KiB.
	inBuffer = 8 << 10

	rootNode = 1
)

// opcode is what a request asks for.
type opcode uint32

const (
	opLookup      opcode = 1
	opForget      opcode = 2
	opGetattr     opcode = 3
	opReadlink    opcode = 5
	opOpen        opcode = 14
	opRead        opcode = 15
	opStatfs      opcode = 17
	opRelease     opcode = 18
	opGetxattr    opcode = 22
	opListxattr   opcode = 23
	opFlush       opcode = 25
	opInit        opcode = 26
	opOpendir     opcode = 27
	opReaddir     opcode = 28
	opReleasedir  opcode = 29
	opInterrupt   opcode = 36
	opDestroy     opcode = 38
	opBatchForget opcode = 42
)

// Flags of INIT. Those from bit 32 on are in its second word.
const (
	initAsyncRead     = 1 << 0
	initBigWrites     = 1 << 5
	initParallelDirs  = 1 << 18
	initPosixACL      = 1 << 20
	initMaxPages      = 1 << 22
	initCacheSymlinks = 1 << 23
	initNoOpendir     = 1 << 24
	initExplicitInval = 1 << 25
	initExt           = 1 << 30
	initHasResend     = 1 << 39

	initWanted = initAsyncRead | initBigWrites | initParallelDirs | initPosixACL | initMaxPages |
		initCacheSymlinks | initNoOpendir | initExplicitInval | initExt | initHasResend
)

const (
	openKeepCache = 1 << 1
	openCacheDir  = 1 << 3
	openNoFlush   = 1 << 5 // who closes a file does not wait for its server (Linux 5.16)

	notifyInvalEntry = 3
	notifyStore      = 4
	notifyResend     = 7

	// What the kernel sends again has bit 63 of its number set, which the
	// answer repeats.

	// maxBackground bounds the kernel's read-ahead requests under way. Readers
	// that wait must not use it up, nor the reads of others.
	maxBackground = 4096
	maxPages      = 256 // of 4 KiB in one read
	maxRead       = maxPages * page

	forever = 1 << 30 // seconds
)

// request is one message of the kernel. body lies in the reader's buffer.
type request struct {
	op     opcode
	unique uint64
	node   uint64
	pid    uint32
	body   []byte
}

func parseRequest(b []byte) (request, bool) {
	if len(b) < inHeaderSize || int(native.Uint32(b)) != len(b) {
		return request{}, false
	}
	return request{
		op: opcode(native.Uint32(b[4:])), unique: native.Uint64(b[8:]), node: native.Uint64(b[16:]),
		pid: native.Uint32(b[32:]), body: b[inHeaderSize:],
	}, true
}

// name is the body as a string that ends with NUL.
func (r *request) name() string {
	for i, c := range r.body {
		if c == 0 {
			return string(r.body[:i])
		}
	}
	return string(r.body)
}

// readIn is what READ and READDIR ask for.
type readIn struct {
	off   int64
	size  int
	flags uint32 // of the open file
}

func (r *request) readIn() (readIn, bool) {
	if len(r.body) < 40 {
		return readIn{}, false
	}
	in := readIn{off: int64(native.Uint64(r.body[8:])), size: int(native.Uint32(r.body[16:])),
		flags: native.Uint32(r.body[32:])}
	return in, in.off >= 0 && in.off <= math.MaxInt64-maxRead && in.size <= maxRead
}

// reply builds the answer to a request: a header and a body.
type reply struct{ b []byte }

// reset begins an answer in the same memory.
func (r *reply) reset() { r.b = append(r.b[:0], make([]byte, outHeaderSize)...) }

func (r *reply) u16(n uint16) { r.b = native.AppendUint16(r.b, n) }
func (r *reply) u32(n uint32) { r.b = native.AppendUint32(r.b, n) }
func (r *reply) u64(n uint64) { r.b = native.AppendUint64(r.b, n) }

func putOutHeader(b []byte, size int, errno unix.Errno, unique uint64) {
	native.PutUint32(b, uint32(size))
	native.PutUint32(b[4:], uint32(-int32(errno)))
	native.PutUint64(b[8:], unique)
}

// attr is what stat(2) shows of a node.
type attr struct {
	ino      uint64
	size     int64
	sec      int64
	nsec     uint32
	mode     uint32
	nlink    uint32
	uid, gid uint32
	rdev     uint32
}

func (r *reply) attr(a attr) {
	r.u64(a.ino)
	r.u64(uint64(a.size))
	r.u64(uint64(a.size+511) / 512)
	for range 3 {
		r.u64(uint64(a.sec))
	}
	for range 3 {
		r.u32(a.nsec)
	}
	for _, n := range []uint32{a.mode, a.nlink, a.uid, a.gid, a.rdev, page, 0} {
		r.u32(n)
	}
}

// entry is the answer to LOOKUP: a node that the kernel may keep for ever.
func (r *reply) entry(a attr) {
	r.u64(a.ino)
	r.u64(0)
	r.u64(forever)
	r.u64(forever)
	r.u64(0)
	r.attr(a)
}

// dirent appends an entry of READDIR, unless it would make the answer larger
// than limit.
func (r *reply) dirent(ino uint64, next uint64, typ uint32, name string, limit int) bool {
	const fixed = 24
	size := (fixed + len(name) + 7) &^ 7
	if len(r.b)+size > outHeaderSize+limit {
		return false
	}
	r.u64(ino)
	r.u64(next)
	r.u32(uint32(len(name)))
	r.u32(typ)
	r.b = append(r.b, name...)
	r.b = append(r.b, make([]byte, size-fixed-len(name))...)
	return true
}
