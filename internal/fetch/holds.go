package fetch

import (
	"context"
	"sync"

	"github.com/opencontainers/go-digest"
)

// Holds are the layers that must stay for now: those of pulls under way, and those that are being copied
// elsewhere. It is safe for concurrent use.
type Holds struct {
	mu    sync.Mutex            // nothing is locked while it is held
	pulls map[*Pull]bool        // whose layers must stay
	given map[digest.Digest]int // layers that are being copied elsewhere
}

func newHolds() *Holds { return &Holds{pulls: map[*Pull]bool{}, given: map[digest.Digest]int{}} }

// hold keeps the layers of a pull from being collected until ctx ends.
func (h *Holds) hold(ctx context.Context, pull *Pull) {
	h.mu.Lock()
	h.pulls[pull] = true
	h.mu.Unlock()
	context.AfterFunc(ctx, func() {
		h.mu.Lock()
		delete(h.pulls, pull)
		h.mu.Unlock()
	})
}

// PinLayer keeps a layer from being collected until it is called with -1.
func (h *Holds) PinLayer(id digest.Digest, n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.given[id] += n; h.given[id] == 0 {
		delete(h.given, id)
	}
}

// Held reports whether a layer must stay.
func (h *Holds) Held(id digest.Digest) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.given[id] > 0 {
		return true
	}
	for pull := range h.pulls {
		for _, l := range pull.layers {
			if l.DiffID == id {
				return true
			}
		}
	}
	return false
}

// Busy reports whether a pull is under way.
func (h *Holds) Busy() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.pulls) > 0
}

// Claimed is inUse with what is held. It is called with the store locked.
func (h *Holds) Claimed(inUse func(digest.Digest) bool) func(digest.Digest) bool {
	return func(id digest.Digest) bool { return h.Held(id) || inUse(id) }
}
