package profile

import (
	"fmt"
	"os"

	"dewpoint/internal/layer/bdi"

	"golang.org/x/sys/unix"
)

// locate opens the root of a layer's mount, and returns the number by which
// tracepoints know the mount, and its backing device (package bdi).
func locate(l Layer) (root *os.File, dev uint32, device string, err error) {
	if l.Tree != "" {
		return nil, 0, "", fmt.Errorf("%w: it is an unpacked directory; only EROFS mounts are recorded",
			ErrUnsupported)
	}
	if root, err = os.OpenFile(l.Mount, unix.O_DIRECTORY, 0); err != nil {
		return nil, 0, "", err
	}
	if dev, device, err = identify(root); err != nil {
		root.Close()
		return nil, 0, "", fmt.Errorf("mount %s: %w", l.Mount, err)
	}
	return root, dev, device, nil
}

func identify(root *os.File) (dev uint32, device string, err error) {
	var fs unix.Statfs_t
	var st unix.Stat_t
	if err := unix.Fstatfs(int(root.Fd()), &fs); err != nil {
		return 0, "", os.NewSyscallError("statfs", err)
	}
	if fs.Type != unix.EROFS_SUPER_MAGIC_V1 {
		return 0, "", fmt.Errorf("%w: it is not EROFS", ErrUnsupported)
	}
	if err := unix.Fstat(int(root.Fd()), &st); err != nil {
		return 0, "", os.NewSyscallError("stat", err)
	}
	if device, err = bdi.Of(root); err != nil {
		return 0, "", fmt.Errorf("%w: %w", ErrUnsupported, err)
	}
	major, minor := unix.Major(uint64(st.Dev)), unix.Minor(uint64(st.Dev))
	return major<<20 | minor&(1<<20-1), device, nil
}
