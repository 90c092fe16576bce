package lazypages

import (
	"encoding/binary"
	"errors"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

var pageSize = uint64(os.Getpagesize())

// Requests of userfaultfd(2), as linux/userfaultfd.h numbers them.
const (
	ioctlWake     = 0x8010aa02
	ioctlCopy     = 0xc028aa03
	ioctlZeropage = 0xc020aa04
	ioctlProtect  = 0xc018aa06

	eventFault  = 0x12
	eventFork   = 0x13
	eventRemap  = 0x14
	eventRemove = 0x15
	eventUnmap  = 0x16

	messageSize = 32
)

var (
	// errAgain: the process is changing its memory; its events are to be read first.
	errAgain = errors.New("the memory is changing")
	// errGone: the process has ended, or has executed another program.
	errGone = errors.New("the process is gone")
	// errAbsent: nothing is registered at this address.
	errAbsent = errors.New("no such memory")
)

type message [messageSize]byte

func (m *message) event() byte      { return m[0] }
func (m *message) arg(i int) uint64 { return binary.LittleEndian.Uint64(m[8+8*i:]) }
func (m *message) fd() int          { return int(int32(binary.LittleEndian.Uint32(m[8:]))) }

// readMessages gives what the kernel has to say, none if there is nothing.
func readMessages(fd int, buf []message) ([]message, error) {
	b := unsafe.Slice(&buf[0][0], len(buf)*messageSize)
	for {
		n, err := unix.Read(fd, b)
		switch {
		case err == unix.EINTR:
		case err == unix.EAGAIN:
			return nil, nil
		case err != nil:
			return nil, os.NewSyscallError("read userfaultfd", err)
		default:
			return buf[:n/messageSize], nil
		}
	}
}

type copyArg struct {
	dst, src, size, mode uint64
	done                 int64
}

type zeroArg struct {
	start, size, mode uint64
	done              int64
}

// copyPages puts b at addr and wakes who waits there. It returns how many bytes
// from the start are dealt with: copied, or found to be there already.
// The error is errAgain, errGone, errAbsent, or that of the kernel.
func copyPages(fd int, addr uint64, b []byte) (int, error) {
	done, step := 0, len(b)
	for done < len(b) {
		n := min(step, len(b)-done)
		copied, err := copyOnce(fd, addr+uint64(done), b[done:done+n])
		done += copied
		switch {
		case err == nil, copied > 0:
		case err == unix.EEXIST:
			wake(fd, addr+uint64(done), pageSize)
			done += int(pageSize)
		case err == errAbsent && n > int(pageSize):
			step = int(pageSize) // the range is more than one mapping by now
		default:
			return done, err
		}
	}
	return done, nil
}

func copyOnce(fd int, addr uint64, b []byte) (int, error) {
	arg := &copyArg{dst: addr, src: uint64(uintptr(unsafe.Pointer(&b[0]))), size: uint64(len(b))}
	err := ioctl(fd, ioctlCopy, unsafe.Pointer(arg))
	runtime.KeepAlive(b)
	return int(max(arg.done, 0)), err
}

// zeroPage puts an empty page at addr; one that is there already stays.
func zeroPage(fd int, addr uint64) error {
	err := ioctl(fd, ioctlZeropage, unsafe.Pointer(&zeroArg{start: addr, size: pageSize}))
	if err == unix.EEXIST || err == errAbsent {
		wake(fd, addr, pageSize)
		return nil
	}
	return err
}

func wake(fd int, addr, size uint64) {
	arg := &[2]uint64{addr, size}
	_ = ioctl(fd, ioctlWake, unsafe.Pointer(arg)) // nobody waits: nothing to do
}

// alive tells whether the memory behind fd still exists. It asks for a change
// that the kernel never makes to memory registered as CRIU registers it.
func alive(fd int) bool {
	err := ioctl(fd, ioctlProtect, unsafe.Pointer(&[3]uint64{1 << 20, pageSize, 0}))
	return err != errGone
}

func ioctl(fd int, req uintptr, arg unsafe.Pointer) error {
	for {
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), req, uintptr(arg))
		switch errno {
		case 0:
			return nil
		case unix.EINTR:
		case unix.EAGAIN:
			return errAgain
		case unix.ESRCH, unix.ENOSPC: // ENOSPC until Linux 4.14
			return errGone
		case unix.ENOENT:
			return errAbsent
		default:
			return errno
		}
	}
}
