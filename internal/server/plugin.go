package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	engineapi "dewpoint/internal/engine/containerd"
	"dewpoint/internal/fetch"
	"dewpoint/internal/image"
	"dewpoint/internal/layer"
	"dewpoint/internal/layer/mount"
	"dewpoint/internal/snapshot"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/content/proxy"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// layers is the puller as the snapshotter wants it.
type layers struct {
	p     *fetch.Puller
	begun time.Time // of the daemon
}

// notHere says in the snapshotter's words that a layer is missing.
func notHere(err error) error {
	if errors.Is(err, layer.ErrUnknown) {
		return fmt.Errorf("%w: %w", snapshot.ErrNotHere, err)
	}
	return err
}

func (l layers) Chain(ctx context.Context, chain digest.Digest) ([]digest.Digest, error) {
	ids, err := l.p.Chain(ctx, chain)
	return ids, notHere(err)
}

func (l layers) Fetch(ctx context.Context, w snapshot.Want) (digest.Digest, error) {
	ref, err := image.ParseReference(w.Ref)
	if err != nil {
		return "", err
	}
	return l.p.Fetch(ctx, fetch.Want{Ref: ref, Manifest: w.Manifest, Layer: w.Layer})
}

// refillWait is how long after its start a daemon waits for layers that a power
// cut has left incomplete, all together, before what stands on them can be
// mounted; later mounts wait for refillLater each. The layers go on filling
// behind it.
const (
	refillWait  = 20 * time.Second
	refillLater = 2 * time.Second
)

func (l layers) HasLayer(id digest.Digest) bool { return l.p.HasLayer(id) }

func (l layers) Files(id digest.Digest) (mount.Files, error) {
	ctx, cancel := context.WithTimeout(context.Background(),
		max(refillLater, time.Until(l.begun.Add(refillWait))))
	defer cancel()
	f, err := l.p.Files(ctx, id)
	return f, notHere(err)
}

func (l layers) Import(ctx context.Context, desc ocispec.Descriptor, r io.Reader) (digest.Digest, int64,
	error) {
	got, err := l.p.Import(ctx, image.Layer{Digest: desc.Digest, Size: desc.Size, MediaType: desc.MediaType},
		&once{r: r})
	if err != nil {
		return "", 0, err
	}
	return got.DiffID, got.Size, nil
}

// once is a source that can be read from the start, one time.
type once struct {
	r    io.Reader
	used atomic.Bool
}

func (o *once) Open(_ context.Context, _ *layer.Fill, offset int64) (io.ReadCloser, error) {
	if offset != 0 || o.used.Swap(true) {
		return nil, errors.New("the blob cannot be read again")
	}
	return io.NopCloser(o.r), nil
}

// blobs is containerd's content store. It is made before containerd runs,
// since containerd wants the plugins first.
type blobs struct {
	conn  atomic.Pointer[grpc.ClientConn]
	store atomic.Pointer[content.Store]
	root  atomic.Pointer[string] // of its files
}

// find learns where containerd keeps its blobs. Nothing is found there before.
func (b *blobs) find(ctx context.Context, c *engineapi.Client) error {
	root, err := c.ContentRoot(ctx)
	if err == nil {
		b.root.Store(&root)
	}
	return err
}

// Open implements fetch.Stored: it gives a blob of any namespace, as a file.
func (b *blobs) Open(d digest.Digest) (*os.File, error) {
	root := b.root.Load()
	if root == nil {
		return nil, fmt.Errorf("containerd is not connected yet: %w", errdefs.ErrUnavailable)
	}
	if err := d.Validate(); err != nil {
		return nil, err
	}
	return os.Open(filepath.Join(*root, "blobs", d.Algorithm().String(), d.Encoded()))
}

func (b *blobs) dial(socket string) error {
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(16<<20)))
	if err != nil {
		return err
	}
	store := proxy.NewContentStore(conn)
	b.conn.Store(conn)
	b.store.Store(&store)
	return nil
}

func (b *blobs) close() {
	if c := b.conn.Load(); c != nil {
		c.Close()
	}
}

// ReaderAt implements content.Provider.
func (b *blobs) ReaderAt(ctx context.Context, desc ocispec.Descriptor) (content.ReaderAt, error) {
	s := b.store.Load()
	if s == nil {
		return nil, fmt.Errorf("containerd is not connected yet: %w", errdefs.ErrUnavailable)
	}
	return (*s).ReaderAt(ctx, desc)
}
