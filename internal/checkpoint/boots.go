package checkpoint

import (
	"encoding/json"
	"os"
	"slices"
	"sync"
)

// keepTimes is how many measurements of one thing count.
const keepTimes = 9

// times remembers how long things took, over restarts. What a crash loses is
// measured again. It is safe for concurrent use.
type times struct {
	path string

	mu  sync.Mutex
	all map[string][]float64 // seconds, the oldest first; guarded by mu
}

func openTimes(path string) *times {
	t := &times{path: path, all: map[string][]float64{}}
	if b, err := os.ReadFile(path); err == nil && json.Unmarshal(b, &t.all) != nil {
		t.all = map[string][]float64{}
	}
	return t
}

// add records a measurement. The error is of writing it down; it counts anyway.
func (t *times) add(key string, seconds float64) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	list := append(t.all[key], seconds)
	t.all[key] = list[max(0, len(list)-keepTimes):]
	if len(t.all) > maxTimes {
		for k := range t.all {
			if k != key {
				delete(t.all, k)
				break
			}
		}
	}
	b, err := json.Marshal(t.all)
	if err != nil {
		return err
	}
	if err := os.WriteFile(t.path+".tmp", b, 0o600); err != nil {
		return err
	}
	return os.Rename(t.path+".tmp", t.path)
}

// maxTimes bounds how many things are remembered.
const maxTimes = 4096

// median is what a thing takes, 0 if that was never measured.
func (t *times) median(key string) float64 {
	list := t.sorted(key)
	if len(list) == 0 {
		return 0
	}
	return list[len(list)/2]
}

// sorted are the measurements of a thing, the shortest first.
func (t *times) sorted(key string) []float64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Sorted(slices.Values(t.all[key]))
}
