// Package image holds what the OCI image specification says of an image as
// plain values: references, digests, manifests, layers, platforms. It does no
// I/O; package registry fetches, package layer stores.
package image

import (
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Compression names how a layer blob is packed.
type Compression string

const (
	Plain Compression = "plain"
	Gzip  Compression = "gzip"
	Zstd  Compression = "zstd"
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
// are kept byte for byte, since their digests are their names.
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
