package demo

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/klauspost/compress/zstd"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"dewpoint/testkit"
)

func testStore(t *testing.T) store {
	t.Helper()
	s := store{dir: t.TempDir()}
	if err := s.init(); err != nil {
		t.Fatal(err)
	}
	return s
}

func TestLayersAreWhatTheirDigestsSay(t *testing.T) {
	s := testStore(t)
	content := bytes.Repeat([]byte("a layer "), 1<<14)
	l, err := s.pack(ocispec.MediaTypeImageLayerGzip, gzip6, func(l *layerWriter) error {
		_, err := l.Write(content)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.add("x:1", ocispec.Image{}, []layer{l}); err != nil {
		t.Fatal(err)
	}
	z, err := s.recompress("x:1")
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range append(z, l) {
		raw, err := os.ReadFile(Blob(s.dir, l.Desc.Digest))
		if err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprintf("sha256:%x", sha256.Sum256(raw)); got != string(l.Desc.Digest) ||
			int64(len(raw)) != l.Desc.Size {
			t.Errorf("%s: the blob has digest %s and %d bytes", l.Desc.MediaType, got, len(raw))
		}
		plain := unpack(t, l.Desc.MediaType, raw)
		if !bytes.Equal(plain, content) || l.DiffID != z[0].DiffID || l.Size != int64(len(content)) {
			t.Errorf("%s: the content is not what was written", l.Desc.MediaType)
		}
	}
}

func unpack(t *testing.T, mediaType string, raw []byte) []byte {
	t.Helper()
	var r io.Reader
	var err error
	if mediaType == ocispec.MediaTypeImageLayerZstd {
		r, err = zstd.NewReader(bytes.NewReader(raw))
	} else {
		r, err = gzip.NewReader(bytes.NewReader(raw))
	}
	if err != nil {
		t.Fatal(err)
	}
	plain, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	return plain
}

func TestAnImageIsVisibleOnceItIsAdded(t *testing.T) {
	s := testStore(t)
	if has, err := s.hasImage("x:1"); has || err != nil {
		t.Fatalf("an empty layout has it: %v, %v", has, err)
	}
	if _, err := Manifest(s.dir, "x:1"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("manifest of an absent image: %v", err)
	}
	for _, name := range []string{"x:1", "y:1"} {
		if err := s.add(name, ocispec.Image{Config: ocispec.ImageConfig{Cmd: []string{name}}}, nil); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"x:1", "y:1"} {
		if has, err := s.hasImage(name); !has || err != nil {
			t.Errorf("%s: %v, %v", name, has, err)
		}
	}
}

func TestALayerThatFailsLeavesNothing(t *testing.T) {
	s := testStore(t)
	broken := errors.New("broken")
	if _, err := s.pack(ocispec.MediaTypeImageLayerGzip, gzip6, func(*layerWriter) error {
		return broken
	}); !errors.Is(err, broken) {
		t.Fatalf("error %v", err)
	}
	for _, dir := range []string{"blobs", "blobs/sha256"} {
		entries, err := os.ReadDir(filepath.Join(s.dir, dir))
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			if !e.IsDir() {
				t.Errorf("%s is left in %s", e.Name(), dir)
			}
		}
	}
}

func TestFillStopsWhenFull(t *testing.T) {
	files := &hostFiles{paths: hostTree(t)}
	var out bytes.Buffer
	tw := tar.NewWriter(&out)
	if err := files.fill(t.Context(), tw, "opt", func() bool { return out.Len() > 5000 }); err != nil {
		t.Fatal(err)
	}
	if err := files.fill(t.Context(), tw, "opt2", func() bool { return true }); err != nil {
		t.Fatal(err)
	}
	if err := tw.Close(); err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for tr := tar.NewReader(&out); ; {
		hdr, err := tr.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if seen[hdr.Name] {
			t.Errorf("%s is there twice", hdr.Name)
		}
		seen[hdr.Name] = true
	}
	if len(seen) < 4 || len(seen) > 8 {
		t.Errorf("%d files", len(seen))
	}
}

func hostTree(t *testing.T) (paths []string) {
	t.Helper()
	dir := t.TempDir()
	for i := range 3 {
		path := filepath.Join(dir, fmt.Sprint(i))
		if err := os.WriteFile(path, make([]byte, 600), 0o644); err != nil {
			t.Fatal(err)
		}
		paths = append(paths, path)
	}
	return paths
}

// The machine's own mirror is found without naming it anywhere.
func TestAptSources(t *testing.T) {
	testkit.Long(t)
	lines, codename, err := aptSources(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if codename == "" || len(lines) == 0 {
		t.Errorf("%q, %v", codename, lines)
	}
}
