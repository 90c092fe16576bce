package inflate

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"testing"
	"testing/iotest"

	"dewpoint/internal/image"
	"dewpoint/testkit"

	"github.com/klauspost/compress/zstd"
)

func zstdFrame(t testing.TB, data []byte, o ...zstd.EOption) []byte {
	t.Helper()
	var b bytes.Buffer
	w, err := zstd.NewWriter(&b, append([]zstd.EOption{zstd.WithEncoderConcurrency(1)}, o...)...)
	if err != nil {
		t.Fatal(err)
	}
	w.Write(data)
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// zstdSingle makes a frame whose content is its window.
func zstdSingle(t testing.TB, data []byte) []byte {
	t.Helper()
	w, err := zstd.NewWriter(nil, zstd.WithSingleSegment(true), zstd.WithEncoderConcurrency(1))
	if err != nil {
		t.Fatal(err)
	}
	return w.EncodeAll(data, nil)
}

func skippable(n int) []byte {
	b := binary.LittleEndian.AppendUint32(nil, zstdSkipMagic+5)
	return append(binary.LittleEndian.AppendUint32(b, uint32(n)), make([]byte, n)...)
}

// zstdFrames is a stream of many kinds of frames.
func zstdFrames(t testing.TB, data []byte) []byte {
	var out []byte
	for i, p := range split(data, 50_000) {
		out = append(out, skippable(i*1000)...)
		switch i % 4 {
		case 0:
			out = append(out, zstdFrame(t, p, zstd.WithEncoderCRC(false))...)
		case 1:
			out = append(out, zstdSingle(t, p)...)
		case 2:
			out = append(out, zstdFrame(t, p, zstd.WithEncoderLevel(zstd.SpeedBestCompression),
				zstd.WithWindowSize(32<<20))...)
		case 3:
			out = append(out, zstdFrame(t, nil, zstd.WithZeroFrames(true))...)
			out = append(out, zstdFrame(t, p, zstd.WithWindowSize(1<<10))...)
		}
	}
	return append(out, skippable(300_000)...)
}

func TestZstdAgrees(t *testing.T) {
	for name, data := range payloads() {
		if len(data) == 0 {
			continue
		}
		t.Run(name, func(t *testing.T) {
			for _, z := range [][]byte{zstdFrame(t, data), zstdSingle(t, data), zstdFrames(t, data)} {
				for _, size := range []int{1 << 20, 3000} {
					r := open(t, bytes.NewReader(z), image.Zstd, nil)
					check(t, r, size, data)
					if r.In() != int64(len(z)) {
						t.Fatalf("consumed %d of %d bytes", r.In(), len(z))
					}
				}
				check(t, open(t, iotest.HalfReader(bytes.NewReader(z)), image.Zstd, nil), 1<<20, data)
			}
		})
	}
}

func TestZstdPoints(t *testing.T) {
	data := payloads()["mixed"]
	z := zstdFrames(t, data)
	list := collect(t, open(t, bytes.NewReader(z), image.Zstd, nil), data, 1<<20)
	if want := len(split(data, 50_000)) - 1; len(list) < want {
		t.Fatalf("%d points, want %d", len(list), want)
	}
	for _, p := range list {
		q := roundTrip(t, p)
		check(t, open(t, bytes.NewReader(z[p.In:]), image.Zstd, &q), 1<<20, data[p.Out:])
	}
	one := zstdFrame(t, data)
	if list := collect(t, open(t, bytes.NewReader(one), image.Zstd, nil), data, 1<<20); len(list) != 0 {
		t.Fatalf("%d points in one frame", len(list))
	}
}

func TestZstdTruncated(t *testing.T) {
	data := payloads()["text"][:2000]
	first := zstdFrame(t, data)
	z := append(append(bytes.Clone(first), skippable(9)...), zstdFrame(t, data)...)
	for n := range len(z) {
		r := open(t, bytes.NewReader(z[:n]), image.Zstd, nil)
		_, err := readAll(r, 5000)
		r.Close()
		if n == len(first) || n == len(first)+17 {
			if err != nil {
				t.Fatalf("whole frames, cut at %d: %v", n, err)
			}
		} else if err != io.ErrUnexpectedEOF {
			t.Fatalf("cut at %d of %d: %v", n, len(z), err)
		}
	}
}

func TestZstdFlipped(t *testing.T) {
	testkit.Long(t)
	data := payloads()["text"][:2000]
	z := zstdFrame(t, data)
	for i := range len(z) * 8 {
		z[i/8] ^= 1 << (i % 8)
		r := open(t, bytes.NewReader(z), image.Zstd, nil)
		got, err := readAll(r, 5000)
		r.Close()
		z[i/8] ^= 1 << (i % 8)
		if err == nil && bytes.Equal(got, data) {
			continue
		}
		if !errors.Is(err, ErrCorrupt) && !errors.Is(err, ErrWindow) && err != io.ErrUnexpectedEOF {
			t.Fatalf("bit %d: %v", i, err)
		}
	}
}

func TestZstdRefuses(t *testing.T) {
	good := zstdFrame(t, []byte("hello"))
	for name, z := range map[string][]byte{
		"garbage behind": append(bytes.Clone(good), "garbage"...),
		"zeros behind":   append(bytes.Clone(good), 0, 0, 0),
		"no magic":       []byte("not zstd"),
		"gzip":           goGzip(6, []byte("hello")),
		"dictionary":     {0x28, 0xb5, 0x2f, 0xfd, 0x01, 0x40, 0x07, 1, 0, 0},
		"block type":     {0x28, 0xb5, 0x2f, 0xfd, 0x00, 0x40, 7, 0, 0},
		"reserved bit":   {0x28, 0xb5, 0x2f, 0xfd, 0x08, 0x40, 1, 0, 0},
	} {
		if _, err := readAll(open(t, bytes.NewReader(z), image.Zstd, nil), 100); !errors.Is(err, ErrCorrupt) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, z := range map[string][]byte{
		"window":  {0x28, 0xb5, 0x2f, 0xfd, 0x00, (27-10)<<3 | 1, 1, 0, 0},
		"content": {0x28, 0xb5, 0x2f, 0xfd, 0xa0, 1, 0, 0, 8, 1, 0, 0},
	} {
		if _, err := readAll(open(t, bytes.NewReader(z), image.Zstd, nil), 100); !errors.Is(err, ErrWindow) {
			t.Errorf("%s: %v", name, err)
		}
	}
	wide := []byte{0x28, 0xb5, 0x2f, 0xfd, 0x00, (27 - 10) << 3, 1, 0, 0}
	if b, err := readAll(open(t, bytes.NewReader(wide), image.Zstd, nil), 100); err != nil || len(b) != 0 {
		t.Errorf("a window of %d: %v", MaxWindow, err)
	}
}

func TestZstdSourceError(t *testing.T) {
	z := zstdFrame(t, payloads()["binary"])
	broken := fmt.Errorf("link down")
	r := open(t, io.MultiReader(bytes.NewReader(z[:len(z)/2]), iotest.ErrReader(broken)), image.Zstd, nil)
	if got, err := readAll(r, 1<<20); err != broken || len(got) == 0 {
		t.Fatal(len(got), err)
	}
}
