package tree

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"dewpoint/internal/layer/toc"
)

// dir is a directory that was made; its attributes are set by Seal.
type dir struct {
	name     string
	mode     uint32
	uid, gid uint32
	time     unix.Timespec
	xattrs   map[string]string
	opaque   bool
	dead     bool // removed again by a later entry
}

// making is the mode of a directory until Seal.
const making = 0o700

// directory makes t or, where the directory is there already, notes its new
// attributes; extended attributes of both entries hold, as with containerd.
func (e *Extractor) directory(t *toc.Entry) error {
	d, err := e.ensure(t.Name)
	if err != nil {
		return err
	}
	d.set(t)
	return nil
}

func (d *dir) set(t *toc.Entry) {
	d.mode, d.uid, d.gid = t.Mode&0o7777, t.UID, t.GID
	d.time = timespec(t.ModTime)
	for k, v := range t.Xattrs {
		if d.xattrs == nil {
			d.xattrs = make(map[string]string, len(t.Xattrs))
		}
		d.xattrs[k] = v
	}
}

func (e *Extractor) opaque(name string) error {
	d, err := e.ensure(name)
	if err != nil {
		return err
	}
	d.opaque = true
	return nil
}

// ensure returns the directory name, which it makes if need be, in place of
// whatever else had the name.
func (e *Extractor) ensure(name string) (*dir, error) {
	if d := e.dirs[name]; d != nil {
		return d, nil
	}
	parent, base, err := e.walk.parent(name)
	if err != nil {
		return nil, err
	}
	err = unix.Mkdirat(parent, base, making)
	if err == unix.EEXIST {
		if err = e.remove(parent, base, name); err == nil {
			err = unix.Mkdirat(parent, base, making)
		}
	}
	if err != nil {
		return nil, os.NewSyscallError("mkdirat", err)
	}
	return e.note(name), nil
}

// note remembers a directory that was made. One that was whited out before
// shows nothing of the layers below.
func (e *Extractor) note(name string) *dir {
	d := &dir{name: name, mode: 0o755, opaque: e.hides[name]}
	e.dirs[name] = d
	e.order = append(e.order, d)
	return d
}

// imply makes a directory that something lies in but that had no entry yet,
// in place of a whiteout if there is one.
func (e *Extractor) imply(parent int, base, name string) error {
	err := unix.Mkdirat(parent, base, making)
	if err == unix.EEXIST {
		if !e.hides[name] || !isWhiteout(parent, base) {
			return unix.ENOTDIR
		}
		if err = unix.Unlinkat(parent, base, 0); err == nil {
			err = unix.Mkdirat(parent, base, making)
		}
	}
	if err != nil {
		return err
	}
	d := e.note(name)
	if e.Parent != nil {
		if t, ok := e.Parent(name); ok {
			d.set(t)
		}
	}
	return nil
}

// whiteout hides name in the layers below. What this layer itself has there
// stays, a directory cut off from those it would be merged with.
func (e *Extractor) whiteout(name string) error {
	e.hides[name] = true
	if d := e.dirs[name]; d != nil {
		d.opaque = true
		return nil
	}
	parent, base, err := e.walk.parent(name)
	if err != nil {
		return err
	}
	err = unix.Mknodat(parent, base, unix.S_IFCHR, 0)
	if err == unix.EEXIST {
		return nil
	}
	return os.NewSyscallError("mknodat", err)
}

func isWhiteout(parent int, base string) bool {
	var st unix.Stat_t
	err := unix.Fstatat(parent, base, &st, unix.AT_SYMLINK_NOFOLLOW)
	return err == nil && st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == 0
}

// finishDir gives d its attributes, its times last.
func (e *Extractor) finishDir(d *dir) error {
	fd, err := e.openDir(d.name)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if e.chown || d.uid|d.gid != 0 {
		if err := unix.Fchown(fd, int(d.uid), int(d.gid)); err != nil {
			return os.NewSyscallError("fchown", err)
		}
	}
	if err := d.setXattrs(fd); err != nil {
		return err
	}
	if d.mode != making || e.umask&making != 0 || d.xattrs != nil {
		if err := unix.Fchmod(fd, d.mode); err != nil {
			return os.NewSyscallError("fchmod", err)
		}
	}
	return setTimes(fd, ".", d.time)
}

func (d *dir) setXattrs(fd int) error {
	for k, v := range d.xattrs {
		if err := setXattr(fd, -1, "", k, v, toc.Directory); err != nil {
			return err
		}
	}
	if !d.opaque {
		return nil
	}
	return os.NewSyscallError("fsetxattr", unix.Fsetxattr(fd, "trusted.overlay.opaque", []byte{'y'}, 0))
}

func (e *Extractor) openDir(name string) (int, error) {
	const how = unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC
	if name == "" {
		return unix.Openat(e.root, ".", how, 0)
	}
	parent, base, err := e.walk.parent(name)
	if err != nil {
		return -1, err
	}
	fd, err := unix.Openat(parent, base, how, 0)
	if err != nil {
		return -1, fmt.Errorf("open %q: %w", name, err)
	}
	return fd, nil
}

// link gives the file t.Link a second name and the attributes of t, which are
// nearly always those that it has.
func (e *Extractor) link(parent int, base string, t *toc.Entry) error {
	if t.Link == t.Name {
		return refuse(toc.ErrCorrupt, "hard link to itself")
	}
	from, target, err := e.links.parent(t.Link)
	if err == nil && e.hides[t.Link] && isWhiteout(from, target) {
		err = unix.ENOENT
	}
	if err == nil {
		err = unix.Linkat(from, target, parent, base, 0)
	}
	switch {
	case err == nil:
		return e.relabel(parent, base, t)
	case err == unix.EEXIST:
		return err
	case errors.Is(err, unix.ENOENT):
		return refuse(toc.ErrCorrupt, "hard link to %q, which the layer does not have before it", t.Link)
	case errors.Is(err, unix.EPERM):
		return refuse(toc.ErrCorrupt, "hard link to the directory %q", t.Link)
	}
	return fmt.Errorf("link to %q: %w", t.Link, err)
}
