package snapshot

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"dewpoint/internal/layer/mount"
)

// table is the set of layers in use, each with its mount.
type table struct {
	dir     string // ROOT/m
	backend mount.Backend
	files   func(digest.Digest) (mount.Files, error)

	mu      sync.Mutex
	layers  map[digest.Digest]*layer // guarded by mu
	numbers map[int]*layer           // the same ones by n; guarded by mu
	swept   atomic.Bool              // what an earlier process left is gone

	sweeping sync.Mutex // held by sweep; never waited for
}

// layer is one layer in use. Its mount point is named by n.
type layer struct {
	id   digest.Digest
	n    int // changes only before anything is mounted there
	refs int // snapshots that stand for it, and calls under way; guarded by table.mu

	busy    sync.Mutex // held while mounting and unmounting
	mounted bool       // guarded by busy
	implied []string   // mount.Files.Implied, known once it was mounted; guarded by busy
	shown   bool       // who reads files may know the mount; guarded by busy
}

func (l *layer) impliedDirs() []string {
	l.busy.Lock()
	defer l.busy.Unlock()
	return l.implied
}

func newTable(dir string, backend mount.Backend, files func(digest.Digest) (mount.Files, error)) *table {
	return &table{
		dir: dir, backend: backend, files: files,
		layers: make(map[digest.Digest]*layer), numbers: make(map[int]*layer),
	}
}

func (t *table) path(l *layer) string { return filepath.Join(t.dir, strconv.Itoa(l.n)) }

// hold counts one more use of the layer, under the smallest free number if it
// had none. Every hold needs its release.
func (t *table) hold(id digest.Digest) *layer { return t.holdAs(id, 0) }

// holdAs is hold with a wish for a number that is honoured when it is free.
func (t *table) holdAs(id digest.Digest, n int) *layer {
	t.mu.Lock()
	defer t.mu.Unlock()
	l := t.layers[id]
	if l == nil {
		l = &layer{id: id, n: t.number(n)}
		t.layers[id], t.numbers[l.n] = l, l
	}
	l.refs++
	return l
}

func (t *table) number(wish int) int {
	if wish > 0 && t.numbers[wish] == nil {
		return wish
	}
	n := 1
	for t.numbers[n] != nil {
		n++
	}
	return n
}

// again counts one more use of a layer that the caller holds.
func (t *table) again(l *layer) {
	t.mu.Lock()
	defer t.mu.Unlock()
	l.refs++
}

// ensure mounts the layer, which the caller holds, unless it is mounted. That
// it is gets looked up each time: a container without one of its layers would
// be worse than a system call.
func (t *table) ensure(ctx context.Context, l *layer) error {
	l.busy.Lock()
	defer l.busy.Unlock()
	if l.mounted && isMountRoot(t.path(l)) {
		return nil
	}
	files, err := t.files(l.id)
	if err != nil {
		return fmt.Errorf("mount layer %s: %w", l.id, err)
	}
	err = os.Mkdir(t.path(l), 0o700)
	if err != nil && !os.IsExist(err) {
		return err
	}
	l.shown = err != nil // what is there may be an old mount
	err = t.backend.Mount(ctx, files, t.path(l))
	// by what the layer was mounted from before it was whole: the number is its own
	if errors.Is(err, mount.ErrOccupied) {
		err = t.backend.Replace(ctx, files, t.path(l))
	}
	if err != nil {
		return fmt.Errorf("mount layer %s at %s: %w", l.id, t.path(l), err)
	}
	l.mounted, l.implied = true, files.Implied
	return nil
}

// renew mounts the layer id anew, if it is mounted, from where it lies now.
func (t *table) renew(ctx context.Context, id digest.Digest) error {
	t.mu.Lock()
	l := t.layers[id]
	t.mu.Unlock()
	if l == nil {
		return nil
	}
	l.busy.Lock()
	defer l.busy.Unlock()
	if !l.mounted || !isMountRoot(t.path(l)) {
		return nil
	}
	files, err := t.files(id)
	if err == nil {
		err = t.backend.Replace(ctx, files, t.path(l))
	}
	if err != nil {
		return fmt.Errorf("mount layer %s anew: %w", id, err)
	}
	return nil
}

// isMountRoot says whether something is mounted at path. Kernels before 5.8
// cannot say, and then it is true.
func isMountRoot(path string) bool {
	var st unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, path, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT, 0,
		&st); err != nil {
		return false
	}
	return st.Attributes_mask&unix.STATX_ATTR_MOUNT_ROOT == 0 || st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0
}

// release undoes one hold. The last one unmounts; when that fails the number
// stays taken, and sweep tries again.
func (t *table) release(l *layer) error {
	t.mu.Lock()
	l.refs--
	idle := l.refs == 0
	t.mu.Unlock()
	if !idle {
		return nil
	}
	return t.retire(l)
}

// retire unmounts a layer that nobody holds. Who holds it meanwhile waits in
// ensure, or finds it under the same number.
func (t *table) retire(l *layer) error {
	l.busy.Lock()
	defer l.busy.Unlock()
	return t.retireBusy(l)
}

// retireBusy is called with l.busy held.
func (t *table) retireBusy(l *layer) error {
	if !t.idle(l) {
		return nil
	}
	if err := t.clear(t.path(l)); err != nil {
		return err
	}
	l.mounted = false
	t.mu.Lock()
	defer t.mu.Unlock()
	if l.refs == 0 && t.layers[l.id] == l {
		delete(t.layers, l.id)
		delete(t.numbers, l.n)
	}
	return nil
}

func (t *table) idle(l *layer) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return l.refs == 0 && t.layers[l.id] == l
}

// clear unmounts and removes one mount point.
func (t *table) clear(path string) error {
	if err := t.backend.Unmount(path); err != nil {
		return fmt.Errorf("unmount layer: %w", err)
	}
	if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
		return fmt.Errorf("remove mount point: %w", err)
	}
	return nil
}

// sweep retires the layers whose unmounting failed earlier, and clears mount
// points that belong to no layer. It returns the first error and goes on. It
// does nothing while another sweep is at work, which an unmount may hold up.
func (t *table) sweep() error {
	if !t.sweeping.TryLock() {
		return nil
	}
	defer t.sweeping.Unlock()
	var first error
	note := func(err error) {
		if first == nil {
			first = err
		}
	}
	for _, l := range t.idlers() {
		if l.busy.TryLock() { // else it is being retired
			note(t.retireBusy(l))
			l.busy.Unlock()
		}
	}
	entries, err := os.ReadDir(t.dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		// later ones are at work
		if first := !t.swept.Load(); first || !strings.HasPrefix(e.Name(), mount.AsidePrefix) {
			note(t.clearStranger(e.Name()))
		}
	}
	t.swept.Store(true)
	return first
}

func (t *table) idlers() []*layer {
	t.mu.Lock()
	defer t.mu.Unlock()
	var idle []*layer
	for _, l := range t.layers {
		if l.refs == 0 {
			idle = append(idle, l)
		}
	}
	return idle
}

// clearStranger clears ROOT/m/NAME unless a layer owns it. Its number is taken
// meanwhile, and stays so until clearing succeeds: what is mounted there would
// pass for another layer. Only sweep calls it.
func (t *table) clearStranger(name string) error {
	n, _ := strconv.Atoi(name)
	if !t.takeNumber(n) {
		return nil
	}
	if err := t.clear(filepath.Join(t.dir, name)); err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.numbers, n)
	return nil
}

// takeNumber reports whether no layer has the number n, which then none gets. 0 is no number.
func (t *table) takeNumber(n int) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if l := t.numbers[n]; l != nil {
		return l.id == ""
	}
	if n > 0 {
		t.numbers[n] = &layer{n: n}
	}
	return true
}

func (t *table) inUse() map[digest.Digest]bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	used := make(map[digest.Digest]bool, len(t.layers))
	for id, l := range t.layers {
		if l.refs > 0 {
			used[id] = true
		}
	}
	return used
}
