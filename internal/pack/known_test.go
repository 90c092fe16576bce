package pack_test

import (
	"bytes"
	"io"
	"testing"

	"dewpoint/internal/layer/inflate"
	"dewpoint/testkit"
)

// found gives the restart points of a blob, about every MiB.
func found(t *testing.T, b *bed, l int) func(func(inflate.Point) error) error {
	return func(yield func(inflate.Point) error) error {
		r, err := inflate.NewReader(bytes.NewReader(b.blobs[l]), b.in.Layers[l].Compression, nil)
		check(t, err)
		defer r.Close()
		buf, at, last := make([]byte, 64<<10), int64(0), int64(0)
		for {
			if at-last > 1<<20 {
				r.Mark()
			}
			n, err := r.Read(buf)
			at += int64(n)
			if err == io.EOF {
				return nil
			}
			check(t, err)
			if p, ok := r.Point(); ok && at-last > 1<<20 {
				last = at
				if err := yield(p); err != nil {
					return err
				}
			}
		}
	}
}

// With points that are known a pack gives every segment, and without a blob.
func TestKnownPoints(t *testing.T) {
	testkit.Long(t)
	from := packed()
	b := *from
	b.in.Layers = nil
	for l, in := range from.in.Layers {
		in.Open = nil
		in.Compression = from.header(t).Layers[l].Compression // the registry may say otherwise
		b.in.Layers = append(b.in.Layers, in)
	}
	for l := range b.in.Layers {
		b.in.Layers[l].Points = found(t, &b, l)
	}
	b.build()
	h := b.header(t)
	for l, c := range compressors {
		if c.few {
			digestsAlone(t, &b, h, l)
			continue
		}
		p, err := h.DecodePoints(l, b.part(h.PointsSpan(l)))
		check(t, err)
		if p.Len() < 2 {
			t.Errorf("%s: %d segments of %d bytes", c.name, p.Len(), len(b.tars[l]))
		}
		for i := range p.Len() {
			got, err := segment(&b, h, p, l, i)
			check(t, err)
			if from, to := p.Data(i); !bytes.Equal(got, b.tars[l][from:to]) {
				t.Errorf("%s: segment %d differs", c.name, i)
			}
		}
	}
}
