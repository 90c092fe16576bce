package pack_test

import (
	"bytes"
	"context"
	"io"
	"sync"
	"testing"

	"dewpoint/internal/image"
	"dewpoint/internal/pack"

	"github.com/opencontainers/go-digest"
)

// large is an image of one gzip layer of 64 MiB, of which 16 MiB are needed.
var large = sync.OnceValue(func() *bed {
	b := &bed{in: pack.Input{Image: digest.FromString("large")}}
	tar := layerTar(77, 64<<20)
	b.add(tar, gz(6, tar), image.Gzip)
	b.profile(3, 16<<20)
	b.build()
	return b
})

func BenchmarkBuild(b *testing.B) {
	l := large()
	b.SetBytes(l.in.Layers[0].Size)
	b.ReportAllocs()
	b.ReportMetric(float64(l.stats.Size)/1e6, "MB/pack")
	for b.Loop() {
		if _, err := pack.Build(context.Background(), io.Discard, l.in); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkStream(b *testing.B) {
	l := large()
	b.SetBytes(l.stats.Raw)
	b.ReportAllocs()
	put := func(int, int64, []byte) error { return nil }
	for b.Loop() {
		s, err := pack.Open(bytes.NewReader(l.pack))
		check(b, err)
		for {
			it, err := s.Next()
			if err == io.EOF {
				break
			}
			check(b, err)
			if it.Kind == pack.KindChunk {
				check(b, s.Header.Chunks[it.Chunk].Each(it.Data, put))
			}
		}
	}
}

func BenchmarkSegment(b *testing.B) {
	l := large()
	h := l.header(b)
	p, err := h.DecodePoints(0, l.part(h.PointsSpan(0)))
	check(b, err)
	b.SetBytes(2 << 20)
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		if _, err := segment(l, h, p, 0, i%p.Len()); err != nil {
			b.Fatal(err)
		}
	}
}
