// Package image is the file that a checkpoint's processes are kept in: one
// immutable, compressed file, made of the directory of small files and large
// memory that a checkpoint engine writes.
//
// Memory (the files pages-*.img and ckpt_*.dmtcp) is cut into chunks of ChunkSize, each compressed by
// itself, so that any of them can be read without the others; chunks of zeros are left
// out. Everything else, a few hundred kilobytes mostly, is one tar in one compressed stream
// ahead of them: a restore needs all of it before it needs any memory. An index behind the
// chunks says where each begins and what its bytes hash to. So a file is written as
// a stream, by Pack, in little memory, and read by ranges from wherever it lies, by a
// Reader: from local disk, from a shared file system, from another node.
//
//	DEWCKPT1 | meta: tar, zstd | chunk: zstd | chunk … | index: zstd | footer
//
// docs/design/formats.md has it byte by byte. The same directory gives the same bytes.
//
// What a Reader reads may be anything: it is bounded in memory, verified before it is
// given out, and names no path outside the directory that it is to be written to. The
// hashes find damage. Whether a file is the one that was made is for who knows its
// digest to say, before it is used.
package image

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"regexp"
	"sync"

	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"
)

// ChunkSize is how many bytes of memory one chunk has, but for a file's last.
const ChunkSize = 256 << 10

// ErrDamaged says that a file is not one that Pack has written, or not all of it.
var ErrDamaged = errors.New("damaged checkpoint image")

// Info describes a file that Pack has written.
type Info struct {
	Size   int64         // of the file, bytes
	Digest digest.Digest // sha256 of it
	Meta   int64         // bytes of all files that are not memory
	Pages  int64         // bytes of memory, before compression, zeros included
	Files  int           // how many files there are, of both kinds
}

// PagesFile is a file of memory.
type PagesFile struct {
	Name string
	Size int64
}

const (
	magic      = "DEWCKPT1"
	endMagic   = "DEWCKEND"
	footerSize = 32 + 8 + 4 + 4 + 8
	version    = 1

	maxIndex   = 48 << 20 // bytes, decompressed
	maxMeta    = 16 << 30
	maxEntries = 65536   // files in meta
	maxPages   = 1 << 40 // bytes of one file of memory
	maxFiles   = 4096    // of memory
	maxName    = 255
)

// pagesName is how engines name files of memory: CRIU, and DMTCP.
var pagesName = regexp.MustCompile(`^(pages-[0-9]{1,9}\.img|ckpt_[^/\x00]{1,240}\.dmtcp)$`)

// chunk is one that is stored. Those of a file are in order; what is missing
// between them is zeros.
type chunk struct {
	number uint32 // in its file
	length uint32 // stored
	at     int64
	sum    uint64 // xxh64 of the chunk
}

type pages struct {
	PagesFile
	chunks []chunk
}

// index is what the end of a file says of the rest.
type index struct {
	metaLength int64 // stored
	metaRaw    int64 // of the tar
	metaSum    [32]byte
	files      []pages
}

func (x *index) encode() []byte {
	b := binary.AppendUvarint(nil, version)
	b = binary.AppendUvarint(b, uint64(x.metaLength))
	b = binary.AppendUvarint(b, uint64(x.metaRaw))
	b = append(b, x.metaSum[:]...)
	b = binary.AppendUvarint(b, uint64(len(x.files)))
	for _, f := range x.files {
		b = binary.AppendUvarint(b, uint64(len(f.Name)))
		b = append(b, f.Name...)
		b = binary.AppendUvarint(b, uint64(f.Size))
		b = binary.AppendUvarint(b, uint64(len(f.chunks)))
		next := uint32(0)
		for _, c := range f.chunks {
			b = binary.AppendUvarint(b, uint64(c.number-next))
			b = binary.AppendUvarint(b, uint64(c.length))
			b = binary.LittleEndian.AppendUint64(b, c.sum)
			next = c.number + 1
		}
	}
	return b
}

// decodeIndex reads an index of a file in which it begins at end.
func decodeIndex(b []byte, end int64) (*index, error) {
	d := &decoder{b: b}
	if v := d.number(1 << 32); v != version {
		return nil, fmt.Errorf("%w: version %d", ErrDamaged, v)
	}
	x := &index{metaLength: d.number(end), metaRaw: d.number(maxMeta)}
	copy(x.metaSum[:], d.bytes(32))
	at := int64(len(magic)) + x.metaLength
	for range d.number(maxFiles) {
		f := d.file(&at, end)
		if len(x.files) > 0 && f.Name <= x.files[len(x.files)-1].Name {
			d.fail("the files are not in order")
		}
		if d.err != nil {
			return nil, d.err
		}
		x.files = append(x.files, f)
	}
	if d.err == nil && (len(d.b) > 0 || at != end) {
		d.fail("the parts do not fill it")
	}
	return x, d.err
}

// decoder reads numbers and bytes until something is wrong; from then on all are zero.
type decoder struct {
	b   []byte
	err error
}

func (d *decoder) fail(why string) {
	if d.err == nil {
		d.err = fmt.Errorf("%w: its index: %s", ErrDamaged, why)
	}
	d.b = nil
}

func (d *decoder) number(most int64) int64 {
	v, n := binary.Uvarint(d.b)
	if n <= 0 || v > uint64(most) {
		d.fail("a number is cut off or too large")
		return 0
	}
	d.b = d.b[n:]
	return int64(v)
}

func (d *decoder) bytes(n int) []byte {
	if n > len(d.b) {
		d.fail("it is cut off")
		return make([]byte, min(n, 32))
	}
	b := d.b[:n]
	d.b = d.b[n:]
	return b
}

// file reads a file's part. Its first chunk lies at at, which is moved on.
func (d *decoder) file(at *int64, end int64) pages {
	var f pages
	f.Name = string(d.bytes(int(d.number(maxName))))
	f.Size = d.number(maxPages)
	if d.err == nil && !pagesName.MatchString(f.Name) {
		d.fail("a file of memory has another's name")
	}
	all := chunksOf(f.Size)
	n := d.number(all)
	f.chunks = make([]chunk, 0, min(n, int64(len(d.b)/10))) // that is what one takes at least
	next := int64(0)
	for ; n > 0 && d.err == nil; n-- {
		number := next + d.number(all)
		length := d.number(ChunkSize + 1024)
		sum := binary.LittleEndian.Uint64(d.bytes(8))
		if next = number + 1; number >= all || length > end-*at || length == 0 {
			d.fail("a chunk lies outside")
		}
		f.chunks = append(f.chunks, chunk{uint32(number), uint32(length), *at, sum})
		*at += length
	}
	return f
}

func chunksOf(size int64) int64 { return (size + ChunkSize - 1) / ChunkSize }

// encoder compresses chunks; it is for EncodeAll only, by any number of goroutines.
var encoder = sync.OnceValue(func() *zstd.Encoder {
	e, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(packers),
		zstd.WithEncoderCRC(false), zstd.WithSingleSegment(true))
	if err != nil {
		panic(err) // of the options
	}
	return e
})

// decoders decompress what is in memory, into no more than is there for it.
var decoders = sync.OnceValue(func() *zstd.Decoder {
	d, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(0), zstd.WithDecodeAllCapLimit(true),
		zstd.WithDecoderMaxMemory(maxIndex))
	if err != nil {
		panic(err) // of the options
	}
	return d
})

// inflate decompresses b into to, which it must fill.
func inflate(to, b []byte) error {
	got, err := decoders().DecodeAll(b, to[:0:len(to)])
	if err == nil && len(got) != len(to) {
		err = fmt.Errorf("%d bytes for %d", len(got), len(to))
	}
	if err != nil {
		return fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	return nil
}

// readAt reads exactly len(b) bytes. That there are fewer is damage.
func readAt(r io.ReaderAt, b []byte, at int64) error {
	n, err := r.ReadAt(b, at)
	if n == len(b) {
		return nil
	}
	if err == nil || errors.Is(err, io.EOF) {
		return fmt.Errorf("%w: it ends at %d", ErrDamaged, at+int64(n))
	}
	return err
}
