package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"strings"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// lockFile locks the first bytes of a file by fcntl's command.
func lockFile(path string, command int) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	return f, unix.FcntlFlock(f.Fd(), command, &unix.Flock_t{Type: unix.F_WRLCK, Len: 10})
}

// posix is a lock of the process: nobody but the kernel's list tells it that it has one.
func posix() (func() error, error) {
	f, err := lockFile("/work/posix", unix.F_SETLK)
	if err != nil {
		return nil, err
	}
	held = append(held, f)
	return func() error {
		var st unix.Stat_t
		all, err := os.ReadFile("/proc/locks")
		if err = errors.Join(err, unix.Fstat(int(f.Fd()), &st)); err != nil {
			return err
		}
		for line := range strings.Lines(string(all)) {
			if strings.Contains(line, " POSIX ") && strings.Contains(line, fmt.Sprintf(":%d ", st.Ino)) {
				return nil
			}
		}
		return errors.New("the lock is gone")
	}, nil
}

// ofd is a lock of an open file.
func ofd() (func() error, error) {
	f, err := lockFile("/work/ofd", unix.F_OFD_SETLK)
	held = append(held, f)
	return func() error {
		g, err := lockFile("/work/ofd", unix.F_OFD_SETLK)
		if g != nil {
			g.Close()
		}
		if !errors.Is(err, unix.EAGAIN) {
			return fmt.Errorf("locked twice: %v", err)
		}
		return nil
	}, err
}

// signals counts a signal; ticks waits until one more has come.
func signals(s os.Signal) (ticks func() error) {
	var n atomic.Int64
	c := make(chan os.Signal, 1)
	signal.Notify(c, s)
	go func() {
		for range c {
			n.Add(1)
		}
	}()
	return func() error {
		before := n.Load()
		for range 400 {
			if n.Load() > before {
				return nil
			}
			time.Sleep(10 * time.Millisecond)
		}
		return fmt.Errorf("%v comes no more", s)
	}
}

func itimer() (func() error, error) {
	ticks := signals(unix.SIGALRM)
	every := unix.Timeval{Usec: 20000}
	_, err := unix.Setitimer(unix.ITIMER_REAL, unix.Itimerval{Interval: every, Value: every})
	return ticks, err
}

// ptimer is a timer of timer_create(2).
func ptimer() (func() error, error) {
	ticks := signals(unix.SIGUSR2)
	var event [64]byte // struct sigevent: value, signal, SIGEV_SIGNAL
	*(*int32)(unsafe.Pointer(&event[8])) = int32(unix.SIGUSR2)
	var id int32
	if _, _, e := unix.Syscall(unix.SYS_TIMER_CREATE, unix.CLOCK_MONOTONIC, uintptr(unsafe.Pointer(&event)),
		uintptr(unsafe.Pointer(&id))); e != 0 {
		return nil, e
	}
	every := unix.NsecToTimespec(int64(20 * time.Millisecond))
	spec := unix.ItimerSpec{Interval: every, Value: every}
	if _, _, e := unix.Syscall6(unix.SYS_TIMER_SETTIME, uintptr(id), 0, uintptr(unsafe.Pointer(&spec)), 0, 0,
		0); e != 0 {
		return nil, e
	}
	return ticks, nil
}

// fifo has bytes under way.
func fifo() (func() error, error) {
	if err := unix.Mkfifo("/work/fifo", 0o600); err != nil {
		return nil, err
	}
	f, err := os.OpenFile("/work/fifo", os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	_, err = f.WriteString("kept")
	return func() error {
		b := make([]byte, 4)
		_, err := f.Read(b)
		_, werr := f.Write(b)
		return errors.Join(err, werr, same(string(b), "kept"))
	}, err
}

func udp() (func() error, error) {
	c, err := net.ListenPacket("udp", ":7002")
	if err != nil {
		return nil, err
	}
	return func() error {
		from, err := net.Dial("udp", "127.0.0.1:7002")
		if err != nil {
			return err
		}
		defer from.Close()
		b := make([]byte, 4)
		_, err = from.Write([]byte("sent"))
		if err = errors.Join(err, c.SetReadDeadline(time.Now().Add(4*time.Second))); err != nil {
			return err
		}
		_, _, err = c.ReadFrom(b)
		return errors.Join(err, same(string(b), "sent"))
	}, nil
}
