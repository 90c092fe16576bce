package layer

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"dewpoint/internal/image"
	"dewpoint/internal/layer/inflate"
)

// A layer's restart points are kept while its stream passes, in "points": a
// line of text for each. What a point's window would be is in the data.
const (
	pointsFile = "points"
	pointEvery = 2 << 20 // bytes of data between points
	pointLine  = "%d %d %d %d %d %d\n"
)

// pointWriter appends points to a layer's file. One goroutine uses it.
type pointWriter struct {
	f    *os.File
	last int64 // Out of the newest
}

// keepPoints opens the points of the layer in dir, less those that lie behind
// from, where the stream goes on.
func keepPoints(dir string, from int64) (*pointWriter, error) {
	f, err := os.OpenFile(filepath.Join(dir, pointsFile), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	k := &pointWriter{f: f}
	var keep int64
	err = eachPoint(f, func(p inflate.Point, _ int, end int64) error {
		if p.Out <= from {
			keep, k.last = end, p.Out
		}
		return nil
	})
	if err == nil {
		err = f.Truncate(keep)
	}
	if err == nil {
		_, err = f.Seek(keep, io.SeekStart)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return k, nil
}

// due reports whether the data's byte at off is far enough from the last point.
func (k *pointWriter) due(off int64) bool { return k != nil && off-k.last >= pointEvery }

// add keeps a point that is due. A nil writer keeps none.
func (k *pointWriter) add(p inflate.Point) error {
	if !k.due(p.Out) {
		return nil
	}
	k.last = p.Out
	_, err := fmt.Fprintf(k.f, pointLine, p.In, p.Bit, p.Out, p.CRC, p.Length, len(p.Window))
	return err
}

func (k *pointWriter) close() {
	if k != nil {
		k.f.Close()
	}
}

// eachPoint reads points, without their windows, whose lengths it gives, and
// where each line ends. It stops where the text does not make sense: a file that
// a power cut has spoilt has fewer points.
func eachPoint(r io.Reader, yield func(p inflate.Point, window int, end int64) error) error {
	var at int64
	var last inflate.Point
	for in := bufio.NewReader(r); ; {
		line, err := in.ReadString('\n')
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		var p inflate.Point
		var window int
		_, err = fmt.Sscanf(line, pointLine, &p.In, &p.Bit, &p.Out, &p.CRC, &p.Length, &window)
		if err != nil || p.Bit > 7 || window < 0 || window > 32<<10 || int64(window) > p.Out || p.In <= last.In ||
			p.Out <= last.Out {
			return nil
		}
		at += int64(len(line))
		if err := yield(p, window, at); err != nil {
			return err
		}
		last = p
	}
}

// Points yields the restart points of the blob that the layer was filled from,
// about every 2 MiB of data, in their order. There may be none. The window is
// valid during the call. The layer must be readable and not a tree.
func (l *Layer) Points(yield func(inflate.Point) error) error {
	f, err := os.Open(filepath.Join(l.dir, pointsFile))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	data, err := os.Open(l.Files().Data)
	if err != nil {
		return err
	}
	defer data.Close()
	buf := make([]byte, 32<<10)
	return eachPoint(f, func(p inflate.Point, window int, _ int64) error {
		if p.Out > l.Size {
			return nil
		}
		if window > 0 {
			p.Window = buf[:window]
			if _, err := data.ReadAt(p.Window, p.Out-int64(window)); err != nil {
				return err
			}
		}
		return yield(p)
	})
}

// pointed tells layers whose blobs have points that are worth keeping: any
// position of a plain one is one.
func pointed(c image.Compression) bool { return c == image.Gzip || c == image.Zstd }
