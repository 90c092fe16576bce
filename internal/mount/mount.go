// Package mount makes a layer's files a directory tree of the kernel's.
package mount

import "context"

// Files is where a layer lies.
type Files struct {
	Index string // EROFS image whose external device is Data; always there
	Data  string // the layer's tar; absent once Tree is complete
	Tree  string // directory with the unpacked layer; "" unless the backend is Tree
}

// Backend mounts layers in one way. Its methods are safe for concurrent use.
type Backend interface {
	// Name is "erofs", "loop" or "tree".
	Name() string
	// Mount makes the layer visible, read-only, at the existing directory
	// target. Mounting what is mounted there already is not an error.
	Mount(ctx context.Context, f Files, target string) error
	// Unmount undoes Mount; it is not an error if nothing is mounted there.
	Unmount(target string) error
}
