package inflate

import (
	"bytes"
	"compress/flate"
	"compress/gzip"
	"encoding/binary"
	"hash/crc32"
	"io"
	"os"
	"strings"
	"testing"

	"dewpoint/internal/image"

	"github.com/klauspost/compress/zstd"
)

// fuzzMax bounds what a fuzzed stream may inflate to.
const fuzzMax = 4 << 20

// FuzzGzip compares every engine with the standard library, reads with points,
// and restarts every engine at the first one.
func FuzzGzip(f *testing.F) {
	for _, level := range []int{-2, 0, 1, 6} {
		f.Add(goGzip(level, []byte("hello hello hello"), payloads()["text"][:500]))
	}
	f.Add(members(payloads()["short"][:900], 300))
	f.Fuzz(func(t *testing.T, gz []byte) {
		want, wantErr := stdGzip(gz)
		if len(want) >= fuzzMax {
			return
		}
		for name, make := range engines {
			z := newGzip(bytes.NewReader(gz), make(), &Point{})
			got, err := readAll(io.LimitReader(z, fuzzMax), 5000)
			z.Close()
			if err != nil && strings.Contains(err.Error(), "method or flags") {
				continue // the library lets reserved flags pass
			}
			if wantErr == nil && (err != nil || !bytes.Equal(got, want)) {
				t.Fatalf("%s: %d bytes, %v; the library %d", name, len(got), err, len(want))
			}
			if wantErr != nil && err == nil && !tolerated(gz, got) {
				t.Fatalf("%s: taken, the library says %v", name, wantErr)
			}
			if err == nil {
				fuzzPoints(t, gz, got, make)
			}
		}
	})
}

func stdGzip(gz []byte) ([]byte, error) {
	z, err := gzip.NewReader(bytes.NewReader(gz))
	if err != nil {
		return nil, err
	}
	return io.ReadAll(io.LimitReader(z, fuzzMax))
}

// tolerated reports whether gz is a stream that the library refuses for the
// zeros behind it, or for flags and sizes of the header.
func tolerated(gz, got []byte) bool {
	want, err := stdGzip(bytes.TrimRight(gz, "\x00"))
	for pad := 0; err != nil && pad < 12; pad++ { // zeros of the trailer itself
		want, err = stdGzip(append(bytes.TrimRight(gz, "\x00"), make([]byte, pad)...))
	}
	return err == nil && bytes.Equal(got, want)
}

func fuzzPoints(t *testing.T, gz, want []byte, first func() engine) {
	z := newGzip(bytes.NewReader(gz), first(), &Point{})
	defer z.Close()
	z.Mark()
	buf := make([]byte, 1<<16)
	for {
		_, err := z.Read(buf)
		if err != nil {
			return
		}
		p, ok := z.Point()
		if !ok {
			continue
		}
		for name, make := range engines {
			y := newGzip(bytes.NewReader(gz[p.In:]), make(), &p)
			got, err := readAll(y, 1<<16)
			y.Close()
			if err != nil || !bytes.Equal(got, want[p.Out:]) {
				t.Fatalf("%s from %d: %v", name, p.In, err)
			}
		}
		return
	}
}

// FuzzDeflate compares every engine with the standard library on raw deflate
// data, which is given a header and a fitting trailer.
func FuzzDeflate(f *testing.F) {
	header := []byte{gzipID1, gzipID2, gzipDeflate, 0, 0, 0, 0, 0, 0, 255}
	for _, level := range []int{-2, 0, 1, 6, 9} {
		for _, name := range []string{"text", "skewed", "short", "binary"} {
			gz := goGzip(level, payloads()[name][:700], payloads()[name][:300])
			f.Add(gz[10+2+5+5+8 : len(gz)-8])
		}
	}
	fixed, err := os.ReadFile("testdata/fixed.gz")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(fixed[10:600])
	f.Fuzz(func(t *testing.T, raw []byte) {
		src := bytes.NewReader(raw)
		want, wantErr := io.ReadAll(io.LimitReader(flate.NewReader(src), fuzzMax))
		if len(want) >= fuzzMax {
			return
		}
		gz := append(bytes.Clone(header), raw[:len(raw)-src.Len()]...)
		gz = binary.LittleEndian.AppendUint32(gz, crc32.ChecksumIEEE(want))
		gz = binary.LittleEndian.AppendUint32(gz, uint32(len(want)))
		for name, make := range engines {
			z := newGzip(bytes.NewReader(gz), make(), &Point{})
			got, err := readAll(z, 5000)
			z.Close()
			if wantErr == nil && (err != nil || !bytes.Equal(got, want)) {
				t.Fatalf("%s: %d bytes, %v; the library %d", name, len(got), err, len(want))
			}
			if wantErr != nil && err == nil {
				t.Fatalf("%s: taken, the library says %v", name, wantErr)
			}
			if err == nil {
				fuzzPoints(t, gz, got, make)
			}
		}
	})
}

// FuzzZstd compares the reader with the decoder left to find the frames itself.
func FuzzZstd(f *testing.F) {
	f.Add(zstdFrame(f, []byte("hello hello hello")))
	f.Add(append(skippable(3), zstdSingle(f, payloads()["text"][:700])...))
	f.Add(append(zstdFrame(f, payloads()["short"][:900]), zstdFrame(f, nil, zstd.WithZeroFrames(true))...))
	dec, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(fuzzMax),
		zstd.WithDecoderMaxWindow(8<<20))
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, z []byte) {
		want, wantErr := dec.DecodeAll(z, nil)
		r, err := NewReader(bytes.NewReader(z), image.Zstd, nil)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		r.Mark()
		got, err := readAll(io.LimitReader(r, fuzzMax), 5000)
		if wantErr == nil && len(want) > 0 && (err != nil || !bytes.Equal(got, want)) {
			t.Fatalf("%d bytes, %v; the library %d", len(got), err, len(want))
		}
		if wantErr == nil && err == nil && !bytes.Equal(got, want) {
			t.Fatal("other bytes")
		}
	})
}
