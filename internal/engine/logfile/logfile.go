// Package logfile follows files that another process appends to, such as the
// output files that a shim writes for a container. Growth is noticed by
// inotify, the end by a file lease: the kernel grants one only when nobody has
// the file open for writing.
package logfile

import (
	"bytes"
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
	return copyOf(ctx, path, w, ended, func(f *os.File) (int64, error) {
		if tail == 0 {
			return 0, nil
		}
		return tailOf(f, tail)
	})
}

// CopyFrom is Copy from a place in the file on.
func CopyFrom(ctx context.Context, path string, w io.Writer, at int64, ended <-chan struct{}) error {
	return copyOf(ctx, path, w, ended, func(*os.File) (int64, error) { return at, nil })
}

func copyOf(ctx context.Context, path string, w io.Writer, ended <-chan struct{},
	begin func(*os.File) (int64, error)) error {
	f, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	r := &reader{f: f}
	if r.at, err = begin(f); err != nil {
		return err
	}
	if ended == nil {
		return copyNow(r, w)
	}
	watch, err := newWatch(path)
	if err != nil {
		return err
	}
	defer watch.Close()
	return follow(ctx, r, w, watch, ended)
}

// copyNow copies to the end that the file has now, however fast it grows.
func copyNow(r *reader, w io.Writer) error {
	fi, err := r.f.Stat()
	if err != nil {
		return err
	}
	buf := make([]byte, 32<<10)
	for r.at < fi.Size() {
		n, err := r.Read(buf[:min(int64(len(buf)), fi.Size()-r.at)])
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if _, err := w.Write(buf[:n]); err != nil {
			return err
		}
	}
	return nil
}

func follow(ctx context.Context, r *reader, w io.Writer, watch *os.File, ended <-chan struct{}) error {
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
		if _, err := io.Copy(w, r); err != nil {
			return err
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		select {
		case <-ended:
			return drain(ctx, r, w)
		default:
		}
		if _, err := watch.Read(events); err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			return fmt.Errorf("inotify: %w", err)
		}
	}
}

// Written returns when nobody has the file open for writing any more, or after two
// seconds; with an error if it cannot be opened, or ctx has ended.
func Written(ctx context.Context, path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	for limit := time.Now().Add(patience); beingWritten(f) && time.Now().Before(limit); {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(endPoll):
		}
	}
	return nil
}

// drain copies until the last writer has closed the file.
func drain(ctx context.Context, r *reader, w io.Writer) error {
	for limit := time.Now().Add(patience); ; {
		done := !beingWritten(r.f) || time.Now().After(limit)
		if _, err := io.Copy(w, r); err != nil || done {
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

// tailOf is where the last n lines of what is there of a file begin; its end if n is below 0.
func tailOf(f *os.File, n int) (int64, error) {
	end, err := f.Seek(0, io.SeekEnd)
	if err != nil || n < 0 {
		return end, err
	}
	cutting.RLock()
	defer cutting.RUnlock()
	first := begin(f)
	buf := make([]byte, 64<<10)
	seen := 0
	for pos := end; pos > first; {
		k := min(int64(len(buf)), pos-first)
		pos -= k
		if _, err := f.ReadAt(buf[:k], pos); err != nil {
			return 0, err
		}
		for i := k - 1; i >= 0; i-- {
			if buf[i] != '\n' || pos+i == end-1 {
				continue
			}
			if seen++; seen == n {
				return pos + i + 1, nil
			}
		}
	}
	return 0, nil // reading begins behind what is cut
}

// Tail returns the last n lines of the file, at most 8 KiB, without the final
// newline; "" if it cannot be read.
func Tail(path string, n int) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	at, err := tailOf(f, n)
	if err != nil {
		return ""
	}
	const most = 8 << 10
	if st, err := f.Stat(); err == nil {
		at = max(at, st.Size()-most)
	}
	b, _ := io.ReadAll(io.LimitReader(&reader{f: f, at: at}, most))
	for len(b) > 0 && b[len(b)-1] == '\n' {
		b = b[:len(b)-1]
	}
	return string(b)
}

// AddLine appends a line to a file that nobody writes to any more.
func AddLine(path, line string) error {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_APPEND, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	var text bytes.Buffer
	if st, err := f.Stat(); err == nil && st.Size() > 0 {
		end := make([]byte, 1)
		if _, err := f.ReadAt(end, st.Size()-1); err == nil && end[0] != '\n' {
			text.WriteByte('\n')
		}
	}
	text.WriteString(line + "\n")
	_, err = f.Write(text.Bytes())
	return err
}
