package pack

import (
	"fmt"
	"io"

	"dewpoint/internal/image"
	"dewpoint/internal/layer/inflate"
)

// data reads the layer without its blob.
func (s *scan) data() error {
	if err := s.learn(); err != nil {
		return err
	}
	r := io.NewSectionReader(s.in.Data, 0, s.in.Size)
	for _, q := range s.known {
		s.points = append(s.points, q)
		end := s.in.Size
		if n := len(s.points); n < len(s.known) {
			end = s.known[n].out
		}
		if err := s.read(io.NewSectionReader(r, q.out, end-q.out), nil); err != nil {
			return err
		}
		s.endSegment()
	}
	if len(s.known) == 0 {
		if err := s.read(r, nil); err != nil {
			return err
		}
	}
	if s.useless {
		s.points = nil
	}
	return s.check()
}

// learn takes the points that are known, stores their windows, and leaves out
// those that lie too close.
func (s *scan) learn() error {
	if s.in.Points == nil || s.in.Size == 0 {
		return nil
	}
	list := []point{{}}
	err := s.in.Points(func(p inflate.Point) error {
		last := list[len(list)-1]
		if p.Out < last.out+s.every-lateMark || p.Out >= s.in.Size || len(list) == MaxPoints {
			return nil
		}
		q, err := s.store(p)
		list = append(list, q)
		return err
	})
	if err != nil {
		return fmt.Errorf("restart points: %w", err)
	}
	if s.in.Compression == image.Zstd && len(list) == 1 {
		return nil // one frame cannot be entered in the middle
	}
	s.known = list
	return nil
}

// store makes a point, and stores its window.
func (s *scan) store(p inflate.Point) (point, error) {
	q := point{in: p.In, out: p.Out, bit: p.Bit, crc: p.CRC, length: p.Length, window: s.window}
	if len(p.Window) == 0 {
		return q, nil
	}
	stored := s.enc.window(p.Window)
	q.windowLen = uint16(len(stored))
	s.window += int64(len(stored))
	_, err := s.windows.Write(stored)
	return q, err
}
