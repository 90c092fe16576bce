package pack

import "github.com/opencontainers/go-digest"

// Sum is what segment i hashes to.
func (p *Points) Sum(i int) digest.Digest {
	return digest.NewDigestFromBytes(digest.SHA256, p.list[i].sum[:])
}
