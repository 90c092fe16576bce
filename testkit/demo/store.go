package demo

import (
	"compress/gzip"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// store is an OCI image layout.
type store struct{ dir string }

// layer is a blob of the layout with what the image's configuration says of it.
type layer struct {
	Desc   ocispec.Descriptor
	DiffID digest.Digest
	Size   int64 // of the tar
}

func (s store) init() error {
	if err := os.MkdirAll(filepath.Join(s.dir, "blobs", "sha256"), 0o755); err != nil {
		return err
	}
	return s.writeJSON(ocispec.ImageLayoutFile, ocispec.ImageLayout{Version: ocispec.ImageLayoutVersion})
}

// Blob is the path of a blob in the layout dir.
func Blob(dir string, d digest.Digest) string {
	return filepath.Join(dir, "blobs", d.Algorithm().String(), d.Encoded())
}

// Index reads a layout's index; a layout without one has no images.
func Index(dir string) (ocispec.Index, error) {
	index := ocispec.Index{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageIndex}
	raw, err := os.ReadFile(filepath.Join(dir, ocispec.ImageIndexFile))
	if errors.Is(err, fs.ErrNotExist) {
		return index, nil
	}
	if err != nil {
		return index, err
	}
	return index, json.Unmarshal(raw, &index)
}

// Manifest reads the manifest of the image that the layout dir calls name.
func Manifest(dir, name string) (ocispec.Manifest, error) {
	var m ocispec.Manifest
	index, err := Index(dir)
	if err != nil {
		return m, err
	}
	for _, d := range index.Manifests {
		if d.Annotations[ocispec.AnnotationRefName] != name {
			continue
		}
		raw, err := os.ReadFile(Blob(dir, d.Digest))
		if err != nil {
			return m, err
		}
		return m, json.Unmarshal(raw, &m)
	}
	return m, fmt.Errorf("image %s in %s: %w", name, dir, fs.ErrNotExist)
}

func (s store) hasImage(name string) (bool, error) {
	_, err := Manifest(s.dir, name)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

// add makes the image visible under name.
func (s store) add(name string, img ocispec.Image, layers []layer) error {
	manifest := ocispec.Manifest{Versioned: specs.Versioned{SchemaVersion: 2},
		MediaType: ocispec.MediaTypeImageManifest}
	img.RootFS.Type = "layers"
	for _, l := range layers {
		img.RootFS.DiffIDs = append(img.RootFS.DiffIDs, l.DiffID)
		manifest.Layers = append(manifest.Layers, l.Desc)
	}
	var err error
	if manifest.Config, err = s.putJSON(ocispec.MediaTypeImageConfig, img); err != nil {
		return err
	}
	desc, err := s.putJSON(ocispec.MediaTypeImageManifest, manifest)
	if err != nil {
		return err
	}
	desc.Annotations = map[string]string{ocispec.AnnotationRefName: name}
	index, err := Index(s.dir)
	if err != nil {
		return err
	}
	index.Manifests = append(index.Manifests, desc)
	return s.writeJSON(ocispec.ImageIndexFile, index)
}

func (s store) putJSON(mediaType string, v any) (ocispec.Descriptor, error) {
	raw, err := json.Marshal(v)
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	d := digest.FromBytes(raw)
	return ocispec.Descriptor{MediaType: mediaType, Digest: d, Size: int64(len(raw))},
		replace(Blob(s.dir, d), raw)
}

func (s store) writeJSON(name string, v any) error {
	raw, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	return replace(filepath.Join(s.dir, name), raw)
}

func replace(path string, raw []byte) error {
	tmp := path + ".tmp"
	if err := os.WriteFile(tmp, raw, 0o644); err != nil {
		return err
	}
	return os.Rename(tmp, path)
}

// layerWriter compresses a tar into a blob. Exactly one of commit and
// abandon ends it.
type layerWriter struct {
	store    store
	file     *os.File
	media    string
	encoder  io.WriteCloser
	packed   counter // compressed bytes, digested
	unpacked counter
}

// counter counts and digests what is written through it.
type counter struct {
	w io.Writer
	h hash.Hash
	n int64
}

func (c *counter) Write(p []byte) (int, error) {
	c.h.Write(p)
	n, err := c.w.Write(p)
	c.n += int64(n)
	return n, err
}

func (c *counter) digest() digest.Digest { return digest.NewDigest(digest.SHA256, c.h) }

// encode wraps the blob's file in a compressor.
type encode func(io.Writer) (io.WriteCloser, error)

func gzip6(w io.Writer) (io.WriteCloser, error) { return gzip.NewWriterLevel(w, 6) }

func zstd3(w io.Writer) (io.WriteCloser, error) {
	return zstd.NewWriter(w, zstd.WithEncoderConcurrency(1))
}

func (s store) newLayer(mediaType string, enc encode) (*layerWriter, error) {
	f, err := os.CreateTemp(filepath.Join(s.dir, "blobs"), ".layer")
	if err != nil {
		return nil, err
	}
	l := &layerWriter{store: s, file: f, media: mediaType}
	l.packed = counter{w: f, h: sha256.New()}
	if l.encoder, err = enc(&l.packed); err != nil {
		l.abandon()
		return nil, err
	}
	l.unpacked = counter{w: l.encoder, h: sha256.New()}
	return l, nil
}

func (l *layerWriter) Write(p []byte) (int, error) { return l.unpacked.Write(p) }

func (l *layerWriter) abandon() {
	l.file.Close()
	os.Remove(l.file.Name())
}

func (l *layerWriter) commit() (layer, error) {
	if err := errors.Join(l.encoder.Close(), l.file.Chmod(0o644), l.file.Close()); err != nil {
		os.Remove(l.file.Name())
		return layer{}, err
	}
	desc := ocispec.Descriptor{MediaType: l.media, Digest: l.packed.digest(), Size: l.packed.n}
	err := os.Rename(l.file.Name(), Blob(l.store.dir, desc.Digest))
	return layer{Desc: desc, DiffID: l.unpacked.digest(), Size: l.unpacked.n}, err
}

// pack makes a layer of what write writes.
func (s store) pack(mediaType string, enc encode, write func(*layerWriter) error) (layer, error) {
	l, err := s.newLayer(mediaType, enc)
	if err != nil {
		return layer{}, err
	}
	if err := write(l); err != nil {
		l.abandon()
		return layer{}, err
	}
	return l.commit()
}

func (s store) recompress(name string) ([]layer, error) {
	m, err := Manifest(s.dir, name)
	if err != nil {
		return nil, err
	}
	var layers []layer
	for _, d := range m.Layers {
		l, err := s.pack(ocispec.MediaTypeImageLayerZstd, zstd3, func(l *layerWriter) error {
			return inflate(l, Blob(s.dir, d.Digest))
		})
		if err != nil {
			return nil, err
		}
		layers = append(layers, l)
	}
	return layers, nil
}

func inflate(w io.Writer, path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		return err
	}
	_, err = io.Copy(w, z)
	return err
}
