// Package tree unpacks a layer into a directory: the form of a layer for
// kernels that cannot mount its EROFS index.
//
// An Extractor is fed with the entries of one layer's tar in tar order and
// leaves a directory that overlayfs can stack: whiteouts are character devices
// 0/0, opaque directories carry trusted.overlay.opaque, names, types, modes,
// owners, times, extended attributes, hard links and contents are those that
// containerd's applier gives them. What several entries of one name come to, and
// which entries are refused, is what the rules of toc.Tree say, so that a layer
// is the same unpacked and as an EROFS index.
//
// Three habits keep it fast. The way to the directory last used is held open
// (type walk), so that an entry costs no path lookup; small contents come out of
// one buffer that is filled in tar order; and attributes are set only where
// the kernel has not given the right ones at creation. A plain file of root's
// costs openat, write, utimensat and close. Directories get their attributes at
// the end, in Seal, since making entries in them would change their times.
//
// Nothing is ever made outside the target directory: a name is walked one
// component at a time by descriptor, never through a symbolic link.
package tree

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"dewpoint/internal/layer/toc"
)

// Extractor unpacks one layer. It is not safe for concurrent use. Whoever made
// it calls Seal and Close, to give up Close alone; what Close leaves behind is for the
// caller to remove.
type Extractor struct {
	// Parent, if not nil, gives the attributes of a directory that has no
	// entry in this layer but is needed for one (mode 0755, root's, time 0 if
	// Parent is nil or does not know it): overlayfs shows the attributes of the
	// topmost layer that has a directory, so they should be those it has in
	// the layers below. Set it before the first Add.
	Parent func(name string) (*toc.Entry, bool)

	root  int // O_PATH descriptor of the target directory
	src   source
	walk  walk // to the directory of the entry at hand
	links walk // to the directory of a hard link's target
	dirs  map[string]*dir
	order []*dir          // dirs as they were made, dead ones included
	hides map[string]bool // names that a whiteout hides in the layers below
	umask uint32
	chown bool // a new file's owner may be other than 0:0
}

// New begins to unpack into the existing, empty directory path. Ranges of
// entries are read from data; when that is an *os.File, the kernel copies what
// is large.
func New(path string, data io.ReaderAt) (*Extractor, error) {
	root, err := unix.Open(path, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	e := &Extractor{root: root, src: newSource(data), dirs: map[string]*dir{}, hides: map[string]bool{}}
	e.walk = walk{root: root, missing: e.imply}
	e.links = walk{root: root}
	if err := e.inspect(); err != nil {
		e.Close()
		return nil, fmt.Errorf("unpack into %s: %w", path, err)
	}
	top := &dir{mode: 0o755}
	e.dirs[""], e.order = top, append(e.order, top)
	return e, nil
}

// inspect finds out what the kernel will do to new files unasked.
func (e *Extractor) inspect() error {
	var st unix.Stat_t
	if err := unix.Fstat(e.root, &st); err != nil {
		return err
	}
	e.chown = unix.Geteuid() != 0 || unix.Getegid() != 0 || st.Gid != 0 || st.Mode&unix.S_ISGID != 0
	e.umask = umask()
	if _, err := unix.Lgetxattr(procPath(e.root, "."), "system.posix_acl_default", nil); err == nil {
		e.umask = 0o7777 // an inherited ACL stands in for the umask
	}
	return nil
}

// umask is the process's file mode creation mask. Reading it by umask(2) would
// change it for other threads meanwhile.
func umask() uint32 {
	status, err := os.ReadFile("/proc/thread-self/status")
	if err != nil {
		return 0o7777
	}
	_, rest, ok := strings.Cut(string(status), "\nUmask:")
	var mask uint32
	if _, err := fmt.Sscanf(rest, "%o", &mask); !ok || err != nil {
		return 0o7777 // unknown: every mode is set explicitly
	}
	return mask
}

// Add unpacks the next entry of the tar. What is wrong with the layer gives a
// *toc.Error. After an error the Extractor is only good for Close.
func (e *Extractor) Add(t *toc.Entry) error {
	err := e.add(t)
	if bad := (*toc.Error)(nil); errors.As(err, &bad) {
		bad.Name = t.Name
		return bad
	}
	if err != nil {
		return fmt.Errorf("unpack %q: %w", t.Name, err)
	}
	return nil
}

// refuse is an error about the entry at hand, which Add names.
func refuse(err error, why string, args ...any) error {
	return &toc.Error{Offset: -1, Err: err, Why: fmt.Sprintf(why, args...)}
}

func (e *Extractor) add(t *toc.Entry) error {
	switch {
	case t.Type == toc.Opaque:
		return e.opaque(t.Name)
	case t.Type == toc.Directory:
		return e.directory(t)
	case t.Type == toc.Whiteout:
		return e.whiteout(t.Name)
	case t.Name == "":
		return refuse(toc.ErrCorrupt, "the root is no %v", t.Type)
	}
	parent, base, err := e.walk.parent(t.Name)
	if err != nil {
		return err
	}
	err = e.create(parent, base, t)
	if errors.Is(err, unix.EEXIST) {
		if err = e.remove(parent, base, t.Name); err == nil {
			err = e.create(parent, base, t)
		}
	}
	return err
}

// create makes anything but a directory. It returns EEXIST, unwrapped, when
// the name is taken.
func (e *Extractor) create(parent int, base string, t *toc.Entry) error {
	switch t.Type {
	case toc.Regular:
		return e.regular(parent, base, t)
	case toc.Symlink:
		return e.made(unix.Symlinkat(t.Link, parent, base), parent, base, t)
	case toc.Hardlink:
		return e.link(parent, base, t)
	case toc.Char:
		return e.node(parent, base, t, unix.S_IFCHR, unix.Mkdev(t.Major, t.Minor))
	case toc.Block:
		return e.node(parent, base, t, unix.S_IFBLK, unix.Mkdev(t.Major, t.Minor))
	case toc.Fifo:
		return e.node(parent, base, t, unix.S_IFIFO, 0)
	}
	return refuse(toc.ErrCorrupt, "its type is %v", t.Type)
}

func (e *Extractor) node(parent int, base string, t *toc.Entry, kind uint32, dev uint64) error {
	return e.made(unix.Mknodat(parent, base, kind|t.Mode&0o777, int(dev)), parent, base, t)
}

// made finishes an entry that was just created without being opened.
func (e *Extractor) made(err error, parent int, base string, t *toc.Entry) error {
	if err != nil {
		return err
	}
	return e.attributes(-1, parent, base, t)
}

// remove takes an earlier entry away, a directory with all that is in it.
func (e *Extractor) remove(parent int, base, name string) error {
	err := unix.Unlinkat(parent, base, 0)
	if err != unix.EISDIR {
		return err
	}
	e.forget(name)
	// The way to base leads through a descriptor and no symbolic link, and
	// RemoveAll follows none below.
	return os.RemoveAll(procPath(parent, base))
}

// forget drops what is remembered of the directory name and those below.
func (e *Extractor) forget(name string) {
	e.walk.leave(name)
	e.links.leave(name)
	for n, d := range e.dirs {
		if within(n, name) {
			d.dead = true
			delete(e.dirs, n)
		}
	}
	for n := range e.hides {
		if n != name && within(n, name) {
			delete(e.hides, n)
		}
	}
}

// Seal sets the directories' attributes. After it the tree is whole and can be
// used, but would not survive a power cut.
func (e *Extractor) Seal() error {
	for _, d := range e.order {
		if d.dead {
			continue
		}
		if err := e.finishDir(d); err != nil {
			return fmt.Errorf("unpack %q: %w", d.name, err)
		}
	}
	return nil
}

// Close releases the Extractor's descriptors. It may be called more than once.
func (e *Extractor) Close() error {
	e.walk.close()
	e.links.close()
	if e.root >= 0 {
		unix.Close(e.root)
		e.root = -1
	}
	return nil
}
