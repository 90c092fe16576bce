// Package datafs serves layers that are not whole yet.
//
// A layer may be mounted while its data has holes. EROFS reads such data through
// a file of a small FUSE file system, where a read of bytes that are there is
// answered from the layer's own data file, and a read of bytes that are not
// waits. Two processes share the work:
//
//	container ─▶ EROFS ─▶ kernel's FUSE ─▶ datafs ─▶ data, present
//	                                         │ ▲
//	                  want, released, held ──┘ └── add, present, fail, abort, remove
//	                                         ▼ │
//	                                        dewd
//
// datafs (Serve, a process of its own) has the FUSE connection, the layers'
// descriptors and the reads that wait. dewd's side (Client) says which layers
// there are, is told which absent bytes are wanted, fetches them, sets their
// bits in the presence file, and says so. Either may die:
//
//   - dewd: datafs goes on. Present bytes are read as ever, wants stand, and the
//     next dewd gets all descriptors, the wants, and the FUSE descriptor.
//   - datafs: dewd, which holds the FUSE descriptor too, starts another with it
//     and adds all layers again; then the kernel resends what was being served
//     (Linux 6.9). Where it cannot, the mount is lost and says so: reads fail, and
//     a new mount serves what comes later.
//   - both: the kernel ends the connection, and reads of it fail.
//
// The file system's root has a file for each layer, named by the diffID in
// hexadecimal, and for kernels that cannot mount EROFS a tree, HEX.tree, which is
// read out of the layer's EROFS index by this package instead of by the kernel.
// Names, attributes and contents never change, so the kernel may keep them.
//
// # Which reads wait
//
// The kernel asks for a page when something reads it, and for more when it
// expects that. It expects wrongly where neighbours are absent, and everything in
// one request is answered at once. So a request of several pages that are not all
// present is refused: no reader sees that, since the kernel then asks for the
// one page that is needed, and that request waits for nothing else. Presence is
// looked at again after a read has been put on the list of those that wait, and
// dewd sets bits before it says so, therefore no wake-up is lost.
//
// # Who lives how long
//
// datafs ends when, for a minute, no dewd was connected and the kernel held none
// of its files; and by Client.Shutdown. It takes its mount along.
package datafs

import (
	"errors"
	"time"

	"dewpoint/internal/layer/presence"
)

const (
	page = presence.Page

	socketName = "datafs.sock"
	logName    = "datafs.log"
	fsType     = "dewpoint"

	// idleAfter is how long a datafs without dewd and without used files lives.
	idleAfter = time.Minute
)

var (
	// ErrUnusable says that layers cannot be served lazily on this node.
	ErrUnusable = errors.New("layers cannot be read lazily here")
	// ErrClosed is returned by a Client's methods after Close or Shutdown.
	ErrClosed = errors.New("datafs client is closed")
	// ErrUnknown says that no layer of this digest was added.
	ErrUnknown = errors.New("layer is not served by datafs")
)
