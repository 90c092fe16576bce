// Package bdi sets how far the kernel reads ahead in a mount.
//
// Each mount has a backing device, which has a directory below /sys/class/bdi
// and there a file read_ahead_kb: it holds for files that are opened from then
// on. Its name is "MAJOR:MINOR" for a mount of a block device and for FUSE, and
// one of the file system's own ("erofs-7") for a mount of a file. Since Linux
// 6.9 the kernel tells which one that is (Of); on an older one it can only be
// seen which devices come up while something is mounted (Without).
package bdi

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// class has the kernel's backing devices.
const class = "/sys/class/bdi"

func file(name string) string { return filepath.Join(class, filepath.Base(name), "read_ahead_kb") }

// ReadAhead returns how many KiB are read ahead by a backing device. It returns
// os.ErrNotExist, wrapped, if that is gone.
func ReadAhead(name string) (int, error) {
	b, err := os.ReadFile(file(name))
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(string(b)))
}

// SetReadAhead sets how many KiB are read ahead by a backing device. It returns
// os.ErrNotExist, wrapped, if that is gone.
func SetReadAhead(name string, kib int) error {
	f, err := os.OpenFile(file(name), os.O_WRONLY, 0)
	if err == nil {
		_, err = f.WriteString(strconv.Itoa(kib))
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		return fmt.Errorf("set read-ahead: %w", err)
	}
	return nil
}

// Of returns the name of the backing device of the mount that root is in.
func Of(root *os.File) (string, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(root.Fd()), &st); err != nil {
		return "", os.NewSyscallError("stat", err)
	}
	name := fmt.Sprintf("%d:%d", unix.Major(st.Dev), unix.Minor(st.Dev))
	if _, err := os.Stat(file(name)); err == nil {
		return name, nil
	}
	name, err := sysfsName(root)
	if err != nil {
		return "", fmt.Errorf("name in sysfs: %w", err)
	}
	if _, err := os.Stat(file(name)); err != nil {
		return "", fmt.Errorf("read-ahead: %w", err)
	}
	return name, nil
}

// sysfsName asks the kernel (6.9 and newer; file-backed mounts need 6.12) by
// what name a superblock without a block device goes in sysfs. EROFS names its
// backing device alike.
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

// mounting is held while a mount is made whose backing device is to be found.
var mounting sync.Mutex

// Without calls mount, which mounts one EROFS image at the directory target, and
// switches the new mount's read-ahead off. It returns the names of the mount's
// backing devices, for SetReadAhead.
//
// If the kernel does not tell the mount's device, those that come up during mount
// are taken for it; another process's EROFS mount of the same moment would lose
// its read-ahead too, and nothing else.
//
// If anything of that fails, nothing is mounted at target.
func Without(target string, mount func() error) ([]string, error) {
	mounted := false
	names, err := without(func() error {
		err := mount()
		mounted = err == nil
		return err
	}, func() (string, error) {
		root, err := os.OpenFile(target, unix.O_DIRECTORY, 0)
		if err != nil {
			return "", err
		}
		defer root.Close()
		return Of(root)
	})
	if err != nil && mounted {
		err = errors.Join(err,
			os.NewSyscallError("umount2", unix.Unmount(target, unix.UMOUNT_NOFOLLOW|unix.MNT_DETACH)))
	}
	return names, err
}

func without(mount func() error, tell func() (string, error)) ([]string, error) {
	mounting.Lock()
	defer mounting.Unlock()
	before, err := ofErofs()
	if err != nil {
		return nil, err
	}
	if err := mount(); err != nil {
		return nil, err
	}
	if name, err := tell(); err == nil {
		return []string{name}, SetReadAhead(name, 0)
	}
	after, err := ofErofs()
	if err != nil {
		return nil, err
	}
	var came []string
	for name := range after {
		if before[name] {
			continue
		}
		if err := SetReadAhead(name, 0); err == nil {
			came = append(came, name)
		} else if !errors.Is(err, os.ErrNotExist) { // another's, and gone
			return came, err
		}
	}
	if len(came) == 0 {
		return nil, errors.New("the new EROFS mount has no backing device of its own")
	}
	return came, nil
}

// ofErofs lists the backing devices of EROFS mounts of files.
func ofErofs() (map[string]bool, error) {
	dir, err := os.Open(class)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	found := map[string]bool{}
	for _, n := range names {
		if strings.HasPrefix(n, "erofs-") {
			found[n] = true
		}
	}
	return found, err
}
