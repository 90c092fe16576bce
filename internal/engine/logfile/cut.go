package logfile

import (
	"bytes"
	"errors"
	"io"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// ErrKept says that the file system cannot give back the beginning of a file.
var ErrKept = errors.New("the file system gives back no part of a file")

// cutting is held by Cut, and shared by who reads: what is cut reads as zeros.
var cutting sync.RWMutex

const cutUnit = 64 << 10 // a multiple of every file system's blocks

// Cut gives the beginning of a file back to the disk when the file takes more than
// most bytes there, such that the last half of these stay. Who has it open to append
// goes on and loses nothing, which no file of another name, and no file that is
// copied and emptied, could do without his help: the file keeps its length, with a
// hole in front. What this package reads of it begins behind the hole, with a line.
// It returns ErrKept where that cannot be done.
func Cut(path string, most int64) error {
	st, err := os.Stat(path)
	if err != nil {
		return err
	}
	if s, ok := st.Sys().(*syscall.Stat_t); !ok || s.Blocks*512 <= most {
		return nil
	}
	end := (st.Size() - most/2) / cutUnit * cutUnit
	if end <= 0 {
		return nil
	}
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	cutting.Lock()
	defer cutting.Unlock()
	err = unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, end)
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOSYS) {
		return ErrKept
	}
	return os.NewSyscallError("fallocate", err)
}

// maxLine is how much is passed over at most where a line begins in the middle.
const maxLine = 64 << 10

// reader reads a file of which the beginning may be cut off meanwhile.
type reader struct {
	f    *os.File
	at   int64
	skip int  // bytes that may yet be passed over until a line begins
	part bool // what was read last is a part of a line
}

// errTorn says that a line ends where it was not at its end.
var errTorn = errors.New("the rest of the line was cut off")

// Read returns io.EOF at the end; there may be more to read later.
func (r *reader) Read(p []byte) (int, error) {
	for {
		n, err := r.read(p)
		if err == errTorn {
			return copy(p, "\n"), nil
		}
		if n == 0 || r.skip == 0 {
			return n, err
		}
		i := bytes.IndexByte(p[:n], '\n') + 1
		if r.skip -= n; i > 0 {
			r.skip = 0
		}
		r.skip = max(r.skip, 0)
		if i > 0 || r.skip == 0 {
			if n = copy(p, p[i:n]); n > 0 {
				return n, err
			}
		}
	}
}

func (r *reader) read(p []byte) (int, error) {
	cutting.RLock()
	defer cutting.RUnlock()
	switch at, err := unix.Seek(int(r.f.Fd()), r.at, unix.SEEK_DATA); {
	case err == unix.ENXIO:
		return 0, io.EOF
	case err == nil && at > r.at:
		r.at, r.skip = at, maxLine
		if r.part { // its rest was cut off
			r.part = false
			return 0, errTorn
		}
	}
	n, err := r.f.ReadAt(p, r.at)
	r.at += int64(n)
	if n > 0 {
		err, r.part = nil, p[n-1] != '\n'
	}
	return n, err
}

// begin is where the file's data begins.
func begin(f *os.File) int64 {
	at, err := unix.Seek(int(f.Fd()), 0, unix.SEEK_DATA)
	if err != nil {
		return 0
	}
	return at
}
