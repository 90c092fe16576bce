// Package presence keeps which pages of a layer's data are there, in a small
// file that two processes share.
//
// A layer that is mounted before it is whole has a data file with holes and,
// beside it, a presence file: a header of one page and one bit for each page of
// data. dewd, which fills the data, sets a bit after the page's bytes have been
// written; datafs, which serves the data, maps the same file and looks. Bits are
// never cleared, so who has seen a bit may read the page without asking again.
// Both see what the page cache has, so nothing needs to be synced between them,
// and a reader goes on while dewd is dead.
//
// What a presence file says holds for the boot that wrote it: after a power cut
// pages may be missing that it calls present. docs/design/formats.md has the layout.
package presence

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"os"
	"sync/atomic"
	"unsafe"

	"dewpoint/internal/durable"

	"golang.org/x/sys/unix"
)

// Page is the unit of presence in bytes, whatever the kernel's page size.
const Page = 4096

const (
	magic      = "DEWPRES1"
	headerSize = 4096
	sizeAt     = 8  // u64, little endian
	bootAt     = 16 // 36 bytes of text
	bootLen    = 36
	maxSize    = 1 << 44
)

// ErrStale says that a presence file was written in another boot or is not one.
var ErrStale = errors.New("presence file is not of this boot")

// Map is the presence of one layer's data. It is safe for concurrent use, by
// several processes too, but for Close.
type Map struct {
	size  int64
	mem   []byte
	words []uint64 // bit i of word i/64 is page i; accessed atomically
	file  *os.File
}

// Create makes the presence file of data that is size bytes long, with
// nothing present. What was at path goes.
func Create(path string, size int64) (*Map, error) {
	if size < 0 || size > maxSize {
		return nil, fmt.Errorf("presence of %d bytes: out of range", size)
	}
	f, err := os.OpenFile(path+".tmp", os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, err
	}
	head := make([]byte, headerSize)
	copy(head, magic)
	binary.LittleEndian.PutUint64(head[sizeAt:], uint64(size))
	copy(head[bootAt:bootAt+bootLen], durable.BootID())
	if _, err = f.Write(head); err == nil {
		// Allocated, not sparse: on a full disk a store into a mapped hole kills the process.
		err = allocate(f, fileSize(size))
	}
	var m *Map
	if err == nil {
		m, err = mapFile(f, size, unix.PROT_READ|unix.PROT_WRITE)
	}
	if err == nil {
		err = os.Rename(path+".tmp", path)
	}
	if err != nil {
		f.Close()
		return nil, errors.Join(err, os.Remove(path+".tmp"))
	}
	return m, nil
}

// allocate gives f n bytes of disk that read as zeros.
func allocate(f *os.File, n int64) error {
	err := unix.Fallocate(int(f.Fd()), 0, 0, n)
	if !errors.Is(err, unix.EOPNOTSUPP) {
		return err
	}
	_, err = f.WriteAt(make([]byte, n-headerSize), headerSize)
	return err
}

// Open maps the presence file at path for reading and writing. It returns an
// error that wraps ErrStale for a file of another boot.
func Open(path string) (*Map, error) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	m, err := load(f, unix.PROT_READ|unix.PROT_WRITE)
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return m, nil
}

// View maps the presence file f for reading. The map owns f if there is no error.
func View(f *os.File) (*Map, error) { return load(f, unix.PROT_READ) }

func load(f *os.File, prot int) (*Map, error) {
	head := make([]byte, headerSize)
	if _, err := f.ReadAt(head, 0); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrStale, err)
	}
	size := int64(binary.LittleEndian.Uint64(head[sizeAt:]))
	if !bytes.HasPrefix(head, []byte(magic)) || size < 0 || size > maxSize {
		return nil, ErrStale
	}
	if boot := durable.BootID(); len(boot) != bootLen || string(head[bootAt:bootAt+bootLen]) != boot {
		return nil, ErrStale
	}
	fi, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if fi.Size() < fileSize(size) {
		return nil, fmt.Errorf("%w: it is cut short", ErrStale)
	}
	return mapFile(f, size, prot)
}

func mapFile(f *os.File, size int64, prot int) (*Map, error) {
	mem, err := unix.Mmap(int(f.Fd()), 0, int(fileSize(size)), prot, unix.MAP_SHARED)
	if err != nil {
		return nil, os.NewSyscallError("mmap", err)
	}
	n := pages(size)
	m := &Map{size: size, mem: mem, file: f}
	if n > 0 {
		m.words = unsafe.Slice((*uint64)(unsafe.Pointer(&mem[headerSize])), (n+63)/64)
	}
	return m, nil
}

func pages(size int64) int64 { return (size + Page - 1) / Page }

// fileSize is a whole number of pages, so that the mapping has no torn end.
func fileSize(size int64) int64 {
	n := (pages(size) + 63) / 64 * 8
	return headerSize + (n+Page-1)/Page*Page
}

// File is the presence file, to be passed to another process. It stays the
// map's.
func (m *Map) File() *os.File { return m.file }

// Size is the number of bytes of data that the map is about.
func (m *Map) Size() int64 { return m.size }

// HasRange reports whether every byte of [from, to) that lies within the data is there.
func (m *Map) HasRange(from, to int64) bool {
	at, _ := m.Absent(from, to)
	return at >= min(to, m.size)
}

// Absent returns the first run of absent pages that [from, to) touches, as
// bytes, cut to [from, to) at neither end but to the data's size. If all is
// there it returns two offsets of at least to, or of the data's end.
func (m *Map) Absent(from, to int64) (int64, int64) {
	to = min(to, m.size)
	if from >= to {
		return max(from, to), max(from, to)
	}
	last := (to - 1) / Page
	p := m.next(from/Page, last, false)
	if p > last {
		return to, to
	}
	end := m.next(p, last, true)
	return p * Page, min(end*Page, m.size)
}

// next is the first page from p to last whose bit is as wanted, or last+1.
func (m *Map) next(p, last int64, want bool) int64 {
	for p <= last {
		w := atomic.LoadUint64(&m.words[p/64])
		if !want {
			w = ^w
		}
		w &= ^uint64(0) << (p % 64)
		if w != 0 {
			return min(p/64*64+int64(bits.TrailingZeros64(w)), last+1)
		}
		p = (p/64 + 1) * 64
	}
	return last + 1
}

// Add records that the bytes [from, to) have been written. Pages that lie
// within only in part are not recorded, but for the data's last one.
func (m *Map) Add(from, to int64) {
	first, end := (from+Page-1)/Page, to/Page
	if to >= m.size {
		end = pages(m.size)
	}
	for p := first; p < end; {
		n := min(64-p%64, end-p)
		mask := ^uint64(0) >> (64 - n) << (p % 64)
		atomic.OrUint64(&m.words[p/64], mask)
		p += n
	}
}

// Count is the number of pages that are there, and of all.
func (m *Map) Count() (present, all int64) {
	for i := range m.words {
		present += int64(bits.OnesCount64(atomic.LoadUint64(&m.words[i])))
	}
	return present, pages(m.size)
}

// Close unmaps the file. No method may be running or called after it.
func (m *Map) Close() error {
	m.words = nil
	return errors.Join(unix.Munmap(m.mem), m.file.Close())
}
