// Package image holds what the OCI image specification says of an image as
// plain values: references, digests, manifests, layers, platforms. It does no
// I/O; package registry fetches, package layer stores.
//
// An image arrives as up to three JSON documents, each named by its digest:
// an index that lists platforms (optional), the manifest of one platform, and
// that platform's config. Kind tells which of them some bytes are, Select
// picks the manifest for a platform, and New joins the documents to an Image.
// New is the one gate: an Image that it returned has documents that hash to
// their descriptors, as many layers as diffIDs, and no layer that Dewpoint
// could not fetch and unpack. Everything else in the tree relies on that.
//
// OCI and Docker schema 2 documents are the same but for their media types,
// and are treated alike. Docker schema 1 is refused. Layers are named by
// sha256; index, manifest and config may be named by sha512 too.
package image

import (
	"fmt"
	"slices"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/identity"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Limits that a document or an image must keep. They bound memory: documents
// are the only part of an image that is ever held whole.
const (
	MaxManifest = 4 << 20 // bytes of an index or a manifest
	MaxConfig   = 8 << 20 // bytes of a config
	MaxLayers   = 500     // as many as overlayfs stacks
	MaxLayer    = 1 << 40 // bytes of one layer's blob
)

// Layer is one layer of an image: the blob as the registry serves it, and the
// identity of the tar inside it.
type Layer struct {
	Digest    digest.Digest // of the blob as served
	Size      int64         // bytes as served
	MediaType string
	DiffID    digest.Digest // sha256 of the uncompressed tar (OCI image config, rootfs.diff_ids)
}

// Image is one image for one platform, resolved and parsed. The raw documents
// are kept byte for byte, since their digests are their names. One layer may
// occur more than once in Layers. An Image is not changed once made.
//
// As JSON, an Image is its reference, descriptors and raw documents; what is
// parsed is made again, and verified again, when it is read.
type Image struct {
	Ref      Reference
	Target   ocispec.Descriptor // what the reference names: an index or the manifest itself
	Index    []byte             // raw index, nil if Target is the manifest
	Desc     ocispec.Descriptor // of the platform's manifest
	Manifest []byte
	ConfigD  ocispec.Descriptor
	Config   []byte
	Spec     ocispec.Image // Config, parsed
	Layers   []Layer       // bottom first
}

// New joins the documents of one image and verifies them. index is nil if
// target is the manifest's descriptor itself. The slices are kept, not copied.
// Errors wrap ErrInvalid, or one of the more telling sentinels beside it.
func New(ref Reference, target ocispec.Descriptor, index []byte, desc ocispec.Descriptor, manifest,
	config []byte) (*Image, error) {
	img := &Image{Ref: ref, Target: target, Index: index, Desc: desc, Manifest: manifest, Config: config}
	if err := img.parse(); err != nil {
		return nil, err
	}
	return img, nil
}

func (i *Image) parse() error {
	if err := i.checkTarget(); err != nil {
		return err
	}
	if err := CheckBytes("manifest", i.Desc, i.Manifest); err != nil {
		return err
	}
	m, err := ParseManifest(i.Manifest)
	if err != nil {
		return err
	}
	i.ConfigD = m.Config
	if err := CheckBytes("config", m.Config, i.Config); err != nil {
		return err
	}
	if i.Spec, err = ParseConfig(i.Config); err != nil {
		return err
	}
	i.Layers, err = joinLayers(m.Layers, i.Spec.RootFS.DiffIDs)
	return err
}

// checkTarget verifies that the target is the index that lists the manifest,
// or the manifest itself.
func (i *Image) checkTarget() error {
	if i.Index == nil {
		if i.Target.Digest != i.Desc.Digest || i.Target.Size != i.Desc.Size {
			return fmt.Errorf("%w: target %s is not the manifest %s", ErrInvalid, i.Target.Digest, i.Desc.Digest)
		}
		return nil
	}
	if err := CheckBytes("index", i.Target, i.Index); err != nil {
		return err
	}
	idx, err := ParseIndex(i.Index)
	if err != nil {
		return err
	}
	for _, d := range idx.Manifests {
		if d.Digest == i.Desc.Digest {
			return nil
		}
	}
	return fmt.Errorf("%w: the index does not list the manifest %s", ErrInvalid, i.Desc.Digest)
}

// ChainIDs names each prefix of the layers, bottom first, as containerd names
// the snapshots that hold them. There are as many as layers.
func (i *Image) ChainIDs() []digest.Digest {
	ids := make([]digest.Digest, len(i.Layers))
	for n, l := range i.Layers {
		ids[n] = l.DiffID
	}
	return identity.ChainIDs(ids)
}

// Size is the number of compressed bytes of all layers, one that occurs twice
// counted once.
func (i *Image) Size() int64 {
	var sum int64
	for _, l := range i.Unique() {
		sum += l.Size
	}
	return sum
}

// HasLayer reports whether the image has the layer of that diffID.
func (i *Image) HasLayer(diffID digest.Digest) bool {
	return slices.ContainsFunc(i.Layers, func(l Layer) bool { return l.DiffID == diffID })
}

// Unique gives the layers in order, each blob once.
func (i *Image) Unique() []Layer {
	seen := make(map[digest.Digest]bool, len(i.Layers))
	out := make([]Layer, 0, len(i.Layers))
	for _, l := range i.Layers {
		if !seen[l.Digest] {
			seen[l.Digest] = true
			out = append(out, l)
		}
	}
	return out
}

// Platform is what the image's config says it runs on.
func (i *Image) Platform() ocispec.Platform { return i.Spec.Platform }
