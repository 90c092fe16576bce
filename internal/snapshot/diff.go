package snapshot

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/diff"
	"github.com/containerd/containerd/v2/core/diff/apply"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/storage"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// readSize is how much of a blob one request to containerd's content store
// asks for.
const readSize = 1 << 20

// Diff is containerd's diff plugin. For layers that containerd fetched and
// wants extracted into a snapshot of ours it puts a file into the store instead;
// everything else it leaves to the next differ in containerd's configuration
// by ErrNotImplemented. It is safe for concurrent use.
type Diff struct {
	snapshotter *Snapshotter
	content     content.Provider
}

var (
	_ diff.Applier  = (*Diff)(nil)
	_ diff.Comparer = (*Diff)(nil)
)

// NewDiff returns the diff plugin of s. Blobs are read from containerd's
// content store, in the namespace that the caller is in.
func NewDiff(s *Snapshotter, blobs content.Provider) *Diff {
	return &Diff{snapshotter: s, content: blobs}
}

// Compare is not implemented: containerd's walking differ does it.
func (d *Diff) Compare(context.Context, []mount.Mount, []mount.Mount, ...diff.Opt) (ocispec.Descriptor,
	error) {
	return ocispec.Descriptor{}, fmt.Errorf("compare: %w", errdefs.ErrNotImplemented)
}

// Apply makes the extraction whose mounts these are an image layer, so that
// Commit needs no directory, and returns the descriptor of the uncompressed
// layer. When the blob cannot be imported Apply extracts it into the mounts.
// Mounts that are not those of an empty extraction of ours give
// ErrNotImplemented.
func (d *Diff) Apply(ctx context.Context, desc ocispec.Descriptor, mounts []mount.Mount,
	opts ...diff.ApplyOpt) (ocispec.Descriptor, error) {
	x, err := d.snapshotter.extracting(ctx, mounts)
	if err != nil {
		return ocispec.Descriptor{}, fmt.Errorf("apply layer %s: %w", desc.Digest, err)
	}
	if ns, ok := namespaces.Namespace(ctx); ok {
		ctx = namespaces.WithNamespace(ctx, ns)
	}
	diffID, size, err := d.obtain(ctx, desc, x)
	if err == nil && !x.fits(diffID) {
		return layerDescriptor(diffID, size), nil // not what the image promised: containerd says so
	}
	if err == nil {
		err = d.snapshotter.mark(ctx, x, diffID)
	}
	if err == nil {
		return layerDescriptor(diffID, size), nil
	}
	if ctx.Err() != nil {
		return ocispec.Descriptor{}, context.Cause(ctx)
	}
	d.snapshotter.log.Warn("layer becomes a directory", "layer", desc.Digest, "chain", x.chain, "why", err)
	return apply.NewFileSystemApplier(d.content).Apply(ctx, desc, mounts, opts...)
}

func layerDescriptor(diffID digest.Digest, size int64) ocispec.Descriptor {
	return ocispec.Descriptor{MediaType: ocispec.MediaTypeImageLayer, Digest: diffID, Size: size}
}

// obtain finds the layer in the store, or imports the blob.
func (d *Diff) obtain(ctx context.Context, desc ocispec.Descriptor, x extracting) (digest.Digest, int64,
	error) {
	diffID, err := d.snapshotter.find(ctx, x.extraction, false)
	if err == nil {
		return diffID, 0, nil
	}
	if !errors.Is(err, ErrNotHere) {
		return "", 0, err
	}
	blob, err := d.content.ReaderAt(ctx, desc)
	if err != nil {
		return "", 0, fmt.Errorf("read blob %s: %w", desc.Digest, err)
	}
	defer blob.Close()
	r := bufio.NewReaderSize(io.NewSectionReader(blob, 0, blob.Size()), readSize)
	return d.snapshotter.layers.Import(ctx, desc, r)
}

// extracting is an extraction under way, with its active snapshot.
type extracting struct {
	extraction
	key, id string
}

// extracting finds the extraction that mounts belong to.
func (s *Snapshotter) extracting(ctx context.Context, mounts []mount.Mount) (extracting, error) {
	id, ok := s.roots.idOf(mounts)
	if !ok || !empty(s.roots.upper(id)) {
		return extracting{}, errdefs.ErrNotImplemented
	}
	x := extracting{id: id}
	err := s.view(ctx, func(ctx context.Context) error {
		keys, err := idMap(ctx)
		if err != nil {
			return err
		}
		x.key = keys[id]
		_, info, _, err := storage.GetInfo(ctx, x.key)
		if err != nil {
			return err
		}
		var ok bool
		x.extraction, ok = extractionOf(ctx, x.key, info.Parent, info.Labels)
		if !ok || info.Kind != snapshots.KindActive {
			return errdefs.ErrNotImplemented
		}
		return nil
	})
	if errdefs.IsNotFound(err) {
		err = errdefs.ErrNotImplemented
	}
	return x, err
}

// idOf returns the id of the active snapshot whose writable directory mounts
// end in.
func (r *roots) idOf(mounts []mount.Mount) (string, bool) {
	if len(mounts) != 1 {
		return "", false
	}
	dir := mounts[0].Source
	if mounts[0].Type == "overlay" {
		dir = ""
		for _, o := range mounts[0].Options {
			if v, ok := strings.CutPrefix(o, "upperdir="); ok {
				dir = v
			}
		}
	}
	id := filepath.Base(filepath.Dir(dir))
	return id, dir == r.upper(id)
}

// mark makes an active snapshot one that Commit makes an image layer. It
// survives a restart from when it returns.
func (s *Snapshotter) mark(ctx context.Context, x extracting, diffID digest.Digest) error {
	if l := s.roots.layerOf(x.id); l != nil && l.id == diffID {
		return nil
	}
	l := s.table.hold(diffID)
	err := s.table.ensure(ctx, l)
	if err == nil {
		err = s.recordMark(ctx, x, l)
	}
	if err != nil {
		s.drop(l)
	}
	return err
}

func (s *Snapshotter) recordMark(ctx context.Context, x extracting, l *layer) error {
	kept := false
	err := s.update(ctx, func(ctx context.Context) error {
		id, info, _, err := storage.GetInfo(ctx, x.key)
		if err != nil {
			return err
		}
		if id != x.id || info.Labels[LabelLayer] != "" {
			return fmt.Errorf("snapshot %s changed meanwhile: %w", x.key, errdefs.ErrFailedPrecondition)
		}
		info.Labels = withLayer(info.Labels, l)
		if _, err := storage.UpdateInfo(ctx, info); err != nil {
			return err
		}
		s.roots.keep(x.id, l)
		kept = true
		return nil
	})
	if err != nil && kept {
		s.roots.forget(x.id)
	}
	return err
}
