package network

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

const nsfsMagic = 0x6e736673

// NewNS makes a network namespace whose loopback device is up and keeps it at
// path, a new file. It is an error if something is there.
func NewNS(path string) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDONLY, 0o444)
	if err != nil {
		return fmt.Errorf("network namespace: %w", err)
	}
	f.Close()
	err = onThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return os.NewSyscallError("unshare", err)
		}
		if err := loopbackUp(); err != nil {
			return err
		}
		return os.NewSyscallError("mount", unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, ""))
	})
	if err != nil {
		_ = RemoveNS(path)
		return fmt.Errorf("network namespace %s: %w", path, err)
	}
	return nil
}

// RemoveNS lets go of a namespace; it ends with its last process. It is not
// an error if nothing is there.
func RemoveNS(path string) error {
	err := unix.Unmount(path, unix.MNT_DETACH)
	if err != nil && err != unix.ENOENT && err != unix.EINVAL {
		return fmt.Errorf("unmount network namespace %s: %w", path, err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("network namespace: %w", err)
	}
	return nil
}

// IsNS says whether a namespace is kept at path. After a reboot the file may
// be there without one.
func IsNS(path string) bool {
	var st unix.Statfs_t
	return unix.Statfs(path, &st) == nil && st.Type == nsfsMagic
}

// Do runs fn on a thread inside the network namespace at path. Sockets that
// fn opens itself belong to the namespace; goroutines that it starts do not.
func Do(path string, fn func() error) error {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open network namespace %s: %w", path, err)
	}
	defer unix.Close(fd)
	return onThread(func() error {
		if err := unix.Setns(fd, unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter network namespace %s: %w", path, err)
		}
		return fn()
	})
}

// onThread runs fn on a thread that may change its network namespace. A
// thread that does not find back is given up.
func onThread(fn func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		home, err := unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			runtime.UnlockOSThread()
			done <- os.NewSyscallError("open", err)
			return
		}
		err = fn()
		if unix.Setns(home, unix.CLONE_NEWNET) == nil {
			runtime.UnlockOSThread()
		}
		unix.Close(home)
		done <- err
	}()
	return <-done
}

func loopbackUp() error {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	defer unix.Close(s)
	var req struct {
		name  [unix.IFNAMSIZ]byte
		flags uint16
		_     [22]byte
	}
	copy(req.name[:], "lo")
	req.flags = unix.IFF_UP | unix.IFF_RUNNING
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(s), unix.SIOCSIFFLAGS,
		uintptr(unsafe.Pointer(&req))); e != 0 {
		return os.NewSyscallError("bring lo up", e)
	}
	return nil
}
