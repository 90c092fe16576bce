package inflate

import "io"

// plainReader passes src through. Every position is a restart point.
type plainReader struct {
	src io.Reader
	at  int64
	err error
}

func (r *plainReader) Read(p []byte) (int, error) {
	if r.err != nil {
		return 0, r.err
	}
	n, err := r.src.Read(p)
	r.at += int64(n)
	r.err = err
	return n, err
}

func (r *plainReader) Mark() {}

func (r *plainReader) Point() (Point, bool) {
	return Point{In: r.at, Out: r.at}, true
}

func (r *plainReader) In() int64 { return r.at }

func (r *plainReader) Close() error {
	r.err = errClosed
	return nil
}
