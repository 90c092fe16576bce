package datafs

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sort"
	"strings"

	"golang.org/x/sys/unix"
)

// index reads a layer's EROFS index (package erofs writes them; docs/design/erofs.md
// has the subset) in place of a kernel that cannot. Nothing of it is kept in
// memory. An index that is not well formed gives errors and no more. It is safe
// for concurrent use.
type index struct {
	r      io.ReaderAt
	size   int64
	inodes int64 // where inode number 0 lies
	shared int64 // where shared attributes lie
	root   uint32
}

const (
	indexBlock  = 512
	indexSlot   = 32
	indexInode  = 64
	superAt     = 1024
	superMagic  = 0xe0f5e1e2
	direntBytes = 12
	noBlock     = 1<<32 - 1

	layoutPlain  = 0
	layoutInline = 2
	layoutChunks = 4
)

// errIndex says that an index is not well formed.
var errIndex = errors.New("corrupt EROFS index")

// openIndex reads the superblock of the index in r, which is size bytes long.
func openIndex(r io.ReaderAt, size int64) (*index, error) {
	b := make([]byte, 128)
	if _, err := r.ReadAt(b, superAt); err != nil {
		return nil, fmt.Errorf("%w: %w", errIndex, err)
	}
	le := binary.LittleEndian
	if le.Uint32(b) != superMagic || b[12] != 9 {
		return nil, fmt.Errorf("%w: not one with blocks of 512 bytes", errIndex)
	}
	x := &index{r: r, size: size, root: uint32(le.Uint16(b[14:])),
		inodes: int64(le.Uint32(b[40:])) * indexBlock, shared: int64(le.Uint32(b[44:])) * indexBlock}
	n, err := x.inode(x.root)
	if err == nil && n.mode&unix.S_IFMT != unix.S_IFDIR {
		err = errIndex
	}
	return x, err
}

// inode is one inode of an index.
type inode struct {
	nid      uint32
	at       int64 // of what follows its fixed part and attributes
	attrs    int   // bytes of attributes before at
	layout   uint16
	mode     uint32
	size     int64
	union    uint32
	uid, gid uint32
	sec      int64
	nsec     uint32
	nlink    uint32
}

func (x *index) read(b []byte, at int64) error {
	if at < 0 || at > x.size {
		return errIndex
	}
	if n, err := x.r.ReadAt(b, at); n < len(b) {
		return fmt.Errorf("%w: %w", errIndex, err)
	}
	return nil
}

func (x *index) inode(nid uint32) (inode, error) {
	var b [indexInode]byte
	at := x.inodes + int64(nid)*indexSlot
	if err := x.read(b[:], at); err != nil {
		return inode{}, err
	}
	le := binary.LittleEndian
	format, icount := le.Uint16(b[0:]), int(le.Uint16(b[2:]))
	n := inode{
		nid: nid, layout: format >> 1 & 7, mode: uint32(le.Uint16(b[4:])), size: int64(le.Uint64(b[8:])),
		union: le.Uint32(b[16:]), uid: le.Uint32(b[24:]), gid: le.Uint32(b[28:]),
		sec: int64(le.Uint64(b[32:])), nsec: le.Uint32(b[40:]), nlink: le.Uint32(b[44:]),
	}
	if icount > 0 {
		n.attrs = 12 + 4*(icount-1)
	}
	n.at = at + indexInode + int64(n.attrs)
	if format&1 == 0 || n.size < 0 || n.size > 1<<44 {
		return inode{}, errIndex
	}
	return n, nil
}

func (n *inode) isDir() bool { return n.mode&unix.S_IFMT == unix.S_IFDIR }

// block returns block i of a directory or of a link's target, as much as is
// used of it, in buf.
func (x *index) block(n *inode, i int64, buf *[indexBlock]byte) ([]byte, error) {
	used := min(n.size-i*indexBlock, indexBlock)
	if used <= 0 || n.layout != layoutInline && n.layout != layoutPlain {
		return nil, errIndex
	}
	at := (int64(n.union) + i) * indexBlock
	if n.layout == layoutInline && i == n.size/indexBlock {
		at = n.at
	}
	return buf[:used], x.read(buf[:used], at)
}

// direntAt returns entry k of a directory's block b, and how many it has.
func direntAt(b []byte, k int) (nid uint32, typ byte, name []byte, count int, err error) {
	le := binary.LittleEndian
	if len(b) < direntBytes {
		return 0, 0, nil, 0, errIndex
	}
	count = int(le.Uint16(b[8:])) / direntBytes
	if count == 0 || k >= count || count*direntBytes > len(b) {
		return 0, 0, nil, count, errIndex
	}
	from, to := int(le.Uint16(b[k*direntBytes+8:])), len(b)
	if k+1 < count {
		to = int(le.Uint16(b[(k+1)*direntBytes+8:]))
	}
	if from > to || to > len(b) {
		return 0, 0, nil, count, errIndex
	}
	name = b[from:to]
	if i := strings.IndexByte(string(name), 0); i >= 0 {
		name = name[:i]
	}
	return uint32(le.Uint64(b[k*direntBytes:])), b[k*direntBytes+10], name, count, nil
}

// lookup finds a name in a directory. It returns ENOENT if it is not there.
func (x *index) lookup(dir *inode, name string) (uint32, error) {
	var buf [indexBlock]byte
	var failed error
	blocks := int((dir.size + indexBlock - 1) / indexBlock)
	at := sort.Search(blocks, func(i int) bool { // the first block that begins behind the name
		b, err := x.block(dir, int64(i), &buf)
		if err == nil {
			var first []byte
			if _, _, first, _, err = direntAt(b, 0); err == nil {
				return string(first) > name
			}
		}
		failed = err
		return true
	})
	if failed != nil || at == 0 {
		return 0, errors.Join(failed, unix.ENOENT)
	}
	b, err := x.block(dir, int64(at-1), &buf)
	if err != nil {
		return 0, err
	}
	for k, count := 0, 1; k < count; k++ {
		var nid uint32
		var found []byte
		if nid, _, found, count, err = direntAt(b, k); err != nil {
			return 0, err
		}
		if string(found) == name {
			return nid, nil
		}
	}
	return 0, unix.ENOENT
}

// list calls yield for a directory's entries from a place on, which is 0 or one
// that yield got before, until it returns false.
func (x *index) list(dir *inode, place uint64,
	yield func(nid uint32, next uint64, typ byte, name string) bool) error {
	const perBlock = 64
	var buf [indexBlock]byte
	for i := int64(place / perBlock); i*indexBlock < dir.size; i++ {
		b, err := x.block(dir, i, &buf)
		if err != nil {
			return err
		}
		for k, count := int(place%perBlock), perBlock; k < count; k++ {
			var nid uint32
			var typ byte
			var name []byte
			if nid, typ, name, count, err = direntAt(b, k); err != nil {
				if k >= count && count > 0 {
					break
				}
				return err
			}
			next := uint64(i)*perBlock + uint64(k) + 1
			if k+1 == count {
				next = uint64(i+1) * perBlock
			}
			if !yield(nid, next, typ, string(name)) {
				return nil
			}
		}
		place = 0
	}
	return nil
}

// link returns a symbolic link's target.
func (x *index) link(n *inode) (string, error) {
	var buf [indexBlock]byte
	if n.size > 4095 {
		return "", errIndex
	}
	var out strings.Builder
	for i := int64(0); i*indexBlock < n.size; i++ {
		b, err := x.block(n, i, &buf)
		if err != nil {
			return "", err
		}
		out.Write(b)
	}
	return out.String(), nil
}

var attrPrefixes = map[byte]string{
	1: "user.", 2: "system.posix_acl_access", 3: "system.posix_acl_default", 4: "trusted.", 6: "security.",
}

// attrs calls yield for each extended attribute until it returns false. Values
// are yield's to keep.
func (x *index) attrs(n *inode, yield func(name string, value []byte) bool) error {
	if n.attrs == 0 {
		return nil
	}
	b := make([]byte, n.attrs)
	if err := x.read(b, n.at-int64(n.attrs)); err != nil {
		return err
	}
	shared := int(b[4])
	rest := b[12:]
	if len(rest) < 4*shared {
		return errIndex
	}
	for i := range shared {
		at := x.shared + 4*int64(binary.LittleEndian.Uint32(rest[4*i:]))
		var head [4]byte
		if err := x.read(head[:], at); err != nil {
			return err
		}
		one := make([]byte, attrBytes(head[:]))
		if err := x.read(one, at); err != nil {
			return err
		}
		if !yieldAttr(one, yield) {
			return nil
		}
	}
	for rest = rest[4*shared:]; len(rest) >= 4; {
		size := attrBytes(rest)
		if size > len(rest) {
			return errIndex
		}
		if !yieldAttr(rest[:size], yield) {
			return nil
		}
		rest = rest[min(len(rest), (size+3)&^3):]
	}
	return nil
}

func attrBytes(head []byte) int { return 4 + int(head[0]) + int(binary.LittleEndian.Uint16(head[2:])) }

func yieldAttr(b []byte, yield func(string, []byte) bool) bool {
	n := int(b[0])
	return yield(attrPrefixes[b[1]]+string(b[4:4+n]), b[4+n:])
}

// Where bytes of a file lie.
type source uint8

const (
	fromHole  source = iota // zeros
	fromData                // the layer's data
	fromIndex               // the index itself
)

// part is n bytes of a file that lie in one place.
type part struct {
	from source
	off  int64
	n    int
}

// parts appends where the n bytes of a file from off on lie, up to its end.
func (x *index) parts(out []part, node *inode, off int64, n int) ([]part, error) {
	end := min(off+int64(n), node.size)
	if off >= end {
		return out, nil
	}
	if node.layout != layoutChunks {
		return nil, errIndex
	}
	bits := 9 + node.union&0x1f
	first := off >> bits
	refs := make([]byte, 8*((end-1)>>bits-first+1))
	if err := x.read(refs, (node.at+7)&^7+8*first); err != nil {
		return nil, err
	}
	for off < end {
		ref := refs[8*(off>>bits-first):]
		stop := min(end, (off>>bits+1)<<bits)
		p := part{n: int(stop - off)}
		if block := binary.LittleEndian.Uint32(ref[4:]); block != noBlock {
			p.from, p.off = fromIndex, int64(block)*indexBlock+off&(1<<bits-1)
			if binary.LittleEndian.Uint16(ref[2:]) != 0 {
				p.from = fromData
			}
		}
		out = joinPart(out, p)
		off = stop
	}
	return out, nil
}

// joinPart appends p, to the last part if it goes on there.
func joinPart(out []part, p part) []part {
	if len(out) > 0 {
		last := &out[len(out)-1]
		if last.from == p.from && (p.from == fromHole || last.off+int64(last.n) == p.off) {
			last.n += p.n
			return out
		}
	}
	return append(out, p)
}
