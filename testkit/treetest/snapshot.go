// Package treetest compares directory trees as the kernel shows them, and
// provides layers that are worth comparing. It is for tests: those of every way
// to mount a layer compare the tree they show with the one that containerd's own
// applier makes.
package treetest

import (
	"crypto/sha256"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Tree says of each path, relative to the tree's root, which is ".", what is
// there. Fields are type, mode, owner, mtime (seconds and nanoseconds), size,
// nlink, rdev, link (a symbolic link's target), sum (sha256 of contents), same
// (the first path of the same inode) and xattr.NAME.
type Tree map[string]map[string]string

// Snapshot reads a tree with all contents. It has to run as root to see all
// attributes.
func Snapshot(root string) (Tree, error) {
	t := Tree{}
	first := map[uint64]string{}
	err := filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		t[rel], err = describe(path, rel, first)
		return err
	})
	return t, err
}

func describe(path, rel string, first map[uint64]string) (map[string]string, error) {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return nil, fmt.Errorf("stat %s: %w", path, err)
	}
	f := map[string]string{
		"type":  fmt.Sprintf("%o", st.Mode&unix.S_IFMT),
		"mode":  fmt.Sprintf("%o", st.Mode&^unix.S_IFMT),
		"owner": fmt.Sprintf("%d:%d", st.Uid, st.Gid),
		"mtime": fmt.Sprintf("%d.%09d", st.Mtim.Sec, st.Mtim.Nsec),
		"nlink": fmt.Sprint(st.Nlink),
	}
	var err error
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		f["size"] = fmt.Sprint(st.Size)
		f["sum"], err = sum(path)
	case unix.S_IFLNK:
		f["link"], err = os.Readlink(path)
	case unix.S_IFCHR, unix.S_IFBLK:
		f["rdev"] = fmt.Sprintf("%d:%d", unix.Major(uint64(st.Rdev)), unix.Minor(uint64(st.Rdev)))
	}
	if err != nil {
		return nil, err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR && st.Nlink > 1 {
		if _, ok := first[st.Ino]; !ok {
			first[st.Ino] = rel
		}
		f["same"] = first[st.Ino]
	}
	return f, xattrs(path, f)
}

func sum(path string) (string, error) {
	file, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer file.Close()
	h := sha256.New()
	if _, err := io.Copy(h, file); err != nil {
		return "", err
	}
	return fmt.Sprintf("%x", h.Sum(nil)), nil
}

func xattrs(path string, f map[string]string) error {
	names := make([]byte, 64<<10)
	n, err := unix.Llistxattr(path, names)
	if err == syscall.EOPNOTSUPP {
		return nil
	}
	if err != nil {
		return fmt.Errorf("list attributes of %s: %w", path, err)
	}
	value := make([]byte, 64<<10)
	for _, name := range strings.Split(strings.TrimSuffix(string(names[:n]), "\x00"), "\x00") {
		if name == "" {
			continue
		}
		n, err := unix.Lgetxattr(path, name, value)
		if err != nil {
			return fmt.Errorf("attribute %s of %s: %w", name, path, err)
		}
		f["xattr."+name] = string(value[:n])
	}
	return nil
}

// Diff lists the differences between two trees, a line each, in order. Fields
// for which skip, if not nil, reports true are not compared; the field of a
// whole path is "".
func Diff(want, got Tree, skip func(path, field string) bool) []string {
	if skip == nil {
		skip = func(string, string) bool { return false }
	}
	var out []string
	for path, w := range want {
		g, ok := got[path]
		if !ok {
			if !skip(path, "") {
				out = append(out, fmt.Sprintf("%q: missing", path))
			}
			continue
		}
		for field := range union(w, g) {
			if w[field] != g[field] && !skip(path, field) {
				out = append(out, fmt.Sprintf("%q: %s is %q, want %q", path, field, g[field], w[field]))
			}
		}
	}
	for path := range got {
		if _, ok := want[path]; !ok && !skip(path, "") {
			out = append(out, fmt.Sprintf("%q: should not be there", path))
		}
	}
	sort.Strings(out)
	return out
}

func union(a, b map[string]string) map[string]bool {
	all := map[string]bool{}
	for k := range a {
		all[k] = true
	}
	for k := range b {
		all[k] = true
	}
	return all
}
