package inflate

import (
	"bytes"
	"encoding/binary"
	"encoding/gob"
	"encoding/json"
	"errors"
	"hash/crc32"
	"io"
	"os"
	"testing"
	"testing/iotest"

	"dewpoint/testkit"
)

func eachEngine(t *testing.T, f func(t *testing.T, open func(io.Reader, *Point) *gzipReader)) {
	for name, make := range engines {
		t.Run(name, func(t *testing.T) {
			f(t, func(src io.Reader, p *Point) *gzipReader {
				if p == nil {
					p = &Point{}
				}
				z := newGzip(src, make(), p)
				t.Cleanup(func() { z.Close() })
				return z
			})
		})
	}
}

func check(t *testing.T, r io.Reader, bufSize int, want []byte) {
	t.Helper()
	got, err := readAll(r, bufSize)
	if err != nil {
		t.Fatalf("after %d of %d bytes: %v", len(got), len(want), err)
	}
	if !bytes.Equal(got, want) {
		t.Fatalf("%d bytes differ from the %d expected, first at %d", len(got), len(want), firstDiff(got, want))
	}
}

func firstDiff(a, b []byte) int {
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			return i
		}
	}
	return min(len(a), len(b))
}

func TestGzipAgrees(t *testing.T) {
	testkit.Long(t)
	for _, p := range packers() {
		for name, data := range payloads() {
			gz := p.pack(t, data)
			want := data
			if p.name == "tiny members" {
				want = data[:len(data)/20]
			}
			t.Run(p.name+"/"+name, func(t *testing.T) {
				eachEngine(t, func(t *testing.T, open func(io.Reader, *Point) *gzipReader) {
					for _, size := range []int{1 << 20, 70_001, 4093} {
						z := open(bytes.NewReader(gz), nil)
						check(t, z, size, want)
						z.Close()
					}
				})
			})
		}
	}
}

// TestGzipPieces gives and takes small pieces.
func TestGzipPieces(t *testing.T) {
	testkit.Long(t)
	for _, name := range []string{"text", "binary", "skewed", "short"} {
		data := payloads()[name][:60_000]
		gz := append(command(t, data, "gzip -6"), goGzip(0, data)...)
		want := append(bytes.Clone(data), data...)
		eachEngine(t, func(t *testing.T, open func(io.Reader, *Point) *gzipReader) {
			check(t, open(iotest.OneByteReader(bytes.NewReader(gz)), nil), 1<<20, want)
			check(t, open(iotest.OneByteReader(bytes.NewReader(gz)), nil), 1, want)
			check(t, open(iotest.HalfReader(iotest.DataErrReader(bytes.NewReader(gz))), nil), 99_999, want)
			z := open(iotest.OneByteReader(bytes.NewReader(gz)), nil)
			z.Mark()
			check(t, z, 1<<20, want)
		})
	}
}

// TestFixtures reads streams whose makers the machine may not have.
func TestFixtures(t *testing.T) {
	for _, name := range []string{"pigz.gz", "fixed.gz", "rle.gz", "header-crc.gz"} {
		gz, err := os.ReadFile("testdata/" + name)
		if err != nil {
			t.Fatal(err)
		}
		want := reference(t, gz)
		if len(want) < 10_000 {
			t.Fatalf("%s: %d bytes", name, len(want))
		}
		t.Run(name, func(t *testing.T) {
			eachEngine(t, func(t *testing.T, open func(io.Reader, *Point) *gzipReader) {
				check(t, open(bytes.NewReader(gz), nil), 1<<20, want)
				points(t, gz, want, open, 1)
			})
		})
	}
}

// collect reads gz and returns every point that it offers.
func collect(t *testing.T, r Reader, want []byte, bufSize int) []Point {
	t.Helper()
	var list []Point
	buf := make([]byte, bufSize)
	at := 0
	for {
		r.Mark()
		n, err := r.Read(buf)
		if !bytes.Equal(buf[:n], want[at:at+n]) {
			t.Fatalf("wrong bytes between %d and %d", at, at+n)
		}
		at += n
		if p, ok := r.Point(); ok {
			if p.Out != int64(at) {
				t.Fatalf("point at %d, %d bytes read", p.Out, at)
			}
			list = append(list, p)
		}
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if at != len(want) {
		t.Fatalf("%d of %d bytes", at, len(want))
	}
	return list
}

// points collects the points of gz and restarts every engine at each, or at
// some of them if there are many.
func points(t *testing.T, gz, want []byte, open func(io.Reader, *Point) *gzipReader, least int) {
	t.Helper()
	for _, size := range []int{1 << 20, 3001} {
		list := collect(t, open(bytes.NewReader(gz), nil), want, size)
		if len(list) < least {
			t.Fatalf("%d points, want at least %d", len(list), least)
		}
		for i := 0; i < len(list); i += 1 + len(list)/5 {
			p := roundTrip(t, list[i])
			for name, make := range engines {
				z := newGzip(bytes.NewReader(gz[p.In:]), make(), &p)
				got, err := readAll(z, size)
				if err != nil || !bytes.Equal(got, want[p.Out:]) {
					t.Fatalf("%s: restart at point %d (in %d bit %d out %d): %v, %d bytes, want %d",
						name, i, p.In, p.Bit, p.Out, err, len(got), len(want)-int(p.Out))
				}
				if z.In() != int64(len(gz)) {
					t.Fatalf("%s: consumed %d of %d bytes", name, z.In(), len(gz))
				}
				z.Close()
			}
		}
	}
}

func roundTrip(t *testing.T, p Point) (q Point) {
	t.Helper()
	var b bytes.Buffer
	if err := gob.NewEncoder(&b).Encode(p); err != nil {
		t.Fatal(err)
	}
	if err := gob.NewDecoder(&b).Decode(&q); err != nil {
		t.Fatal(err)
	}
	j, err := json.Marshal(q)
	if err != nil {
		t.Fatal(err)
	}
	q = Point{}
	if err := json.Unmarshal(j, &q); err != nil {
		t.Fatal(err)
	}
	if q.startsUnit() != p.startsUnit() {
		t.Fatal("the window was lost")
	}
	return q
}

func TestGzipPoints(t *testing.T) {
	testkit.Long(t)
	for _, p := range packers() {
		for name, least := range map[string]int{"text": 1, "binary": 2, "mixed": 1, "random": 1} {
			data := payloads()[name]
			gz := p.pack(t, data)
			if p.name == "tiny members" {
				data = data[:len(data)/20]
			}
			t.Run(p.name+"/"+name, func(t *testing.T) {
				eachEngine(t, func(t *testing.T, open func(io.Reader, *Point) *gzipReader) {
					points(t, gz, data, open, least)
				})
			})
		}
	}
}

// TestPointChain goes from point to point, each time in a new reader.
func TestPointChain(t *testing.T) {
	data := payloads()["binary"]
	gz := command(t, data, "gzip -6")
	var make []func() engine
	for _, m := range engines {
		make = append(make, m)
	}
	p, buf := Point{}, bytes.Repeat([]byte{0}, 1<<20)
	for hop := 0; int(p.Out) < len(data); hop++ {
		z := newGzip(bytes.NewReader(gz[p.In:]), make[hop%len(make)](), &p)
		z.Mark()
		next, ok := Point{}, false
		for at := int(p.Out); !ok && at < len(data); {
			n, err := z.Read(buf)
			if err != nil || !bytes.Equal(buf[:n], data[at:at+n]) {
				t.Fatalf("hop %d at %d: %v", hop, at, err)
			}
			at += n
			if next, ok = z.Point(); !ok {
				next = Point{Out: int64(at)}
			}
		}
		z.Close()
		p = next
	}
}

func TestGzipTruncated(t *testing.T) {
	data := payloads()["text"][:3000]
	gz := append(goGzip(6, data[:1000], data[1000:]), goGzip(6, data)...)
	first := len(goGzip(6, data[:1000], data[1000:]))
	eachEngine(t, func(t *testing.T, open func(io.Reader, *Point) *gzipReader) {
		for n := range len(gz) {
			z := open(bytes.NewReader(gz[:n]), nil)
			got, err := readAll(z, 5000)
			z.Close()
			if n == first && err == nil {
				continue
			}
			if err != io.ErrUnexpectedEOF {
				t.Fatalf("cut at %d of %d: %v", n, len(gz), err)
			}
			if want := append(bytes.Clone(data), data...); !bytes.HasPrefix(want, got) {
				t.Fatalf("cut at %d: wrong bytes", n)
			}
		}
	})
}

func TestGzipFlipped(t *testing.T) {
	testkit.Long(t)
	data := payloads()["text"][:4000]
	gz := goGzip(6, data)
	eachEngine(t, func(t *testing.T, open func(io.Reader, *Point) *gzipReader) {
		bad := bytes.Clone(gz)
		for i := range len(gz) * 8 {
			bad[i/8] ^= 1 << (i % 8)
			z := open(bytes.NewReader(bad), nil)
			got, err := readAll(z, 8000)
			z.Close()
			bad[i/8] ^= 1 << (i % 8)
			if err == nil && bytes.Equal(got, data) {
				continue // a byte of the header that does not matter
			}
			if !errors.Is(err, ErrCorrupt) && err != io.ErrUnexpectedEOF {
				t.Fatalf("bit %d: %v", i, err)
			}
		}
	})
}

func TestGzipRefuses(t *testing.T) {
	good := goGzip(6, []byte("hello"))
	with := func(i int, v ...byte) []byte {
		b := bytes.Clone(good)
		copy(b[(i+len(b))%len(b):], v)
		return b
	}
	for name, gz := range map[string][]byte{
		"garbage behind":     append(bytes.Clone(good), "garbage"...),
		"zeros then garbage": append(bytes.Clone(good), "\x00\x00\x00x"...),
		"zeros then member":  bytes.Join([][]byte{good, {0, 0}, good}, nil),
		"no magic":           []byte("this is no gzip stream at all"),
		"short garbage":      []byte("abc"),
		"method":             with(2, 7),
		"flags":              with(3, 0xe0),
		"crc":                with(-8, 1, 2, 3, 4),
		"length":             with(-4, 6),
		"header crc":         append([]byte{0x1f, 0x8b, 8, 2, 0, 0, 0, 0, 0, 3, 1, 1}, good...),
		"long name": append([]byte{0x1f, 0x8b, 8, 8, 0, 0, 0, 0, 0, 3},
			bytes.Repeat([]byte("x"), 100_000)...),
	} {
		t.Run(name, func(t *testing.T) {
			eachEngine(t, func(t *testing.T, open func(io.Reader, *Point) *gzipReader) {
				if _, err := readAll(open(bytes.NewReader(gz), nil), 1000); !errors.Is(err, ErrCorrupt) {
					t.Fatal(err)
				}
			})
		})
	}
}

func TestGzipEmpty(t *testing.T) {
	eachEngine(t, func(t *testing.T, open func(io.Reader, *Point) *gzipReader) {
		if _, err := readAll(open(bytes.NewReader(nil), nil), 100); err != io.ErrUnexpectedEOF {
			t.Fatal(err)
		}
	})
}

func TestSourceError(t *testing.T) {
	gz := goGzip(6, payloads()["text"])
	broken := errors.New("link down")
	eachEngine(t, func(t *testing.T, open func(io.Reader, *Point) *gzipReader) {
		src := io.MultiReader(bytes.NewReader(gz[:50_000]), iotest.ErrReader(broken))
		got, err := readAll(open(src, nil), 1<<20)
		if err != broken || len(got) < 50_000 || !bytes.HasPrefix(payloads()["text"], got) {
			t.Fatalf("%d bytes, %v", len(got), err)
		}
	})
}

// TestOtherWindow starts with the window of another place: the bytes differ,
// so the checksum must not fit, and nothing worse happens.
func TestOtherWindow(t *testing.T) {
	data := payloads()["binary"]
	gz := command(t, data, "gzip -6")
	eachEngine(t, func(t *testing.T, open func(io.Reader, *Point) *gzipReader) {
		list := collect(t, open(bytes.NewReader(gz), nil), data, 1<<20)
		p := list[len(list)/2]
		for _, w := range [][]byte{p.Window[:100], bytes.Repeat([]byte("no"), windowSize/2)} {
			q := p
			q.Window = w
			if _, err := readAll(open(bytes.NewReader(gz[p.In:]), &q), 1<<20); !errors.Is(err, ErrCorrupt) {
				t.Fatal(err)
			}
		}
	})
}

// TestHostileTables gives the decoder random dynamic blocks behind a valid header.
func TestHostileTables(t *testing.T) {
	h := []byte{0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3}
	src := payloads()["random"]
	eachEngine(t, func(t *testing.T, open func(io.Reader, *Point) *gzipReader) {
		for i := range 2000 {
			bad := append(bytes.Clone(h), src[i*100:i*100+800]...)
			bad[10] = bad[10]&^6 | 4 | byte(i&1)
			z := open(bytes.NewReader(bad), nil)
			_, err := readAll(z, 8000)
			z.Close()
			if !errors.Is(err, ErrCorrupt) && err != io.ErrUnexpectedEOF {
				t.Fatalf("%d: %v", i, err)
			}
		}
	})
}

// TestLongLength wraps the length, which the trailer holds modulo 2^32, by
// starting at a point that is just short of it.
func TestLongLength(t *testing.T) {
	data := payloads()["text"][:200_000]
	full := crc32.ChecksumIEEE(data)
	gz := goGzip(6, data[:100_000], data[100_000:])
	eachEngine(t, func(t *testing.T, open func(io.Reader, *Point) *gzipReader) {
		p := collect(t, open(bytes.NewReader(gz), nil), data, 1<<20)[0]
		p.Length += 1<<32 - 150_000
		cut := bytes.Clone(gz[p.In:])
		binary.LittleEndian.PutUint32(cut[len(cut)-8:], full)
		binary.LittleEndian.PutUint32(cut[len(cut)-4:], uint32(50_000))
		check(t, open(bytes.NewReader(cut), &p), 1<<20, data[p.Out:])
	})
}
