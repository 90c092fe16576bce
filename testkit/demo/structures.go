package demo

import (
	"archive/tar"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"

	"github.com/klauspost/compress/gzip"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// structure is an image by the compressed sizes of its layers, in MB. The
// first layer holds the Debian base; the rest of each is filled with files of
// the machine's own /usr, so that content compresses as real content does.
type structure struct {
	mb        []float64
	generated int64 // bytes of made-up content instead of files
}

// The images of Table I of the Docker-pi paper, their flattened forms, and
// one of 2 GiB for the measurement of memory.
var structures = map[string]structure{
	"ubuntu:pi":      {mb: []float64{46, 0, 0, 0, 0}},
	"mubuntu:pi":     {mb: []float64{46, 0, 0, 0, 0, 51}},
	"biglayers:pi":   {mb: []float64{52, 64, 54, 62}},
	"ubuntu:flat":    {mb: []float64{46}},
	"mubuntu:flat":   {mb: []float64{97}},
	"biglayers:flat": {mb: []float64{232}},
	"big:2g":         {mb: []float64{0}, generated: 2 << 30},
}

func (s structure) layers(ctx context.Context, b *builder) ([]layer, error) {
	base, err := b.baseTree(ctx)
	if err != nil {
		return nil, err
	}
	files := &hostFiles{}
	var layers []layer
	for i, mb := range s.mb {
		l, err := b.store.pack(ocispec.MediaTypeImageLayerGzip, s.encoder(), func(l *layerWriter) error {
			tw := tar.NewWriter(l)
			if i == 0 {
				if err := packTree(tw, base.dir); err != nil {
					return err
				}
			}
			err := files.fill(ctx, tw, fmt.Sprintf("opt/layer%d", i+1), func() bool {
				return l.packed.n >= int64(mb*1e6)
			})
			return errors.Join(err, generate(tw, s.generated), tw.Close())
		})
		if err != nil {
			return nil, err
		}
		layers = append(layers, l)
	}
	return layers, nil
}

// encoder is Go's gzip at level 6, as for real images; generated content has
// nothing real to keep and takes the fast one.
func (s structure) encoder() encode {
	if s.generated == 0 {
		return gzip6
	}
	return func(w io.Writer) (io.WriteCloser, error) { return gzip.NewWriterLevel(w, gzip.BestSpeed) }
}

// packTree writes the directories, files and links of a tree; hard links
// become files.
func packTree(tw *tar.Writer, root string) error {
	return filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == root {
			return err
		}
		name, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		return packFile(tw, path, name)
	})
}

func packFile(tw *tar.Writer, path, name string) error {
	info, err := os.Lstat(path)
	if err != nil {
		return err
	}
	var target string
	if info.Mode()&fs.ModeSymlink != 0 {
		if target, err = os.Readlink(path); err != nil {
			return err
		}
	}
	hdr, err := tar.FileInfoHeader(info, target)
	if err != nil {
		return err
	}
	hdr.Name, hdr.Uname, hdr.Gname = name, "", ""
	if info.IsDir() {
		hdr.Name += "/"
	}
	if err := tw.WriteHeader(hdr); err != nil || !info.Mode().IsRegular() {
		return err
	}
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = io.CopyN(tw, f, info.Size())
	return err
}

// hostFiles hands out the regular files of /usr/bin, /usr/lib and /usr/share
// of up to maxFile bytes, each once; when all are given it starts again.
type hostFiles struct {
	paths []string
	next  int
}

// maxFile keeps a layer from overshooting its size by one large file.
const maxFile = 4 << 20

func (h *hostFiles) scan() error {
	for _, root := range []string{"/usr/bin", "/usr/lib", "/usr/share"} {
		err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err != nil || !d.Type().IsRegular() || strings.HasPrefix(path, "/usr/share/doc/") {
				return nil // what vanishes while we walk is not missed
			}
			if info, err := d.Info(); err == nil && info.Size() <= maxFile {
				h.paths = append(h.paths, path)
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	// Mix large and small ones, the same way each time.
	rand.New(rand.NewPCG(1, 1)).Shuffle(len(h.paths), func(i, j int) {
		h.paths[i], h.paths[j] = h.paths[j], h.paths[i]
	})
	return nil
}

// fill writes files under dir, at least one, until full says so.
func (h *hostFiles) fill(ctx context.Context, tw *tar.Writer, dir string, full func() bool) error {
	if h.paths == nil {
		if err := h.scan(); err != nil {
			return err
		}
	}
	for n := 0; ctx.Err() == nil && (n == 0 || !full()); n++ {
		path := h.paths[h.next%len(h.paths)]
		name := fmt.Sprintf("%s/%d%s", dir, h.next/len(h.paths), path)
		h.next++
		if err := packFile(tw, path, name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return ctx.Err()
}

// generate writes size bytes in files of 64 MiB, half of them random: they
// compress to a little over half.
func generate(tw *tar.Writer, size int64) error {
	const file, block = 64 << 20, 64 << 10
	rng := rand.New(rand.NewPCG(2, 2))
	buf := make([]byte, block)
	for i := int64(0); i*file < size; i++ {
		hdr := &tar.Header{Name: fmt.Sprintf("opt/big/%03d", i), Mode: 0o644, Size: file}
		if err := tw.WriteHeader(hdr); err != nil {
			return err
		}
		for range file / block {
			for j := 0; j < block/2; j += 8 {
				binary.LittleEndian.PutUint64(buf[j:], rng.Uint64())
			}
			if _, err := tw.Write(buf); err != nil {
				return err
			}
		}
	}
	return nil
}
