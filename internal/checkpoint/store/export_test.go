package store

import (
	"context"
	"slices"
	"time"
)

// Find returns the checkpoints of a manifest and key that may be restored here, newest
// first: not those in quarantine, and of the PoP's store only those whose upper layer is
// there too. A PoP's store that does not answer has none. What others have done is seen at once.
func (s *Store) Find(ctx context.Context, manifest, key string) []Listed {
	all, _ := s.List(ctx, "")
	return slices.DeleteFunc(all, func(l Listed) bool {
		return l.Manifest != manifest || l.Key != key || l.Quarantined || !s.HasUpper(ctx, l)
	})
}

// LookEvery sets how long a look at the PoP's store holds in any case.
func (s *Store) LookEvery(d time.Duration) { s.view.every = d }
