package lazypages

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
)

// Dir is a Source over files of pages that lie in a directory as CRIU wrote them.
type Dir string

// Chunk reads from the file; nothing verifies it.
func (d Dir) Chunk(_ context.Context, file string, chunk int) ([]byte, error) {
	f, err := os.Open(filepath.Join(string(d), filepath.Base(file)))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b := make([]byte, ChunkSize)
	n, err := f.ReadAt(b, int64(chunk)*ChunkSize)
	if errors.Is(err, io.EOF) && n > 0 {
		err = nil
	}
	return b[:n], err
}

// Eager writes into dir the files of pages that CRIU opens although it restores
// lazily. Of their pages it fills those that CRIU reads itself: shared and locked
// memory, stacks' ends, private pages of files, the vDSO. The others are holes.
// It returns the bytes of both kinds. What is there already is overwritten.
func Eager(ctx context.Context, dir string, src Source) (eager, lazy int64, err error) {
	maps, err := pagemaps(dir)
	if err != nil {
		return 0, 0, err
	}
	for _, m := range maps {
		e, err := fillEager(ctx, dir, m, src)
		if err != nil {
			return 0, 0, fmt.Errorf("%s: %w", m.file, err)
		}
		eager, lazy = eager+e, lazy+m.size-e
	}
	return eager, lazy, nil
}

func fillEager(ctx context.Context, dir string, m pagemap, src Source) (int64, error) {
	f, err := os.OpenFile(filepath.Join(dir, m.file), os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return 0, err
	}
	written, err := copyEager(ctx, f, m, src)
	if err == nil {
		err = f.Truncate(m.size)
	}
	return written, errors.Join(err, f.Close())
}

func copyEager(ctx context.Context, w io.WriterAt, m pagemap, src Source) (int64, error) {
	var written int64
	have, chunk := []byte(nil), -1
	for _, r := range m.runs {
		for !r.lazy && r.size > 0 {
			if c := int(r.offset / ChunkSize); c != chunk {
				var err error
				if have, err = src.Chunk(ctx, m.file, c); err != nil {
					return 0, err
				}
				chunk = c
			}
			at := r.offset % ChunkSize
			n := min(r.size, ChunkSize-at)
			if at+n > int64(len(have)) {
				return 0, fmt.Errorf("chunk %d is too short: %d bytes", chunk, len(have))
			}
			if _, err := w.WriteAt(have[at:at+n], r.offset); err != nil {
				return 0, err
			}
			r.offset, r.size, written = r.offset+n, r.size-n, written+n
		}
	}
	return written, nil
}
