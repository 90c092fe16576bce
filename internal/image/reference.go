package image

import (
	"fmt"

	"github.com/distribution/reference"
	"github.com/opencontainers/go-digest"
)

// Reference is a normalized image reference: registry host, repository, and a
// tag, a digest or both. The zero value is no reference.
type Reference struct {
	Host string // as written: "docker.io", "10.0.0.1:5000"
	Path string // "library/nginx"
	Tag  string // "" only if Digest is set
	Dgst digest.Digest
}

// ParseReference reads a reference as Docker's command line does: "nginx" is
// docker.io/library/nginx:latest. Of a tag and a digest, the digest stays.
func ParseReference(s string) (Reference, error) {
	n, err := reference.ParseDockerRef(s)
	if err != nil {
		return Reference{}, fmt.Errorf("image reference %q: %w", s, err)
	}
	r := Reference{Host: reference.Domain(n), Path: reference.Path(n)}
	if r.Host == "" { // as of one that has an underscore
		return Reference{}, fmt.Errorf("image reference %q: a registry's host has letters, digits, dots and hyphens", s)
	}
	if t, ok := n.(reference.Tagged); ok {
		r.Tag = t.Tag()
	}
	if d, ok := n.(reference.Digested); ok {
		r.Dgst = d.Digest()
	}
	return r, nil
}

// String gives the reference in full, as containerd names images.
func (r Reference) String() string {
	if r == (Reference{}) {
		return ""
	}
	s := r.Host + "/" + r.Path
	if r.Tag != "" {
		s += ":" + r.Tag
	}
	if r.Dgst != "" {
		s += "@" + r.Dgst.String()
	}
	return s
}

// Object is what a registry's manifest endpoint is asked for: the digest if
// there is one, else the tag.
func (r Reference) Object() string {
	if r.Dgst != "" {
		return r.Dgst.String()
	}
	return r.Tag
}

// MarshalText gives String.
func (r Reference) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

// UnmarshalText reads what MarshalText wrote; "" is the zero Reference.
func (r *Reference) UnmarshalText(b []byte) error {
	if len(b) == 0 {
		*r = Reference{}
		return nil
	}
	p, err := ParseReference(string(b))
	if err != nil {
		return err
	}
	*r = p
	return nil
}
