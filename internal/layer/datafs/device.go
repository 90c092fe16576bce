package datafs

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// device is the connection to the kernel: /dev/fuse, open. Only this one open
// file is used, by all threads and by dewd for keeping: what was read from a
// clone of it (FUSE_DEV_IOC_CLONE) dies with the process, and could not be
// resent. Its methods are safe for concurrent use.
type device struct{ fd int }

// errGone says that the mount is gone or the connection was ended.
var errGone = errors.New("FUSE connection has ended")

// read waits for the next request and returns its bytes in buf.
func (d device) read(buf []byte) (int, error) {
	for {
		n, err := unix.Read(d.fd, buf)
		switch err {
		case nil:
			return n, nil
		case unix.EINTR, unix.EAGAIN, unix.ENOENT: // ENOENT: it was interrupted before it was read
			continue
		case unix.ENODEV:
			return 0, errGone
		}
		return 0, os.NewSyscallError("read /dev/fuse", err)
	}
}

// fail answers a request with an error, 0 for success without a body.
func (d device) fail(unique uint64, errno unix.Errno) {
	var head [outHeaderSize]byte
	putOutHeader(head[:], len(head), errno, unique)
	d.write(head[:])
}

// send answers a request with a reply.
func (d device) send(unique uint64, r *reply) {
	putOutHeader(r.b, len(r.b), 0, unique)
	d.write(r.b)
}

// data answers a read. b is room for a header and the bytes.
func (d device) data(unique uint64, b []byte) {
	putOutHeader(b, len(b), 0, unique)
	d.write(b)
}

// write hands a whole answer over. The kernel refuses answers to requests that
// are gone, which is nobody's fault.
func (d device) write(b []byte) error {
	for {
		_, err := unix.Write(d.fd, b)
		if err != unix.EINTR {
			return err
		}
	}
}

// resend makes the kernel send again what earlier servers have read and not
// answered.
func (d device) resend() error {
	var b [outHeaderSize]byte
	native.PutUint32(b[0:], outHeaderSize)
	native.PutUint32(b[4:], notifyResend)
	return os.NewSyscallError("resend", d.write(b[:]))
}

// forgetName makes the kernel drop a name in a directory, and what below it is
// not in use. The kernel
// takes locks for it that a LOOKUP under way may have: not to be called by who
// has to answer that.
func (d device) forgetName(dir uint64, name string) {
	b := make([]byte, outHeaderSize, outHeaderSize+17+len(name))
	b = native.AppendUint64(b, dir)
	b = native.AppendUint32(b, uint32(len(name)))
	b = native.AppendUint32(b, 0)
	b = append(append(b, name...), 0)
	native.PutUint32(b[0:], uint32(len(b)))
	native.PutUint32(b[4:], notifyInvalEntry)
	d.write(b)
}
