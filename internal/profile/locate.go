package profile

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// locate opens the root of a layer's mount, and returns the number by which
// tracepoints know the mount, and the name in /sys/class/bdi of what decides
// about its read-ahead.
func locate(l Layer) (root *os.File, dev uint32, bdi string, err error) {
	if l.Tree != "" {
		return nil, 0, "", fmt.Errorf("%w: it is an unpacked directory; only EROFS mounts are recorded", ErrUnsupported)
	}
	if root, err = os.OpenFile(l.Mount, unix.O_DIRECTORY, 0); err != nil {
		return nil, 0, "", err
	}
	if dev, bdi, err = identify(root); err != nil {
		root.Close()
		return nil, 0, "", fmt.Errorf("mount %s: %w", l.Mount, err)
	}
	return root, dev, bdi, nil
}

func identify(root *os.File) (dev uint32, bdi string, err error) {
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
	major, minor := unix.Major(uint64(st.Dev)), unix.Minor(uint64(st.Dev))
	if bdi = fmt.Sprintf("%d:%d", major, minor); major == 0 {
		if bdi, err = sysfsName(root); err != nil {
			return 0, "", fmt.Errorf("%w: name in sysfs: %w", ErrUnsupported, err)
		}
	}
	if _, err := os.Stat(readAheadFile(bdi)); err != nil {
		return 0, "", fmt.Errorf("%w: read-ahead: %w", ErrUnsupported, err)
	}
	return major<<20 | minor&(1<<20-1), bdi, nil
}

// sysfsName asks the kernel (6.9 and newer; file-backed mounts need 6.12) by
// what name a superblock without a block device goes in sysfs. EROFS names its
// backing_dev_info alike.
func sysfsName(root *os.File) (string, error) {
	const request = 2<<30 | 129<<16 | 0x15<<8 | 1 // FS_IOC_GETFSSYSFSPATH
	var path struct {
		len  uint8
		name [128]byte
	}
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, root.Fd(), request, uintptr(unsafe.Pointer(&path))); e != 0 {
		return "", os.NewSyscallError("FS_IOC_GETFSSYSFSPATH", e)
	}
	name := string(path.name[:min(int(path.len), len(path.name))])
	if base, ok := strings.CutPrefix(name, "erofs/"); ok && filepath.IsLocal(base) {
		return base, nil
	}
	return "", fmt.Errorf("the kernel says %q", name)
}
