package datafs

import (
	"bytes"
	"context"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// What a pack brings is about to be read. It is put into the kernel's page cache
// of the layer's file at once (FUSE_NOTIFY_STORE), a quarter MiB at a time:
// otherwise each page of it costs a request and two changes of process. That can
// be done from the moment when the kernel opens the file.

const (
	storeUnit = 256 << 10 // bytes stored in one write
	// storeMost bounds what is stored of one layer, in bytes.
	storeMost = 64 << 20
	// storeSpare is how many bytes of memory must be available.
	storeSpare = 128 << 20
)

// warm notes that the bytes of s are likely to be read soon, and has them
// stored if the kernel knows the file.
func (s *server) warm(l *layer, at span) {
	l.mu.Lock()
	if l.stored += at.to - at.from; l.stored <= storeMost {
		l.early = l.early.add(at)
	}
	known := l.open
	l.mu.Unlock()
	if known {
		s.storeSoon(l)
	}
}

// opens says that the kernel has opened the layer's file.
func (s *server) opens(l *layer) {
	l.mu.Lock()
	l.open = true
	some := len(l.early) > 0
	l.mu.Unlock()
	if some {
		s.storeSoon(l)
	}
}

// storeSoon never waits: what is not stored is read as ever.
func (s *server) storeSoon(l *layer) {
	select {
	case s.stores <- l:
	default:
	}
}

// storeAll stores what it is told to until ctx ends. A page that is being read
// is locked in the kernel until the read is answered, so this is no reader's task.
func (s *server) storeAll(ctx context.Context) {
	buf := make([]byte, outHeaderSize+storeHeader+storeUnit)
	for {
		select {
		case <-ctx.Done():
			return
		case l := <-s.stores:
			s.storeEarly(l, buf)
		}
	}
}

func (s *server) storeEarly(l *layer, buf []byte) {
	for {
		l.mu.Lock()
		if l.gone || len(l.early) == 0 {
			l.mu.Unlock()
			return
		}
		at := l.early[0]
		at.to = min(at.to, at.from+storeUnit)
		l.early = l.early.without(at)
		from := l.from.Load()
		there := from.present.HasRange(at.from, at.to) // closed under the lock
		l.mu.Unlock()
		if !there || memoryAvailable() < storeSpare {
			continue
		}
		b := buf[:outHeaderSize+storeHeader+int(at.to-at.from)]
		if _, err := from.data.ReadAt(b[outHeaderSize+storeHeader:], at.from); err != nil {
			continue // closed meanwhile, or a bad disk, of which the reader will hear
		}
		s.dev.store(l.node(0), at.from, b)
	}
}

// storeHeader is the size of fuse_notify_store_out.
const storeHeader = 24

// store puts bytes into the page cache of a node. b has room for the headers,
// and then the bytes.
func (d device) store(node uint64, off int64, b []byte) {
	putOutHeader(b, len(b), 0, 0)
	native.PutUint32(b[4:], notifyStore)
	h := b[outHeaderSize:]
	native.PutUint64(h, node)
	native.PutUint64(h[8:], uint64(off))
	native.PutUint32(h[16:], uint32(len(b)-outHeaderSize-storeHeader))
	native.PutUint32(h[20:], 0)
	d.write(b) // a kernel that has forgotten the node says so, and nothing is lost
}

// memoryAvailable is what the kernel could give without swapping, in bytes
// (proc(5), MemAvailable); plenty if it does not say.
func memoryAvailable() int64 {
	const plenty = 1 << 40
	f, err := os.Open("/proc/meminfo")
	if err != nil {
		return plenty
	}
	defer f.Close()
	var b [512]byte
	n, err := unix.Read(rawFD(f), b[:])
	if err != nil {
		return plenty
	}
	_, rest, ok := bytes.Cut(b[:n], []byte("MemAvailable:"))
	fields := bytes.Fields(rest)
	if !ok || len(fields) == 0 {
		return plenty
	}
	kib, err := strconv.ParseInt(string(fields[0]), 10, 64)
	if err != nil {
		return plenty
	}
	return kib << 10
}
