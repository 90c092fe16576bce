package datafs

import (
	"bytes"
	"os"
	"testing"
	"unsafe"

	"dewpoint/testkit"

	"golang.org/x/sys/unix"
)

func TestMemoryAvailable(t *testing.T) {
	if n := memoryAvailable(); n < 1<<20 || n >= 1<<40 {
		t.Errorf("%d bytes of memory are available", n)
	}
}

// cached is how many pages of a file the page cache has (mincore(2)).
func cached(t *testing.T, path string) int {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	m, err := unix.Mmap(int(f.Fd()), 0, int(fi.Size()), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(m)
	vec := make([]byte, (len(m)+page-1)/page)
	if _, _, e := unix.Syscall(unix.SYS_MINCORE, addressOf(m), uintptr(len(m)), addressOf(vec)); e != 0 {
		t.Fatal(e)
	}
	n := 0
	for _, v := range vec {
		n += int(v & 1)
	}
	return n
}

// What is said to be read soon is in the page cache of the layer's file before
// anybody reads it, whether the kernel has opened that before or after; and it
// is right.
func TestWarm(t *testing.T) {
	for name, before := range map[string]bool{"mounted before": true, "mounted after": false} {
		t.Run(name, func(t *testing.T) {
			l := newBed(t).start().layer(tarOf(9, repeat(3, 400<<10)...))
			if before {
				l.mount()
			}
			from, to := int64(64*page), int64(192*page)
			l.put(from, to)
			l.client.Warm(l.id, from, to)
			l.client.Warm(l.id, to, to+10*page) // not there: nothing is stored
			if !before {
				l.mount()
			}
			testkit.Eventually(t, "the pages in the cache", func() bool { return cached(t, l.path) == 128 })
			l.putAll()
			for _, f := range []string{"f0", "f1", "f2"} {
				if got, err := os.ReadFile(l.file(f)); err != nil || !bytes.Equal(got, l.content(f)) {
					t.Errorf("%s: %d bytes, %v", f, len(got), err)
				}
			}
		})
	}
}

func addressOf(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }
