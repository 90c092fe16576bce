package pack

import (
	"fmt"
	"io"

	"dewpoint/internal/layer/erofs"
	"dewpoint/internal/layer/toc"
)

// MakeTable makes the table of the tar of size bytes in r: complete, that is
// from the table alone the layer's index can be built. Errors are those of toc.MakeTable
// and erofs.Build.
func MakeTable(r io.ReaderAt, size int64) (*toc.Table, error) {
	list, err := toc.Read(io.NewSectionReader(r, 0, size))
	if err != nil {
		return nil, fmt.Errorf("read layer: %w", err)
	}
	copied := &recorder{ReaderAt: r}
	if err := erofs.Build(io.Discard, list, erofs.Options{DataSize: size, Data: copied}); err != nil {
		return nil, fmt.Errorf("index layer: %w", err)
	}
	t, err := toc.MakeTable(r, size, copied.spans)
	if err != nil {
		return nil, fmt.Errorf("make table: %w", err)
	}
	return t, nil
}

// recorder remembers what is read.
type recorder struct {
	io.ReaderAt
	spans []toc.Span
}

func (r *recorder) ReadAt(b []byte, off int64) (int, error) {
	n, err := r.ReaderAt.ReadAt(b, off)
	if last := len(r.spans) - 1; last >= 0 && r.spans[last].Offset+r.spans[last].Length == off {
		r.spans[last].Length += int64(n)
	} else {
		r.spans = append(r.spans, toc.Span{Offset: off, Length: int64(n)})
	}
	return n, err
}
