package layer_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"testing"

	"dewpoint/internal/image"
	"dewpoint/internal/layer"
	"dewpoint/internal/layer/inflate"
	"dewpoint/testkit"
)

// Every point of a layer enters its blob, also of one whose pull was cut.
func TestPoints(t *testing.T) {
	testkit.Long(t)
	want := pack(t, makeTar(t, 24<<20, 41), image.Gzip)
	dir := t.TempDir()
	s := open(t, dir, layer.Config{Points: true, Interval: 1 << 20})
	ctx, cancel := context.WithCancel(t.Context())
	_, err := s.Fill(ctx, want.layer, &source{blob: want.blob, cut: int64(len(want.blob)) / 2}).Wait(ctx)
	cancel()
	if !errors.Is(err, errCut) {
		t.Fatal(err)
	}
	s.Close()
	s = open(t, dir, layer.Config{Points: true})
	defer s.Close()
	l := mustComplete(t, s, want.layer, &source{blob: want.blob})
	var n, last int64
	err = l.Points(func(p inflate.Point) error {
		n++
		if p.Out-last > 3<<20 {
			t.Errorf("%d bytes between two points", p.Out-last)
		}
		last = p.Out
		r, err := inflate.NewReader(bytes.NewReader(want.blob[p.In:]), image.Gzip, &p)
		if err != nil {
			return err
		}
		defer r.Close()
		got := make([]byte, 100<<10)
		if _, err := io.ReadFull(r, got); err != nil {
			return err
		}
		if !bytes.Equal(got, want.tar[p.Out:p.Out+int64(len(got))]) {
			t.Errorf("from the point at %d other bytes come", p.Out)
		}
		return nil
	})
	if err != nil || n < 8 {
		t.Errorf("%d points, %v", n, err)
	}
}
