package fetch

import (
	"sync"

	"golang.org/x/sync/semaphore"
)

// atOnce is how many ranges are fetched at once of a registry for those who wait,
// those of a layer with their windows.
const atOnce = 6

// slots bound the fetches of each registry for readers who wait, so that one that hangs delays only its own
// images. They are safe for concurrent use.
type slots struct {
	mu     sync.Mutex
	byHost map[string]*semaphore.Weighted
}

func newSlots() *slots { return &slots{byHost: map[string]*semaphore.Weighted{}} }

// slotsOf are those of a registry.
func (s *slots) slotsOf(host string) *semaphore.Weighted {
	s.mu.Lock()
	defer s.mu.Unlock()
	w := s.byHost[host]
	if w == nil {
		w = semaphore.NewWeighted(atOnce)
		s.byHost[host] = w
	}
	return w
}
