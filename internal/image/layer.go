package image

import (
	"bytes"
	"fmt"
	"strings"

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

// Docker's media types. OCI's are in image-spec.
const (
	DockerManifestList = "application/vnd.docker.distribution.manifest.list.v2+json"
	DockerManifest     = "application/vnd.docker.distribution.manifest.v2+json"
	DockerSchema1      = "application/vnd.docker.distribution.manifest.v1+json"
	DockerSchema1JWS   = "application/vnd.docker.distribution.manifest.v1+prettyjws"
	DockerConfig       = "application/vnd.docker.container.image.v1+json"
	DockerLayer        = "application/vnd.docker.image.rootfs.diff.tar"
	DockerForeignLayer = "application/vnd.docker.image.rootfs.foreign.diff.tar"
)

// Compression is what the layer's media type says. Registries are known to
// serve other than they say: compare with Sniff before inflating.
func (l Layer) Compression() Compression {
	c, _ := compressionOf(l.MediaType)
	return c
}

// Empty reports whether the layer's tar is known to hold no entry, as a build
// step that changed nothing leaves it. Such layers occur many times in one image.
func (l Layer) Empty() bool {
	switch l.DiffID {
	case emptyTar0, emptyTar1K, emptyTar10K:
		return true
	}
	return false
}

// The sha256 of 0, 1,024 and 10,240 zero bytes: an empty tar as no writer
// makes it, as Go's writes it, and as GNU tar does.
const (
	emptyTar0   digest.Digest = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
	emptyTar1K  digest.Digest = "sha256:5f70bf18a086007016e948b04aed3b82103a36bea41755b6cddfaf10ace3c6ef"
	emptyTar10K digest.Digest = "sha256:84ff92691f909a05b224e1c56abb4864f01b4f8e3c854e4bb4c7baf1d3f6d652"
)

// SniffLen is the number of bytes that Sniff wants to see.
const SniffLen = 4

// Sniff tells a blob's compression from its first bytes. Fewer than SniffLen
// bytes are enough only if the blob has no more. What is neither gzip nor zstd
// is Plain.
func Sniff(b []byte) Compression {
	switch {
	case bytes.HasPrefix(b, []byte{0x1f, 0x8b}):
		return Gzip
	case bytes.HasPrefix(b, []byte{0x28, 0xb5, 0x2f, 0xfd}):
		return Zstd
	case len(b) >= 4 && b[0]&0xf0 == 0x50 && bytes.HasPrefix(b[1:], []byte{0x2a, 0x4d, 0x18}):
		return Zstd // a skippable frame comes first
	}
	return Plain
}

// compressionOf reads a layer's media type; ok is false if it names no layer
// that Dewpoint can unpack.
func compressionOf(mediaType string) (c Compression, ok bool) {
	c, ok = layerTypes[mediaType]
	return c, ok
}

const layerNonDistributable = "application/vnd.oci.image.layer.nondistributable.v1.tar"

var layerTypes = map[string]Compression{
	DockerLayer:                     Plain,
	DockerLayer + ".gzip":           Gzip,
	DockerLayer + ".zstd":           Zstd,
	DockerForeignLayer:              Plain,
	DockerForeignLayer + ".gzip":    Gzip,
	ocispec.MediaTypeImageLayer:     Plain,
	ocispec.MediaTypeImageLayerGzip: Gzip,
	ocispec.MediaTypeImageLayerZstd: Zstd,
	layerNonDistributable:           Plain,
	layerNonDistributable + "+gzip": Gzip,
	layerNonDistributable + "+zstd": Zstd,
}

// joinLayers pairs a manifest's layers with their config's diffIDs.
func joinLayers(descs []ocispec.Descriptor, diffIDs []digest.Digest) ([]Layer, error) {
	if len(descs) != len(diffIDs) {
		return nil, fmt.Errorf("%w: the manifest lists %d layers, the config %d diff_ids", ErrInvalid, len(descs),
			len(diffIDs))
	}
	if len(descs) > MaxLayers {
		return nil, fmt.Errorf("%w: %d layers, more than the %d that overlayfs stacks; flatten the image",
			ErrUnsupported, len(descs), MaxLayers)
	}
	sizes := make(map[digest.Digest]int64, len(descs))
	layers := make([]Layer, 0, len(descs))
	for n, d := range descs {
		if err := checkLayer(d, diffIDs[n]); err != nil {
			return nil, fmt.Errorf("layer %d: %w", n+1, err)
		}
		if s, ok := sizes[d.Digest]; ok && s != d.Size {
			return nil, fmt.Errorf("layer %d: %w: %s occurs with sizes %d and %d", n+1, ErrInvalid, d.Digest, s,
				d.Size)
		}
		sizes[d.Digest] = d.Size
		layers = append(layers, Layer{Digest: d.Digest, Size: d.Size, MediaType: d.MediaType, DiffID: diffIDs[n]})
	}
	return layers, nil
}

func checkLayer(d ocispec.Descriptor, diffID digest.Digest) error {
	if strings.HasSuffix(d.MediaType, "+encrypted") {
		return fmt.Errorf("%w: the layer is encrypted (%s); push the image unencrypted", ErrUnsupported,
			d.MediaType)
	}
	if _, ok := compressionOf(d.MediaType); !ok {
		return fmt.Errorf("%w: media type %q; a layer must be a tar, plain or with gzip or zstd", ErrUnsupported,
			d.MediaType)
	}
	if undistributed(d) {
		return fmt.Errorf("%w: the layer is non-distributable and lies outside the registry (%s); build on another base image", ErrUnsupported, d.MediaType)
	}
	if d.Size < 0 || d.Size > MaxLayer {
		return fmt.Errorf("%w: size %d is not within 0 to %d", ErrInvalid, d.Size, int64(MaxLayer))
	}
	if err := checkDigest(d.Digest, digest.SHA256); err != nil {
		return err
	}
	if err := checkDigest(diffID, digest.SHA256); err != nil {
		return fmt.Errorf("diff_id: %w", err)
	}
	return nil
}

// undistributed reports a layer that its registry is not meant to serve. OCI's
// non-distributable layers that name no other place are ordinary blobs.
func undistributed(d ocispec.Descriptor) bool {
	return strings.HasPrefix(d.MediaType, DockerForeignLayer) ||
		strings.HasPrefix(d.MediaType, layerNonDistributable) && len(d.URLs) > 0
}
