// Package mount makes a layer's files a directory tree of the kernel's.
//
// A layer is an EROFS index whose external device is the layer's tar, or, for
// kernels without EROFS, an unpacked directory. A Backend makes either of them
// visible at a directory of its own, read-only, and overlayfs takes those
// directories as its lower ones. There are three:
//
//   - "erofs" mounts the index file itself, with device= naming the tar
//     (Linux 6.12 and newer);
//   - "loop" puts a loop device under each of the two files first (older ones);
//   - "tree" binds the unpacked directory.
//
// Which of them works depends on more than the kernel's version (block sizes,
// build options, the file system below, missing privileges), so Probe really
// mounts a small layer with each, stacks overlayfs on it, and compares what it
// reads. Its Findings are what `dew doctor` prints.
//
// A mount outlives the daemon and, with all its state, belongs to the kernel:
// Mounted and List read from there what is mounted, so nothing is recorded
// elsewhere and a daemon that starts again takes up what it finds.
//
// Layers are mounted nosuid and nodev. Overlayfs applies its own mount's flags,
// not those of its layers, so containers see setuid programs and devices as
// ever, while a user of the node who strays into a layer's mount gains nothing.
package mount

import (
	"context"
	"errors"
	"fmt"

	"dewpoint/internal/spec"
)

// ErrUnusable is wrapped by Probe's error if the backend that was asked for,
// or every backend, does not work on this node.
var ErrUnusable = errors.New("mount backend does not work here")

// ErrOccupied is wrapped by Mount's error if something else is mounted at target.
var ErrOccupied = errors.New("something else is mounted there")

// Files is where a layer lies. Paths are absolute.
type Files struct {
	Index string // EROFS image whose external device is Data; always there
	Data  string // the layer's tar; absent once Tree is complete
	Tree  string // directory with the unpacked layer; "" unless the backend is Tree
	// Served is a directory in which a layer that is not whole yet can be seen
	// already; "" unless the backend cannot mount its Index over Data then.
	Served string
	// Around, unless nil, is called with what mounts a layer whose Data are
	// served at target, and calls it.
	Around func(target string, mount func() error) error
	// Implied are the directories that the layer has entries in and does not
	// describe, parents first, without the root. The mount shows made-up
	// attributes for them (0755, root's); where a layer below has the
	// directory, tree.Parents makes what puts that right. Not to be written.
	Implied []string
}

// Backend mounts layers in one way. Its methods are safe for concurrent use,
// also by several processes, except for one target at a time.
type Backend interface {
	// Name is "erofs", "loop" or "tree".
	Name() string
	// Mount makes the layer visible, read-only, at the existing directory
	// target. Mounting what is mounted there already is not an error.
	Mount(ctx context.Context, f Files, target string) error
	// Replace mounts the layer anew at target, where it is mounted already, in
	// the way that f says now. Whoever looks at the path meanwhile sees the
	// layer; what uses the old mount keeps it.
	Replace(ctx context.Context, f Files, target string) error
	// Unmount undoes Mount; it is not an error if nothing is mounted there.
	// What still uses the mount (a stack above it, an open file) keeps working.
	Unmount(target string) error
}

// The backends of spec.Mounts.
const (
	EROFS = "erofs"
	Loop  = "loop"
	Tree  = "tree"
)

// New returns a backend by name without trying it.
func New(name string) (Backend, error) {
	switch name {
	case EROFS:
		return &backend{name: EROFS, attach: attachFile}, nil
	case Loop:
		return &backend{name: Loop, attach: attachLoop}, nil
	case Tree:
		return &backend{name: Tree, attach: attachTree}, nil
	}
	return nil, fmt.Errorf("mount backend %q: there are %v", name, spec.Mounts)
}
