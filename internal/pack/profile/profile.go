// Package profile records which bytes of which layers are read, and when first.
//
// A layer that is mounted afresh has an empty page cache. Every first read of it, by read, mmap or exec,
// through overlayfs or without, enters the page cache. The kernel has a tracepoint for just that, and this
// package listens to it:
//
//	instance of the kernel's tracing, of this recording alone
//	    event filemap/mm_filemap_add_to_page_cache, filter s_dev == the layers'
//	        ──▶ ring buffer of each CPU ──▶ (time, inode, page) ──▶ index ──▶ range of the tar
//
// Read-ahead would add pages that nobody asked for, so it is switched off for the recorded mounts (and no
// others) until Stop, which puts it back. The kernel adds nothing after a fault either, and fault-around maps
// only present pages. Pages that a program itself asks for beforehand (readahead, MAP_POPULATE,
// MADV_WILLNEED) count as read.
//
// Inode numbers are those of the layer's index, which also says where the bytes lie in the tar. Names,
// attributes, directories and symbolic links are the index's own contents and not of the tar: they do not
// appear in a Result.
//
// What the recording depends on, and does not check:
//
//   - The mounts are fresh: no page of the layers' files is in the mounts' page cache (the page cache of
//     index and tar themselves does not matter), and no file is open, for an open file keeps the read-ahead
//     it began with.
//   - Every mount is recorded by one process at a time. Several recordings in one process may share mounts.
//
// A first read of a page takes some 3 µs longer while it is recorded; a file that was opened meanwhile reads
// nothing ahead until it is closed, also after Stop.
//
// Unpacked layers (the tree backend) are not recorded: their inode numbers lead to no tar.
package profile

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"
)

// DefaultDir is where a recording writes down what must be put back.
const DefaultDir = "/run/dewpoint/profile"

// ErrUnsupported is wrapped by errors that say that a kernel, or a layer's
// kind of mount, does not allow recording.
var ErrUnsupported = errors.New("cannot record what is read")

// Layer is a mounted layer.
type Layer struct {
	DiffID digest.Digest
	Index  string // path of the index file that is mounted
	Mount  string // where it is mounted, through a loop device or not
	Tree   string // set if the layer is an unpacked directory: ErrUnsupported
}

// Config of a recording. The zero value is usable.
type Config struct {
	Dir string       // private state directory; "" is DefaultDir
	Log *slog.Logger // nil is slog.Default

	bufferKB int           // of each CPU; 0 is the default
	every    time.Duration // between two looks at the buffers; 0 is what their size allows
}

// Read is one range that was read for the first time. Ranges are page-granular
// in the file, clipped to its size, and reads that go on where the last one
// ended are one Read.
type Read struct {
	Layer  digest.Digest
	Offset int64         // in the layer's tar
	Length int64         // bytes
	File   string        // one of the file's names in the layer
	At     time.Duration // since Start
}

// Result is what a recording has seen, in order of first use.
type Result struct {
	Reads []Read
	Lost  int64 // events that were lost: if there are any, the Reads are incomplete
	Pages int64 // distinct pages of files
}

// Recording is a recording that runs. Its methods are safe for concurrent use.
type Recording struct {
	log   *slog.Logger
	inst  *instance
	begin int64 // monotonic nanoseconds
	every time.Duration

	mu     sync.Mutex
	layers map[uint32]*source // by s_dev
	ended  bool
	lower  *lowered

	quit   chan struct{}
	once   sync.Once
	done   chan struct{} // closed after result and err are set
	result Result
	err    error

	events []event // of the goroutine run
	over   int64   // events beyond maxEvents
}

// source is a layer that is being recorded. Its open root keeps the kernel
// from giving the mount's number to another one.
type source struct {
	id    digest.Digest
	root  *os.File
	index *os.File // nil if it could not be opened
}

func (s *source) Close() {
	s.root.Close()
	if s.index != nil {
		s.index.Close()
	}
}

const (
	// maxEvents bounds the memory of a recording that is not stopped: 4 GiB of pages.
	maxEvents = 1 << 20
	// maxLayers is what a filter is sure to have room for.
	maxLayers = 150
)

// Available returns nil if this node can record; else an error that wraps
// ErrUnsupported and says what to do. dir is Config.Dir.
func Available(dir string) error {
	if err := os.MkdirAll(dirOf(dir), 0o700); err != nil {
		return err
	}
	t, err := openTracing()
	if err != nil {
		return err
	}
	defer t.Close()
	_, err = t.layout()
	return err
}

func dirOf(dir string) string {
	if dir == "" {
		return DefaultDir
	}
	return dir
}

// Start switches the layers' read-ahead off and begins to record. The
// recording goes on until Stop is called or ctx is done; Stop must be called
// in either case. When Start fails everything is as it was.
//
// Start waits some tens of milliseconds for the kernel, Add hardly at all: who
// is in a hurry starts without layers while they are being mounted, then adds
// them.
func Start(ctx context.Context, cfg Config, layers []Layer) (*Recording, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	r := &Recording{
		log: cfg.Log, every: cfg.every,
		layers: map[uint32]*source{},
		quit:   make(chan struct{}), done: make(chan struct{}),
	}
	if r.log == nil {
		r.log = slog.Default()
	}
	if err := r.open(cfg, layers); err != nil {
		return nil, fmt.Errorf("start recording: %w", errors.Join(err, r.release()))
	}
	go r.run(ctx)
	return r, nil
}

func (r *Recording) open(cfg Config, layers []Layer) error {
	dir := dirOf(cfg.Dir)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	var err error
	if r.inst, err = newInstance(cfg.bufferKB); err != nil {
		return err
	}
	if r.every <= 0 {
		r.every = r.inst.fills()
	}
	if r.lower, err = newLowered(dir, r.inst.name); err != nil {
		return err
	}
	if r.begin, err = monotonic(); err != nil {
		return err
	}
	if err := r.add(layers); err != nil {
		return err
	}
	return r.inst.enable(true)
}

// Add records more layers from now on. When it fails none of them is added.
func (r *Recording) Add(layers ...Layer) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ended {
		return errors.New("add layers to a recording: it has ended")
	}
	if err := r.add(layers); err != nil {
		return fmt.Errorf("add layers to a recording: %w", err)
	}
	return nil
}

// add is called with mu held, or before anyone else knows r.
func (r *Recording) add(layers []Layer) (err error) {
	fresh := map[uint32]*source{}
	var names []string
	defer func() {
		if err != nil {
			for dev, s := range fresh {
				s.Close()
				delete(r.layers, dev)
			}
			err = errors.Join(err, r.lower.restore(names))
		}
	}()
	for _, l := range layers {
		root, dev, device, err := locate(l)
		if err != nil {
			return fmt.Errorf("layer %s: %w", l.DiffID, err)
		}
		if r.layers[dev] != nil {
			root.Close()
			continue
		}
		s := &source{id: l.DiffID, root: root}
		fresh[dev], r.layers[dev] = s, s
		if s.index, err = os.Open(l.Index); err != nil {
			return err
		}
		if err := r.lower.add(device); err != nil {
			return err
		}
		names = append(names, device)
	}
	if len(r.layers) > maxLayers {
		return fmt.Errorf("%d layers: at most %d are recorded together", len(r.layers), maxLayers)
	}
	return r.inst.filter(r.layers)
}

// Stop ends the recording, restores read-ahead and returns what was read. It
// may be called again and returns the same. A Result is whole even if there is
// an error about what could not be put back.
func (r *Recording) Stop() (Result, error) {
	r.once.Do(func() { close(r.quit) })
	<-r.done
	return r.result, r.err
}

// run owns the buffers until the recording ends.
func (r *Recording) run(ctx context.Context) {
	defer close(r.done)
	tick := time.NewTicker(r.every)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			r.drain()
			continue
		case <-r.quit:
		case <-ctx.Done():
		}
		break
	}
	r.end()
}

func (r *Recording) drain() {
	room := maxEvents - len(r.events)
	var over int64
	r.events, over = r.inst.drain(r.events, room)
	r.over += over
}

func (r *Recording) end() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ended = true
	err := r.inst.enable(false)
	r.drain()
	lost, lerr := r.inst.lost()
	result, rerr := r.resolve()
	result.Lost += lost + r.over
	r.result = result
	r.events = nil
	if r.err = errors.Join(err, lerr, rerr, r.release()); r.err != nil {
		r.err = fmt.Errorf("stop recording: %w", r.err)
	}
	if result.Lost > 0 {
		r.log.Warn("a recording of what is read is incomplete", "lost", result.Lost, "pages", result.Pages)
	}
}

// release gives back everything that the recording holds.
func (r *Recording) release() error {
	var errs []error
	if r.inst != nil {
		errs = append(errs, r.inst.remove())
	}
	if r.lower != nil {
		errs = append(errs, r.lower.Close())
	}
	for _, s := range r.layers {
		s.Close()
	}
	return errors.Join(errs...)
}

func monotonic() (int64, error) {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &t); err != nil {
		return 0, os.NewSyscallError("clock_gettime", err)
	}
	return t.Nano(), nil
}
