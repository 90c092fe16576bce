package image

import (
	"fmt"
	"strings"

	"github.com/containerd/platforms"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// DefaultPlatform is the node's own.
func DefaultPlatform() ocispec.Platform { return platforms.DefaultSpec() }

// ParsePlatform reads "linux/arm64/v8" and its short forms; "" is the node's own.
func ParsePlatform(s string) (ocispec.Platform, error) {
	if s == "" {
		return DefaultPlatform(), nil
	}
	p, err := platforms.Parse(s)
	if err != nil {
		return ocispec.Platform{}, fmt.Errorf("platform %q: %w", s, err)
	}
	return p, nil
}

// Select gives the manifest in idx that fits platform p best: the same
// variant before older ones that run too (arm v7, then v6). Attestations are
// passed over. An entry without a platform is taken if it is the only image.
// If none fits, the error wraps ErrPlatform and names those there are.
func Select(idx ocispec.Index, p ocispec.Platform) (ocispec.Descriptor, error) {
	images := candidates(idx)
	if len(images) == 1 && images[0].Platform == nil {
		return images[0], nil
	}
	fits := platforms.Only(platforms.Normalize(p))
	var best *ocispec.Descriptor
	for n := range images {
		d := &images[n]
		if d.Platform == nil || !fits.Match(*d.Platform) {
			continue
		}
		if best == nil || fits.Less(*d.Platform, *best.Platform) {
			best = d
		}
	}
	if best == nil {
		return ocispec.Descriptor{},
			fmt.Errorf("%w %s; the image has: %s", ErrPlatform, platforms.Format(p), listPlatforms(images))
	}
	return *best, nil
}

// CheckPlatform says whether an image whose config names have runs on want.
// Variants are not compared: single-platform images seldom state theirs.
func CheckPlatform(have, want ocispec.Platform) error {
	if have.OS == "" && have.Architecture == "" {
		return nil
	}
	have, want = platforms.Normalize(have), platforms.Normalize(want)
	if have.OS == want.OS && have.Architecture == want.Architecture {
		return nil
	}
	return fmt.Errorf("%w %s; the image is for %s only", ErrPlatform, platforms.Format(want),
		platforms.Format(have))
}

// candidates gives the entries of an index that are images.
func candidates(idx ocispec.Index) []ocispec.Descriptor {
	var out []ocispec.Descriptor
	for _, d := range idx.Manifests {
		switch d.MediaType {
		case ocispec.MediaTypeImageManifest, DockerManifest, "":
		default:
			continue
		}
		if attestation(d) {
			continue
		}
		out = append(out, d)
	}
	return out
}

func attestation(d ocispec.Descriptor) bool {
	if d.Annotations["vnd.docker.reference.type"] != "" {
		return true
	}
	if d.ArtifactType != "" && d.ArtifactType != ocispec.MediaTypeImageConfig && d.ArtifactType != DockerConfig {
		return true
	}
	return d.Platform != nil && d.Platform.OS == "unknown" && d.Platform.Architecture == "unknown"
}

func listPlatforms(images []ocispec.Descriptor) string {
	var names []string
	for _, d := range images {
		if d.Platform != nil {
			names = append(names, platforms.Format(*d.Platform))
		}
	}
	if len(names) == 0 {
		return "none"
	}
	return strings.Join(names, ", ")
}
