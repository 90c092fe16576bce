package inflate

import (
	"bytes"
	"errors"
	"io"
	"testing"
	"testing/iotest"

	"dewpoint/internal/image"
)

func open(t *testing.T, src io.Reader, c image.Compression, p *Point) Reader {
	t.Helper()
	r, err := NewReader(src, c, p)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	return r
}

func TestPlain(t *testing.T) {
	data := payloads()["mixed"]
	r := open(t, bytes.NewReader(data), image.Plain, nil)
	list := collect(t, r, data, 10_000)
	if len(list) < len(data)/10_000 {
		t.Fatal(len(list))
	}
	p := list[len(list)/2]
	check(t, open(t, bytes.NewReader(data[p.In:]), image.Plain, &p), 9999, data[p.Out:])
}

func TestNewReaderRefuses(t *testing.T) {
	for name, p := range map[string]struct {
		c image.Compression
		p Point
	}{
		"bit":           {image.Gzip, Point{In: 5, Bit: 8, Out: 5, Window: []byte("hello")}},
		"negative":      {image.Gzip, Point{In: -1}},
		"bare bit":      {image.Gzip, Point{In: 100, Bit: 3, Out: 100}},
		"window":        {image.Gzip, Point{In: 5, Out: 1 << 20, Window: make([]byte, windowSize+1)}},
		"window beyond": {image.Gzip, Point{In: 5, Out: 4, Window: []byte("hello")}},
		"zstd window":   {image.Zstd, Point{In: 5, Out: 5, Window: []byte("hello")}},
		"plain":         {image.Plain, Point{In: 5, Out: 6}},
	} {
		if _, err := NewReader(nil, p.c, &p.p); !errors.Is(err, ErrCorrupt) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := NewReader(nil, "lzma", nil); err == nil {
		t.Error("unknown compression taken")
	}
}

func TestClosed(t *testing.T) {
	for c, blob := range map[image.Compression][]byte{
		image.Plain: []byte("x"), image.Gzip: goGzip(6, []byte("x")), image.Zstd: zstdFrame(t, []byte("x")),
	} {
		r := open(t, bytes.NewReader(blob), c, nil)
		for range 2 {
			if err := r.Close(); err != nil {
				t.Fatal(err)
			}
			if n, err := r.Read(make([]byte, 10)); n != 0 || err != errClosed {
				t.Fatal(c, n, err)
			}
		}
	}
}

// TestEndIsFinal reads on behind the end and behind an error.
func TestEndIsFinal(t *testing.T) {
	good := goGzip(6, []byte("hello"))
	r := open(t, bytes.NewReader(good), image.Gzip, nil)
	if b, err := io.ReadAll(r); err != nil || string(b) != "hello" {
		t.Fatal(err)
	}
	if _, err := r.Read(make([]byte, 1)); err != io.EOF {
		t.Fatal(err)
	}
	r = open(t, iotest.TimeoutReader(iotest.OneByteReader(bytes.NewReader(good))), image.Gzip, nil)
	for range 3 {
		if _, err := r.Read(make([]byte, 1)); err != iotest.ErrTimeout {
			t.Fatal(err)
		}
	}
}
