// Package snapshot is containerd's snapshotter, and its diff plugin, over layers that are one file each.
//
// A committed snapshot stands for a layer on top of its parent's layers, an active one for a container's
// writable directory on top of them. A chain may mix two kinds of committed snapshots:
//
//   - An image layer owns nothing but a reference to a layer of the node's store, by diffID. The layer is
//     mounted once, at ROOT/m/N, for all snapshots on it, until the last of them is removed. N is small, so
//     that the options of an overlay mount of 127 layers fit into a page.
//   - A local layer (built, imported, or fetched by containerd) is a directory, ROOT/snapshots/ID/fs, as in
//     containerd's overlay snapshotter.
//
// Active snapshots have ROOT/snapshots/ID/{fs,work}; views have fs alone. Where an image layer has entries in
// directories that it does not describe, a tree of these as they are below stands above its mount, ROOT/f/ID
// (type corrections).
//
// An image layer comes about in one of three ways. The remote-snapshot protocol: Prepare carries the chain's
// name in the label containerd.io/snapshot.ref; when the layer is here or can be fetched, Prepare commits it
// and answers ErrAlreadyExists. The diff plugin: containerd has fetched the blob, and Diff.Apply turns it
// into a file of the store. Or late: Commit of an extraction whose layer has arrived meanwhile takes the file
// and drops the tree. All three check that the parent's chain and the diffID hash to the name asked for; what
// does not is left to containerd.
//
// ROOT/metadata.db (core/snapshots/storage on bbolt) is the only authority: labels of the snapshot
// (LabelLayer, LabelMount), written in the transaction that makes it one, have its layer and N. So dewd may
// be killed anywhere. New removes a mount or directory that no record names, and mounts the layers of active
// snapshots. One containerd per root: its garbage collector removes every snapshot that its own database does
// not know.
package snapshot

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/storage"
	"github.com/containerd/continuity/fs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	bolt "go.etcd.io/bbolt"
	berrors "go.etcd.io/bbolt/errors"

	"dewpoint/internal/layer/mount"
)

// Labels of image-layer snapshots. Clients see them and cannot set them.
const (
	LabelLayer = "dewpoint/layer" // diffID
	LabelMount = "dewpoint/mount" // N of ROOT/m/N
)

// ErrNotHere is what Layers.Chain returns for a chain of which a layer is
// missing or unknown.
var ErrNotHere = errors.New("layer is not here")

// ErrInUse is what New returns when another process has the root open.
var ErrInUse = errors.New("snapshotter root is in use by another process")

// Layers gives the snapshotter the image layers of the node's store. Its
// methods are called concurrently, and never while a lock of this package is
// held, so they may call InUse.
//
// A layer that InUse reports must not be removed. The snapshotter counts a
// layer as in use before it asks Files for it; a store that decides by InUse
// and removes under the same lock that Files takes never removes what a
// snapshot is about to stand on.
type Layers interface {
	// Chain returns the diffIDs, bottom first, of a chain whose layers are all
	// here and readable; ErrNotHere otherwise. It is called within
	// containerd's own transactions and must be quick.
	Chain(ctx context.Context, chain digest.Digest) ([]digest.Digest, error)
	// Fetch makes a layer of an image readable, fetching what is missing, and
	// starts the layers above it in the background. It blocks.
	Fetch(ctx context.Context, w Want) (digest.Digest, error)
	// HasLayer reports whether a layer is readable, without doing anything about it.
	HasLayer(id digest.Digest) bool
	// Files says where a readable layer lies; ErrNotHere when it does not.
	Files(id digest.Digest) (mount.Files, error)
	// Import turns a layer blob of desc.Size bytes, which containerd fetched,
	// into a readable layer. It checks the blob against desc.Digest. The size
	// is that of the uncompressed tar, in bytes.
	Import(ctx context.Context, desc ocispec.Descriptor, blob io.Reader) (diffID digest.Digest, size int64,
		err error)
}

// Want names one layer of an image as containerd's labels do.
type Want struct {
	Ref      string          // the image's reference, as the client gave it
	Manifest digest.Digest   // "" when the client did not say
	Layer    digest.Digest   // the compressed layer
	Layers   []digest.Digest // this layer and those above it, possibly cut short
	Chain    digest.Digest   // the chain that ends with this layer
	DiffID   digest.Digest   // "" before containerd 2.4
}

// Config says what a Snapshotter works with.
type Config struct {
	Root    string // directory; keep it short, "/var/lib/dewpoint" is
	Layers  Layers
	Backend mount.Backend
	Log     *slog.Logger // nil discards
	// Overlay are more options for every overlay mount, such as
	// "redirect_dir=on"; those that the kernel needs are added anyway.
	Overlay []string
	// LockWait bounds the wait for another process to close Root; 0 is 2 s.
	LockWait time.Duration
	// Prepared is told of a container's snapshot before its client can mount
	// it: the diffIDs below, bottom first, if all are image layers. gone is closed
	// when the snapshot is removed. It is called with no lock held, and Prepare
	// waits for it. May be nil.
	Prepared func(layers []digest.Digest, gone <-chan struct{})
}

// Snapshotter implements containerd's snapshots.Snapshotter and Cleaner. It
// is safe for concurrent use.
type Snapshotter struct {
	root   string
	layers Layers
	log    *slog.Logger
	ms     *storage.MetaStore
	table  *table
	fixes  *corrections
	roots  *roots
	tell   func([]digest.Digest, <-chan struct{}) // Config.Prepared

	mu   sync.Mutex
	gone map[string]chan struct{} // by snapshot id, what Config.Prepared was given; guarded by mu
}

var (
	_ snapshots.Snapshotter = (*Snapshotter)(nil)
	_ snapshots.Cleaner     = (*Snapshotter)(nil)
)

// New opens the snapshotter at cfg.Root and repairs what a crash or a reboot
// left: see the package's text. A layer that cannot be mounted is logged, and
// the error comes back from the Mounts of the snapshots that need it.
func New(ctx context.Context, cfg Config) (*Snapshotter, error) {
	root, err := filepath.Abs(cfg.Root)
	if err != nil {
		return nil, err
	}
	if err := makeRoot(root); err != nil {
		return nil, err
	}
	ms, err := openStore(filepath.Join(root, "metadata.db"), cfg.LockWait)
	if err != nil {
		return nil, err
	}
	s := &Snapshotter{
		root: root, layers: cfg.Layers, log: cfg.Log, ms: ms, tell: cfg.Prepared,
		gone: make(map[string]chan struct{}),
	}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	if s.fixes, err = openCorrections(filepath.Join(root, "f")); err != nil {
		ms.Close()
		return nil, fmt.Errorf("open snapshotter %s: %w", root, err)
	}
	s.table = newTable(filepath.Join(root, "m"), cfg.Backend, cfg.Layers.Files)
	s.roots = newRoots(root, s.table, s.fixes, cfg.Overlay, s.log)
	if err := s.reconcile(ctx); err != nil {
		ms.Close()
		return nil, fmt.Errorf("open snapshotter %s: %w", root, err)
	}
	return s, nil
}

func makeRoot(root string) error {
	for _, dir := range []string{root, filepath.Join(root, "m"), filepath.Join(root, "snapshots")} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return err
		}
	}
	ok, err := fs.SupportsDType(root)
	if err != nil {
		return err
	}
	if !ok {
		return fmt.Errorf("%s: its file system does not tell file types in directories (on XFS: made with ftype=0), which overlayfs needs", root)
	}
	return nil
}

// openStore opens the metadata, which takes a lock on the file.
func openStore(file string, wait time.Duration) (*storage.MetaStore, error) {
	if wait == 0 {
		wait = 2 * time.Second
	}
	ms, err := storage.NewMetaStore(file, func(o *bolt.Options) error {
		o.Timeout = wait
		o.FreelistType = bolt.FreelistMapType
		return nil
	})
	if err != nil {
		return nil, err
	}
	_, tx, err := ms.TransactionContext(context.Background(), false)
	if errors.Is(err, berrors.ErrTimeout) {
		return nil, fmt.Errorf("%s: %w", file, ErrInUse)
	}
	if err != nil {
		return nil, err
	}
	return ms, tx.Rollback()
}

// Close releases the metadata. Mounts stay, for the containers that use them.
func (s *Snapshotter) Close() error { return s.ms.Close() }

// InUse returns the diffIDs of the layers that a snapshot stands on or is
// about to: those must stay in the store. The caller owns the map.
func (s *Snapshotter) InUse() map[digest.Digest]bool { return s.table.inUse() }

// Renew mounts a layer anew, from where Layers.Files says that it lies now. What
// runs already keeps its mount. It does nothing if the layer is not mounted.
func (s *Snapshotter) Renew(ctx context.Context, id digest.Digest) error {
	return s.table.renew(ctx, id)
}

func (s *Snapshotter) view(ctx context.Context, fn func(context.Context) error) error {
	return s.ms.WithTransaction(ctx, false, fn)
}

func (s *Snapshotter) update(ctx context.Context, fn func(context.Context) error) error {
	return s.ms.WithTransaction(ctx, true, fn)
}
