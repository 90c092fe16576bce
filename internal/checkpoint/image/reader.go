package image

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"

	"github.com/cespare/xxhash/v2"
	"github.com/klauspost/compress/zstd"
	"golang.org/x/sync/errgroup"
)

// Reader reads a file that Pack has written. It is safe for concurrent use if
// what it reads from is; it has nothing to be closed.
type Reader struct {
	r io.ReaderAt
	index
}

// Open reads the index of the file of size bytes in r. It returns an error that
// wraps ErrDamaged if there is none, or what r returned.
func Open(r io.ReaderAt, size int64) (*Reader, error) {
	if size < int64(len(magic)+footerSize) {
		return nil, fmt.Errorf("%w: it has %d bytes", ErrDamaged, size)
	}
	var head [len(magic)]byte
	var foot [footerSize]byte
	if err := errors.Join(readAt(r, head[:], 0), readAt(r, foot[:], size-footerSize)); err != nil {
		return nil, fmt.Errorf("open checkpoint image: %w", err)
	}
	at, stored := binary.LittleEndian.Uint64(foot[32:]), binary.LittleEndian.Uint32(foot[40:])
	raw := binary.LittleEndian.Uint32(foot[44:])
	if string(head[:]) != magic || string(foot[48:]) != endMagic || at > uint64(size) ||
		int64(at) < int64(len(magic)) ||
		int64(at)+int64(stored) != size-footerSize || raw > maxIndex || stored > maxIndex {
		return nil, fmt.Errorf("%w: it has no beginning or no end", ErrDamaged)
	}
	packed, plain := make([]byte, stored), make([]byte, raw)
	if err := readAt(r, packed, int64(at)); err != nil {
		return nil, fmt.Errorf("open checkpoint image: %w", err)
	}
	if err := inflate(plain, packed); err != nil {
		return nil, fmt.Errorf("its index: %w", err)
	}
	if sha256.Sum256(plain) != [32]byte(foot[:32]) {
		return nil, fmt.Errorf("%w: its index has another sum", ErrDamaged)
	}
	x, err := decodeIndex(plain, int64(at))
	if err != nil {
		return nil, err
	}
	return &Reader{r, *x}, nil
}

// Pages are the files of memory, by name.
func (r *Reader) Pages() []PagesFile {
	all := make([]PagesFile, len(r.files))
	for i, f := range r.files {
		all[i] = f.PagesFile
	}
	return all
}

// ReadPages reads a chunk of a file, both by number, into buf, which has ChunkSize
// bytes, and returns how many there are: ChunkSize but for the last. They are
// verified. An error wraps ErrDamaged, or is what reading returned.
func (r *Reader) ReadPages(ctx context.Context, file, chunk int, buf []byte) (int, error) {
	if file < 0 || file >= len(r.files) || chunk < 0 || int64(chunk) >= chunksOf(r.files[file].Size) {
		return 0, fmt.Errorf("there is no chunk %d of file %d", chunk, file)
	}
	if ctx.Err() != nil {
		return 0, context.Cause(ctx)
	}
	f := r.files[file]
	buf = buf[:min(ChunkSize, f.Size-int64(chunk)*ChunkSize)]
	c, ok := f.chunk(uint32(chunk))
	if !ok {
		clear(buf)
		return len(buf), nil
	}
	stored := make([]byte, c.length)
	if err := readAt(r.r, stored, c.at); err != nil {
		return 0, fmt.Errorf("%s: chunk %d: %w", f.Name, chunk, err)
	}
	if err := c.unpack(buf, stored); err != nil {
		return 0, fmt.Errorf("%s: chunk %d: %w", f.Name, chunk, err)
	}
	return len(buf), nil
}

// Chunk is ReadPages by the file's name, into memory of its own.
func (r *Reader) Chunk(ctx context.Context, name string, chunk int) ([]byte, error) {
	i := slices.IndexFunc(r.files, func(f pages) bool { return f.Name == name })
	if i < 0 {
		return nil, fmt.Errorf("there is no file %q", name)
	}
	buf := make([]byte, ChunkSize)
	n, err := r.ReadPages(ctx, i, chunk, buf)
	return buf[:n], err
}

// chunk finds one that is stored.
func (f *pages) chunk(number uint32) (chunk, bool) {
	i, ok := slices.BinarySearchFunc(f.chunks, number, func(c chunk, n uint32) int {
		return int(c.number) - int(n)
	})
	if !ok {
		return chunk{}, false
	}
	return f.chunks[i], true
}

// unpack fills to with the chunk that is stored as b.
func (c *chunk) unpack(to, b []byte) error {
	if err := inflate(to, b); err != nil {
		return err
	}
	if xxhash.Sum64(to) != c.sum {
		return fmt.Errorf("%w: it has another sum", ErrDamaged)
	}
	return nil
}

// Meta writes the files that are not memory into dir, which exists: files of mode
// 0600, directories of mode 0700. A file that is there already is an error. What was
// written counts only if there is no error.
func (r *Reader) Meta(dir string) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	src := &source{r: io.NewSectionReader(r.r, int64(len(magic)), r.metaLength)}
	dec, err := zstd.NewReader(src, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true),
		zstd.WithDecoderMaxWindow(8<<20))
	if err != nil {
		return fmt.Errorf("meta: %w", src.damage(err))
	}
	defer dec.Close()
	sum := sha256.New()
	raw := io.TeeReader(io.LimitReader(dec, r.metaRaw), sum)
	x := extractor{root: root, src: src, room: r.metaRaw}
	if err := x.all(tar.NewReader(raw)); err != nil {
		return fmt.Errorf("meta: %w", err)
	}
	if _, err := io.Copy(io.Discard, raw); err != nil { // padding
		return fmt.Errorf("meta: %w", src.damage(err))
	}
	if [32]byte(sum.Sum(nil)) != r.metaSum {
		return fmt.Errorf("%w: meta has another sum", ErrDamaged)
	}
	return nil
}

// source keeps the error of what is read from, to tell it from what is wrong with what was read.
type source struct {
	r   io.Reader
	err error
}

func (s *source) Read(b []byte) (int, error) {
	n, err := s.r.Read(b)
	if err != nil && !errors.Is(err, io.EOF) {
		s.err = err
	}
	return n, err
}

func (s *source) damage(err error) error {
	if s.err != nil {
		return s.err
	}
	return fmt.Errorf("%w: %w", ErrDamaged, err)
}

type extractor struct {
	root *os.Root
	src  *source
	room int64 // bytes that files may still take
}

func (x *extractor) all(t *tar.Reader) error {
	for n := 0; ; n++ {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return x.src.damage(err)
		}
		name := path.Clean(h.Name)
		x.room -= h.Size
		switch {
		case n >= maxEntries || x.room < 0:
			return fmt.Errorf("%w: too many files, or too large", ErrDamaged)
		case pagesName.MatchString(name) || !filepath.IsLocal(name):
			return fmt.Errorf("%w: %q is not to be there", ErrDamaged, name)
		case h.Typeflag == tar.TypeDir:
			err = x.root.Mkdir(name, 0o700)
		case h.Typeflag == tar.TypeReg:
			err = x.file(name, t)
		default:
			return fmt.Errorf("%w: %q is neither a file nor a directory", ErrDamaged, name)
		}
		if err != nil {
			return err
		}
	}
}

func (x *extractor) file(name string, from io.Reader) error {
	f, err := x.root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(struct{ io.Writer }{f}, reading{from, x.src})
	return errors.Join(err, f.Close())
}

// reading tells errors of reading from those of writing.
type reading struct {
	r   io.Reader
	src *source
}

func (r reading) Read(b []byte) (int, error) {
	n, err := r.r.Read(b)
	if err != nil && !errors.Is(err, io.EOF) {
		err = r.src.damage(err)
	}
	return n, err
}

// spanStored is how many stored bytes are read at once, about: a file system that
// is far away takes as long for one chunk as for many.
const spanStored = 2 << 20

// span is chunks of one file that lie in a row.
type span struct {
	file   int
	chunks []chunk
}

func (r *Reader) spans() []span {
	var all []span
	for i, f := range r.files {
		from, size := 0, 0
		for k, c := range f.chunks {
			if size += int(c.length); size >= spanStored || k == len(f.chunks)-1 {
				all = append(all, span{i, f.chunks[from : k+1]})
				from, size = k+1, 0
			}
		}
	}
	return all
}

// Unpack writes everything into dir, which exists and is empty, as it was packed, by
// so many workers, at least one. Chunks that are not stored become holes. What was written
// counts only if there is no error. It takes about 2.5 MiB of memory for each worker.
func (r *Reader) Unpack(ctx context.Context, dir string, workers int) (err error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	files := make([]*os.File, len(r.files))
	defer func() {
		for _, f := range files {
			if f != nil {
				err = errors.Join(err, f.Close())
			}
		}
	}()
	for i, f := range r.files {
		if files[i], err = root.OpenFile(f.Name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600); err != nil {
			return err
		}
		if err = files[i].Truncate(f.Size); err != nil {
			return err
		}
	}
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(max(1, workers))
	g.Go(func() error { return r.Meta(dir) })
	for _, s := range r.spans() {
		if gctx.Err() != nil {
			break
		}
		g.Go(func() error { return r.write(gctx, s, files[s.file]) })
	}
	if err := g.Wait(); err != nil {
		return fmt.Errorf("unpack: %w", err)
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return nil
}

// write reads a span and writes its chunks to where they belong.
func (r *Reader) write(ctx context.Context, s span, to *os.File) error {
	f, first, last := r.files[s.file], s.chunks[0], s.chunks[len(s.chunks)-1]
	stored := make([]byte, last.at+int64(last.length)-first.at)
	if err := readAt(r.r, stored, first.at); err != nil {
		return fmt.Errorf("%s: %w", f.Name, err)
	}
	buf := make([]byte, ChunkSize)
	for _, c := range s.chunks {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		at := int64(c.number) * ChunkSize
		b := buf[:min(ChunkSize, f.Size-at)]
		if err := c.unpack(b, stored[c.at-first.at:][:c.length]); err != nil {
			return fmt.Errorf("%s: chunk %d: %w", f.Name, c.number, err)
		}
		if _, err := to.WriteAt(b, at); err != nil {
			return err
		}
	}
	return nil
}
