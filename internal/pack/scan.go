package pack

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"hash"
	"io"

	"dewpoint/internal/image"
	"dewpoint/internal/layer/inflate"

	"github.com/opencontainers/go-digest"
)

const (
	segmentSize = 2 << 20   // about what lies between two points
	scanBuffer  = 512 << 10 // at least as much as the decoder likes
	lateMark    = 64 << 10  // the decoder is told of a point when this much is left
)

// scan reads a layer once, front to back, and finds its restart points. What the blob inflates to is compared
// with the data.
type scan struct {
	ctx     context.Context
	in      InputLayer
	windows io.Writer // windows go here as they are found
	enc     *encoder
	points  []point

	src     source
	at      int64     // bytes of the tar that have passed
	whole   hash.Hash // of the tar
	segment hash.Hash // since the last point
	every   int64     // bytes between points
	useless bool      // a segment is longer than MaxSegment
	window  int64     // bytes of windows so far
	known   []point   // points to come, where they are known
}

func (s *scan) run() error {
	s.whole, s.segment = sha256.New(), sha256.New()
	s.every = max(segmentSize, s.in.Size/(MaxPoints/4))
	if s.in.Open == nil {
		return s.data()
	}
	blob, err := s.in.Open()
	if err != nil {
		return err
	}
	defer blob.Close()
	if err := s.inflate(blob); err != nil {
		return err
	}
	s.finish()
	return s.check()
}

// inflate reads the blob to its end.
func (s *scan) inflate(blob io.Reader) error {
	s.src = source{r: bufio.NewReaderSize(blob, 4096), sum: sha256.New()}
	head, err := s.src.r.Peek(image.SniffLen)
	if err != nil && err != io.EOF {
		return err
	}
	s.in.Compression = image.Sniff(head)
	r, err := inflate.NewReader(&s.src, s.in.Compression, nil)
	if err != nil {
		return err
	}
	defer r.Close()
	s.points = []point{{}}
	if err := s.read(r, r); err != nil {
		return err
	}
	if _, err := io.Copy(io.Discard, &s.src); err != nil {
		return err
	}
	if got := digest.NewDigest(digest.SHA256, s.src.sum); got != s.in.Blob || s.src.n != s.in.BlobSize {
		return fmt.Errorf("%w: its blob has %d bytes and digest %s", ErrMismatch, s.src.n, got)
	}
	return nil
}

// source is the blob. It fills what it is asked to fill, so that points do not
// depend on how the bytes arrive.
type source struct {
	r   *bufio.Reader
	sum hash.Hash
	n   int64
}

func (s *source) Read(b []byte) (int, error) {
	n, err := io.ReadFull(s.r, b)
	if err == io.ErrUnexpectedEOF && n > 0 {
		err = nil
	}
	s.sum.Write(b[:n])
	s.n += int64(n)
	return n, err
}

// read takes the tar from r. If points is not nil, it is r and gives restart
// points.
func (s *scan) read(r io.Reader, points inflate.Reader) error {
	buf, data := make([]byte, scanBuffer), make([]byte, scanBuffer)
	for {
		if err := context.Cause(s.ctx); err != nil {
			return err
		}
		n, err := r.Read(buf[:s.step(points)])
		if n > 0 {
			if points != nil {
				if err := s.compare(buf[:n], data[:n]); err != nil {
					return err
				}
			}
			s.pass(buf[:n])
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		if points != nil {
			if err := s.point(points); err != nil {
				return err
			}
		}
	}
}

// step is how many bytes to read next; it asks for a point when one is due.
func (s *scan) step(points inflate.Reader) int64 {
	if points == nil {
		return scanBuffer
	}
	left := s.points[len(s.points)-1].out + s.every - s.at
	if left >= lateMark || s.in.Compression == image.Plain {
		return min(max(left, 1), scanBuffer)
	}
	points.Mark()
	return scanBuffer
}

func (s *scan) compare(b, data []byte) error {
	if s.at+int64(len(b)) > s.in.Size {
		return fmt.Errorf("%w: its blob inflates to more than %d bytes", ErrMismatch, s.in.Size)
	}
	if err := readData(s.in.Data, data, s.at); err != nil {
		return err
	}
	if !bytes.Equal(b, data) {
		return fmt.Errorf("%w: its data differs from its blob at bytes %d to %d", ErrMismatch, s.at,
			s.at+int64(len(b)))
	}
	return nil
}

// pass hashes bytes of the tar.
func (s *scan) pass(b []byte) {
	s.whole.Write(b)
	if s.points != nil {
		s.segment.Write(b)
	}
	s.at += int64(len(b))
}

// point takes the restart point at which the last read stopped, if it did and
// one is due.
func (s *scan) point(r inflate.Reader) error {
	if s.at < s.points[len(s.points)-1].out+s.every-lateMark || s.at >= s.in.Size {
		return nil
	}
	if s.in.Compression == image.Plain && s.at < s.points[len(s.points)-1].out+s.every {
		return nil
	}
	p, ok := r.Point()
	if !ok {
		return nil
	}
	s.endSegment()
	q, err := s.store(p)
	if err != nil {
		return err
	}
	s.points = append(s.points, q)
	return nil
}

func (s *scan) endSegment() {
	last := &s.points[len(s.points)-1]
	s.segment.Sum(last.sum[:0])
	s.segment.Reset()
	s.useless = s.useless || s.at-last.out > MaxSegment
}

// finish ends the last segment, and forgets points that are of no use: those of
// a zstd layer of one frame, and of one where they lie too far apart.
func (s *scan) finish() {
	s.endSegment()
	single := s.in.Compression == image.Zstd && len(s.points) == 1
	if single || s.useless || s.in.Size == 0 {
		s.points = nil
	}
}

// digests makes points that have the digests of the segments and nothing else,
// for layers that cannot be entered in the middle.
func (s *scan) digests() error {
	for off := int64(0); off < s.in.Size; off += s.every {
		q := point{out: off}
		if s.in.Compression == image.Plain {
			q.in = off
		}
		h := sha256.New()
		if _, err := io.Copy(h, io.NewSectionReader(s.in.Data, off, min(s.every, s.in.Size-off))); err != nil {
			return err
		}
		h.Sum(q.sum[:0])
		s.points = append(s.points, q)
	}
	return nil
}

func (s *scan) check() error {
	if got := digest.NewDigest(digest.SHA256, s.whole); got != s.in.DiffID || s.at != s.in.Size {
		return fmt.Errorf("%w: its data has %d bytes and digest %s", ErrMismatch, s.at, got)
	}
	return nil
}
