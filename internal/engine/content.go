package engine

import (
	"context"
	"fmt"
	"io"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/content/proxy"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/errdefs"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// WriteBlob puts a blob that open gives into containerd's content store, for
// clients that want an image's original layers (push, save, export). It does
// nothing if the blob is there. Containerd verifies it; a blob that does not
// match leaves nothing behind.
//
// The content proxy reads errors its own way, so it has a bare connection.
func (e *images) WriteBlob(ctx context.Context, d ocispec.Descriptor,
	open func() (io.ReadCloser, error)) error {
	conn, err := grpc.NewClient("unix://"+e.socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer conn.Close()
	store := proxy.NewContentStore(conn)
	ctx = namespaces.WithNamespace(ctx, e.cfg.Namespace)
	if _, err := store.Info(ctx, d.Digest); err == nil {
		return nil
	} else if !errdefs.IsNotFound(err) {
		return err
	}
	r, err := open()
	if err != nil {
		return err
	}
	defer r.Close()
	if err := content.WriteBlob(ctx, store, "dewpoint-"+d.Digest.String(), r, d); err != nil {
		return fmt.Errorf("store blob %s: %w", d.Digest, err)
	}
	return nil
}
