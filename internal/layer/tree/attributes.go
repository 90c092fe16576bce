package tree

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"dewpoint/internal/layer/toc"
)

// attributes gives what was just created as base in parent the owner, extended
// attributes, mode and times of t, in that order: a change of owner clears
// setuid bits and capabilities. fd is open on it, or -1.
func (e *Extractor) attributes(fd, parent int, base string, t *toc.Entry) error {
	if e.chown || t.UID|t.GID != 0 {
		if err := unix.Fchownat(parent, base, int(t.UID), int(t.GID), unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return os.NewSyscallError("fchownat", err)
		}
	}
	for k, v := range t.Xattrs {
		if err := setXattr(fd, parent, base, k, v, t.Type); err != nil {
			return err
		}
	}
	// Symbolic links have no mode of their own; nothing else here is one. An
	// access control list may have changed the mode.
	if t.Type != toc.Symlink && (t.Mode&(0o7000|e.umask) != 0 || t.Xattrs != nil) {
		if err := unix.Fchmodat(parent, base, t.Mode&0o7777, 0); err != nil {
			return os.NewSyscallError("fchmodat", err)
		}
	}
	return setTimes(parent, base, timespec(t.ModTime))
}

// relabel gives an existing file the attributes of a hard link's entry. The
// owner is set even if it is right already: as with containerd, that takes the
// file's capabilities away.
func (e *Extractor) relabel(parent int, base string, t *toc.Entry) error {
	if err := unix.Fchownat(parent, base, int(t.UID), int(t.GID), unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return os.NewSyscallError("fchownat", err)
	}
	var st unix.Stat_t
	if err := unix.Fstatat(parent, base, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return os.NewSyscallError("fstatat", err)
	}
	for k, v := range t.Xattrs {
		if err := setXattr(-1, parent, base, k, v, kind(st.Mode)); err != nil {
			return err
		}
	}
	if kind(st.Mode) != toc.Symlink && (st.Mode&0o7777 != t.Mode&0o7777 || t.Xattrs != nil) {
		if err := unix.Fchmodat(parent, base, t.Mode&0o7777, 0); err != nil {
			return os.NewSyscallError("fchmodat", err)
		}
	}
	if st.Mtim == timespec(t.ModTime) {
		return nil
	}
	return setTimes(parent, base, timespec(t.ModTime))
}

// kind is as much of a file's type as extended attributes and modes need.
func kind(mode uint32) toc.Type {
	switch mode & unix.S_IFMT {
	case unix.S_IFREG:
		return toc.Regular
	case unix.S_IFLNK:
		return toc.Symlink
	}
	return toc.Fifo
}

// setXattr sets one extended attribute on fd or, if that is -1, on base in
// parent. The trusted namespace is not a layer's to set. Attributes that the
// file system does not know, and "user." ones on what cannot have them, are
// left out: containerd does the same.
func setXattr(fd, parent int, base, key, value string, t toc.Type) error {
	if strings.HasPrefix(key, "trusted.") {
		return nil
	}
	var err error
	if fd >= 0 {
		err = unix.Fsetxattr(fd, key, []byte(value), 0)
	} else {
		err = unix.Lsetxattr(procPath(parent, base), key, []byte(value), 0)
	}
	special := t != toc.Regular && t != toc.Directory && strings.HasPrefix(key, "user.")
	if err == nil || errors.Is(err, unix.ENOTSUP) || special && errors.Is(err, unix.EPERM) {
		return nil
	}
	return fmt.Errorf("set extended attribute %q: %w", key, err)
}

func setTimes(parent int, base string, t unix.Timespec) error {
	ts := []unix.Timespec{t, t}
	return os.NewSyscallError("utimensat", unix.UtimesNanoAt(parent, base, ts, unix.AT_SYMLINK_NOFOLLOW))
}

// timespec is t as the file system gets it; times before 1970, or after what
// fits 64 bits of nanoseconds, become 0, as with containerd.
func timespec(t time.Time) unix.Timespec {
	if t.Before(time.Unix(0, 0)) || t.After(time.Unix(0, 1<<63-1)) {
		return unix.Timespec{}
	}
	return unix.NsecToTimespec(t.UnixNano())
}
