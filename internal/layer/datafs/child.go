package datafs

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"dewpoint/internal/sender"
)

// The descriptors that a datafs inherits.
const (
	deviceFD = 3 + iota
	listenFD
)

// maxLog is how long datafs's log may be before it is begun anew.
const maxLog = 1 << 20

// spawn starts a datafs in a session of its own, which nothing that happens to
// this process ends, unless it is mortal.
func spawn(cfg *Config, device *os.File, adopted bool) (*exec.Cmd, error) {
	path := filepath.Join(cfg.State, socketName)
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	listener, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		return nil, err
	}
	listener.SetUnlinkOnClose(false)
	defer listener.Close()
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, err
	}
	sock, err := listener.File()
	if err != nil {
		return nil, err
	}
	defer sock.Close()
	log, err := openLog(filepath.Join(cfg.State, logName))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	args := append(cfg.Exec[1:len(cfg.Exec):len(cfg.Exec)], "-mountpoint", cfg.Mountpoint)
	if adopted {
		args = append(args, "-adopted")
	}
	cmd := exec.Command(cfg.Exec[0], args...)
	cmd.Dir = "/"
	cmd.Stdout, cmd.Stderr = log, log
	cmd.ExtraFiles = []*os.File{device, sock}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if cfg.mortal {
		cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start datafs: %w", err)
	}
	return cmd, nil
}

func openLog(path string) (*os.File, error) {
	how := os.O_WRONLY | os.O_CREATE | os.O_APPEND
	if fi, err := os.Stat(path); err == nil && fi.Size() > maxLog {
		how |= os.O_TRUNC
	}
	return os.OpenFile(path, how, 0o600)
}

// lastWords is the end of datafs's log.
func lastWords(cfg *Config) string {
	b, err := os.ReadFile(filepath.Join(cfg.State, logName))
	if err != nil || len(b) == 0 {
		return ""
	}
	return "; its log ends: " + strings.TrimSpace(string(b[max(0, len(b)-300):]))
}

// peer is a datafs that this process is connected to.
type peer struct {
	*link
	hello message
	pidfd int       // of who sent hello; -1 if the kernel has none
	cmd   *exec.Cmd // nil if another process started it
}

// handshakeTime bounds how long a datafs takes to say what it has.
const handshakeTime = 20 * time.Second

// dial connects to the datafs that listens in the state directory, and reads
// what it says up to kindReady into told.
func dial(ctx context.Context, state string, told func(message)) (*peer, error) {
	by := sender.Now() // it runs already
	conn, err := connect(filepath.Join(state, socketName))
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	conn.SetReadDeadline(time.Now().Add(handshakeTime))
	p := &peer{link: newLink(conn), pidfd: -1}
	for {
		m, control, err := receive(conn)
		if p.hello.kind == 0 && control != nil {
			p.sentBy(control, by, err == nil && m.kind == kindHello)
		}
		if err == nil && (m.kind == kindHello && len(m.files) != 1 || m.kind == kindReady && p.hello.kind == 0) {
			closeFiles(m.files)
			err = errMessage
		}
		if err != nil {
			p.release()
			return nil, err
		}
		switch m.kind {
		case kindHello:
			closeFiles(p.hello.files)
			m.flags |= p.hello.flags
			p.hello = m
		case kindKernel:
			p.hello.flags |= m.flags
		case kindReady:
			conn.SetReadDeadline(time.Time{})
			return p, nil
		default:
			told(m)
		}
	}
}

// connect has the kernel say who sends what comes.
func connect(path string) (*net.UnixConn, error) {
	d := net.Dialer{Control: func(_, _ string, c syscall.RawConn) (err error) {
		cerr := c.Control(func(fd uintptr) { err = sender.Ask(int(fd)) })
		return errors.Join(err, cerr)
	}}
	conn, err := d.Dial("unixpacket", path)
	if err != nil {
		return nil, err
	}
	return conn.(*net.UnixConn), nil
}

// sentBy keeps the sender of hello as the process; nobody asks for that of later messages.
func (p *peer) sentBy(control []unix.SocketControlMessage, by sender.Moment, hello bool) {
	from := sender.Of(control, by)
	if !hello {
		if from.FD >= 0 {
			unix.Close(from.FD)
		}
		return
	}
	p.pidfd = from.FD
	if c, err := p.conn.SyscallConn(); err == nil {
		c.Control(func(fd uintptr) { sender.Enough(int(fd)) })
	}
}

// release gives the connection up and leaves the process alone.
func (p *peer) release() {
	p.close()
	closeFiles(p.hello.files)
	if p.pidfd >= 0 {
		unix.Close(p.pidfd)
		p.pidfd = -1
	}
}

// finish sees to it that the process is dead: two that serve one mount would
// take each other's requests.
func (p *peer) finish() {
	reap(p.cmd, true)
	if p.cmd == nil && p.pidfd >= 0 {
		unix.PidfdSendSignal(p.pidfd, unix.SIGKILL, nil, 0)
		waitPidfd(p.pidfd)
	}
	p.release()
}

// reap waits for a child's end, which it may bring about.
func reap(cmd *exec.Cmd, kill bool) {
	if cmd == nil {
		return
	}
	if kill {
		cmd.Process.Kill()
	}
	cmd.Wait()
}

func waitPidfd(fd int) {
	deadline := time.Now().Add(handshakeTime)
	for time.Now().Before(deadline) {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 1000)
		if n > 0 || err != nil && err != unix.EINTR {
			return
		}
	}
}
