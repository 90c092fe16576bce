// Workload is the only program in the containers of the contract suite. Each
// argument is a thing that it takes up at its start and that must work on in
// what is restored. It answers lines on TCP port 7000: "count" with a number
// that grows, "host" with its host name, "conns" with how many connections it
// has, and the name of a thing with "ok" if it works.
package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// things take something up and return what checks it.
var things = map[string]func() (check func() error, err error){
	"children": children, "unlinked": unlinked, "flock": flock, "timer": timer, "inotify": inotify,
	"pidfd": pidfd, "memfd": memfd,
	"shm": shm, "unix": unixPair, "epoll": epoll, "uring": uring, "mptcp": mptcp, "memory": memory,
	"posix": posix, "ofd": ofd, "itimer": itimer, "ptimer": ptimer, "fifo": fifo, "udp": udp,
}

var counter, conns atomic.Int64

func main() {
	if len(os.Args) == 2 && os.Args[1] == "echo" {
		echo()
		return
	}
	fmt.Println(serve(os.Args[1:]))
	os.Exit(1)
}

func serve(names []string) error {
	answers := map[string]func() string{
		"count": func() string { return fmt.Sprint(counter.Load()) },
		"conns": func() string { return fmt.Sprint(conns.Load()) },
		"host":  func() string { h, _ := os.Hostname(); return h },
	}
	for _, n := range names {
		check, err := things[n]()
		if err != nil {
			return fmt.Errorf("%s: %w", n, err)
		}
		answers[n] = func() string {
			if err := check(); err != nil {
				return err.Error()
			}
			return "ok"
		}
	}
	go func() {
		for {
			time.Sleep(time.Millisecond)
			counter.Add(1)
		}
	}()
	var c net.ListenConfig
	c.SetMultipathTCP(false)
	l, err := c.Listen(context.Background(), "tcp", ":7000")
	if err != nil {
		return err
	}
	fmt.Println("serving")
	for {
		conn, err := l.Accept()
		if err != nil {
			return err
		}
		go answer(conn, answers)
	}
}

func answer(c net.Conn, answers map[string]func() string) {
	conns.Add(1)
	defer conns.Add(-1)
	defer c.Close()
	for s := bufio.NewScanner(c); s.Scan(); {
		if f := answers[s.Text()]; f != nil {
			fmt.Fprintln(c, f())
		} else {
			fmt.Fprintln(c, "unknown")
		}
	}
}

func echo() {
	for s := bufio.NewScanner(os.Stdin); s.Scan(); {
		fmt.Println(s.Text())
	}
}

func same(got, want string) error {
	if got != want {
		return fmt.Errorf("%q is not %q", got, want)
	}
	return nil
}

// children are two processes that talk with this one by pipes.
func children() (func() error, error) {
	var talk []func() error
	for range 2 {
		cmd := exec.Command("/proc/self/exe", "echo")
		in, err := cmd.StdinPipe()
		if err != nil {
			return nil, err
		}
		out, err := cmd.StdoutPipe()
		if err != nil {
			return nil, err
		}
		if err := cmd.Start(); err != nil {
			return nil, err
		}
		r := bufio.NewReader(out)
		talk = append(talk, func() error {
			fmt.Fprintln(in, "hello")
			s, err := r.ReadString('\n')
			return errors.Join(err, same(s, "hello\n"))
		})
	}
	return func() error { return errors.Join(talk[0](), talk[1]()) }, nil
}

func unlinked() (func() error, error) {
	f, err := os.Create("/work/unlinked")
	if err != nil {
		return nil, err
	}
	_, err = f.WriteString(strings.Repeat("kept ", 1000))
	if err = errors.Join(err, os.Remove(f.Name())); err != nil {
		return nil, err
	}
	return func() error {
		b := make([]byte, 5)
		_, err := f.ReadAt(b, 4995)
		_, werr := f.WriteString("more")
		return errors.Join(err, werr, same(string(b), "kept "))
	}, nil
}

func flock() (func() error, error) {
	lock := func() error {
		f, err := os.OpenFile("/work/lock", os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			return err
		}
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
			f.Close()
			return err
		}
		held = append(held, f)
		return nil
	}
	return func() error {
		if err := lock(); !errors.Is(err, unix.EWOULDBLOCK) {
			return fmt.Errorf("locked twice: %v", err)
		}
		return nil
	}, lock()
}

var held []*os.File // or they would be closed

func timer() (func() error, error) {
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_CLOEXEC)
	if err != nil {
		return nil, err
	}
	every := unix.NsecToTimespec(int64(20 * time.Millisecond))
	err = unix.TimerfdSettime(fd, 0, &unix.ItimerSpec{Interval: every, Value: every}, nil)
	return func() error {
		_, err := unix.Read(fd, make([]byte, 8))
		began := time.Now()
		_, err2 := unix.Read(fd, make([]byte, 8))
		if time.Since(began) > time.Second {
			return errors.New("the timer is late")
		}
		return errors.Join(err, err2)
	}, err
}

func inotify() (func() error, error) {
	fd, err := unix.InotifyInit1(unix.IN_NONBLOCK)
	if err != nil {
		return nil, err
	}
	_, err = unix.InotifyAddWatch(fd, "/work", unix.IN_CREATE)
	return func() error {
		_ = os.Remove("/work/new")
		f, err := os.Create("/work/new")
		if err != nil {
			return err
		}
		f.Close()
		_, err = unix.Read(fd, make([]byte, 4096))
		return err
	}, err
}

func pidfd() (func() error, error) {
	cmd := exec.Command("/proc/self/exe", "echo")
	if _, err := cmd.StdinPipe(); err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	fd, err := unix.PidfdOpen(cmd.Process.Pid, 0)
	return func() error { return unix.PidfdSendSignal(fd, 0, nil, 0) }, err
}

func memfd() (func() error, error) {
	fd, err := unix.MemfdCreate("m", 0)
	if err != nil {
		return nil, err
	}
	if err := unix.Ftruncate(fd, 1<<16); err != nil {
		return nil, err
	}
	m, err := unix.Mmap(fd, 0, 1<<16, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, err
	}
	copy(m[50000:], "kept")
	return func() error {
		b := make([]byte, 4)
		_, err := unix.Pread(fd, b, 50000)
		copy(m, "more")
		return errors.Join(err, same(string(b), "kept"), same(string(m[50000:50004]), "kept"))
	}, nil
}

func shm() (func() error, error) {
	id, err := unix.SysvShmGet(unix.IPC_PRIVATE, 1<<16, unix.IPC_CREAT|0o600)
	if err != nil {
		return nil, err
	}
	m, err := unix.SysvShmAttach(id, 0, 0)
	if err != nil {
		return nil, err
	}
	copy(m[100:], "kept")
	if err := os.WriteFile("/dev/shm/file", []byte("kept"), 0o600); err != nil {
		return nil, err
	}
	return func() error {
		b, err := os.ReadFile("/dev/shm/file")
		return errors.Join(err, same(string(b), "kept"), same(string(m[100:104]), "kept"))
	}, nil
}

// unixPair has bytes under way.
func unixPair() (func() error, error) {
	p, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err != nil {
		return nil, err
	}
	_, err = unix.Write(p[0], []byte("kept"))
	return func() error {
		b := make([]byte, 4)
		_, err := unix.Read(p[1], b)
		_, werr := unix.Write(p[0], b)
		return errors.Join(err, werr, same(string(b), "kept"))
	}, err
}

func epoll() (func() error, error) {
	ep, err := unix.EpollCreate1(0)
	if err != nil {
		return nil, err
	}
	ev, err := unix.Eventfd(0, 0)
	if err != nil {
		return nil, err
	}
	err = unix.EpollCtl(ep, unix.EPOLL_CTL_ADD, ev,
		&unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLET, Fd: 77})
	return func() error {
		if _, err := unix.Write(ev, []byte{1, 0, 0, 0, 0, 0, 0, 0}); err != nil {
			return err
		}
		got := make([]unix.EpollEvent, 1)
		n, err := unix.EpollWait(ep, got, 1000)
		if err == nil && (n != 1 || got[0].Fd != 77) {
			err = fmt.Errorf("%d events, %+v", n, got)
		}
		return err
	}, err
}

// uring works if it can be had or is refused as a container's filter refuses it.
func uring() (func() error, error) {
	params := make([]byte, 120)
	_, _, errno := unix.Syscall(unix.SYS_IO_URING_SETUP, 8, uintptr(unsafe.Pointer(&params[0])), 0)
	if errno != 0 && errno != unix.EPERM {
		return nil, errno
	}
	return func() error { return nil }, nil
}

// mptcp works if the kernel or the container's filter has it or refuses it.
func mptcp() (func() error, error) {
	var c net.ListenConfig
	c.SetMultipathTCP(true)
	l, err := c.Listen(context.Background(), "tcp", ":7001")
	if err != nil {
		return nil, err
	}
	return func() error {
		go func() {
			if c, err := l.Accept(); err == nil {
				c.Close()
			}
		}()
		c, err := net.Dial("tcp", "127.0.0.1:7001")
		if err == nil {
			c.Close()
		}
		return err
	}, nil
}

// memory is 64 MiB that does not compress.
func memory() (func() error, error) {
	block := make([]byte, 64<<20)
	x := uint64(88172645463325252)
	for i := 0; i < len(block); i += 8 {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		for j := range 8 {
			block[i+j] = byte(x >> (8 * j))
		}
	}
	first, last := string(block[:16]), string(block[len(block)-16:])
	return func() error {
		return errors.Join(same(string(block[:16]), first), same(string(block[len(block)-16:]), last))
	}, nil
}
