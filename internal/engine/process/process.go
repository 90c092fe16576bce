// Package process holds processes that are no children of this program, and tells them apart for as long
// as the machine is up: by their number and the time at which they started.
package process

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// StopTimeout is how long Terminate waits between SIGTERM and SIGKILL.
const StopTimeout = 15 * time.Second

// Process is a running process, a child or not, held by a pidfd. It is not safe for concurrent use.
type Process struct {
	PID int
	fd  int       // pidfd, -1 once closed
	cmd *exec.Cmd // nil if it is no child
}

// Open takes hold of a process; cmd is what started it, nil if this program has not.
func Open(pid int, cmd *exec.Cmd) (*Process, error) {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil, os.NewSyscallError("pidfd_open", err)
	}
	return &Process{PID: pid, fd: fd, cmd: cmd}, nil
}

// Exited waits up to d for the process to end.
func (p *Process) Exited(d time.Duration) bool {
	if p.fd < 0 {
		return true
	}
	fds := []unix.PollFd{{Fd: int32(p.fd), Events: unix.POLLIN}}
	n, err := unix.Poll(fds, int(d.Milliseconds()))
	return err == nil && n > 0
}

// Wait returns true when the process has ended, false when ctx has.
func (p *Process) Wait(ctx context.Context) bool {
	pipe := make([]int, 2)
	if err := unix.Pipe2(pipe, unix.O_CLOEXEC); err != nil {
		return false
	}
	woken := make(chan struct{})
	stop := context.AfterFunc(ctx, func() { unix.Close(pipe[1]); close(woken) })
	defer func() {
		if stop() {
			unix.Close(pipe[1])
		} else {
			<-woken
		}
		unix.Close(pipe[0])
	}()
	fds := []unix.PollFd{{Fd: int32(p.fd), Events: unix.POLLIN}, {Fd: int32(pipe[0]), Events: unix.POLLIN}}
	for {
		if _, err := unix.Poll(fds, -1); err != nil && err != unix.EINTR {
			return false
		}
		if fds[0].Revents != 0 {
			p.Close()
			return true
		}
		if ctx.Err() != nil {
			return false
		}
	}
}

// Signal sends a signal; an error means that it has ended.
func (p *Process) Signal(sig unix.Signal) error { return unix.PidfdSendSignal(p.fd, sig, nil, 0) }

// Terminate sends SIGTERM, after StopTimeout or the end of ctx SIGKILL, and
// reaps the process.
func (p *Process) Terminate(ctx context.Context) error {
	if p.fd < 0 {
		return nil
	}
	defer p.Close()
	ctx, cancel := context.WithTimeout(ctx, StopTimeout)
	defer cancel()
	_ = unix.PidfdSendSignal(p.fd, unix.SIGTERM, nil, 0)
	for !p.Exited(5 * time.Millisecond) {
		if ctx.Err() == nil {
			continue
		}
		_ = unix.PidfdSendSignal(p.fd, unix.SIGKILL, nil, 0)
		if !p.Exited(5 * time.Second) {
			return fmt.Errorf("process %d survives SIGKILL", p.PID)
		}
	}
	return nil
}

// Close releases the pidfd and reaps a child that has ended.
func (p *Process) Close() {
	if p.fd < 0 {
		return
	}
	unix.Close(p.fd)
	p.fd = -1
	if p.cmd != nil {
		_ = p.cmd.Wait()
	}
}

// Detach releases what is held of a process that goes on.
func (p *Process) Detach() {
	if p.fd < 0 {
		return
	}
	unix.Close(p.fd)
	p.fd = -1
	if p.cmd != nil {
		_ = p.cmd.Process.Release()
	}
}

// stat is the state of a process and the time of its start, in ticks since the machine is up, as
// proc_pid_stat(5) has them.
func stat(pid int) (state string, started uint64, err error) {
	path := "/proc/" + strconv.Itoa(pid) + "/stat"
	b, err := os.ReadFile(path)
	if err != nil {
		return "", 0, err
	}
	const field = 22 - 3 // of those behind the name
	f := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	if len(f) <= field {
		return "", 0, fmt.Errorf("%s has %d fields", path, len(f))
	}
	started, err = strconv.ParseUint(f[field], 10, 64)
	return f[0], started, err
}

// Started is when the process with that number was started, which with the number names a process for as long
// as the machine is up.
func Started(pid int) (uint64, error) {
	_, started, err := stat(pid)
	return started, err
}

// Lives reports whether the process is there and has not ended.
func Lives(pid uint32, started uint64) bool {
	state, at, err := stat(int(pid))
	return err == nil && at == started && state != "Z" && state != "X"
}

// Alive reports whether any process has that number and has not ended.
func Alive(pid uint32) bool {
	state, _, err := stat(int(pid))
	return err == nil && state != "Z" && state != "X"
}
