package tree

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"dewpoint/internal/layer/toc"
)

const (
	window = 256 << 10 // bytes read at once
	small  = 64 << 10  // contents up to this size go through the window
)

// source reads contents out of a layer's data.
type source struct {
	data io.ReaderAt
	file *os.File // data, if the kernel can copy out of it
	buf  []byte
	at   int64 // buf[:n] are the bytes of data from at on
	n    int
}

func newSource(data io.ReaderAt) source {
	file, _ := data.(*os.File)
	return source{data: data, file: file}
}

// regular creates a file with content and attributes. It returns EEXIST,
// unwrapped, when the name is taken.
func (e *Extractor) regular(parent int, base string, t *toc.Entry) error {
	const how = unix.O_WRONLY | unix.O_CREAT | unix.O_EXCL | unix.O_NOFOLLOW | unix.O_CLOEXEC
	fd, err := unix.Openat(parent, base, how, t.Mode&0o777)
	if err != nil {
		return err
	}
	if err = e.src.fill(fd, t); err == nil {
		err = e.attributes(fd, parent, base, t)
	}
	if cerr := unix.Close(fd); err == nil && cerr != nil {
		err = os.NewSyscallError("close", cerr)
	}
	return err
}

// fill writes the content of t to the new file fd; what lies in no range
// becomes a hole.
func (s *source) fill(fd int, t *toc.Entry) error {
	end := int64(0)
	for _, r := range t.Ranges {
		if r.File < end || r.Length < 0 || r.Data < 0 || r.Length > t.Size-r.File {
			return refuse(toc.ErrCorrupt, "range %+v of a file of %d bytes", r, t.Size)
		}
		end = r.File + r.Length
		if err := s.copy(fd, r); err != nil {
			return err
		}
	}
	if end < t.Size {
		return os.NewSyscallError("ftruncate", unix.Ftruncate(fd, t.Size))
	}
	return nil
}

// copy writes one range to fd: the large ones without passing user space,
// where the kernel does that for this pair of files.
func (s *source) copy(fd int, r toc.Range) error {
	for r.Length > small && s.file != nil {
		n, err := unix.CopyFileRange(int(s.file.Fd()), &r.Data, fd, &r.File, int(min(r.Length, 1<<30)), 0)
		if err == unix.EINTR {
			continue
		}
		if err != nil || n == 0 {
			s.file = nil // read and write tell what is wrong, if anything is
			break
		}
		r.Length -= int64(n) // the call moves both offsets
	}
	for r.Length > 0 {
		b, err := s.bytes(r.Data, r.Length)
		if err != nil {
			return err
		}
		if err := writeAt(fd, b, r.File); err != nil {
			return err
		}
		n := int64(len(b))
		r = toc.Range{File: r.File + n, Data: r.Data + n, Length: r.Length - n}
	}
	return nil
}

// bytes gives data[at:at+n] or, if that is large, a beginning of it, good until
// the next call.
func (s *source) bytes(at, n int64) ([]byte, error) {
	n = min(n, window)
	if at < s.at || at+n > s.at+int64(s.n) {
		if err := s.load(at, n); err != nil {
			return nil, err
		}
	}
	return s.buf[at-s.at:][:n], nil
}

// load reads a window that begins with the n bytes at at. Reads may come back
// short while the data is still being written.
func (s *source) load(at, n int64) error {
	if s.buf == nil {
		s.buf = make([]byte, window)
	}
	s.at, s.n = at, 0
	for int64(s.n) < n {
		got, err := s.data.ReadAt(s.buf[s.n:], at+int64(s.n))
		if s.n += got; got > 0 {
			continue
		}
		if err == nil || errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return fmt.Errorf("read the layer's data at %d: %w", at, err)
	}
	return nil
}

func writeAt(fd int, b []byte, at int64) error {
	for len(b) > 0 {
		n, err := unix.Pwrite(fd, b, at)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return os.NewSyscallError("pwrite", err)
		}
		b, at = b[n:], at+int64(n)
	}
	return nil
}
