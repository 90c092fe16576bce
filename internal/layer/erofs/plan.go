package erofs

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"dewpoint/internal/layer/toc"
)

// How an inode's contents lie.
const (
	layoutPlain  = 0 // in data blocks
	layoutInline = 2 // the last block after the inode, others in data blocks
	layoutChunks = 4 // chunk references after the inode
)

// place is where a node's parts lie.
type place struct {
	slot   uint32 // inode number; 0 is not placed
	data   uint32 // first of its data blocks, counted from the data area's start
	blocks uint32 // data blocks
	attrs  int32  // index into plan.attrs, -1 for none
	tail   uint16 // bytes of inline contents
	layout uint8
	bits   uint8 // of the chunk size
}

// directory is a directory of the tree with its names in order.
type directory struct {
	name  int32
	node  int32
	first int // of its names in plan.kids
	n     int
	subs  uint32 // directories among them
}

// plan is the layout of an image.
type plan struct {
	tree *toc.Tree
	opts Options

	place  []place // of each of tree.Nodes, and last of the whiteout inode
	order  []int32 // nodes by slot
	dirs   []directory
	dirOf  map[int32]int32 // node of a directory to its index in dirs
	kids   []int32         // names, directory by directory, sorted
	hidden uint32          // whiteouts

	attrs  []attrs
	shared []byte

	end        int64 // of the inode area so far
	inodes     int
	dataBlocks uint32
	extra      int64
}

// whiteout is the number of the node that all whiteouts share.
func (p *plan) whiteout() int32 { return int32(len(p.tree.Nodes)) }

func (p *plan) inodeStart() int64 { return align(metaStart+int64(len(p.shared)), blockSize) }
func (p *plan) dataStart() int64  { return align(p.inodeStart()+p.end, blockSize) }

func align(n, to int64) int64 { return (n + to - 1) &^ (to - 1) }

// layout places the nodes: the root, then level by level the entries of each
// directory, so that what is listed together lies together.
func (p *plan) layout() error {
	p.place = make([]place, len(p.tree.Nodes)+1)
	p.end = slotSize // inode 0 means none to some readers of directories
	for i := range p.place {
		p.place[i].attrs = -1
	}
	if err := p.planAttrs(); err != nil {
		return err
	}
	p.openDir(0)
	p.placeDir(0)
	for d := 0; d < len(p.dirs); d++ {
		if err := p.placeKids(d); err != nil {
			return err
		}
	}
	if size := p.dataStart() + int64(p.dataBlocks)*blockSize; size > MaxDataSize {
		return fmt.Errorf("%w: index of %d bytes", ErrTooLarge, size)
	}
	return nil
}

func (p *plan) placeKids(d int) error {
	first, n := p.dirs[d].first, p.dirs[d].n
	for i := first; i < first+n; i++ {
		name := p.kids[i]
		id := p.tree.Names[name].Node
		if id < 0 {
			id = p.whiteout()
			p.hidden++
		}
		if p.place[id].slot != 0 {
			continue // another of its names came first
		}
		if id < p.whiteout() && p.tree.Nodes[id].Type == toc.Directory {
			p.dirs[d].subs++
			p.openDir(name)
			p.placeDir(len(p.dirs) - 1)
		} else if err := p.placeNode(id, name); err != nil {
			return err
		}
	}
	return nil
}

// openDir lists a directory's names in the order of their bytes.
func (p *plan) openDir(name int32) {
	n := &p.tree.Names[name]
	d := directory{name: name, node: n.Node, first: len(p.kids)}
	for c := n.First; c >= 0; c = p.tree.Names[c].Next {
		if k := &p.tree.Names[c]; k.Node >= 0 || k.Hides {
			p.kids = append(p.kids, c)
		}
	}
	kids := p.kids[d.first:]
	d.n = len(kids)
	skip := len(n.Path)
	slices.SortFunc(kids, func(a, b int32) int {
		return cmp.Compare(p.tree.Names[a].Path[skip:], p.tree.Names[b].Path[skip:])
	})
	p.dirs = append(p.dirs, d)
}

// placeDir places a directory's inode and blocks.
func (p *plan) placeDir(d int) {
	dir := &p.dirs[d]
	var w dirWalk
	blocks, tail := w.measure(p, dir)
	pl := &p.place[dir.node]
	pl.layout, pl.tail = layoutInline, uint16(tail)
	fixed := inodeSize + p.attrSize(dir.node)
	if tail > blockSize-fixed%slotSize {
		pl.layout, pl.tail, blocks = layoutPlain, 0, blocks+1
	}
	p.putData(pl, blocks)
	p.putInode(dir.node, fixed, 0)
}

// placeNode places an inode that is no directory.
func (p *plan) placeNode(id, name int32) error {
	fixed := inodeSize + p.attrSize(id)
	if id == p.whiteout() {
		p.putInode(id, fixed, 0)
		return nil
	}
	n, pl := &p.tree.Nodes[id], &p.place[id]
	after := 0
	switch {
	case n.Type == toc.Symlink && len(n.Link) <= blockSize-fixed%slotSize && len(n.Link) < blockSize:
		pl.layout, pl.tail = layoutInline, uint16(len(n.Link))
	case n.Type == toc.Symlink:
		p.putData(pl, uint32(align(int64(len(n.Link)), blockSize)/blockSize))
	case n.Type == toc.Regular && n.Size > 0:
		refs, err := p.chunks(pl, n)
		if err != nil {
			return &toc.Error{Name: p.tree.Names[name].Path, Offset: -1, Err: err}
		}
		pl.layout = layoutChunks
		after = int(align(int64(fixed), 8)) - fixed + 8*int(refs)
	}
	p.putInode(id, fixed, after)
	return nil
}

// putInode gives a node the next slot. Its fixed part is followed by after
// bytes, or by its tail, which must not cross a block's end.
func (p *plan) putInode(id int32, fixed, after int) {
	pl := &p.place[id]
	for (p.end+int64(fixed))%blockSize+int64(pl.tail) > blockSize {
		p.end += slotSize
	}
	pl.slot = uint32(p.end / slotSize)
	p.order = append(p.order, id)
	p.inodes++
	p.end = align(p.end+int64(fixed+after)+int64(pl.tail), slotSize)
}

func (p *plan) putData(pl *place, blocks uint32) {
	if blocks > 0 {
		pl.data, pl.blocks = p.dataBlocks, blocks
		p.dataBlocks += blocks
	}
}

// dirWalk goes through a directory's names, "." and ".." among them, in the
// order of their bytes, and cuts them into blocks.
type dirWalk struct {
	names []dirent
}

type dirent struct {
	name string
	node int32 // or dot, dotdot
}

const (
	dot    = -1
	dotdot = -2
)

// direntSize is what a name takes of a directory's block beside its bytes.
const direntSize = 12

// list fills w.names with all names of the directory.
func (w *dirWalk) list(p *plan, d *directory) {
	w.names = w.names[:0]
	special := []dirent{{".", dot}, {"..", dotdot}}
	for _, k := range p.kids[d.first : d.first+d.n] {
		e := dirent{p.tree.Base(k), p.tree.Names[k].Node}
		if e.node < 0 {
			e.node = p.whiteout()
		}
		for len(special) > 0 && strings.Compare(special[0].name, e.name) < 0 {
			w.names, special = append(w.names, special[0]), special[1:]
		}
		w.names = append(w.names, e)
	}
	w.names = append(w.names, special...)
}

// next returns how many of w.names[i:] go into the block that begins with the
// first of them, and the bytes they take.
func (w *dirWalk) next(i int) (n, size int) {
	for ; i < len(w.names); i++ {
		need := direntSize + len(w.names[i].name)
		if size+need > blockSize {
			break
		}
		size += need
		n++
	}
	return n, size
}

// measure returns the number of a directory's blocks before the last, and the
// bytes used of the last.
func (w *dirWalk) measure(p *plan, d *directory) (blocks uint32, tail int) {
	w.list(p, d)
	for i := 0; ; {
		n, size := w.next(i)
		if i += n; i == len(w.names) {
			return blocks, size
		}
		blocks++
	}
}
