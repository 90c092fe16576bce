package upper

import (
	"archive/tar"
	"context"
	"errors"
	"io"
	"io/fs"
	"path"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Merge writes one layer that shows what two do: the upper one is the tar that
// Write has made, read from top, the other one is the directory below, as
// overlayfs has it below the first. The tar is what of below is to be seen through
// top, and then top itself. Nobody may write to below meanwhile.
func Merge(ctx context.Context, w io.Writer, below string, top io.ReadSeeker) (Info, error) {
	over, err := contentsOf(top)
	if err != nil {
		return Info{}, err
	}
	t := &writer{ctx: ctx, dir: below, raw: w, tar: tar.NewWriter(w), seen: map[inode]string{}, over: over.names}
	t.info = over.info
	err = filepath.WalkDir(below, t.entry)
	if err == nil {
		err = t.tar.Flush()
	}
	if err == nil {
		_, err = top.Seek(0, io.SeekStart)
	}
	if err == nil {
		_, err = io.Copy(w, top)
	}
	return t.info, err
}

// cover is what an entry of the upper layer does to that of its name below.
type cover int

const (
	hides  cover = iota + 1 // nothing of it is seen, nor what is below it
	merges                  // a directory over a directory: what is in that is seen
)

// contents is what a layer's tar has.
type contents struct {
	names map[string]cover
	info  Info
}

// contentsOf reads a tar of Write's.
func contentsOf(r io.Reader) (contents, error) {
	all := contents{names: map[string]cover{}}
	for t := tar.NewReader(r); ; {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			return all, err
		}
		name := path.Clean(h.Name)
		dir, base := path.Split(name)
		hidden, whites := strings.CutPrefix(base, whiteout)
		switch {
		case name == ".":
		case base == opaque:
			all.names[path.Clean(dir)] = hides
		case whites:
			all.names[dir+hidden] = hides
			all.info.Entries++
		default:
			all.names[name] = hides
			if h.Typeflag == tar.TypeDir {
				all.names[name] = merges
			}
			all.info.Entries++
			all.info.Bytes += h.Size
		}
	}
}

// covered deals with an entry that the upper layer has something to say about.
func (t *writer) covered(at, rel string, st *syscall.Stat_t) error {
	dir := st.Mode&unix.S_IFMT == unix.S_IFDIR
	switch {
	case rel == ".":
		return nil
	case t.over[rel] == hides && dir:
		return fs.SkipDir
	case t.over[rel] == hides:
		return nil
	case !dir: // the upper one's directory does not show what the image has there
		return t.mark(path.Join(path.Dir(rel), whiteout+path.Base(rel)))
	}
	_, alone, err := t.header(at, rel, st)
	if err == nil && alone {
		err = t.mark(path.Join(rel, opaque))
	}
	return err
}

// mark writes an entry that is all name.
func (t *writer) mark(name string) error {
	return t.tar.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, ModTime: time.Unix(0, 0)})
}
