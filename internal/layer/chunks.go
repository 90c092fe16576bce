package layer

import (
	"context"
	"io"
)

// chunkReader reads chunks as one stream and remembers the state of the
// blob's hash at the start of those that a restart point may still lie in.
type chunkReader struct {
	ctx  context.Context
	p    *pipeline
	in   <-chan chunk
	skip int64 // bytes that were hashed again but are not to be inflated again

	cur   chunk
	off   int // bytes of cur read
	marks []hashMark
}

type hashMark struct {
	at   int64
	hash []byte
}

func (r *chunkReader) Read(b []byte) (int, error) {
	for r.off == r.cur.n {
		if err := r.next(); err != nil {
			return 0, err
		}
	}
	n := copy(b, (*r.cur.buf)[r.off:r.cur.n])
	r.off += n
	return n, nil
}

// next takes the next chunk, less what is to be skipped.
func (r *chunkReader) next() error {
	if r.cur.buf != nil {
		chunkPool.Put(r.cur.buf)
		r.cur, r.off = chunk{}, 0
	}
	c, ok, err := receive(r.ctx, r.in)
	if err != nil {
		return err
	}
	if cut := r.p.cut.Load(); !ok && cut != nil {
		return *cut
	}
	if !ok {
		return io.EOF
	}
	r.cur, r.off = c, 0
	r.marks = append(r.marks, hashMark{c.at, c.hash})
	if r.skip > 0 {
		n := min(r.skip, int64(c.n))
		r.skip -= n
		r.off = int(n)
	}
	return nil
}

// stateAt returns the last remembered hash state at or before offset in, and
// forgets those before it.
func (r *chunkReader) stateAt(in int64) (int64, []byte) {
	i := 0
	for i+1 < len(r.marks) && r.marks[i+1].at <= in {
		i++
	}
	r.marks = r.marks[i:]
	return r.marks[0].at, r.marks[0].hash
}

// drain reads to the end, so that every byte has been hashed.
func (r *chunkReader) drain() error {
	for {
		if err := r.next(); err != nil {
			if err == io.EOF {
				return nil
			}
			return err
		}
	}
}
