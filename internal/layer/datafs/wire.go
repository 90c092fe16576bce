package datafs

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"dewpoint/internal/sender"
)

// dewd and datafs talk over a socket of sequenced packets. Each packet is one
// message of messageSize bytes, with up to maxFiles descriptors.

type kind uint8

const (
	// From dewd.
	kindAdd     kind = 1 + iota // files: data, present; number; flagHeld…: the kernel may know the nodes
	kindTree                    // file: index
	kindPresent                 // from, to
	kindFail                    // from, to
	kindRemove
	kindShutdown // answered when there is nothing left to serve, else refused
	kindResend   // all layers were added: ask the kernel for what was being served

	// From datafs. Kind add, tree and shutdown come back as answers, with an error number in from.
	kindHello    // file: /dev/fuse; flags; from: process id, for people
	kindHave     // a layer: as kindAdd, and its index if it has one
	kindReady    // all layers and wants were told
	kindWant     // from, to
	kindReleased // nothing uses the layer any more, and it is gone
	kindKernel   // flags: what the kernel can do, once that is known
	kindHeld     // flags say which nodes the kernel knows

	// From dewd, later additions.
	kindWarm    // from, to
	kindUnblock // number: the thread whose reads fail
	lastKind
)

const (
	flagHeldFile = 1 << iota
	flagHeldTree
	flagTree    // there is an index
	flagRemoved // of a layer that waits for its release
	flagResend  // the kernel can resend
	flagIdle    // nothing is served before kindResend
)

const (
	wireVersion = 1
	messageSize = 96
	idLength    = 64
	maxFiles    = 3
)

// message is one packet. Which fields count depends on the kind.
type message struct {
	kind     kind
	flags    uint8
	number   uint32
	from, to int64
	id       string // hexadecimal
	files    []*os.File
}

func (m *message) encode() []byte {
	b := make([]byte, messageSize)
	b[0], b[1], b[2] = byte(m.kind), m.flags, wireVersion
	binary.LittleEndian.PutUint32(b[4:], m.number)
	binary.LittleEndian.PutUint64(b[8:], uint64(m.from))
	binary.LittleEndian.PutUint64(b[16:], uint64(m.to))
	copy(b[24:24+idLength], m.id)
	return b
}

var errMessage = errors.New("malformed message")

func decodeMessage(b []byte) (message, error) {
	if len(b) != messageSize || b[0] == 0 || kind(b[0]) >= lastKind {
		return message{}, errMessage
	}
	if b[2] != wireVersion {
		return message{}, fmt.Errorf("%w: version %d", errMessage, b[2])
	}
	m := message{
		kind: kind(b[0]), flags: b[1], number: binary.LittleEndian.Uint32(b[4:]),
		from: int64(binary.LittleEndian.Uint64(b[8:])), to: int64(binary.LittleEndian.Uint64(b[16:])),
	}
	if id := string(b[24 : 24+idLength]); id[0] != 0 {
		if !validID(id) {
			return message{}, fmt.Errorf("%w: bad name", errMessage)
		}
		m.id = id
	}
	return m, nil
}

// validID reports whether id is a sha256 in hexadecimal.
func validID(id string) bool {
	return len(id) == idLength && strings.Trim(id, "0123456789abcdef") == ""
}

// sendMessage writes a message. The descriptors stay the sender's.
func sendMessage(c *net.UnixConn, m *message) error {
	var oob []byte
	if len(m.files) > 0 {
		fds := make([]int, len(m.files))
		for i, f := range m.files {
			fds[i] = rawFD(f)
		}
		oob = unix.UnixRights(fds...)
	}
	_, _, err := c.WriteMsgUnix(m.encode(), oob, nil)
	return err
}

// rawFD is f's descriptor, without the side effect of Fd on its mode.
func rawFD(f *os.File) int {
	fd := -1
	if c, err := f.SyscallConn(); err == nil {
		c.Control(func(n uintptr) { fd = int(n) })
	}
	return fd
}

// receiveMessage reads a message. Its files are the receiver's, also when there
// is an error of the message itself; then none are left open.
func receiveMessage(c *net.UnixConn) (message, error) {
	m, _, err := receive(c)
	return m, err
}

// receive is receiveMessage that keeps what came beside the message.
func receive(c *net.UnixConn) (message, []unix.SocketControlMessage, error) {
	b := make([]byte, messageSize+1)
	oob := make([]byte, unix.CmsgSpace(4*maxFiles)+sender.Room)
	n, oobn, flags, _, err := c.ReadMsgUnix(b, oob)
	if err != nil {
		return message{}, nil, err
	}
	control, err := unix.ParseSocketControlMessage(oob[:oobn])
	if err != nil {
		control = nil
	}
	files := receivedFiles(control)
	m, err := decodeMessage(b[:n])
	if err == nil && flags&(unix.MSG_CTRUNC|unix.MSG_TRUNC) != 0 {
		err = fmt.Errorf("%w: cut short", errMessage)
	}
	if err != nil {
		closeFiles(files)
		return message{}, control, err
	}
	m.files = files
	return m, control, nil
}

func receivedFiles(control []unix.SocketControlMessage) []*os.File {
	var files []*os.File
	for i := range control {
		fds, err := unix.ParseUnixRights(&control[i])
		if err != nil {
			continue
		}
		for _, fd := range fds {
			unix.CloseOnExec(fd)
			files = append(files, os.NewFile(uintptr(fd), "received"))
		}
	}
	return files
}

func closeFiles(files []*os.File) {
	for _, f := range files {
		if f != nil {
			f.Close()
		}
	}
}

// dup returns another descriptor of the open file f.
func dup(f *os.File) (*os.File, error) {
	fd, err := unix.FcntlInt(uintptr(rawFD(f)), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return nil, os.NewSyscallError("dup", err)
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
}
