package erofs

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"

	"dewpoint/internal/layer/toc"
)

// emitter writes a planned image, front to back.
type emitter struct {
	*plan
	w   *bufio.Writer
	pos int64
	buf []byte
	dir dirWalk
	err error
}

func (e *emitter) write(b []byte) {
	if e.err == nil {
		_, e.err = e.w.Write(b)
		e.pos += int64(len(b))
	}
}

var zeros [blockSize]byte

func (e *emitter) padTo(pos int64) {
	for e.pos < pos && e.err == nil {
		e.write(zeros[:min(pos-e.pos, blockSize)])
	}
}

func (e *emitter) image() error {
	e.dirOf = make(map[int32]int32, len(e.dirs))
	for i := range e.dirs {
		e.dirOf[e.dirs[i].node] = int32(i)
	}
	e.padTo(superOffset)
	e.write(e.superblock())
	e.write(e.shared)
	for _, id := range e.order {
		e.padTo(e.inodeStart() + int64(e.place[id].slot)*slotSize)
		e.inode(id)
	}
	e.padTo(e.dataStart())
	for _, id := range e.order {
		if pl := &e.place[id]; pl.blocks > 0 {
			e.contents(id, pl)
			e.padTo(e.dataStart() + int64(pl.data+pl.blocks)*blockSize)
		}
	}
	return e.err
}

// Modes and directory entry types of the kernel, by toc.Type.
var kinds = map[toc.Type]struct {
	mode uint16
	ft   byte
}{
	toc.Regular:   {0o100000, 1},
	toc.Directory: {0o040000, 2},
	toc.Char:      {0o020000, 3},
	toc.Block:     {0o060000, 4},
	toc.Fifo:      {0o010000, 5},
	toc.Symlink:   {0o120000, 7},
}

// node returns the node by its number in the plan.
func (e *emitter) node(id int32) *toc.Node {
	if id == e.whiteout() {
		return &toc.Node{Type: toc.Char, Nlink: e.hidden}
	}
	return &e.tree.Nodes[id]
}

// inode writes an inode with what follows it.
func (e *emitter) inode(id int32) {
	n, pl := e.node(id), &e.place[id]
	e.buf = e.buf[:0]
	b := append(e.buf, make([]byte, inodeSize)...)
	le := binary.LittleEndian
	le.PutUint16(b[0:], 1|uint16(pl.layout)<<1)
	le.PutUint16(b[4:], kinds[n.Type].mode|uint16(n.Mode))
	le.PutUint64(b[8:], uint64(e.size(id, n)))
	le.PutUint32(b[16:], e.union(n, pl))
	le.PutUint32(b[20:], pl.slot)
	le.PutUint32(b[24:], n.UID)
	le.PutUint32(b[28:], n.GID)
	le.PutUint64(b[32:], uint64(n.Sec))
	le.PutUint32(b[40:], n.Nsec)
	le.PutUint32(b[44:], e.links(id, n))
	if pl.attrs >= 0 {
		a := &e.attrs[pl.attrs]
		le.PutUint16(b[2:], uint16((a.size-attrHeader)/4+1))
		b = a.appendTo(b)
	}
	e.buf = b
	switch {
	case n.Type == toc.Directory && pl.layout == layoutInline:
		e.write(b)
		e.tail(id)
	case n.Type == toc.Symlink && pl.layout == layoutInline:
		e.write(append(b, n.Link...))
	case pl.layout == layoutChunks:
		e.references(b, n, pl)
	default:
		e.write(b)
	}
}

// union is the field whose meaning depends on the kind of inode.
func (e *emitter) union(n *toc.Node, pl *place) uint32 {
	const withIndexes = 0x20
	switch {
	case n.Type == toc.Char || n.Type == toc.Block:
		return n.Minor&0xff | n.Major<<8 | n.Minor&^0xff<<12
	case pl.layout == layoutChunks:
		return withIndexes | uint32(pl.bits-blockBits)
	case pl.blocks > 0:
		return e.blockAddr(pl)
	}
	return 0
}

func (e *emitter) blockAddr(pl *place) uint32 { return uint32(e.dataStart()/blockSize) + pl.data }

func (e *emitter) size(id int32, n *toc.Node) int64 {
	switch n.Type {
	case toc.Regular:
		return n.Size
	case toc.Symlink:
		return int64(len(n.Link))
	case toc.Directory:
		pl := &e.place[id]
		if pl.layout == layoutInline {
			return int64(pl.blocks)*blockSize + int64(pl.tail)
		}
		_, tail := e.dir.measure(e.plan, &e.dirs[e.dirOf[id]])
		return int64(pl.blocks-1)*blockSize + int64(tail)
	}
	return 0
}

func (e *emitter) links(id int32, n *toc.Node) uint32 {
	if n.Type == toc.Directory {
		return 2 + e.dirs[e.dirOf[id]].subs
	}
	return n.Nlink
}

// references writes an inode and the references to its chunks. b is the inode.
func (e *emitter) references(b []byte, n *toc.Node, pl *place) {
	const device, noBlock = 1, 1<<32 - 1
	for len(b)%8 != 0 {
		b = append(b, 0)
	}
	w := chunkWalk{p: e.plan, n: n, bits: int(pl.bits)}
	next := uint32(0)
	if pl.blocks > 0 {
		next = e.blockAddr(pl)
	}
	for w.pos < n.Size {
		var ref [8]byte
		switch c, from, to := w.next(); c.kind {
		case hole:
			binary.LittleEndian.PutUint32(ref[4:], noBlock)
		case direct:
			ref[2] = device
			binary.LittleEndian.PutUint32(ref[4:], uint32(c.data/blockSize))
		case copied:
			binary.LittleEndian.PutUint32(ref[4:], next)
			next += uint32(align(to-from, blockSize) / blockSize)
		}
		if b = append(b, ref[:]...); len(b) >= 32<<10 {
			e.write(b)
			b = b[:0]
		}
	}
	e.write(b)
	e.buf = b[:0]
}

// contents writes a node's data blocks; the caller pads.
func (e *emitter) contents(id int32, pl *place) {
	switch n := e.node(id); n.Type {
	case toc.Symlink:
		e.write([]byte(n.Link))
	case toc.Directory:
		d := &e.dirs[e.dirOf[id]]
		e.dir.list(e.plan, d)
		for i, k := 0, uint32(0); k < pl.blocks; k++ {
			i += e.dirBlock(d, i)
			e.padTo(align(e.pos, blockSize))
		}
	case toc.Regular:
		e.copyChunks(n, pl)
	}
}

// tail writes the last block of a directory, as much as is used of it.
func (e *emitter) tail(id int32) {
	d := &e.dirs[e.dirOf[id]]
	e.dir.list(e.plan, d)
	i := 0
	for k := uint32(0); k < e.place[id].blocks; k++ {
		n, _ := e.dir.next(i)
		i += n
	}
	e.dirBlock(d, i)
}

// dirBlock writes the directory block whose first name is number i, without
// padding, and returns how many names it holds.
func (e *emitter) dirBlock(d *directory, i int) int {
	n, size := e.dir.next(i)
	b := append(e.buf[:0], make([]byte, size)...)
	off := n * direntSize
	for k, ent := range e.dir.names[i : i+n] {
		nid, ft := e.target(d, ent.node)
		h := b[k*direntSize:]
		binary.LittleEndian.PutUint64(h, nid)
		binary.LittleEndian.PutUint16(h[8:], uint16(off))
		h[10] = ft
		off += copy(b[off:], ent.name)
	}
	e.buf = b
	e.write(b)
	return n
}

func (e *emitter) target(d *directory, id int32) (nid uint64, ft byte) {
	switch id {
	case dot:
		id = d.node
	case dotdot:
		id = e.tree.Names[e.tree.Names[d.name].Parent].Node
	}
	return uint64(e.place[id].slot), kinds[e.node(id).Type].ft
}

// copyChunks writes the chunks of a file that cannot be referred to.
func (e *emitter) copyChunks(n *toc.Node, pl *place) {
	w := chunkWalk{p: e.plan, n: n, bits: int(pl.bits)}
	for w.pos < n.Size && e.err == nil {
		if c, from, to := w.next(); c.kind == copied {
			e.copyChunk(n, w.i, from, to)
			e.padTo(align(e.pos, blockSize))
		}
	}
}

// copyChunk writes a file's bytes from..to-1. i is the first range among them.
func (e *emitter) copyChunk(n *toc.Node, i int, from, to int64) {
	start := e.pos
	for ; i < len(n.Ranges) && n.Ranges[i].File < to; i++ {
		r := &n.Ranges[i]
		lo, hi := max(r.File, from), min(r.File+r.Length, to)
		e.padTo(start + lo - from)
		e.copyData(r.Data+lo-r.File, hi-lo)
	}
	e.padTo(start + to - from)
}

func (e *emitter) copyData(off, n int64) {
	if e.err != nil {
		return
	}
	if e.opts.Data == nil {
		e.err = fmt.Errorf("copy %d bytes at %d of a sparse file: no data given", n, off)
		return
	}
	got, err := io.Copy(e.w, io.NewSectionReader(e.opts.Data, off, n))
	if e.pos += got; err == nil && got < n {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		e.err = fmt.Errorf("copy contents of a sparse file: %w", err)
	}
}
