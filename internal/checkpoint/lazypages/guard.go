package lazypages

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// What a server tells its guard: a letter and the number of an address space.
const (
	guardHold = 'h' // with its userfaultfd and, if it was restored, its pidfd
	guardDrop = 'd' // it is filled, or gone
	guardEnd  = 'e' // nothing is left to guard

	guardFD      = 3
	guardMessage = 5
)

// guard is the server's end. A nil guard does nothing.
type guard struct {
	cmd  *exec.Cmd
	sock int
}

// startGuard runs command, whose main function calls Guard, and gives it held, unless nil.
func startGuard(command []string, held *os.File) (*guard, error) {
	if len(command) == 0 {
		return nil, nil
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socketpair", err)
	}
	theirs := os.NewFile(uintptr(pair[1]), "guard")
	defer theirs.Close()
	cmd := exec.Command(command[0], command[1:]...)
	cmd.ExtraFiles = []*os.File{theirs}
	if held != nil {
		cmd.ExtraFiles = append(cmd.ExtraFiles, held)
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		unix.Close(pair[0])
		return nil, fmt.Errorf("guard: %w", err)
	}
	return &guard{cmd: cmd, sock: pair[0]}, nil
}

// hold passes descriptors on before the server relies on them.
func (g *guard) hold(id uint32, fds ...int) error {
	if g == nil {
		return nil
	}
	return os.NewSyscallError("sendmsg",
		unix.Sendmsg(g.sock, guardWord(guardHold, id), unix.UnixRights(fds...), nil, unix.MSG_NOSIGNAL))
}

func (g *guard) drop(id uint32) {
	if g != nil {
		// it has ended: so has the hold
		_ = unix.Sendmsg(g.sock, guardWord(guardDrop, id), nil, nil, unix.MSG_NOSIGNAL)
	}
}

// end lets the guard go and waits for it.
func (g *guard) end() {
	if g == nil {
		return
	}
	_ = unix.Sendmsg(g.sock, guardWord(guardEnd, 0), nil, nil, unix.MSG_NOSIGNAL)
	unix.Close(g.sock)
	stuck := time.AfterFunc(deathWait, func() { g.cmd.Process.Kill() })
	defer stuck.Stop()
	_ = g.cmd.Wait() // how it ended changes nothing any more
}

func guardWord(letter byte, id uint32) []byte {
	return binary.LittleEndian.AppendUint32([]byte{letter}, id)
}

// held is what a guard has of one address space.
type held struct{ uffd, pidfd int }

// Guard is the body of the process that Config.Guard starts. It holds the
// userfaultfds of a restore beside the server: the kernel gives empty pages for
// missing ones only when the last holder has closed them. If the server goes
// away without taking its leave, Guard kills the processes before that.
func Guard() error {
	signal.Ignore(unix.SIGTERM, unix.SIGINT, unix.SIGHUP)
	all := map[uint32]held{}
	for {
		letter, id, fds, err := guardReceive()
		switch {
		case err != nil:
			guardKill(all)
			return fmt.Errorf("guard: %w", err)
		case letter == guardEnd:
			return nil
		case letter == guardDrop:
			all[id].close()
			delete(all, id)
		case letter == guardHold && len(fds) > 0:
			h := held{uffd: fds[0], pidfd: -1}
			if len(fds) > 1 {
				h.pidfd = fds[1]
			}
			all[id] = h
		}
	}
}

func (h held) close() {
	for _, fd := range []int{h.uffd, h.pidfd} {
		if fd > 0 {
			unix.Close(fd)
		}
	}
}

func guardReceive() (letter byte, id uint32, fds []int, err error) {
	var b [guardMessage]byte
	oob := make([]byte, unix.CmsgSpace(2*4))
	var n, nOOB int
	for {
		n, nOOB, _, _, err = unix.Recvmsg(guardFD, b[:], oob, unix.MSG_CMSG_CLOEXEC)
		if err != unix.EINTR {
			break
		}
	}
	if err != nil {
		return 0, 0, nil, os.NewSyscallError("recvmsg", err)
	}
	if n != guardMessage {
		return 0, 0, nil, errors.New("the server is gone")
	}
	msgs, err := unix.ParseSocketControlMessage(oob[:nOOB])
	if err != nil {
		return 0, 0, nil, err
	}
	for i := range msgs {
		rights, err := unix.ParseUnixRights(&msgs[i])
		if err != nil {
			return 0, 0, nil, err
		}
		fds = append(fds, rights...)
	}
	return b[0], binary.LittleEndian.Uint32(b[1:]), fds, nil
}

// guardKill ends the processes and waits until their memory is gone.
func guardKill(all map[uint32]held) {
	var tasks []task
	for _, h := range all {
		if h.pidfd >= 0 {
			tasks = append(tasks, task{pidfd: h.pidfd})
		}
	}
	killTasks(tasks)
	deadline := time.Now().Add(deathWait)
	awaitTasks(tasks, deadline)
	for _, h := range all {
		awaitGone(h.uffd, deadline)
	}
}
