// Package sender tells which process sent a message over a Unix socket, by the kernel's word. A number that
// the message itself holds may be anybody's, and any number may belong to another process by the time it is
// used; a process descriptor names one process for good.
package sender

import (
	"encoding/binary"
	"os"

	"golang.org/x/sys/unix"

	"dewpoint/internal/engine/process"
)

// Process is who sent a message.
type Process struct {
	PID int // as it is numbered here; 0 is not known
	FD  int // its process descriptor, the receiver's; -1 if it has ended, or if the kernel cannot tell
}

// Room is how many bytes of control messages the sender takes.
var Room = unix.CmsgSpace(unix.SizeofUcred) + unix.CmsgSpace(4)

// Ask has the kernel say of each message that the socket receives who sent it, also of a listener's
// connections. Each message then brings a descriptor, until Enough: Of has to be called for it. It is to be
// called before the messages are sent.
func Ask(socket int) error {
	if err := unix.SetsockoptInt(socket, unix.SOL_SOCKET, unix.SO_PASSCRED, 1); err != nil {
		return os.NewSyscallError("setsockopt", err)
	}
	_ = unix.SetsockoptInt(socket, unix.SOL_SOCKET, unix.SO_PASSPIDFD, 1) // Linux 6.5; Of does without
	return nil
}

// Enough ends what Ask began.
func Enough(socket int) {
	_ = unix.SetsockoptInt(socket, unix.SOL_SOCKET, unix.SO_PASSPIDFD, 0)
	_ = unix.SetsockoptInt(socket, unix.SOL_SOCKET, unix.SO_PASSCRED, 0)
}

// Moment is a time since the machine was started, in the unit in which the kernel tells when processes were.
type Moment uint64

// perSecond is the kernel's USER_HZ.
const perSecond = 100

// Now is the present moment.
func Now() Moment {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &t); err != nil {
		return 0
	}
	return Moment(t.Sec*perSecond + t.Nsec/(1e9/perSecond))
}

// Of takes the sender out of a message's control messages. On kernels that give only its number, a process
// that has it and was started after by is not taken for the sender: by is a moment when that one ran already.
func Of(control []unix.SocketControlMessage, by Moment) Process {
	p := Process{FD: -1}
	told := false
	for i := range control {
		c := &control[i]
		switch {
		case c.Header.Level != unix.SOL_SOCKET:
		case c.Header.Type == unix.SCM_CREDENTIALS:
			if cred, err := unix.ParseUnixCredentials(c); err == nil {
				p.PID = int(cred.Pid)
			}
		case c.Header.Type == unix.SCM_PIDFD && len(c.Data) >= 4:
			told = true
			if fd := int(int32(binary.NativeEndian.Uint32(c.Data))); fd >= 0 { // else an error's number
				p.FD = fd
			}
		}
	}
	if !told {
		p.FD = open(p.PID, by)
	}
	return p
}

// open is a descriptor of the process that has the number pid and was started not after by; else -1.
func open(pid int, by Moment) int {
	if pid <= 0 {
		return -1
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return -1
	}
	if at, err := process.Started(pid); err != nil || Moment(at) > by {
		unix.Close(fd)
		return -1
	}
	return fd
}
