package erofs

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"dewpoint/internal/layer/toc"
)

// ErrIndex says that an image is not one that Write has written.
var ErrIndex = errors.New("not an index of this kind")

const (
	superMagic = 0xe0f5e1e2
	tarDevice  = 1 // in a chunk reference
)

// Index reads an image back: from an inode's number, which is what the kernel
// shows as st_ino, to the file's place in the tar. It is safe for concurrent
// use if its reader is.
type Index struct {
	r     io.ReaderAt
	nodes int64 // where inode 0 would lie
	root  uint64
}

// OpenIndex reads the superblock of the image in r.
func OpenIndex(r io.ReaderAt) (*Index, error) {
	var b [blockSize]byte
	if _, err := r.ReadAt(b[:], superOffset); err != nil {
		return nil, fmt.Errorf("read superblock: %w", err)
	}
	le := binary.LittleEndian
	if le.Uint32(b[0:]) != superMagic || b[12] != blockBits {
		return nil, ErrIndex
	}
	return &Index{
		r:     r,
		nodes: int64(le.Uint32(b[40:])) * blockSize,
		root:  uint64(le.Uint16(b[14:])),
	}, nil
}

// inode is what an inode says of where its contents lie.
type inode struct {
	mode   uint16
	layout uint8
	union  uint32
	size   int64
	after  int64 // where the attributes end
}

func (x *Index) inode(nid uint64) (inode, error) {
	var b [inodeSize]byte
	if nid > 1<<32-1 {
		return inode{}, fmt.Errorf("inode %d: %w", nid, ErrIndex)
	}
	at := x.nodes + int64(nid)*slotSize
	if _, err := x.r.ReadAt(b[:], at); err != nil {
		return inode{}, fmt.Errorf("read inode %d: %w", nid, err)
	}
	le := binary.LittleEndian
	format := le.Uint16(b[0:])
	i := inode{
		mode:   le.Uint16(b[4:]),
		layout: uint8(format >> 1 & 7),
		union:  le.Uint32(b[16:]),
		size:   int64(le.Uint64(b[8:])),
		after:  at + inodeSize,
	}
	if format&1 == 0 || i.size < 0 || i.size > toc.MaxFileSize {
		return inode{}, fmt.Errorf("inode %d: %w", nid, ErrIndex)
	}
	if n := int64(le.Uint16(b[2:])); n > 0 {
		i.after += attrHeader + (n-1)*4
	}
	return i, nil
}

// File is a regular file of an index.
type File struct {
	Size int64
	x    *Index
	refs int64  // where its chunk references lie; 0 if it has none
	bits uint   // of the chunk size
	few  []byte // the references, unless they are many
}

const fewRefs = 64

// File returns the regular file whose inode number is nid, or nil if that
// inode is something else.
func (x *Index) File(nid uint64) (*File, error) {
	i, err := x.inode(nid)
	if err != nil || i.mode&0o170000 != kinds[toc.Regular].mode {
		return nil, err
	}
	f := &File{Size: i.size, x: x}
	if i.layout != layoutChunks || i.size == 0 {
		return f, nil
	}
	f.refs, f.bits = align(i.after, 8), uint(i.union&0x1f)+blockBits
	if n := (i.size-1)>>f.bits + 1; n <= fewRefs {
		f.few, err = f.references(0, n)
	}
	return f, err
}

// Ranges returns where the file's bytes from..to-1 lie in the tar, in order.
// Bytes beyond the file's end, in holes, and such as the index holds a copy of
// are left out. It takes memory for each chunk between from and to.
func (f *File) Ranges(from, to int64) ([]toc.Range, error) {
	from, to = max(from, 0), min(to, f.Size)
	if f.refs == 0 || from >= to {
		return nil, nil
	}
	first := from >> f.bits
	refs, err := f.references(first, (to-1)>>f.bits+1)
	if err != nil {
		return nil, err
	}
	var out []toc.Range
	for ; len(refs) > 0; refs = refs[8:] {
		start := first << f.bits
		first++
		if binary.LittleEndian.Uint16(refs[2:]) != tarDevice {
			continue
		}
		lo, hi := max(from, start), min(to, first<<f.bits)
		data := int64(binary.LittleEndian.Uint32(refs[4:]))*blockSize + lo - start
		out = appendRange(out, toc.Range{File: lo, Data: data, Length: hi - lo})
	}
	return out, nil
}

// references returns those of the chunks from..to-1.
func (f *File) references(from, to int64) ([]byte, error) {
	if f.few != nil {
		return f.few[from*8 : to*8], nil
	}
	b := make([]byte, (to-from)*8)
	if _, err := f.x.r.ReadAt(b, f.refs+from*8); err != nil {
		return nil, fmt.Errorf("read chunk references: %w", err)
	}
	return b, nil
}

func appendRange(out []toc.Range, r toc.Range) []toc.Range {
	if n := len(out); n > 0 {
		if l := &out[n-1]; l.File+l.Length == r.File && l.Data+l.Length == r.Data {
			l.Length += r.Length
			return out
		}
	}
	return append(out, r)
}

// Names finds a path, relative to the root, for each inode number that is a
// key of want, and sets it as the value. Of several names of one inode it
// takes the one that it meets first. It reads the directories until all are
// found.
func (x *Index) Names(want map[uint64]string) error {
	type dir struct {
		nid  uint64
		path string
	}
	missing := len(want)
	seen := map[uint64]bool{x.root: true}
	for todo := []dir{{x.root, ""}}; len(todo) > 0 && missing > 0; {
		d := todo[0]
		todo = todo[1:]
		err := x.list(d.nid, func(name string, nid uint64, ft byte) {
			path := d.path + name
			if old, ok := want[nid]; ok && old == "" {
				want[nid] = path
				missing--
			}
			if ft == kinds[toc.Directory].ft && !seen[nid] {
				seen[nid] = true
				todo = append(todo, dir{nid, path + "/"})
			}
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// list calls each with the names of a directory but "." and "..".
func (x *Index) list(nid uint64, each func(name string, nid uint64, ft byte)) error {
	i, err := x.inode(nid)
	if err != nil {
		return err
	}
	var b [blockSize]byte
	for pos := int64(0); pos < i.size; pos += blockSize {
		block := b[:min(blockSize, i.size-pos)]
		at := int64(i.union)*blockSize + pos
		if i.layout == layoutInline && pos+blockSize >= i.size {
			at = i.after
		}
		if _, err := x.r.ReadAt(block, at); err != nil {
			return fmt.Errorf("read directory %d: %w", nid, err)
		}
		if err := listBlock(block, each); err != nil {
			return fmt.Errorf("directory %d: %w", nid, err)
		}
	}
	return nil
}

func listBlock(b []byte, each func(name string, nid uint64, ft byte)) error {
	le := binary.LittleEndian
	if len(b) < direntSize {
		return ErrIndex
	}
	names := int(le.Uint16(b[8:]))
	for h := 0; h < names; h += direntSize {
		if h+direntSize > len(b) {
			return ErrIndex
		}
		from, to := int(le.Uint16(b[h+8:])), len(b)
		if h+direntSize < names && h+2*direntSize <= len(b) {
			to = int(le.Uint16(b[h+direntSize+8:]))
		}
		if from > to || to > len(b) {
			return ErrIndex
		}
		name := string(b[from:to])
		for len(name) > 0 && name[len(name)-1] == 0 {
			name = name[:len(name)-1]
		}
		if name != "." && name != ".." {
			each(name, le.Uint64(b[h:]), b[h+10])
		}
	}
	return nil
}
