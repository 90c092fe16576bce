package datafs

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// mountFS opens /dev/fuse and mounts it on the existing directory dir. The
// kernel asks for everything through the file, and ends the mount's service when
// the last descriptor of it is closed.
func mountFS(dir string) (*os.File, error) {
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("%w: open /dev/fuse: %w", ErrUnusable, err)
	}
	// Modes are the kernel's to check, as for every file system.
	options := fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions,max_read=%d", fd, maxRead)
	const flags = unix.MS_RDONLY | unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOATIME
	if err := unix.Mount(fsType, dir, "fuse."+fsType, flags, options); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("mount FUSE at %s: %w", dir, err)
	}
	return os.NewFile(uintptr(fd), "/dev/fuse"), nil
}

// detach takes away whatever is mounted at dir, used or not. It ends the connections of what is FUSE there,
// whoever holds their devices.
func detach(dir string) error { return unmountAll(dir, unix.MNT_DETACH|unix.MNT_FORCE) }

// leave takes it away too, and whoever uses it goes on.
func leave(dir string) error { return unmountAll(dir, unix.MNT_DETACH) }

func unmountAll(dir string, flags int) error {
	for {
		switch err := unix.Unmount(dir, unix.UMOUNT_NOFOLLOW|flags); {
		case err == nil:
		case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOENT):
			return nil
		default:
			return &os.PathError{Op: "unmount", Path: dir, Err: err}
		}
	}
}
