package lazypages

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"dewpoint/internal/sender"
)

// restoreFinished is what CRIU sends when all processes are about to run.
const restoreFinished = 0x52535446

// task is a restored process: the descriptor names it for good.
type task struct{ pidfd int }

// listen makes the socket in dir; one that was left behind goes. dir may have a
// path of any length. CRIU's messages come with the process that sends them.
func listen(dir string) (*net.UnixListener, error) {
	d, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: dir, Err: err}
	}
	defer unix.Close(d)
	if err := unix.Unlinkat(d, SocketName, 0); err != nil && err != unix.ENOENT {
		return nil, &os.PathError{Op: "remove", Path: filepath.Join(dir, SocketName), Err: err}
	}
	path := fmt.Sprintf("/proc/self/fd/%d/%s", d, SocketName)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, err
	}
	l.SetUnlinkOnClose(false)
	if err := askSenders(l); err != nil {
		l.Close()
		return nil, err
	}
	return l, nil
}

func askSenders(l *net.UnixListener) error {
	conn, err := l.SyscallConn()
	if err != nil {
		return err
	}
	var set error
	err = conn.Control(func(fd uintptr) { set = sender.Ask(int(fd)) })
	return errors.Join(err, set)
}

// receive takes CRIU's connection: the number in the image and the descriptor of
// each process, and at last that all are restored.
func (s *Server) receive(l *net.UnixListener) error {
	defer os.Remove(filepath.Join(s.cfg.Work, SocketName))
	stop := context.AfterFunc(s.ctx, func() { l.Close() })
	defer stop()
	defer l.Close()
	conn, err := l.AcceptUnix()
	if err != nil {
		return fmt.Errorf("wait for criu: %w", err)
	}
	l.Close()
	defer conn.Close()
	defer context.AfterFunc(s.ctx, func() { conn.Close() })()
	for {
		finished, err := s.receiveOne(conn)
		if err != nil || finished {
			return err
		}
	}
}

func (s *Server) receiveOne(conn *net.UnixConn) (finished bool, err error) {
	var word [4]byte
	pidfd, none, err := recv(conn, word[:])
	defer func() { closeIf(pidfd) }() // unless it is kept
	closeIf(none)
	if errors.Is(err, io.EOF) {
		return false, ErrUnfinished
	}
	if err != nil {
		return false, fmt.Errorf("read from criu: %w", err)
	}
	id := binary.NativeEndian.Uint32(word[:])
	switch {
	case id == restoreFinished:
		s.restored()
		return true, nil
	case int32(id) < 0: // a process that has ended and was not waited for: it has no memory
		return false, nil
	}
	same, fd, err := recv(conn, word[:1])
	closeIf(same)
	if err == nil && fd < 0 {
		err = errors.New("no descriptor")
	}
	if err != nil {
		return false, fmt.Errorf("userfaultfd of process %d: %w", id, err)
	}
	kept := pidfd
	pidfd = -1
	return false, s.admit(int(id), kept, fd)
}

// admit begins to serve the process that has the number id in the image. It owns both descriptors. pidfd
// is -1 if the process has ended, or if the kernel does not tell: then Config.Kill alone ends it.
func (s *Server) admit(id, pidfd, fd int) error {
	m, err := readPagemap(filepath.Join(s.cfg.Dir, "pagemap-"+strconv.Itoa(id)+".img"))
	if errors.Is(err, os.ErrNotExist) {
		err = nil
	}
	if err != nil {
		closeIf(pidfd)
		closeIf(fd)
		return err
	}
	return s.add(newProcess(m.file, fd, newMemory(m.runs)), &task{pidfd: pidfd})
}

// restored: every mapping is registered, so what is not there is gone.
func (s *Server) restored() {
	s.mu.Lock()
	s.finished = true
	s.stats.Restored = time.Since(s.start)
	procs := s.list("")
	s.mu.Unlock()
	close(s.live)
	s.plan.open()
	for _, p := range procs {
		s.settled(p)
	}
}

// recv fills b and returns the sender's descriptor and the one that came along, which are the caller's; each
// may be -1.
func recv(conn *net.UnixConn, b []byte) (pidfd, fd int, err error) {
	pidfd, fd = -1, -1
	oob := make([]byte, unix.CmsgSpace(4)+sender.Room)
	for len(b) > 0 {
		n, nOOB, _, _, err := conn.ReadMsgUnix(b, oob)
		if n == 0 && err == nil {
			err = io.EOF
		}
		p, f, perr := control(oob[:nOOB])
		pidfd, fd = newer(pidfd, p), newer(fd, f)
		if err = errors.Join(err, perr); err != nil {
			closeIf(pidfd)
			closeIf(fd)
			return -1, -1, err
		}
		b = b[n:]
	}
	return pidfd, fd, nil
}

// newer is the descriptor next, unless there is none; then old.
func newer(old, next int) int {
	if next < 0 {
		return old
	}
	closeIf(old)
	return next
}

func closeIf(fd int) {
	if fd >= 0 {
		unix.Close(fd)
	}
}

// control takes the sender and at most one descriptor out of control messages.
func control(oob []byte) (pidfd, fd int, err error) {
	if len(oob) == 0 {
		return -1, -1, nil
	}
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return -1, -1, err
	}
	pidfd, fd = sender.Of(msgs, sender.Now()).FD, -1
	for i := range msgs {
		if msgs[i].Header.Type != unix.SCM_RIGHTS {
			continue
		}
		fds, err := unix.ParseUnixRights(&msgs[i])
		if err != nil {
			closeIf(pidfd)
			closeIf(fd)
			return -1, -1, err
		}
		for _, f := range fds {
			fd = newer(fd, f)
		}
	}
	return pidfd, fd, nil
}

// killTasks ends the restored processes.
func killTasks(tasks []task) {
	for _, t := range tasks {
		unix.PidfdSendSignal(t.pidfd, unix.SIGKILL, nil, 0) // it may have ended
	}
}

func closeTasks(tasks []task) {
	for _, t := range tasks {
		unix.Close(t.pidfd)
	}
}

// awaitTasks waits until the processes have ended.
func awaitTasks(tasks []task, deadline time.Time) {
	for _, t := range tasks {
		fds := []unix.PollFd{{Fd: int32(t.pidfd), Events: unix.POLLIN}}
		for {
			left := max(time.Until(deadline).Milliseconds(), 0)
			if _, err := unix.Poll(fds, int(left)); err != unix.EINTR {
				break
			}
		}
	}
}

// awaitGone waits until the memory behind a userfaultfd has ended.
func awaitGone(fd int, deadline time.Time) {
	for alive(fd) && time.Now().Before(deadline) {
		time.Sleep(2 * time.Millisecond)
	}
}
