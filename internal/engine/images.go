package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"runtime"

	contentapi "github.com/containerd/containerd/api/services/content/v1"
	imagesapi "github.com/containerd/containerd/api/services/images/v1"
	"github.com/containerd/containerd/api/types"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/protobuf/types/known/fieldmaskpb"

	"dewpoint/internal/engine/containerd"
	"dewpoint/internal/image"
)

// RemoveImage forgets an image; containerd's garbage collector then lets go
// of what no other image and no container needs. With sync it has done so
// when RemoveImage returns.
func (e *images) RemoveImage(ctx context.Context, name string, sync bool) error {
	_, err := e.c.Images.Delete(ctx, &imagesapi.DeleteImageRequest{Name: name, Sync: sync})
	if err == nil || errdefs.IsNotFound(err) {
		e.state.ImageRemoved(name)
	}
	return wrap(err, "remove image %s", name)
}

// maxDocument bounds the index, manifest or configuration that is read.
const maxDocument = 16 << 20

// LocalImage reads an image back that was registered, so that a container can
// start without its registry. The error is errdefs.ErrNotFound if the image
// or a document of it is not here.
func (e *images) LocalImage(ctx context.Context, ref image.Reference) (*image.Image, error) {
	img, err := e.localImage(ctx, ref)
	if err != nil {
		return nil, fmt.Errorf("local image %s: %w", ref, err)
	}
	return img, nil
}

func (e *images) localImage(ctx context.Context, ref image.Reference) (*image.Image, error) {
	r, err := e.c.Images.Get(ctx, &imagesapi.GetImageRequest{Name: ref.String()})
	if err != nil {
		return nil, err
	}
	img := &image.Image{Ref: ref, Target: ociDescriptor(r.Image.Target), Desc: ociDescriptor(r.Image.Target)}
	raw, err := e.readContent(ctx, img.Target)
	if err != nil {
		return nil, err
	}
	if isIndex(img.Target.MediaType) {
		img.Index = raw
		if img.Desc, raw, err = e.presentManifest(ctx, raw); err != nil {
			return nil, err
		}
	}
	img.Manifest = raw
	var m ocispec.Manifest
	if err := json.Unmarshal(raw, &m); err != nil {
		return nil, err
	}
	img.ConfigD = m.Config
	if img.Config, err = e.readContent(ctx, m.Config); err != nil {
		return nil, err
	}
	if err := json.Unmarshal(img.Config, &img.Spec); err != nil {
		return nil, err
	}
	if len(m.Layers) != len(img.Spec.RootFS.DiffIDs) {
		return nil, fmt.Errorf("%d layers but %d diff IDs", len(m.Layers), len(img.Spec.RootFS.DiffIDs))
	}
	for i, l := range m.Layers {
		img.Layers = append(img.Layers,
			image.Layer{Digest: l.Digest, Size: l.Size, MediaType: l.MediaType, DiffID: img.Spec.RootFS.DiffIDs[i]})
	}
	return img, nil
}

// presentManifest takes the manifest that was registered with the index: the
// first one for this machine's kind that is here.
func (e *images) presentManifest(ctx context.Context, index []byte) (ocispec.Descriptor, []byte, error) {
	var idx ocispec.Index
	if err := json.Unmarshal(index, &idx); err != nil {
		return ocispec.Descriptor{}, nil, err
	}
	err := fmt.Errorf("no manifest for linux/%s: %w", runtime.GOARCH, errdefs.ErrNotFound)
	for _, d := range idx.Manifests {
		if d.Platform != nil && (d.Platform.OS != "linux" || d.Platform.Architecture != runtime.GOARCH) {
			continue
		}
		raw, rerr := e.readContent(ctx, d)
		if rerr == nil {
			return d, raw, nil
		}
		err = rerr
	}
	return ocispec.Descriptor{}, nil, err
}

func isIndex(mediaType string) bool {
	return mediaType == ocispec.MediaTypeImageIndex ||
		mediaType == "application/vnd.docker.distribution.manifest.list.v2+json"
}

// readContent reads a small blob and checks it against its digest.
func (e *images) readContent(ctx context.Context, d ocispec.Descriptor) ([]byte, error) {
	if d.Size > maxDocument {
		return nil, fmt.Errorf("%s has %d bytes, more than a document may have", d.Digest, d.Size)
	}
	ctx, cancel := context.WithTimeout(ctx, containerd.CallTimeout)
	defer cancel()
	s, err := e.c.Content.Read(ctx, &contentapi.ReadContentRequest{Digest: d.Digest.String()})
	if err != nil {
		return nil, err
	}
	b := make([]byte, 0, d.Size)
	for {
		m, err := s.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("read %s: %w", d.Digest, containerd.Native(err))
		}
		if b = append(b, m.Data...); len(b) > maxDocument {
			return nil, fmt.Errorf("read %s: too long", d.Digest)
		}
	}
	if err := d.Digest.Validate(); err != nil {
		return nil, err
	}
	if got := d.Digest.Algorithm().FromBytes(b); got != d.Digest {
		return nil, fmt.Errorf("read %s: content has digest %s", d.Digest, got)
	}
	return b, nil
}

func ociDescriptor(d *types.Descriptor) ocispec.Descriptor {
	return ocispec.Descriptor{MediaType: d.MediaType, Digest: digest.Digest(d.Digest), Size: d.Size,
		Annotations: d.Annotations}
}

func fieldMask(paths []string) *fieldmaskpb.FieldMask { return &fieldmaskpb.FieldMask{Paths: paths} }

// wrap adds words to an error, and leaves nil alone.
func wrap(err error, format string, args ...any) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf(format+": %w", append(args, err)...)
}
