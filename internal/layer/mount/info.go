package mount

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// Info is one mount as the kernel tells of it.
type Info struct {
	Target  string
	Type    string // file system: "erofs"; that of the directory if it is a bind mount
	Source  string // a path of the index, /dev/loopN, or what the file system says
	Root    string // directory of the file system that is mounted: the tree of a bind mount
	Options string // of the file system
}

// Backing is the index that an EROFS mount was made from, for a loop device
// the file below it.
func (i Info) Backing() string {
	name, ok := strings.CutPrefix(i.Source, "/dev/")
	if !ok {
		return i.Source
	}
	file, err := os.ReadFile("/sys/block/" + name + "/loop/backing_file")
	if err != nil {
		return i.Source
	}
	return strings.TrimSuffix(string(file), "\n")
}

// Mounted reports whether something is mounted at the directory target; that
// target does not exist is an error. It takes one system call.
func Mounted(target string) (bool, error) {
	var st unix.Statx_t
	err := unix.Statx(unix.AT_FDCWD, target, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT, 0, &st)
	if err != nil && err != unix.ENOSYS {
		return false, &os.PathError{Op: "statx", Path: target, Err: err}
	}
	if err == nil && st.Attributes_mask&unix.STATX_ATTR_MOUNT_ROOT != 0 {
		return st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0, nil
	}
	return mountinfo.Mounted(target) // before Linux 5.8
}

// lookup finds the uppermost mount at target.
func lookup(target string) (Info, error) {
	path, err := filepath.EvalSymlinks(target)
	if err != nil {
		return Info{}, err
	}
	found, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) {
		return m.Mountpoint != path, false
	})
	if err != nil {
		return Info{}, fmt.Errorf("read mounts: %w", err)
	}
	if len(found) == 0 {
		return Info{}, &os.PathError{Op: "find mount", Path: target, Err: os.ErrNotExist}
	}
	return info(found[len(found)-1]), nil
}

func info(m *mountinfo.Info) Info {
	return Info{Target: m.Mountpoint, Type: m.FSType, Source: m.Source, Root: m.Root, Options: m.VFSOptions}
}
