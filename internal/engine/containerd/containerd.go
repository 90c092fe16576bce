// Package containerd reaches one containerd: the system's, or a private one that it starts and keeps alive.
//
// A [Client] has the generated stubs of containerd's API. Its calls carry the namespace, wait while
// containerd is being restarted, are bounded in time, and give errors of package errdefs. It holds no
// state of containers.
//
// A [Private] is a containerd of the engine's own, with a configuration that this package writes. It is a
// session of its own: it outlives the daemon, as shims and containers outlive both, and the next daemon
// adopts it by its socket and pid file. One that has died, or cannot be reached, is started anew. It does
// not flush its database, which package metadb makes up for.
package containerd

import "log/slog"

// Config says which containerd is meant. All but what says so is required.
type Config struct {
	Address           string // of the socket
	Root              string // of the engine, kept over a reboot
	State             string // of the engine, gone after a reboot
	Program           string // of a private one; "" is beside this program, then in PATH
	Snapshotter       string
	SnapshotterSocket string // of the proxy plugin Snapshotter
	DiffSocket        string // of the diff proxy plugin, used where containerd has those; "" is none
	Log               *slog.Logger
}
