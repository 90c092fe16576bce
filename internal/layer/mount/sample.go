package mount

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"dewpoint/internal/layer/erofs"
	"dewpoint/internal/layer/toc"
	"dewpoint/internal/layer/tree"
)

// What the sample holds. The layer hides one name below and one directory's
// content.
const (
	sampleFile   = "dir/file"
	sampleHidden = "dir/hidden"
	sampleOpaque = "opaque"
)

// sample is a small layer in all forms, with a directory to stack it on.
type sample struct {
	dir     string // its own, with: index, data, tree/, below/, layer/ and merged/
	files   Files
	content []byte // of sampleFile
}

// staleAfter is when a sample that is still there belongs to no living probe.
const staleAfter = 10 * time.Minute

// newSample builds a sample in a new directory in dir, and removes those that
// killed processes have left there.
func newSample(dir string) (*sample, error) {
	sweep(dir)
	own, err := os.MkdirTemp(dir, probePrefix)
	if err != nil {
		return nil, err
	}
	if own, err = filepath.Abs(own); err != nil {
		return nil, err
	}
	s := &sample{dir: own, content: []byte(strings.Repeat("Dewpoint reads what it wrote.\n", 300))}
	s.files = Files{Index: filepath.Join(own, "index"), Data: filepath.Join(own, "data"),
		Tree: filepath.Join(own, "tree")}
	if err := s.build(); err != nil {
		s.remove()
		return nil, err
	}
	return s, nil
}

func (s *sample) remove() { os.RemoveAll(s.dir) }

func sweep(dir string) {
	old, _ := filepath.Glob(filepath.Join(dir, probePrefix+"*"))
	for _, path := range old {
		if st, err := os.Lstat(path); err == nil && time.Since(st.ModTime()) > staleAfter {
			os.RemoveAll(path)
		}
	}
}

func (s *sample) build() error {
	for _, d := range []string{"tree", "layer", "merged", "below/dir", "below/" + sampleOpaque} {
		if err := os.MkdirAll(filepath.Join(s.dir, d), 0o755); err != nil {
			return err
		}
	}
	for _, f := range []string{sampleHidden, sampleOpaque + "/hidden"} {
		if err := os.WriteFile(filepath.Join(s.dir, "below", f), nil, 0o644); err != nil {
			return err
		}
	}
	data, err := s.tar()
	if err != nil {
		return err
	}
	if err := os.WriteFile(s.files.Data, data, 0o644); err != nil {
		return err
	}
	return s.convert(bytes.NewReader(data))
}

// tar makes the layer as an image would bring it.
func (s *sample) tar() ([]byte, error) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	var failed error
	add := func(name string, typ byte, content []byte) {
		h := &tar.Header{Name: name, Typeflag: typ, Mode: 0o755, Size: int64(len(content)),
			ModTime: time.Unix(1, 0)}
		herr := w.WriteHeader(h)
		_, err := w.Write(content)
		failed = errors.Join(failed, herr, err)
	}
	add("dir/", tar.TypeDir, nil)
	add(sampleFile, tar.TypeReg, s.content)
	add("dir/.wh.hidden", tar.TypeReg, nil)
	add(sampleOpaque+"/", tar.TypeDir, nil)
	add(sampleOpaque+"/.wh..wh..opq", tar.TypeReg, nil)
	failed = errors.Join(failed, w.Close())
	return b.Bytes(), failed
}

// convert makes the index and the tree from the tar.
func (s *sample) convert(data *bytes.Reader) error {
	table, err := toc.Read(data)
	if err != nil {
		return err
	}
	var index bytes.Buffer
	if err := erofs.Build(&index, table, erofs.Options{DataSize: data.Size(), Data: data}); err != nil {
		return err
	}
	if err := os.WriteFile(s.files.Index, index.Bytes(), 0o644); err != nil {
		return err
	}
	return s.unpack(table, data)
}

func (s *sample) unpack(table *toc.TOC, data io.ReaderAt) error {
	x, err := tree.New(s.files.Tree, data)
	if err != nil {
		return err
	}
	defer x.Close()
	for i := range table.Entries {
		if err := x.Add(table.Entries[i]); err != nil {
			return err
		}
	}
	return x.Seal()
}
