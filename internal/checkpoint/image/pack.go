package image

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cespare/xxhash/v2"
	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"
	"golang.org/x/sync/errgroup"
)

// packers is how many chunks are compressed at once, and half of how many are in memory.
const packers = 2

// Pack writes the file of the directory dir to w, from beginning to end. Files
// of memory are those of the names pages-N.img and ckpt_X.dmtcp at the top; other files may lie in
// directories. Modes, owners and times are not kept. What is neither a file nor a directory is an
// error, and so is a file that changes meanwhile. After an error what was written is of no use.
func Pack(ctx context.Context, w io.Writer, dir string) (Info, error) {
	meta, mem, err := survey(dir)
	if err != nil {
		return Info{}, fmt.Errorf("pack %s: %w", dir, err)
	}
	out := &counter{w: w, hash: sha256.New()}
	p := &packer{ctx: ctx, dir: dir, out: out}
	p.info.Files = len(mem)
	if err := p.run(meta, mem); err != nil {
		return Info{}, fmt.Errorf("pack %s: %w", dir, err)
	}
	p.info.Size, p.info.Digest = out.n, digest.NewDigest(digest.SHA256, out.hash)
	return p.info, nil
}

// survey lists what is below dir: directories and files that are not memory, parents
// first, and memory.
func survey(dir string) (meta, mem []string, err error) {
	err = filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		name := strings.TrimPrefix(strings.TrimPrefix(path, dir), "/")
		switch {
		case err != nil || name == "":
			return err
		case !e.IsDir() && !e.Type().IsRegular():
			return fmt.Errorf("%s is neither a file nor a directory", name)
		case e.Type().IsRegular() && pagesName.MatchString(name):
			mem = append(mem, name)
		default:
			meta = append(meta, name)
		}
		return nil
	})
	slices.Sort(mem)
	if err == nil && (len(meta) > maxEntries || len(mem) > maxFiles) {
		err = fmt.Errorf("it has too many files: %d", len(meta)+len(mem))
	}
	return meta, mem, err
}

// counter passes on what is written, and knows how much and what it hashes to.
type counter struct {
	w    io.Writer
	n    int64
	hash hash.Hash
}

func (c *counter) Write(b []byte) (int, error) {
	n, err := c.w.Write(b)
	c.hash.Write(b[:n])
	c.n += int64(n)
	return n, err
}

type packer struct {
	ctx   context.Context
	dir   string
	out   *counter
	info  Info
	index index
}

func (p *packer) run(meta, mem []string) error {
	if _, err := io.WriteString(p.out, magic); err != nil {
		return err
	}
	if err := p.meta(meta); err != nil {
		return err
	}
	for _, name := range mem {
		if err := p.pages(name); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return p.end()
}

// meta writes the tar of the files that are not memory.
func (p *packer) meta(names []string) error {
	enc, err := zstd.NewWriter(p.out, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1),
		zstd.WithEncoderCRC(false), zstd.WithWindowSize(1<<20))
	if err != nil {
		return err
	}
	raw := &counter{w: enc, hash: sha256.New()}
	t := tar.NewWriter(raw)
	for _, name := range names {
		if err := p.entry(t, name); err != nil {
			return errors.Join(fmt.Errorf("%s: %w", name, err), enc.Close())
		}
	}
	if err := errors.Join(t.Close(), enc.Close()); err != nil {
		return err
	}
	p.index.metaLength, p.index.metaRaw = p.out.n-int64(len(magic)), raw.n
	p.index.metaSum = [32]byte(raw.hash.Sum(nil))
	return nil
}

func (p *packer) entry(t *tar.Writer, name string) error {
	if p.ctx.Err() != nil {
		return context.Cause(p.ctx)
	}
	f, err := os.Open(filepath.Join(p.dir, name))
	if err != nil {
		return err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return err
	}
	h := &tar.Header{Typeflag: tar.TypeReg, Name: name, Size: fi.Size(), Mode: 0o600}
	if fi.IsDir() {
		h.Typeflag, h.Name, h.Size, h.Mode = tar.TypeDir, name+"/", 0, 0o700
	}
	if err := t.WriteHeader(h); err != nil || fi.IsDir() {
		return err
	}
	p.info.Files++
	p.info.Meta += fi.Size()
	if p.info.Meta > maxMeta/2 {
		return errors.New("it is too large")
	}
	_, err = io.CopyN(t, f, fi.Size())
	return err
}

// squeezed is a chunk that is being compressed.
type squeezed struct {
	number uint32
	raw    []byte
	sum    uint64
	out    []byte
	done   chan struct{}
}

func (s *squeezed) squeeze() {
	s.sum = xxhash.Sum64(s.raw)
	s.out = encoder().EncodeAll(s.raw, s.out[:0])
	close(s.done)
}

// pages writes a file of memory: one goroutine reads it, others compress chunks,
// and this one writes them in order.
func (p *packer) pages(name string) error {
	f, err := os.Open(filepath.Join(p.dir, name))
	if err != nil {
		return err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return err
	}
	if fi.Size() > maxPages {
		return errors.New("it is too large")
	}
	file := pages{PagesFile: PagesFile{Name: name, Size: fi.Size()}}
	g, ctx := errgroup.WithContext(p.ctx)
	order, todo := make(chan *squeezed, packers), make(chan *squeezed)
	free := make(chan *squeezed, 2*packers) // as many as there are at all
	for range cap(free) {
		free <- &squeezed{raw: make([]byte, ChunkSize)}
	}
	for range packers {
		g.Go(func() error {
			for s := range todo {
				s.squeeze()
			}
			return nil
		})
	}
	g.Go(func() error {
		defer close(order)
		defer close(todo)
		return cut(ctx, f, fi.Size(), free, order, todo)
	})
	g.Go(func() error {
		for s := range order {
			<-s.done
			if err := p.chunk(&file, s); err != nil {
				return err
			}
			free <- s
		}
		return nil
	})
	if err := g.Wait(); err != nil {
		return err
	}
	p.info.Pages += file.Size
	p.index.files = append(p.index.files, file)
	return nil
}

// cut reads the chunks of a file and hands on those that are not all zeros.
func cut(ctx context.Context, f io.ReaderAt, size int64, free <-chan *squeezed, order,
	todo chan<- *squeezed) error {
	var s *squeezed
	for k := range chunksOf(size) {
		if s == nil {
			select {
			case s = <-free:
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}
		s.raw = s.raw[:min(ChunkSize, size-k*ChunkSize)]
		if n, err := f.ReadAt(s.raw, k*ChunkSize); n < len(s.raw) {
			return fmt.Errorf("it ends at %d of %d: %w", k*ChunkSize+int64(n), size, err)
		}
		if allZero(s.raw) {
			continue
		}
		s.number, s.done = uint32(k), make(chan struct{})
		todo <- s // somebody takes it: they end when it is closed
		select {
		case order <- s:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		s = nil
	}
	return nil
}

var zeros [ChunkSize]byte

// chunk writes one chunk.
func (p *packer) chunk(file *pages, s *squeezed) error {
	at := p.out.n
	if _, err := p.out.Write(s.out); err != nil {
		return err
	}
	file.chunks = append(file.chunks, chunk{s.number, uint32(len(s.out)), at, s.sum})
	return nil
}

// end writes the index and the footer.
func (p *packer) end() error {
	raw := p.index.encode()
	if len(raw) > maxIndex {
		return errors.New("it has too much memory")
	}
	at, stored := p.out.n, encoder().EncodeAll(raw, nil)
	if _, err := p.out.Write(stored); err != nil {
		return err
	}
	sum := sha256.Sum256(raw)
	foot := append([]byte(nil), sum[:]...)
	foot = binary.LittleEndian.AppendUint64(foot, uint64(at))
	foot = binary.LittleEndian.AppendUint32(foot, uint32(len(stored)))
	foot = binary.LittleEndian.AppendUint32(foot, uint32(len(raw)))
	_, err := p.out.Write(append(foot, endMagic...))
	return err
}

func allZero(b []byte) bool { return bytes.Equal(b, zeros[:len(b)]) }
