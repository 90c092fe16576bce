package pack_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"os/exec"
	"sync"
	"testing"
	"time"

	"dewpoint/internal/image"
	"dewpoint/internal/pack"
	"dewpoint/testkit/treetest"

	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"
)

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// content makes n bytes that compress to about a third.
func content(seed uint64, n int) string {
	rnd := rand.New(rand.NewPCG(seed, 7))
	var words [512][]byte
	for i := range words {
		words[i] = make([]byte, 3+rnd.IntN(9))
		for k := range words[i] {
			words[i][k] = byte(rnd.Uint32())
		}
	}
	b := make([]byte, 0, n+16)
	for len(b) < n {
		b = append(b, words[min(rnd.IntN(512), rnd.IntN(512))]...)
	}
	return string(b[:n])
}

// layerTar makes a tar of about n bytes of files, big and small.
func layerTar(seed uint64, n int) []byte {
	rnd := rand.New(rand.NewPCG(seed, 3))
	a := new(treetest.Archive).Dir("d")
	own := content(uint64(n), 5000)
	for i := 0; n > 0; i++ {
		size := rnd.IntN(20_000)
		if rnd.IntN(8) == 0 {
			size = rnd.IntN(1 << 20)
		}
		a.File(fmt.Sprintf("d/%d-%d", seed, i), content(seed+uint64(i), size))
		n -= size + 512
	}
	a.File("zeros", string(make([]byte, 100_000)))
	a.Symlink("link", "zeros").File("own", own)
	return a.Bytes()
}

func gz(level int, parts ...[]byte) []byte {
	var b bytes.Buffer
	z, _ := gzip.NewWriterLevel(&b, level)
	for _, p := range parts {
		z.Write(p)
		z.Flush()
	}
	z.Close()
	return b.Bytes()
}

// command filters b through a program of the base system.
func command(b []byte, name string, args ...string) []byte {
	cmd := exec.Command(name, args...)
	cmd.Stdin = bytes.NewReader(b)
	out, err := cmd.Output()
	if err != nil {
		panic(fmt.Sprintf("%s %v: %v", name, args, err))
	}
	return out
}

func split(b []byte, n int) (parts [][]byte) {
	for len(b) > n {
		parts, b = append(parts, b[:n]), b[n:]
	}
	return append(parts, b)
}

func members(b []byte, n int, pack func([]byte) []byte) (out []byte) {
	for _, p := range split(b, n) {
		out = append(out, pack(p)...)
	}
	return out
}

func zst(b []byte) []byte {
	e, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1))
	if err != nil {
		panic(err)
	}
	defer e.Close()
	return e.EncodeAll(b, nil)
}

type compressor struct {
	name string
	as   image.Compression
	few  bool // its layers cannot be entered but at the start
	pack func(b []byte) []byte
}

var compressors = []compressor{
	{"gzip 6", image.Gzip, false, func(b []byte) []byte { return gz(6, b) }},
	{"gzip 1", image.Gzip, false, func(b []byte) []byte { return gz(1, b) }},
	{"gzip 9", image.Gzip, false, func(b []byte) []byte { return gz(9, b) }},
	{"gzip stored", image.Gzip, false, func(b []byte) []byte { return gz(0, b) }},
	{"gzip huffman", image.Gzip, false, func(b []byte) []byte { return gz(gzip.HuffmanOnly, b) }},
	{"gzip flushed", image.Gzip, false, func(b []byte) []byte { return gz(6, split(b, 30_000)...) }},
	{"gzip members", image.Gzip, false, func(b []byte) []byte {
		return members(b, 300_000, func(b []byte) []byte { return gz(6, b) })
	}},
	{"gzip padded", image.Gzip, false, func(b []byte) []byte {
		return append(append(gz(6, b), gz(6)...), make([]byte, 5000)...)
	}},
	{"gzip(1)", image.Gzip, false, func(b []byte) []byte { return command(b, "gzip", "-6") }},
	{"gzip(1) rsyncable", image.Gzip, false, func(b []byte) []byte { return command(b, "gzip", "--rsyncable") }},
	{"zstd", image.Zstd, true, zst},
	{"zstd frames", image.Zstd, false, func(b []byte) []byte { return members(b, 700_000, zst) }},
	{"plain", image.Plain, false, bytes.Clone},
}

// bed is an image of one layer for each compressor, and its pack.
type bed struct {
	in    pack.Input
	tars  [][]byte
	blobs [][]byte
	pack  []byte
	stats pack.Stats
}

var packed = sync.OnceValue(func() *bed {
	b := &bed{in: pack.Input{Image: digest.FromString("manifest")}}
	for i, c := range compressors {
		tar := layerTar(uint64(i)/2*2, 5<<20+i*100_000) // two and two share files
		b.add(tar, c.pack(tar), c.as)
	}
	b.add(nil, gz(6), image.Gzip)
	b.profile(1, 6<<20)
	b.build()
	return b
})

// packedSmall is a pack of two layers, for tests that read it many times.
var packedSmall = sync.OnceValue(func() *bed {
	b := &bed{in: pack.Input{Image: digest.FromString("small")}}
	tar := layerTar(50, 3<<20)
	b.add(tar, gz(6, tar), image.Gzip)
	tar = layerTar(51, 200_000)
	b.add(tar, tar, image.Plain)
	b.profile(2, 1<<20)
	b.build()
	return b
})

func (b *bed) add(tar, blob []byte, as image.Compression) {
	b.tars, b.blobs = append(b.tars, tar), append(b.blobs, blob)
	b.in.Layers = append(b.in.Layers, pack.InputLayer{
		DiffID: digest.FromBytes(tar), Blob: digest.FromBytes(blob),
		BlobSize: int64(len(blob)), Size: int64(len(tar)), Compression: as,
		Data: bytes.NewReader(tar),
		Open: func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(blob)), nil },
	})
}

// profile reads about n bytes of all layers.
func (b *bed) profile(seed uint64, n int64) {
	rnd := rand.New(rand.NewPCG(seed, 5))
	p := &pack.Profile{Version: 1, Image: b.in.Image,
		About: pack.About{Runs: 1, Created: time.Unix(1e9, 0).UTC(), Node: "n1"}}
	for i := range b.in.Layers {
		p.Layers = append(p.Layers, b.in.Layers[len(b.in.Layers)-1-i].DiffID)
	}
	for n > 0 {
		l := rnd.IntN(len(p.Layers))
		size := b.in.Layers[len(p.Layers)-1-l].Size
		if size == 0 {
			continue
		}
		r := pack.Range{Layer: l, Offset: rnd.Int64N(size), Length: 1 + rnd.Int64N(120_000)}
		p.Reads = append(p.Reads, r)
		n -= r.Length
	}
	for i := range p.Layers { // the ends, beyond which there is nothing
		size := b.in.Layers[len(p.Layers)-1-i].Size
		p.Reads = append(p.Reads, pack.Range{Layer: i, Offset: max(0, size-5000), Length: 9000})
	}
	b.in.Profile = p
}

func (b *bed) build() {
	var out bytes.Buffer
	var err error
	if b.stats, err = pack.Build(context.Background(), &out, b.in); err != nil {
		panic(err)
	}
	b.pack = out.Bytes()
}

// part cuts a part out of the pack.
func (b *bed) part(s pack.Span) []byte { return b.pack[s.Offset : s.Offset+s.Length] }

func (b *bed) header(t testing.TB) *pack.Header {
	t.Helper()
	h, d, err := pack.ReadHeader(bytes.NewReader(b.pack))
	check(t, err)
	if d != b.stats.Header {
		t.Fatalf("header digest %s, not %s", d, b.stats.Header)
	}
	return h
}
