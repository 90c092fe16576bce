package pop

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// FS is the shared file system, as far as a Store needs it. Names are relative,
// with slashes. Every call may block for as long as the file system does; Dir bounds that.
//
// What WriteFile, Rename, Link, SyncDir and File.Sync did is durable once they return
// nil. Another node may see it a moment later.
type FS interface {
	ReadFile(ctx context.Context, name string) ([]byte, error)
	// WriteFile puts b at name, wholly or not at all. Concurrent writers of one name
	// leave what one of them wrote.
	WriteFile(ctx context.Context, name string, b []byte) error
	ReadDir(ctx context.Context, name string) ([]fs.FileInfo, error)
	// Names are the names in a directory, which cost less than ReadDir.
	Names(ctx context.Context, name string) ([]string, error)
	Stat(ctx context.Context, name string) (fs.FileInfo, error)
	Mkdir(ctx context.Context, name string) error // of which some may be there
	Rename(ctx context.Context, from, to string) error
	// Link gives a file a second name; fs.ErrExist if there is something of that name.
	Link(ctx context.Context, from, to string) error
	Remove(ctx context.Context, name string) error // of what is not there: fs.ErrNotExist
	// SyncDir makes the names durable that are in a directory.
	SyncDir(ctx context.Context, name string) error
	Open(ctx context.Context, name string) (File, error)
	// Append opens a file for writing, making it if need be. SyncDir makes its name durable.
	Append(ctx context.Context, name string) (File, error)
	// Make makes an empty file, unless there is one. It asks less of the file system than Append and Close.
	Make(ctx context.Context, name string) error
	// Space is the bytes of the file system, and those that are free.
	Space(ctx context.Context) (total, free int64, err error)
}

// File is an open file of an FS. Its calls are bounded as those of the FS are.
type File interface {
	io.ReaderAt
	io.WriterAt
	io.Closer
	Sync() error
	Size() (int64, error)
}

// ErrStoreAway says that the shared file system does not answer, or not rightly.
var ErrStoreAway = errors.New("the PoP's store is away")

const (
	defaultPatience = 5 * time.Second  // a call may take so long
	slowPatience    = 60 * time.Second // one that waits for the disks
	stuckCalls      = 64               // that did not return in time, at most
	staleTries      = 5
	staleWait       = 20 * time.Millisecond
	askAgain        = 2 * time.Second // between two looks whether a store that was away is back
)

// Dir is an FS below a directory. A call that takes longer than the patience fails
// with ErrStoreAway, and so does every other one from then on until the file
// system answers again: a process that waits for a file system which is gone
// cannot be ended, so few may begin to. Safe for concurrent use.
type Dir struct {
	root     string
	patience time.Duration
	stuck    chan struct{} // holds an element for each call that runs

	mu    sync.Mutex
	away  error     // why; nil while it answers
	asked time.Time // when it was last tried whether it answers again
	nonce uint64
	syncs map[string]*dirSyncs    // by path
	fsync func(path string) error // syncDir
}

// dirSyncs are the fsyncs of one directory: on a distributed file system each goes to every server.
type dirSyncs struct {
	runs *dirSync // nil if none does
	next *dirSync // has not begun: whoever comes joins it; nil if nobody waits
}

// dirSync is one of them; err is there when done is closed.
type dirSync struct {
	done chan struct{}
	err  error
}

// NewDir returns the FS below root, an absolute path. Nothing is touched yet.
// patience 0 is 5 s.
func NewDir(root string, patience time.Duration) *Dir {
	if patience == 0 {
		patience = defaultPatience
	}
	return &Dir{root: root, patience: patience, stuck: make(chan struct{}, stuckCalls),
		syncs: map[string]*dirSyncs{}, fsync: syncDir}
}

// Path is where name lies for the rest of the system.
func (d *Dir) Path(name string) string { return filepath.Join(d.root, name) }

// Away says why the file system is taken to be away, or nil.
func (d *Dir) Away() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.away
}

// call runs fn and gives up waiting for it after the patience. fn must not
// write to what its caller reads unless call has returned nil.
func (d *Dir) call(ctx context.Context, patience time.Duration, fn func() error) error {
	if err := d.admit(); err != nil {
		return err
	}
	select {
	case d.stuck <- struct{}{}:
	default:
		return d.lost(errors.New("too many calls to it do not return"))
	}
	done := make(chan error, 1)
	go func() {
		err := fn()
		for range staleTries { // another node has replaced the file: its name leads to the new one
			if !errors.Is(err, unix.ESTALE) {
				break
			}
			time.Sleep(staleWait)
			err = fn()
		}
		done <- err
		<-d.stuck
	}()
	late := time.NewTimer(patience)
	defer late.Stop()
	select {
	case err := <-done:
		return d.heard(err)
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-late.C:
		return d.lost(fmt.Errorf("no answer for %v", patience))
	}
}

// admit refuses calls while the file system is away, but for one now and then.
func (d *Dir) admit() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.away == nil || time.Since(d.asked) >= askAgain {
		d.asked = time.Now()
		return nil
	}
	return d.away
}

func (d *Dir) lost(why error) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.away = fmt.Errorf("%w: %s: %w", ErrStoreAway, d.root, why)
	d.asked = time.Now()
	return d.away
}

// heard tells errors that say that the file system is away from others.
func (d *Dir) heard(err error) error {
	for _, gone := range []error{unix.ENOTCONN, unix.ESTALE, unix.EIO, unix.ETIMEDOUT, unix.EHOSTDOWN,
		unix.ECONNABORTED, unix.ESHUTDOWN} {
		if errors.Is(err, gone) {
			return d.lost(err)
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.away = nil
	return err
}

func value[T any](d *Dir, ctx context.Context, fn func() (T, error)) (T, error) {
	var v T
	got := make(chan T, 1)
	err := d.call(ctx, d.patience, func() error {
		v, err := fn()
		select {
		case <-got: // of an earlier try
		default:
		}
		got <- v
		return err
	})
	if err == nil {
		v = <-got
	}
	return v, err
}

// ReadFile implements FS.
func (d *Dir) ReadFile(ctx context.Context, name string) ([]byte, error) {
	return value(d, ctx, func() ([]byte, error) { return os.ReadFile(d.Path(name)) })
}

// WriteFile implements FS.
func (d *Dir) WriteFile(ctx context.Context, name string, b []byte) error {
	tmp := d.Path(d.temporary(name))
	return d.call(ctx, slowPatience, func() error {
		f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return err
		}
		if _, err = f.Write(b); err == nil {
			err = f.Sync()
		}
		if err = errors.Join(err, f.Close()); err == nil {
			err = os.Rename(tmp, d.Path(name))
		}
		if err != nil {
			os.Remove(tmp)
			return err
		}
		return d.syncDir(filepath.Dir(d.Path(name)))
	})
}

// temporary is a name beside name that nobody else uses.
func (d *Dir) temporary(name string) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.nonce++
	host, _ := os.Hostname()
	return filepath.Join(filepath.Dir(name),
		fmt.Sprintf(".%s.%s-%d-%d-%d", filepath.Base(name), host, os.Getpid(), time.Now().UnixNano(), d.nonce))
}

// ReadDir implements FS.
func (d *Dir) ReadDir(ctx context.Context, name string) ([]fs.FileInfo, error) {
	return value(d, ctx, func() ([]fs.FileInfo, error) {
		ents, err := os.ReadDir(d.Path(name))
		all := make([]fs.FileInfo, 0, len(ents))
		for _, e := range ents {
			if fi, err := e.Info(); err == nil {
				all = append(all, fi)
			}
		}
		return all, err
	})
}

// Names implements FS.
func (d *Dir) Names(ctx context.Context, name string) ([]string, error) {
	return value(d, ctx, func() ([]string, error) {
		f, err := os.Open(d.Path(name))
		if err != nil {
			return nil, err
		}
		defer f.Close()
		return f.Readdirnames(-1)
	})
}

// Stat implements FS.
func (d *Dir) Stat(ctx context.Context, name string) (fs.FileInfo, error) {
	return value(d, ctx, func() (fs.FileInfo, error) { return os.Stat(d.Path(name)) })
}

// Reach asks the file system itself for a file's size in bytes, whatever the kernel believes to know of it
// (statx(2), AT_STATX_FORCE_SYNC). It costs less than opening and closing the file, and leaves no descriptor
// of it while it hangs.
func (d *Dir) Reach(ctx context.Context, name string) (size int64, err error) {
	return value(d, ctx, func() (int64, error) {
		var st unix.Statx_t
		for {
			err := unix.Statx(unix.AT_FDCWD, d.Path(name), unix.AT_STATX_FORCE_SYNC, unix.STATX_SIZE, &st)
			if err == nil {
				return int64(st.Size), nil
			}
			if err != unix.EINTR { // of a FUSE server that was told of a signal
				return 0, &fs.PathError{Op: "statx", Path: d.Path(name), Err: err}
			}
		}
	})
}

// Mkdir implements FS.
func (d *Dir) Mkdir(ctx context.Context, name string) error {
	return d.call(ctx, d.patience, func() error {
		err := os.MkdirAll(d.Path(name), 0o700)
		// another node made it a moment ago, and this one's caches do not know it yet
		if errors.Is(err, fs.ErrExist) {
			return nil
		}
		return err
	})
}

// Rename implements FS.
func (d *Dir) Rename(ctx context.Context, from, to string) error {
	return d.call(ctx, slowPatience, func() error {
		if err := os.Rename(d.Path(from), d.Path(to)); err != nil {
			return err
		}
		err := d.syncDir(filepath.Dir(d.Path(to)))
		if a, b := filepath.Dir(from), filepath.Dir(to); a != b {
			err = errors.Join(err, d.syncDir(d.Path(a)))
		}
		return err
	})
}

// Link implements FS.
func (d *Dir) Link(ctx context.Context, from, to string) error {
	return d.call(ctx, slowPatience, func() error {
		if err := os.Link(d.Path(from), d.Path(to)); err != nil {
			return err
		}
		return d.syncDir(filepath.Dir(d.Path(to)))
	})
}

// SyncDir implements FS.
func (d *Dir) SyncDir(ctx context.Context, name string) error {
	return d.call(ctx, slowPatience, func() error { return d.syncDir(d.Path(name)) })
}

// Remove implements FS.
func (d *Dir) Remove(ctx context.Context, name string) error {
	return d.call(ctx, slowPatience, func() error { return os.Remove(d.Path(name)) })
}

// Open implements FS.
func (d *Dir) Open(ctx context.Context, name string) (File, error) {
	return d.open(ctx, name, os.O_RDONLY)
}

// Append implements FS.
func (d *Dir) Append(ctx context.Context, name string) (File, error) {
	return d.open(ctx, name, os.O_RDWR|os.O_CREATE)
}

// Make implements FS.
func (d *Dir) Make(ctx context.Context, name string) error {
	return d.call(ctx, d.patience, func() error {
		err := unix.Mknod(d.Path(name), unix.S_IFREG|0o600, 0)
		for errors.Is(err, unix.EINTR) {
			err = unix.Mknod(d.Path(name), unix.S_IFREG|0o600, 0)
		}
		if !errors.Is(err, unix.EEXIST) {
			if err != nil {
				err = &fs.PathError{Op: "mknod", Path: d.Path(name), Err: err}
			}
			return err
		}
		// the kernel may know of one that is not there any more
		f, err := os.OpenFile(d.Path(name), os.O_RDWR|os.O_CREATE, 0o600)
		if err == nil {
			err = f.Close()
		}
		return err
	})
}

func (d *Dir) open(ctx context.Context, name string, flags int) (File, error) {
	f, err := value(d, ctx, func() (*os.File, error) { return os.OpenFile(d.Path(name), flags, 0o600) })
	if err != nil {
		return nil, err
	}
	return &dirFile{d, f}, nil
}

// Space implements FS.
func (d *Dir) Space(ctx context.Context) (total, free int64, err error) {
	st, err := value(d, ctx, func() (unix.Statfs_t, error) {
		var st unix.Statfs_t
		return st, unix.Statfs(d.root, &st)
	})
	return int64(st.Blocks) * st.Bsize, int64(st.Bavail) * st.Bsize, err
}

// syncDir makes the names in a directory durable. Those who wait for an fsync to end share the
// one that follows: it begins after all that they did. One that failed does not fail those after it: a
// directory has no pages that get lost. Its fsync commits the file system's journal, and where that has
// failed it fails for good.
func (d *Dir) syncDir(path string) error {
	d.mu.Lock()
	q := d.syncs[path]
	if q == nil {
		q = new(dirSyncs)
		d.syncs[path] = q
	}
	if joined := q.next; joined != nil {
		d.mu.Unlock()
		<-joined.done
		return joined.err
	}
	mine, before := &dirSync{done: make(chan struct{})}, q.runs
	q.next = mine
	d.mu.Unlock()
	if before != nil {
		<-before.done
	}
	d.mu.Lock()
	q.runs, q.next = mine, nil
	d.mu.Unlock()
	mine.err = d.fsync(path)
	d.mu.Lock()
	if q.runs = nil; q.next == nil {
		delete(d.syncs, path)
	}
	d.mu.Unlock()
	close(mine.done)
	return mine.err
}

func syncDir(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	err = f.Sync()
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) {
		err = nil // a file system that has no such thing makes renames durable by itself, or not at all
	}
	return errors.Join(err, f.Close())
}

// dirFile bounds the calls to a file. What a call that was given up still
// writes to is its own.
type dirFile struct {
	d *Dir
	f *os.File
}

// borrowed is how much is kept for the next one of what calls to files copy.
const borrowed = 1 << 20

var buffers sync.Pool // of *[]byte

// borrow returns n bytes, which hold anything. Nobody has to give them back.
func borrow(n int) []byte {
	if b, _ := buffers.Get().(*[]byte); b != nil && cap(*b) >= n {
		return (*b)[:n]
	}
	return make([]byte, n)
}

// giveBack returns bytes that nobody looks at any more.
func giveBack(b []byte) {
	if cap(b) <= borrowed {
		buffers.Put(&b)
	}
}

func (f *dirFile) ReadAt(b []byte, off int64) (int, error) {
	type read struct {
		n   int
		b   []byte
		eof bool
	}
	got, err := value(f.d, context.Background(), func() (read, error) {
		own := borrow(len(b))
		n, err := f.f.ReadAt(own, off)
		if err == io.EOF {
			return read{n, own, true}, nil
		}
		return read{n, own, false}, err
	})
	if err != nil {
		return 0, err
	}
	copy(b, got.b[:got.n])
	giveBack(got.b)
	if got.eof {
		return got.n, io.EOF
	}
	return got.n, nil
}

func (f *dirFile) WriteAt(b []byte, off int64) (int, error) {
	own := borrow(len(b))
	copy(own, b)
	err := f.d.call(context.Background(), slowPatience, func() error {
		_, err := f.f.WriteAt(own, off)
		return err
	})
	if err != nil {
		return 0, err // it may still be written
	}
	giveBack(own)
	return len(b), nil
}

func (f *dirFile) Sync() error {
	// call may try again: a second fsync would not say what the first has said
	return f.d.call(context.Background(), slowPatience, sync.OnceValue(f.f.Sync))
}

func (f *dirFile) Size() (int64, error) {
	fi, err := value(f.d, context.Background(), f.f.Stat)
	if err != nil {
		return 0, err
	}
	return fi.Size(), nil
}

// Close may leave the closing to be done behind its caller.
func (f *dirFile) Close() error {
	return f.d.call(context.Background(), slowPatience, f.f.Close)
}
