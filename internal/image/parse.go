package image

import (
	"bytes"
	_ "crypto/sha256" // sha256 and sha512 digests can be verified
	_ "crypto/sha512"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// What the errors of this package wrap.
var (
	// the documents contradict themselves or the specification
	ErrInvalid     = errors.New("invalid image")
	ErrUnsupported = errors.New("unsupported image")     // well-formed, but not for Dewpoint
	ErrPlatform    = errors.New("no image for platform") // the index has none that runs here
	ErrMismatch    = errors.New("digest does not match") // bytes that do not hash to their name
	ErrTooLarge    = errors.New("document is too large") // beyond MaxManifest or MaxConfig
)

// Kind is what a JSON document is.
type Kind int

const (
	Unknown Kind = iota
	Manifest
	Index
)

// KindOf tells an index from a manifest by the document itself, whatever the
// server called it. What is both or neither, schema 1, or at odds with its
// own mediaType is an error.
func KindOf(b []byte) (Kind, error) {
	p, err := examine(b)
	if err != nil {
		return Unknown, err
	}
	return p.kind()
}

// shape is what tells the kinds of document apart.
type shape struct {
	SchemaVersion int             `json:"schemaVersion"`
	MediaType     string          `json:"mediaType"`
	Config        json.RawMessage `json:"config"`
	Layers        json.RawMessage `json:"layers"`
	Manifests     json.RawMessage `json:"manifests"`
	FSLayers      json.RawMessage `json:"fsLayers"`
}

func examine(b []byte) (s shape, err error) {
	if len(b) > MaxManifest {
		return s, fmt.Errorf("%w: %d bytes of manifest, at most %d are read", ErrTooLarge, len(b), MaxManifest)
	}
	if err := json.Unmarshal(b, &s); err != nil {
		return s, fmt.Errorf("%w: manifest: %w", ErrInvalid, err)
	}
	return s, nil
}

func (s shape) kind() (Kind, error) {
	switch s.MediaType {
	case DockerSchema1, DockerSchema1JWS:
		return Unknown, errSchema1
	}
	if s.SchemaVersion == 1 || present(s.FSLayers) {
		return Unknown, errSchema1
	}
	if s.SchemaVersion != 2 {
		return Unknown, fmt.Errorf("%w: schemaVersion is %d, not 2", ErrInvalid, s.SchemaVersion)
	}
	isIndex, isManifest := present(s.Manifests), present(s.Layers) || present(s.Config)
	switch {
	case isIndex && isManifest:
		return Unknown, fmt.Errorf("%w: document is both an index and a manifest", ErrInvalid)
	case isIndex && s.claims(ocispec.MediaTypeImageIndex, DockerManifestList):
		return Index, nil
	case isManifest && s.claims(ocispec.MediaTypeImageManifest, DockerManifest):
		return Manifest, nil
	case isIndex || isManifest:
		return Unknown, fmt.Errorf("%w: mediaType %q contradicts the document", ErrInvalid, s.MediaType)
	}
	return Unknown, fmt.Errorf("%w: document is neither an index nor a manifest", ErrInvalid)
}

var errSchema1 = fmt.Errorf("%w: the registry has it in Docker schema 1 only, which is no longer read; push it again with a current Docker or skopeo", ErrUnsupported)

func present(r json.RawMessage) bool { return len(r) > 0 && !bytes.Equal(r, []byte("null")) }

// claims reports whether the document calls itself one of types, or nothing.
func (s shape) claims(types ...string) bool {
	for _, t := range types {
		if s.MediaType == t {
			return true
		}
	}
	return s.MediaType == ""
}

// MediaType is the media type of an index or manifest: its own word, else the
// server's, else the one that OCI gives its kind.
func MediaType(b []byte, served string) (string, error) {
	s, err := examine(b)
	if err != nil {
		return "", err
	}
	k, err := s.kind()
	if err != nil {
		return "", err
	}
	if s.MediaType != "" {
		return s.MediaType, nil
	}
	oci, docker := ocispec.MediaTypeImageManifest, DockerManifest
	if k == Index {
		oci, docker = ocispec.MediaTypeImageIndex, DockerManifestList
	}
	if served == docker {
		return docker, nil
	}
	return oci, nil
}

// ParseIndex reads an index or a Docker manifest list. Its entries have valid
// digests and sizes; they may be of any media type.
func ParseIndex(b []byte) (ocispec.Index, error) {
	var idx ocispec.Index
	if err := parseAs(b, Index, &idx); err != nil {
		return idx, err
	}
	for n, d := range idx.Manifests {
		if err := checkDocument(d, MaxManifest); err != nil {
			return ocispec.Index{}, fmt.Errorf("manifest %d of the index: %w", n+1, err)
		}
	}
	return idx, nil
}

// ParseManifest reads an image's manifest. Its config's descriptor is valid;
// its layers are for New to verify. A manifest of something that is not a
// container image is ErrUnsupported.
func ParseManifest(b []byte) (ocispec.Manifest, error) {
	var m ocispec.Manifest
	if err := parseAs(b, Manifest, &m); err != nil {
		return m, err
	}
	if !imageConfig(m.Config.MediaType) {
		what := m.Config.MediaType
		if m.ArtifactType != "" {
			what = m.ArtifactType
		}
		return ocispec.Manifest{},
			fmt.Errorf("%w: it is no container image but an artifact of type %q", ErrUnsupported, what)
	}
	if err := checkDocument(m.Config, MaxConfig); err != nil {
		return ocispec.Manifest{}, fmt.Errorf("config: %w", err)
	}
	return m, nil
}

func parseAs(b []byte, want Kind, into any) error {
	k, err := KindOf(b)
	if err != nil {
		return err
	}
	if k != want {
		return fmt.Errorf("%w: a manifest where an index is due, or the reverse", ErrInvalid)
	}
	if err := json.Unmarshal(b, into); err != nil {
		return fmt.Errorf("%w: manifest: %w", ErrInvalid, err)
	}
	return nil
}

// imageConfig reports whether a config of this type can be an image's. Old
// registries stored configs under generic types.
func imageConfig(mediaType string) bool {
	switch mediaType {
	case ocispec.MediaTypeImageConfig, DockerConfig, "", "application/octet-stream", "application/json",
		"text/plain", "text/html":
		return true
	}
	return false
}

// ParseConfig reads an image's config. Its diffIDs are for New to verify.
func ParseConfig(b []byte) (ocispec.Image, error) {
	var c ocispec.Image
	if len(b) > MaxConfig {
		return c, fmt.Errorf("%w: %d bytes of config, at most %d are read", ErrTooLarge, len(b), MaxConfig)
	}
	if err := json.Unmarshal(b, &c); err != nil {
		return ocispec.Image{}, fmt.Errorf("%w: config: %w", ErrInvalid, err)
	}
	if c.RootFS.Type != "layers" && (c.RootFS.Type != "" || len(c.RootFS.DiffIDs) > 0) {
		return ocispec.Image{},
			fmt.Errorf("%w: config: rootfs type %q is not \"layers\"", ErrInvalid, c.RootFS.Type)
	}
	return c, nil
}

// CheckBytes verifies that b is what d names: as long, and hashing to the
// digest. what names the document in the error.
func CheckBytes(what string, d ocispec.Descriptor, b []byte) error {
	if err := checkDigest(d.Digest, digest.SHA256, digest.SHA512); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	if d.Size != int64(len(b)) {
		return fmt.Errorf("%s: %w: %d bytes where the descriptor says %d", what, ErrMismatch, len(b), d.Size)
	}
	if got := d.Digest.Algorithm().FromBytes(b); got != d.Digest {
		return fmt.Errorf("%s: %w: got %s, want %s", what, ErrMismatch, got, d.Digest)
	}
	return nil
}

func checkDocument(d ocispec.Descriptor, limit int64) error {
	if d.Size < 0 {
		return fmt.Errorf("%w: size %d", ErrInvalid, d.Size)
	}
	if d.Size > limit {
		return fmt.Errorf("%w: %d bytes, at most %d are read", ErrTooLarge, d.Size, limit)
	}
	return checkDigest(d.Digest, digest.SHA256, digest.SHA512)
}

func checkDigest(d digest.Digest, allowed ...digest.Algorithm) error {
	if err := d.Validate(); err != nil {
		return fmt.Errorf("%w: digest %q: %w", ErrInvalid, d, err)
	}
	for _, a := range allowed {
		if d.Algorithm() == a {
			return nil
		}
	}
	return fmt.Errorf("%w: digest %q uses %s, not %s", ErrUnsupported, d, d.Algorithm(), allowed[0])
}
