// Package logfile follows files that another process appends to, such as the
// output files that a shim writes for a container. Growth is noticed by
// inotify, the end by a file lease: the kernel grants one only when nobody has
// the file open for writing.
package logfile

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

const (
	endPoll  = 2 * time.Millisecond // between questions whether the writer is gone
	patience = 2 * time.Second      // for a writer that stays after the end
)

// Copy writes the file to w from its last tail lines on (0 is the whole file,
// below 0 only what comes), and what is appended, until ended is closed, no
// writer has the file open any more and all is copied, or ctx ends. With a nil
// ended it copies what is there now. A file that is not there counts as empty.
func Copy(ctx context.Context, path string, w io.Writer, tail int, ended <-chan struct{}) error {
	f, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	if tail != 0 {
		if err := seekTail(f, tail); err != nil {
			return err
		}
	}
	if ended == nil {
		return copyNow(f, w)
	}
	watch, err := newWatch(path)
	if err != nil {
		return err
	}
	defer watch.Close()
	return follow(ctx, f, w, watch, ended)
}

// copyNow copies to the end that the file has now, however fast it grows.
func copyNow(f *os.File, w io.Writer) error {
	fi, err := f.Stat()
	if err != nil {
		return err
	}
	at, err := f.Seek(0, io.SeekCurrent)
	if err != nil {
		return err
	}
	_, err = io.Copy(w, io.LimitReader(f, fi.Size()-at))
	return err
}

func follow(ctx context.Context, f *os.File, w io.Writer, watch *os.File, ended <-chan struct{}) error {
	wake := func() { _ = watch.SetReadDeadline(time.Unix(1, 0)) }
	defer context.AfterFunc(ctx, wake)()
	over := make(chan struct{})
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		select {
		case <-ended:
			wake()
		case <-over:
		}
	}()
	defer func() { close(over); <-gone }()
	events := make([]byte, 4096)
	for {
		if _, err := io.Copy(w, f); err != nil {
			return err
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		select {
		case <-ended:
			return drain(ctx, f, w)
		default:
		}
		if _, err := watch.Read(events); err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			return fmt.Errorf("inotify: %w", err)
		}
	}
}

// drain copies until the last writer has closed the file.
func drain(ctx context.Context, f *os.File, w io.Writer) error {
	for limit := time.Now().Add(patience); ; {
		done := !beingWritten(f) || time.Now().After(limit)
		if _, err := io.Copy(w, f); err != nil || done {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(endPoll):
		}
	}
}

// beingWritten says whether somebody has the file open for writing.
func beingWritten(f *os.File) bool {
	_, err := unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_RDLCK)
	if err != nil {
		return err == unix.EAGAIN || err == unix.EINTR
	}
	_, _ = unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_UNLCK)
	return false
}

func newWatch(path string) (*os.File, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, os.NewSyscallError("inotify_init1", err)
	}
	if _, err := unix.InotifyAddWatch(fd, path, unix.IN_MODIFY|unix.IN_CLOSE_WRITE); err != nil {
		unix.Close(fd)
		return nil, os.NewSyscallError("inotify_add_watch", err)
	}
	return os.NewFile(uintptr(fd), "inotify"), nil
}

// seekTail goes to the beginning of the last n lines.
func seekTail(f *os.File, n int) error {
	end, err := f.Seek(0, io.SeekEnd)
	if err != nil || n < 0 {
		return err
	}
	buf := make([]byte, 64<<10)
	seen := 0
	for pos := end; pos > 0; {
		k := min(int64(len(buf)), pos)
		pos -= k
		if _, err := f.ReadAt(buf[:k], pos); err != nil {
			return err
		}
		for i := k - 1; i >= 0; i-- {
			if buf[i] != '\n' || pos+i == end-1 {
				continue
			}
			if seen++; seen == n {
				_, err := f.Seek(pos+i+1, io.SeekStart)
				return err
			}
		}
	}
	_, err = f.Seek(0, io.SeekStart)
	return err
}

// Tail returns the last n lines of the file, at most 8 KiB, without the final
// newline; "" if it cannot be read.
func Tail(path string, n int) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	if seekTail(f, n) != nil {
		return ""
	}
	const most = 8 << 10
	if pos, _ := f.Seek(0, io.SeekCurrent); pos >= 0 {
		if st, err := f.Stat(); err == nil && st.Size()-pos > most {
			_, _ = f.Seek(-most, io.SeekEnd)
		}
	}
	b, _ := io.ReadAll(io.LimitReader(f, most))
	for len(b) > 0 && b[len(b)-1] == '\n' {
		b = b[:len(b)-1]
	}
	return string(b)
}
