package mount

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	loopControl = "/dev/loop-control"
	// loopTries bounds how often a free device may be snatched away by another
	// process before we give up.
	loopTries = 128
)

// attachLoop mounts the index through a loop device, with the tar on another.
// Both devices clear themselves when the mount goes.
func attachLoop(f Files, target string) error {
	index, err := newLoop(f.Index)
	if err != nil {
		return err
	}
	defer index.Close()
	data, err := newLoop(f.Data)
	if err != nil {
		return err
	}
	defer data.Close()
	return mountErofs(index.Name(), data.Name(), target)
}

// newLoop gives path a loop device of its own, read-only, with 512-byte
// sectors. The device frees itself once the returned file is closed and nothing
// else uses it.
func newLoop(path string) (*os.File, error) {
	backing, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer backing.Close()
	control, err := os.OpenFile(loopControl, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer control.Close()
	for try := range loopTries {
		dev, err := takeLoop(control, backing)
		if err == nil {
			return dev, nil
		}
		if !errors.Is(err, unix.EBUSY) && !errors.Is(err, unix.ENXIO) {
			return nil, fmt.Errorf("loop device for %s: %w", path, err)
		}
		// Another process took the same free device. A step back, longer each
		// time and not the same for all, lets the others finish.
		time.Sleep(time.Duration(try*(os.Getpid()%7+1)) * 50 * time.Microsecond)
	}
	return nil, fmt.Errorf("loop device for %s: %w after %d tries", path, unix.EBUSY, loopTries)
}

// takeLoop configures the device that is free at the moment; EBUSY or ENXIO
// means that it was not free any more.
func takeLoop(control, backing *os.File) (*os.File, error) {
	n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
	if err != nil {
		return nil, os.NewSyscallError("LOOP_CTL_GET_FREE", err)
	}
	dev, err := openLoop(n)
	if err != nil {
		return nil, err
	}
	c := unix.LoopConfig{Fd: uint32(backing.Fd()), Size: sector}
	c.Info.Flags = unix.LO_FLAGS_READ_ONLY | unix.LO_FLAGS_AUTOCLEAR
	copy(c.Info.File_name[:len(c.Info.File_name)-1], backing.Name())
	if err := unix.IoctlLoopConfigure(int(dev.Fd()), &c); err != nil {
		dev.Close()
		return nil, os.NewSyscallError("LOOP_CONFIGURE", err)
	}
	return dev, nil
}

// openLoop opens the device node, which it makes where nobody else does.
func openLoop(n int) (*os.File, error) {
	path := "/dev/loop" + strconv.Itoa(n)
	dev, err := os.OpenFile(path, os.O_RDONLY, 0)
	if !errors.Is(err, os.ErrNotExist) {
		return dev, err
	}
	number, err := loopNumber(n)
	if err != nil {
		return nil, err
	}
	if err := unix.Mknod(path, unix.S_IFBLK|0o660, number); err != nil && err != unix.EEXIST {
		return nil, &os.PathError{Op: "mknod", Path: path, Err: err}
	}
	return os.OpenFile(path, os.O_RDONLY, 0)
}

// loopNumber reads the device number of loop device n from sysfs.
func loopNumber(n int) (int, error) {
	b, err := os.ReadFile("/sys/block/loop" + strconv.Itoa(n) + "/dev")
	if err != nil {
		return 0, err
	}
	var major, minor uint32
	if _, err := fmt.Sscanf(strings.TrimSpace(string(b)), "%d:%d", &major, &minor); err != nil {
		return 0, fmt.Errorf("device number of loop%d: %w", n, err)
	}
	return int(unix.Mkdev(major, minor)), nil
}
