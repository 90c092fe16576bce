package inflate

import (
	"io"
	"sync"
)

const (
	bufferSize = 256 << 10
	// keepBack bytes before the read position stay in the buffer, so that an
	// engine that read ahead can give them back.
	keepBack = 8
)

// input is a buffer over the compressed source. The bytes buf[r:w] are unread.
type input struct {
	src  io.Reader
	buf  []byte
	r, w int
	base int64 // stream offset of buf[0]; negative by keepBack at the start
	err  error // of src, kept until the buffered bytes are used
}

var buffers = sync.Pool{New: func() any { return new([bufferSize]byte) }}

func getBuffer() []byte { return buffers.Get().(*[bufferSize]byte)[:] }

func putBuffer(b []byte) {
	if b != nil {
		buffers.Put((*[bufferSize]byte)(b))
	}
}

func newInput(src io.Reader, at int64) input {
	return input{src: src, buf: getBuffer(), r: keepBack, w: keepBack, base: at - keepBack}
}

// close gives the buffer to the next reader. pos stays right.
func (in *input) close() {
	putBuffer(in.buf)
	in.buf, in.src = nil, nil
}

// pos is the stream offset of the next unread byte.
func (in *input) pos() int64 { return in.base + int64(in.r) }

func (in *input) unread() []byte { return in.buf[in.r:in.w] }

// fill adds at least one byte to the unread ones, or returns src's error,
// io.EOF at its end. At most half of the buffer may be unread.
func (in *input) fill() error {
	if in.err != nil {
		return in.err
	}
	if len(in.buf)-in.w < bufferSize/2 {
		in.compact()
	}
	for range 100 {
		n, err := in.src.Read(in.buf[in.w:])
		in.w += n
		in.err = err
		if n > 0 {
			return nil
		}
		if err != nil {
			return err
		}
	}
	in.err = io.ErrNoProgress
	return in.err
}

func (in *input) compact() {
	from := in.r - keepBack
	copy(in.buf, in.buf[from:in.w])
	in.base += int64(from)
	in.r -= from
	in.w -= from
}

// peek returns at least n unread bytes, n being small, or an error and what there is.
func (in *input) peek(n int) ([]byte, error) {
	for in.w-in.r < n {
		if err := in.fill(); err != nil {
			return in.unread(), err
		}
	}
	return in.unread(), nil
}

// next consumes n bytes, n being small. A stream that ends before gives io.ErrUnexpectedEOF.
func (in *input) next(n int) ([]byte, error) {
	b, err := in.peek(n)
	if err != nil {
		return nil, early(err)
	}
	in.r += n
	return b[:n], nil
}

// early turns the end of a stream where it must not end into its error.
func early(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}
