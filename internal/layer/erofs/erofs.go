// Package erofs makes a layer's index: an EROFS image that holds the layer's
// names and attributes, and for the contents of its files points into the
// layer's tar as an external device.
//
// The kernel mounts the two together:
//
//	mount -t erofs -o ro,device=DATA INDEX
//
// Nothing of the tar is copied, for tar's blocks and the image's are 512 bytes
// alike, and a file's contents begin at a block. The image is made of
//
//	1024 bytes of nothing
//	one block: superblock, and the one slot of the device table
//	shared attributes: values that several inodes have
//	inodes, each followed by its attributes and then by
//	    a file's chunk references (8 bytes for each GiB), or
//	    a symbolic link's target, or the end of a directory
//	data: the other blocks of directories, long targets, and what had to be
//	    copied of sparse files whose segments do not lie at block boundaries
//
// An image depends on nothing but the tree and the options: the same layer
// gives the same bytes everywhere. It is written front to back, in two passes
// over the tree: plan decides where everything lies, emit writes it.
package erofs

import (
	"bufio"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"

	"dewpoint/internal/layer/toc"
)

const (
	blockBits = 9
	blockSize = 1 << blockBits
	slotSize  = 32 // inodes lie at multiples of it; their number is the quotient
	inodeSize = 64

	superOffset = 1024
	metaStart   = superOffset + blockSize // of the shared attributes
	deviceSlot  = 128                     // size, and offset from the superblock
)

// MaxDataSize is what 32-bit numbers of 512-byte blocks can address: 2 TiB.
const MaxDataSize = (1<<32 - 1) * blockSize

// MaxExtra bounds the bytes an image spends on chunk references and copied
// contents of its files together. Beyond lie sparse files of very many or badly
// placed segments.
const MaxExtra = 256 << 20

// ErrTooLarge says that a layer does not fit the format or the bounds above.
var ErrTooLarge = errors.New("layer too large for an index")

// Options of an image.
type Options struct {
	UUID     [16]byte    // see UUID
	DataSize int64       // bytes of the tar
	Data     io.ReaderAt // the tar; read only where contents of sparse files must be copied
}

// UUID derives an image's identity from the layer's: a version 8 UUID of the
// diffID's text.
func UUID(diffID string) [16]byte {
	sum := sha256.Sum256([]byte("dewpoint erofs index\n" + diffID))
	var u [16]byte
	copy(u[:], sum[:])
	u[6] = u[6]&0x0f | 0x80
	u[8] = u[8]&0x3f | 0x80
	return u
}

// Build writes the index of the layer whose table of contents is t.
func Build(w io.Writer, t *toc.TOC, o Options) error {
	tree, err := t.Tree()
	if err != nil {
		return err
	}
	return Write(w, tree, o)
}

// Write writes the index of the layer whose tree is t. Its errors are those of
// w and o.Data, ErrTooLarge, or a *toc.Error that names what cannot be
// represented.
func Write(w io.Writer, t *toc.Tree, o Options) error {
	if o.DataSize < 0 || o.DataSize > MaxDataSize {
		return fmt.Errorf("%w: data of %d bytes", ErrTooLarge, o.DataSize)
	}
	p := &plan{tree: t, opts: o}
	if err := p.layout(); err != nil {
		return err
	}
	out := &emitter{plan: p, w: bufio.NewWriterSize(w, 64<<10)}
	if err := out.image(); err != nil {
		return err
	}
	return out.w.Flush()
}

// superblock returns the block that holds the superblock and the device table.
func (p *plan) superblock() []byte {
	const (
		magic        = 0xe0f5e1e2
		compat       = 1 | 2 // checksum, mtime
		incompat     = 4 | 8 // chunks, device table
		slotInBlocks = (superOffset + deviceSlot) / deviceSlot
	)
	le := binary.LittleEndian
	b := make([]byte, blockSize)
	le.PutUint32(b[0:], magic)
	le.PutUint32(b[8:], compat)
	b[12] = blockBits
	le.PutUint16(b[14:], uint16(p.place[0].slot))
	le.PutUint64(b[16:], uint64(p.inodes))
	le.PutUint32(b[36:], uint32(p.dataStart()/blockSize)+p.dataBlocks)
	le.PutUint32(b[40:], uint32(p.inodeStart()/blockSize))
	le.PutUint32(b[44:], metaStart/blockSize)
	copy(b[48:64], p.opts.UUID[:])
	le.PutUint32(b[80:], incompat)
	le.PutUint16(b[86:], 1) // devices
	le.PutUint16(b[88:], slotInBlocks)
	le.PutUint32(b[deviceSlot+64:], uint32((p.opts.DataSize+blockSize-1)/blockSize))
	le.PutUint32(b[4:], ^crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)))
	return b
}
