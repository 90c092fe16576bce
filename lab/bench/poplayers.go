package bench

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"

	"dewpoint/testkit/demo"

	"github.com/klauspost/compress/gzip"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/errgroup"
)

// madeLayer is a layer of a layout that was made up.
type madeLayer struct {
	desc   ocispec.Descriptor
	diffID digest.Digest
	size   int64 // of the tar
}

// makeLayout writes an OCI layout with an image for each deployment of the script: its layers
// have the trace's sizes times scale, as tars, and compress to about half. The images' names are returned,
// for deployments of the same layers the same.
func makeLayout(ctx context.Context, dir string, s *script, scale float64, seed uint64) (names []string,
	layers []madeLayer, err error) {
	if err := os.MkdirAll(filepath.Join(dir, "blobs", "sha256"), 0o755); err != nil {
		return nil, nil, err
	}
	layers = make([]madeLayer, len(s.sizes))
	all, ctx := errgroup.WithContext(ctx)
	all.SetLimit(runtime.NumCPU())
	for i, size := range s.sizes {
		all.Go(func() error {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			var err error
			layers[i], err = makeLayer(dir, int64(float64(size)*scale), seed, uint64(i))
			return err
		})
	}
	if err := all.Wait(); err != nil {
		return nil, nil, err
	}
	names, err = makeImages(dir, s, layers)
	return names, layers, err
}

// makeLayer writes a layer: a program that waits, and one file.
func makeLayer(dir string, size int64, seed, number uint64) (madeLayer, error) {
	f, err := os.CreateTemp(filepath.Join(dir, "blobs"), ".layer")
	if err != nil {
		return madeLayer{}, err
	}
	defer os.Remove(f.Name()) // fails when it was renamed
	defer f.Close()
	blob, diff := digest.Canonical.Digester(), digest.Canonical.Digester()
	z, err := gzip.NewWriterLevel(io.MultiWriter(f, blob.Hash()), gzip.BestSpeed)
	if err != nil {
		return madeLayer{}, err
	}
	n := &counted{w: io.MultiWriter(z, diff.Hash())}
	if err := errors.Join(writeLayer(n, size, seed, number), z.Close(), f.Close()); err != nil {
		return madeLayer{}, err
	}
	fi, err := os.Stat(f.Name())
	if err != nil {
		return madeLayer{}, err
	}
	l := madeLayer{diffID: diff.Digest(), size: n.n,
		desc: ocispec.Descriptor{MediaType: ocispec.MediaTypeImageLayerGzip, Digest: blob.Digest(),
			Size: fi.Size()}}
	return l, os.Rename(f.Name(), demo.Blob(dir, l.desc.Digest))
}

// counted counts what is written.
type counted struct {
	w io.Writer
	n int64
}

func (c *counted) Write(b []byte) (int, error) {
	n, err := c.w.Write(b)
	c.n += int64(n)
	return n, err
}

// blocks is what a layer's tar takes besides its file: two headers, the program, and the end.
const blocks = 5 * 512

func writeLayer(w io.Writer, size int64, seed, number uint64) error {
	program := waiter()
	t := tar.NewWriter(w)
	if err := t.WriteHeader(&tar.Header{Name: "wait", Mode: 0o755, Size: int64(len(program))}); err != nil {
		return err
	}
	if _, err := t.Write(program); err != nil {
		return err
	}
	size = max(16, size-blocks)
	if err := t.WriteHeader(&tar.Header{Name: fmt.Sprintf("data%d", number), Mode: 0o644,
		Size: size}); err != nil {
		return err
	}
	if _, err := io.CopyN(t, noise(seed, number), size); err != nil {
		return err
	}
	return t.Close()
}

// noise is bytes of which each 2 KiB come twice.
func noise(seed, number uint64) io.Reader {
	key := sha256.Sum256(binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(nil, seed), number))
	return &twice{from: rand.NewChaCha8(key)}
}

type twice struct {
	from *rand.ChaCha8
	buf  [4096]byte
	left []byte
}

func (t *twice) Read(b []byte) (int, error) {
	if len(t.left) == 0 {
		t.from.Read(t.buf[:2048])
		copy(t.buf[2048:], t.buf[:2048])
		t.left = t.buf[:]
	}
	n := copy(b, t.left)
	t.left = t.left[n:]
	return n, nil
}

// waiter is a static program that sleeps until it is killed: an ELF header, a
// program header, and a loop around pause(2) (ppoll(2) for ever on arm64).
func waiter() []byte {
	const header, base = 120, 0x400000
	machine, code := uint16(62), []byte{0xb8, 34, 0, 0, 0, 0x0f, 0x05, 0xeb, 0xf7}
	if runtime.GOARCH == "arm64" {
		machine, code = 183, nil
		for _, word := range []uint32{0xd2800000, 0xd2800001, 0xd2800002, 0xd2800003, 0xd2800004, 0xd2800928,
			0xd4000001, 0x17fffff9} {
			code = binary.LittleEndian.AppendUint32(code, word)
		}
	}
	total := uint64(header + len(code))
	var b bytes.Buffer
	b.WriteString("\x7fELF\x02\x01\x01")
	b.Write(make([]byte, 9))
	for _, v := range []any{uint16(2), machine, uint32(1), uint64(base + header), uint64(64), uint64(0),
		uint32(0), uint16(64), uint16(56), uint16(1), uint16(64), uint16(0), uint16(0),
		uint32(1), uint32(5), uint64(0), uint64(base), uint64(base), total, total, uint64(4096)} {
		binary.Write(&b, binary.LittleEndian, v)
	}
	b.Write(code)
	return b.Bytes()
}

// makeImages writes configurations, manifests and the index.
func makeImages(dir string, s *script, layers []madeLayer) (names []string, err error) {
	index := ocispec.Index{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageIndex}
	made := map[string]bool{}
	for _, d := range s.deployments {
		desc, err := makeImage(dir, d.layers, layers)
		if err != nil {
			return nil, err
		}
		name := d.image + ":" + desc.Digest.Encoded()[:16]
		names = append(names, name)
		if !made[name] {
			made[name] = true
			desc.Annotations = map[string]string{ocispec.AnnotationRefName: name}
			index.Manifests = append(index.Manifests, desc)
		}
	}
	raw, err := json.Marshal(index)
	if err != nil {
		return nil, err
	}
	return names, os.WriteFile(filepath.Join(dir, ocispec.ImageIndexFile), raw, 0o644)
}

func makeImage(dir string, numbers []int, layers []madeLayer) (ocispec.Descriptor, error) {
	img := ocispec.Image{Platform: ocispec.Platform{Architecture: runtime.GOARCH, OS: "linux"},
		Config: ocispec.ImageConfig{Cmd: []string{"/wait"}}}
	m := ocispec.Manifest{Versioned: specs.Versioned{SchemaVersion: 2},
		MediaType: ocispec.MediaTypeImageManifest}
	img.RootFS.Type = "layers"
	for _, i := range numbers {
		img.RootFS.DiffIDs = append(img.RootFS.DiffIDs, layers[i].diffID)
		m.Layers = append(m.Layers, layers[i].desc)
	}
	var err error
	if m.Config, err = putBlob(dir, ocispec.MediaTypeImageConfig, img); err != nil {
		return ocispec.Descriptor{}, err
	}
	return putBlob(dir, ocispec.MediaTypeImageManifest, m)
}

func putBlob(dir, mediaType string, v any) (ocispec.Descriptor, error) {
	raw, err := json.Marshal(v)
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	d := ocispec.Descriptor{MediaType: mediaType, Digest: digest.FromBytes(raw), Size: int64(len(raw))}
	return d, os.WriteFile(demo.Blob(dir, d.Digest), raw, 0o644)
}
