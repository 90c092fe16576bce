// Package datafs serves layers that are not whole yet.
//
// A layer may be mounted while its data has holes. EROFS reads such data through a file of a small FUSE file
// system. A read of present bytes is answered from the layer's own data file, a read of absent bytes waits.
//
//	container ─▶ EROFS ─▶ kernel's FUSE ─▶ datafs ─▶ data, present
//	                                         │ ▲
//	                  want, released, held ──┘ └── add, present, fail, abort, remove
//	                                         ▼ │
//	                                        dewd
//
// datafs (Serve, a process of its own) has the FUSE connection, the layers' descriptors and the waiting
// reads. dewd's side (Client) says which layers there are, learns which bytes are wanted, fetches them, sets
// their bits in the presence file, and says so. Either may die:
//
//   - dewd: datafs goes on; the next dewd gets all descriptors, the wants, and the FUSE descriptor.
//   - datafs: dewd, which holds the FUSE descriptor too, starts another and adds all layers again; then the
//     kernel resends (Linux 6.9). Where it cannot, or no other starts in 20 s, the mount is lost: reads fail
//     but of pages that the kernel has. dewd goes on trying a new mount, which serves what is mounted later.
//   - both: the kernel ends the connection, and reads of it fail.
//
// The root has a file for each layer, named by the diffID in hexadecimal, and for kernels that cannot mount
// EROFS a tree, HEX.tree, read out of the layer's index. Contents never change, so the kernel may keep them.
//
// A request of several pages that are not all present is refused: no reader sees that, since the kernel then
// asks for the one page that is needed, and that request waits. Presence is looked at again after a read is
// on the list of those that wait, and dewd sets bits before it says so: no wake-up is lost. datafs ends, with
// its mount, by Client.Shutdown, or when for a minute no dewd was connected and the kernel held none of its
// files.
package datafs

import (
	"errors"
	"fmt"
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

	errDown = fmt.Errorf("%w now: datafs has died, and does not start", ErrUnusable)
)
