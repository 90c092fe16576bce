package pack

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"

	"dewpoint/internal/image"
	"dewpoint/internal/layer/erofs"
	"dewpoint/internal/layer/inflate"
	"dewpoint/internal/layer/toc"

	"github.com/opencontainers/go-digest"
)

// Input is what a pack is built of.
type Input struct {
	Image   digest.Digest // of the platform's manifest
	Profile *Profile
	Layers  []InputLayer // bottom first; of those that occur again the first counts
	// Dir is where the parts are kept until the pack is written: about the size
	// of the pack. "" is os.TempDir. The files have no names.
	Dir string
}

// InputLayer is a complete layer.
type InputLayer struct {
	DiffID, Blob   digest.Digest
	BlobSize, Size int64
	Compression    image.Compression // what Open's bytes say counts more
	Data           io.ReaderAt       // the tar
	// Open returns the blob, to find restart points. It is read to its end and
	// closed. Without it, and without Points, the layer has no points.
	Open func() (io.ReadCloser, error)
	// Points yields restart points of the blob that were found before, in
	// order; it is used if there is no Open. They are believed: what a wrong one
	// gives does not hash to its segment, and is not used.
	Points func(yield func(inflate.Point) error) error
}

// Stats say what a pack came to.
type Stats struct {
	Size   int64         // of the pack
	Digest digest.Digest // of the pack
	Header digest.Digest // Stream.HeaderDigest
	Chunks int
	Needed int64 // bytes that the profile says are read
	Raw    int64 // of them, those that chunks hold; the others are copies

	// Bytes stored, of which the first three are what a start waits for.
	HeaderSize, Tables, ChunkData, Points, Windows int64
	// Unlazy are layers without a table, for their headers or files are too many.
	Unlazy []digest.Digest
}

// Build writes the pack of a profile to w. It reads the layers' data and blobs
// once, compares them with their digests and with each other, and returns
// ErrMismatch if they differ. What it writes depends on the input alone.
//
// One core works. Memory is about 100 MiB: the zstd encoder's, a chunk twice,
// one layer's table twice with its table of contents, and 64 bytes for each
// page of the profile and each MiB of a layer.
func Build(ctx context.Context, w io.Writer, in Input) (Stats, error) {
	b, err := newBuilder(ctx, in)
	if err != nil {
		return Stats{}, err
	}
	defer b.close()
	if err := b.build(); err != nil {
		return Stats{}, fmt.Errorf("build pack: %w", err)
	}
	s, err := b.write(w)
	if err != nil {
		return Stats{}, fmt.Errorf("write pack: %w", err)
	}
	return s, nil
}

// ErrMismatch says that a layer's data or blob is not what its digest says.
var ErrMismatch = errors.New("layer does not match its digest")

// section is one kind of parts, in a file without a name.
type section struct {
	f *os.File
	n int64
}

func (s *section) Write(b []byte) (int, error) {
	n, err := s.f.Write(b)
	s.n += int64(n)
	return n, err
}

// rewind forgets what was written after the first n bytes.
func (s *section) rewind(n int64) error {
	_, err := s.f.Seek(n, io.SeekStart)
	s.n = n
	return err
}

type builder struct {
	ctx                             context.Context
	in                              Input
	layers                          []InputLayer // distinct
	h                               Header
	enc                             *encoder
	stats                           Stats
	tables, chunks, points, windows section
}

func newBuilder(ctx context.Context, in Input) (*builder, error) {
	if in.Profile == nil || in.Profile.Image != in.Image {
		return nil, fmt.Errorf("build pack: no profile of %s", in.Image)
	}
	if err := in.Profile.check(); err != nil {
		return nil, fmt.Errorf("build pack: %w", err)
	}
	enc, err := newEncoder()
	if err != nil {
		return nil, err
	}
	b := &builder{ctx: ctx, in: in, enc: enc}
	b.h = Header{Version: Version, Image: in.Image, Profile: in.Profile.About, Layers: []Layer{},
		Chunks: []Chunk{}}
	b.h.Profile.Created = b.h.Profile.Created.UTC()
	for _, s := range b.sections() {
		if s.f, err = anonymous(in.Dir); err != nil {
			b.close()
			return nil, fmt.Errorf("build pack: %w", err)
		}
	}
	return b, nil
}

// sections are in the order of the file.
func (b *builder) sections() []*section {
	return []*section{&b.tables, &b.chunks, &b.points, &b.windows}
}

func anonymous(dir string) (*os.File, error) {
	f, err := os.CreateTemp(dir, "pack-*.tmp")
	if err != nil {
		return nil, err
	}
	if err := os.Remove(f.Name()); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

func (b *builder) close() {
	for _, s := range b.sections() {
		if s.f != nil {
			s.f.Close()
		}
	}
}

func (b *builder) build() error {
	seen := make(map[digest.Digest]bool)
	for _, l := range b.in.Layers {
		if seen[l.DiffID] {
			continue
		}
		seen[l.DiffID] = true
		b.layers = append(b.layers, l)
		if err := b.layer(l); err != nil {
			return fmt.Errorf("layer %s: %w", l.DiffID, err)
		}
	}
	p, err := makePlan(b.layers, b.reads())
	if err != nil {
		return err
	}
	b.h.Needed = p.needed
	if b.h.Chunks, err = p.chunks(); err != nil {
		return err
	}
	return b.compress()
}

// layer makes all parts of a layer but its chunks.
func (b *builder) layer(l InputLayer) error {
	b.h.Layers = append(b.h.Layers,
		Layer{DiffID: l.DiffID, Blob: l.Blob, BlobSize: l.BlobSize, Size: l.Size, Compression: l.Compression})
	to := &b.h.Layers[len(b.h.Layers)-1]
	table, err := MakeTable(l.Data, l.Size)
	if errors.Is(err, toc.ErrLimit) || errors.Is(err, erofs.ErrTooLarge) {
		b.stats.Unlazy = append(b.stats.Unlazy, l.DiffID)
		return nil
	}
	if err != nil {
		return err
	}
	raw, err := table.MarshalBinary()
	if err != nil {
		return err
	}
	if to.Table, err = b.part(&b.tables, raw); err != nil {
		return err
	}
	s := &scan{ctx: b.ctx, in: l, windows: &b.windows, enc: b.enc}
	before := b.windows.n
	if err := s.run(); err != nil {
		return err
	}
	if len(s.points) == 0 {
		if err := b.windows.rewind(before); err != nil {
			return err
		}
		if err := s.digests(); err != nil {
			return err
		}
	}
	to.Compression, to.Windows = s.in.Compression, b.windows.n-before
	if len(s.points) > 0 {
		if to.Points, err = b.part(&b.points, encodePoints(s.points)); err != nil {
			return err
		}
	}
	return nil
}

func (b *builder) part(to *section, raw []byte) (*Part, error) {
	p, stored := b.enc.part(raw)
	if _, err := to.Write(stored); err != nil {
		return nil, err
	}
	return &p, nil
}

// reads are the profile's, of layers that can be started lazily, cut to them.
func (b *builder) reads() []Range {
	index := make([]int, len(b.in.Profile.Layers))
	for i, d := range b.in.Profile.Layers {
		index[i] = -1
		for k := range b.h.Layers {
			if b.h.Layers[k].DiffID == d && b.h.Layers[k].Table != nil {
				index[i] = k
			}
		}
	}
	var out []Range
	for _, r := range b.in.Profile.Reads {
		if r.Layer = index[r.Layer]; r.Layer >= 0 && r.Offset < b.h.Layers[r.Layer].Size {
			out = append(out, r)
		}
	}
	return out
}

// compress makes the chunks' parts.
func (b *builder) compress() error {
	buf := make([]byte, 0, MaxChunk)
	for k := range b.h.Chunks {
		if err := context.Cause(b.ctx); err != nil {
			return err
		}
		c := &b.h.Chunks[k]
		buf = buf[:c.Raw]
		to := buf
		for _, r := range c.Ranges {
			if err := readData(b.layers[r.Layer].Data, to[:r.Length], r.Offset); err != nil {
				return err
			}
			to = to[r.Length:]
		}
		p, err := b.part(&b.chunks, buf)
		if err != nil {
			return err
		}
		c.Part = *p
		b.stats.Raw += c.Raw
	}
	return nil
}

// write puts the pack together.
func (b *builder) write(to io.Writer) (Stats, error) {
	if err := b.h.Validate(); err != nil {
		return Stats{}, err
	}
	head, err := b.h.marshal(b.enc)
	if err != nil {
		return Stats{}, err
	}
	hash := sha256.New()
	w := io.MultiWriter(hash, to)
	if _, err := w.Write(head); err != nil {
		return Stats{}, err
	}
	s := b.stats
	s.Size = int64(len(head))
	for _, sec := range b.sections() {
		if err := context.Cause(b.ctx); err != nil {
			return Stats{}, err
		}
		n, err := io.Copy(w, io.NewSectionReader(sec.f, 0, sec.n))
		if s.Size += n; err == nil && n < sec.n {
			err = io.ErrUnexpectedEOF
		}
		if err != nil {
			return Stats{}, err
		}
	}
	s.Digest, s.Header = digest.NewDigest(digest.SHA256, hash), digest.FromBytes(head)
	s.Chunks, s.Needed = len(b.h.Chunks), b.h.Needed
	s.HeaderSize, s.Tables, s.ChunkData = int64(len(head)), b.tables.n, b.chunks.n
	s.Points, s.Windows = b.points.n, b.windows.n
	return s, nil
}
