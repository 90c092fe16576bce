// Package upper makes a layer of a container's writable directory.
//
// What a container has changed of its image lies in the upper directory of its
// overlayfs: files as they are, what was deleted as character devices 0:0, and
// directories that hide what is below them with an attribute of overlayfs. A
// layer's tar says the same by names: ".wh.NAME", and ".wh..wh..opq". Write
// translates one into the other, so that a copy of the writable directory is
// stored, shared and mounted as every other layer is. A container that stands on
// such a layer is saved with both: Merge makes one layer of them.
//
// The tar depends on the directory's contents alone: names are in order, and
// holes of files stay holes, as runs of zeros become. Sockets are left out, for who is restored makes
// them anew. Times are to the nanosecond, as programs compare them.
//
// Nobody may write to the directory meanwhile: the container is frozen.
package upper

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	whiteout    = ".wh."
	opaque      = ".wh..wh..opq"
	xattrRecord = "SCHILY.xattr."
)

// ErrUnfit says that a directory cannot be told as a layer.
var ErrUnfit = errors.New("the container's writable layer cannot be saved")

// Info says what a tar holds.
type Info struct {
	Entries int   // besides the root
	Bytes   int64 // of files' contents, holes left out
}

// Write writes the layer of the upper directory dir as a tar. A directory
// without entries gives a tar without entries, and Info.Entries is 0. Errors wrap
// ErrUnfit if no tar can say what is there.
func Write(ctx context.Context, w io.Writer, dir string) (Info, error) {
	t := &writer{ctx: ctx, dir: dir, raw: w, tar: tar.NewWriter(w), seen: map[inode]string{}}
	err := filepath.WalkDir(dir, t.entry)
	if err == nil {
		err = t.tar.Close()
	}
	return t.info, err
}

type inode struct{ dev, ino uint64 }

type writer struct {
	ctx  context.Context
	dir  string
	raw  io.Writer // below tar
	tar  *tar.Writer
	seen map[inode]string // files with several names, by the first
	over map[string]cover // what lies above; nil is nothing
	info Info
}

func (t *writer) entry(at string, d fs.DirEntry, err error) error {
	if err == nil {
		err = t.ctx.Err()
	}
	if err != nil {
		return err
	}
	rel, err := filepath.Rel(t.dir, at)
	if err != nil {
		return err
	}
	fi, err := d.Info()
	if err != nil {
		return err
	}
	st := fi.Sys().(*syscall.Stat_t)
	if t.over != nil && (rel == "." || t.over[rel] != 0) {
		return t.covered(at, rel, st)
	}
	if rel != "." {
		if strings.HasPrefix(d.Name(), whiteout) {
			return fmt.Errorf("%w: a name that begins with %q means something else in a layer: /%s", ErrUnfit,
				whiteout, rel)
		}
		if fi.Mode()&fs.ModeSocket != 0 {
			return nil
		}
		t.info.Entries++
	}
	if st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == 0 {
		return t.mark(path.Join(path.Dir(rel), whiteout+d.Name()))
	}
	return t.file(at, rel, st)
}

// file writes an entry that is there.
func (t *writer) file(at, rel string, st *syscall.Stat_t) error {
	h, hides, err := t.header(at, rel, st)
	if err != nil {
		return fmt.Errorf("/%s: %w", rel, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR && st.Nlink > 1 {
		id := inode{st.Dev, st.Ino}
		if first, ok := t.seen[id]; ok {
			h.Typeflag, h.Linkname, h.Size = tar.TypeLink, first, 0
		} else {
			t.seen[id] = rel
		}
	}
	if h.Typeflag == tar.TypeReg && h.Size > 0 {
		return t.contents(at, h, st)
	}
	if err := t.tar.WriteHeader(h); err != nil {
		return fmt.Errorf("/%s: %w", rel, err)
	}
	if hides {
		return t.mark(path.Join(rel, opaque))
	}
	return nil
}

// header describes an entry, and says whether it is a directory that hides what
// lies below it.
func (t *writer) header(at, rel string, st *syscall.Stat_t) (h *tar.Header, hides bool, err error) {
	h = &tar.Header{Format: tar.FormatPAX, Name: rel, Mode: int64(st.Mode & 0o7777), Uid: int(st.Uid),
		Gid: int(st.Gid), ModTime: time.Unix(max(0, st.Mtim.Sec), st.Mtim.Nsec)}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		h.Typeflag, h.Size = tar.TypeReg, st.Size
	case unix.S_IFDIR:
		h.Typeflag, h.Name = tar.TypeDir, rel+"/"
	case unix.S_IFLNK:
		h.Typeflag = tar.TypeSymlink
		h.Linkname, err = os.Readlink(at)
	case unix.S_IFIFO:
		h.Typeflag = tar.TypeFifo
	case unix.S_IFCHR, unix.S_IFBLK:
		h.Typeflag = tar.TypeChar
		if st.Mode&unix.S_IFMT == unix.S_IFBLK {
			h.Typeflag = tar.TypeBlock
		}
		h.Devmajor, h.Devminor = int64(unix.Major(st.Rdev)), int64(unix.Minor(st.Rdev))
	}
	if err == nil {
		hides, err = attributes(at, h)
	}
	return h, hides, err
}

// attributes adds the extended attributes of a file but overlayfs's own.
func attributes(at string, h *tar.Header) (hides bool, err error) {
	names, err := listxattr(at)
	if err != nil {
		return false, err
	}
	for _, name := range names {
		own, ok := strings.CutPrefix(name, "trusted.overlay.")
		if !ok {
			own, ok = strings.CutPrefix(name, "user.overlay.")
		}
		value, err := getxattr(at, name)
		switch {
		case err != nil:
			return false, fmt.Errorf("attribute %s: %w", name, err)
		case ok && own == "opaque" && string(value) == "y":
			hides = true
		case ok && (own == "redirect" || own == "metacopy" || own == "whiteout"):
			return false, fmt.Errorf("%w: overlayfs has moved or linked it (%s); load the module overlay with redirect_dir=off metacopy=off", ErrUnfit, name)
		case ok: // where it came from, what it may hold
		default:
			if h.PAXRecords == nil {
				h.PAXRecords = map[string]string{}
			}
			h.PAXRecords[xattrRecord+name] = string(value)
		}
	}
	return hides, nil
}

func listxattr(at string) ([]string, error) {
	buf := make([]byte, 4096)
	for {
		n, err := unix.Llistxattr(at, buf)
		if errors.Is(err, unix.ERANGE) && len(buf) < 1<<16 {
			buf = make([]byte, 1<<16)
			continue
		}
		if errors.Is(err, unix.ENOTSUP) {
			return nil, nil
		}
		if err != nil {
			return nil, err
		}
		return strings.FieldsFunc(string(buf[:n]), func(r rune) bool { return r == 0 }), nil
	}
}

func getxattr(at, name string) ([]byte, error) {
	buf := make([]byte, 1<<16) // the kernel's bound
	n, err := unix.Lgetxattr(at, name, buf)
	if err != nil {
		return nil, err
	}
	return buf[:n], nil
}
