package layer_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	"dewpoint/internal/image"
	"dewpoint/internal/layer"
)

// prepared is a Source that first says how.
type prepared struct {
	source
	prepare func(f *layer.Fill) (layer.Way, error)
	tar     []byte // what Open gives once prepare has said so
	cutTar  int64  // > 0: it ends with an error after so many bytes, once
}

func (s *prepared) Prepare(_ context.Context, f *layer.Fill) (layer.Way, error) { return s.prepare(f) }

func (s *prepared) Open(ctx context.Context, f *layer.Fill, off int64) (io.ReadCloser, error) {
	if s.tar == nil {
		return s.source.Open(ctx, f, off)
	}
	s.opens.Add(1)
	if s.cutTar > 0 {
		defer func() { s.cutTar = 0 }()
		return io.NopCloser(io.MultiReader(bytes.NewReader(s.tar[off:s.cutTar]), failing{})), nil
	}
	return io.NopCloser(bytes.NewReader(s.tar[off:])), nil
}

type failing struct{}

func (failing) Read([]byte) (int, error) {
	return 0, errors.Join(errCut, io.ErrUnexpectedEOF, layer.ErrAgain)
}

// TestFillFromTar takes a layer as its tar, from a source that breaks on the way,
// and goes on with its blob.
func TestFillFromTar(t *testing.T) {
	for _, c := range []image.Compression{image.Gzip, image.Zstd, image.Plain} {
		s := pack(t, makeTar(t, 9<<20, 5), c)
		store := open(t, t.TempDir(), layer.Config{})
		src := &prepared{tar: s.tar, cutTar: 5 << 20, prepare: func(*layer.Fill) (layer.Way, error) {
			return layer.Way{Tar: true}, nil
		}}
		checkData(t, mustComplete(t, store, s.layer, src), s)
		if n := src.opens.Load(); n != 2 {
			t.Errorf("%s: opened %d times, not once more after it broke", c, n)
		}
	}
}

// TestFillFromWrongTar gives a tar that is another layer's, or nothing: who gave it is told, and the fill
// begins anew, a few times.
func TestFillFromWrongTar(t *testing.T) {
	s, other := pack(t, makeTar(t, 1<<20, 5), image.Gzip), makeTar(t, 1<<20, 6)
	store := open(t, t.TempDir(), layer.Config{})
	for _, stays := range []bool{false, true} {
		for _, wrong := range [][]byte{other, {}} {
			store := open(t, t.TempDir(), layer.Config{})
			var told []error
			src := &prepared{tar: wrong}
			src.source = source{blob: s.blob}
			src.prepare = func(*layer.Fill) (layer.Way, error) {
				if len(told) > 1 && !stays {
					src.tar = nil
					return layer.Way{}, nil
				}
				return layer.Way{Tar: true, Wrong: func(err error) { told = append(told, err) }}, nil
			}
			l, err := store.Fill(t.Context(), s.layer, src).WaitComplete(t.Context())
			switch {
			case !stays:
				if err != nil || len(told) != 2 {
					t.Fatalf("after %d wrong tars: %v", len(told), err)
				}
				checkData(t, l, s)
			case !errors.Is(err, layer.ErrMismatch) || len(told) < 2:
				t.Fatalf("after %d wrong tars: %v", len(told), err)
			}
			for _, err := range told {
				if !errors.Is(err, layer.ErrMismatch) {
					t.Errorf("told %v", err)
				}
			}
		}
	}
	src := &prepared{tar: other, prepare: func(*layer.Fill) (layer.Way, error) {
		return layer.Way{Tar: true}, nil
	}}
	if _, err := store.Fill(t.Context(), s.layer, src).WaitComplete(t.Context()); !errors.Is(err,
		layer.ErrMismatch) {
		t.Fatalf("another layer's tar was taken: %v", err)
	}
	if _, err := store.Get(s.layer.DiffID); !errors.Is(err, layer.ErrUnknown) {
		t.Fatalf("it stayed: %v", err)
	}
}

func elsewhere(t *testing.T, s sample) *layer.Elsewhere {
	path := filepath.Join(t.TempDir(), "tar")
	if err := os.WriteFile(path, s.tar, 0o600); err != nil {
		t.Fatal(err)
	}
	return &layer.Elsewhere{DiffID: s.layer.DiffID, Blob: s.layer.Digest, BlobSize: s.layer.Size,
		Size: int64(len(s.tar)), Data: path, Table: table(t, s.tar)}
}

// TestAttach makes a layer of a tar that lies elsewhere, by itself and in the
// course of a fill, and finds it again after a restart.
func TestAttach(t *testing.T) {
	s := pack(t, makeTar(t, 3<<20, 7), image.Gzip)
	whole := mustComplete(t, open(t, t.TempDir(), layer.Config{}), s.layer, &source{blob: s.blob})
	e := elsewhere(t, s)
	for _, in := range []string{"alone", "fill"} {
		dir := t.TempDir()
		store := open(t, dir, layer.Config{})
		var l *layer.Layer
		var err error
		if in != "fill" {
			l, err = store.Attach(e)
		} else {
			src := &prepared{prepare: func(*layer.Fill) (layer.Way, error) { return layer.Way{Elsewhere: e}, nil }}
			l, err = store.Fill(t.Context(), s.layer, src).WaitComplete(t.Context())
		}
		if err != nil {
			t.Fatalf("%s: %v", in, err)
		}
		checkAttached(t, l, whole, e)
		if err := store.Close(); err != nil {
			t.Fatal(err)
		}
		store = open(t, dir, layer.Config{})
		if l, err = store.Get(s.layer.DiffID); err != nil {
			t.Fatalf("%s: after a restart: %v", in, err)
		}
		checkAttached(t, l, whole, e)
		// what it still does in the background would be in the way of its directory's removal
		if err := store.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

func checkAttached(t *testing.T, l, whole *layer.Layer, e *layer.Elsewhere) {
	t.Helper()
	if got := l.Files().Data; got != e.Data {
		t.Errorf("data is %s, not %s", got, e.Data)
	}
	if n := l.DiskUse(); n > e.Size/4 {
		t.Errorf("it takes %d bytes here", n)
	}
	got, err := os.ReadFile(l.Files().Index)
	want, werr := os.ReadFile(whole.Files().Index)
	if err != nil || werr != nil || !bytes.Equal(got, want) {
		t.Errorf("its index differs from the whole layer's (%v, %v)", err, werr)
	}
}

// A layer that may not be used after all is not known, and nothing of it stays.
func TestAttachAwaits(t *testing.T) {
	dir, s := t.TempDir(), pack(t, makeTar(t, 1<<20, 7), image.Gzip)
	store := open(t, dir, layer.Config{})
	defer store.Close()
	e, no := elsewhere(t, s), errors.New("no")
	e.Await = func() error {
		if _, err := store.Peek(s.layer.DiffID); err == nil {
			t.Error("the layer is known before it may be used")
		}
		return no
	}
	if _, err := store.Attach(e); !errors.Is(err, no) {
		t.Fatal(err)
	}
	if _, err := store.Peek(s.layer.DiffID); err == nil {
		t.Error("the layer is known")
	}
	e.Await = func() error { return nil }
	if _, err := store.Attach(e); err != nil {
		t.Fatal(err)
	}
}

// TestLocalize copies an attached layer, once with wrong bytes.
func TestLocalize(t *testing.T) {
	s := pack(t, makeTar(t, 3<<20, 8), image.Gzip)
	dir := t.TempDir()
	store := open(t, dir, layer.Config{})
	e := elsewhere(t, s)
	l, err := store.Attach(e)
	if err != nil {
		t.Fatal(err)
	}
	wrong := bytes.Clone(s.tar)
	wrong[len(wrong)/2] ^= 1
	if err := store.Localize(l, bytes.NewReader(wrong)); !errors.Is(err, layer.ErrMismatch) {
		t.Fatalf("wrong bytes became the layer: %v", err)
	}
	if l, _ = store.Get(s.layer.DiffID); l.Files().Data != e.Data {
		t.Fatal("the layer is not where it was")
	}
	if err := store.Localize(l, bytes.NewReader(s.tar)); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if l, err = store.Get(s.layer.DiffID); err != nil {
			t.Fatal(err)
		}
		checkData(t, l, s)
		store.Close()
		store = open(t, dir, layer.Config{})
	}
}
