package tree

import (
	"fmt"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"dewpoint/internal/layer/toc"
)

// maxOpen bounds the descriptors that a walk holds open.
const maxOpen = 64

// walk finds directories below root by name, component by component, and
// keeps those on the way to the last one open: the next entry of a tar is
// mostly in the same directory or near it.
type walk struct {
	root int
	// missing makes the directory base in parent, whose name in the layer is
	// name, or returns ENOTDIR if there is something else that stays; nil: a
	// missing directory is an error.
	missing func(parent int, base, name string) error

	path string // the directory that the last of open is, "" is root
	open []step // the ancestors of path below root, and path itself
	deep int    // one more, deeper than maxOpen, for the directory far; 0 is none
	far  string
}

// step is a directory on the way: path[:end] is open as fd.
type step struct{ end, fd int }

// parent opens the directory that holds name and gives name's last component.
// The descriptor is the walk's, good until its next call.
func (w *walk) parent(name string) (fd int, base string, err error) {
	dir, base := split(name)
	if name != "" && name[0] == '/' {
		return -1, "", refuse(toc.ErrUnsafe, "it is absolute")
	}
	if err := check(base); err != nil {
		return -1, "", err
	}
	fd, err = w.dir(dir)
	return fd, base, err
}

// dir opens the directory name, "" is root. The descriptor is the walk's.
func (w *walk) dir(name string) (int, error) {
	if name == w.path {
		return w.top(), nil
	}
	w.back(name)
	fd := w.top()
	for at := len(w.path); at < len(name); {
		begin, end := next(name, at)
		sub, err := w.enter(fd, name[begin:end], name[:end])
		if err != nil {
			return -1, err
		}
		w.push(sub, name, end)
		fd, at = sub, end
	}
	return fd, nil
}

// next finds the component of name that follows name[:at].
func next(name string, at int) (begin, end int) {
	begin = at
	if at > 0 {
		begin++ // the slash
	}
	if n := strings.IndexByte(name[begin:], '/'); n >= 0 {
		return begin, begin + n
	}
	return begin, len(name)
}

func (w *walk) enter(parent int, base, name string) (int, error) {
	if err := check(base); err != nil {
		return -1, err
	}
	const how = unix.O_PATH | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC
	fd, err := unix.Openat(parent, base, how, 0)
	if (err == unix.ENOENT || err == unix.ENOTDIR) && w.missing != nil {
		if err = w.missing(parent, base, name); err == nil {
			fd, err = unix.Openat(parent, base, how, 0)
		}
	}
	switch err {
	case nil:
		return fd, nil
	case unix.ENOTDIR, unix.ELOOP:
		return -1, notDirectory(parent, base, name)
	}
	return -1, fmt.Errorf("open %q: %w", name, err)
}

// notDirectory says why name cannot be walked through.
func notDirectory(parent int, base, name string) error {
	var st unix.Stat_t
	err := unix.Fstatat(parent, base, &st, unix.AT_SYMLINK_NOFOLLOW)
	if err == nil && st.Mode&unix.S_IFMT == unix.S_IFLNK {
		return refuse(toc.ErrUnsafe, "its path goes through the symbolic link %q", name)
	}
	return refuse(toc.ErrCorrupt, "its parent %q is no directory", name)
}

func (w *walk) top() int {
	if len(w.open) == 0 {
		return w.root
	}
	return w.open[len(w.open)-1].fd
}

// back closes what does not lead to name.
func (w *walk) back(name string) {
	if w.deep != 0 {
		unix.Close(w.deep)
		w.deep = 0
	}
	for len(w.open) > 0 && !within(name, w.path) {
		w.pop()
	}
}

func (w *walk) pop() {
	n := len(w.open) - 1
	unix.Close(w.open[n].fd)
	w.open = w.open[:n]
	end := 0
	if n > 0 {
		end = w.open[n-1].end
	}
	w.path = w.path[:end]
}

// push remembers that name[:end] is open as fd.
func (w *walk) push(fd int, name string, end int) {
	if len(w.open) < maxOpen {
		w.open = append(w.open, step{end, fd})
		w.path = name[:end]
		return
	}
	if w.deep != 0 {
		unix.Close(w.deep)
	}
	w.deep, w.far = fd, name[:end]
}

// leave closes the directory name and those below: it is going to vanish.
func (w *walk) leave(name string) {
	if within(w.path, name) || w.deep != 0 && within(w.far, name) {
		w.close()
	}
}

func (w *walk) close() { w.back("") }

// within reports whether name is dir or below it.
func within(name, dir string) bool {
	return strings.HasPrefix(name, dir) && (dir == "" || len(name) == len(dir) || name[len(dir)] == '/')
}

// split cuts name into the directory and the last component.
func split(name string) (dir, base string) {
	i := strings.LastIndexByte(name, '/')
	return name[:max(i, 0)], name[i+1:]
}

func check(component string) error {
	switch component {
	case "", ".", "..":
		return refuse(toc.ErrUnsafe, "component %q", component)
	}
	if strings.IndexByte(component, 0) >= 0 {
		return refuse(toc.ErrUnsafe, "it holds a zero byte")
	}
	return nil
}

// procPath names base in the directory fd, for system calls without an "at" form.
func procPath(fd int, base string) string {
	return "/proc/self/fd/" + strconv.Itoa(fd) + "/" + base
}
