package fetch

import (
	"cmp"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/opencontainers/go-digest"
)

// LazyStats counts what was lazy since the puller was made.
type LazyStats struct {
	Starts      int64         // images that ran before they were whole
	PackBytes   int64         // of packs, from registries
	DemandBytes int64         // fetched because something waited for them
	Wants       int64         // stretches of layers that something waited for
	Waited      time.Duration // for them, together
	Failed      int64         // of them, those that did not come: I/O errors
	Mismatches  int64         // layers of which a pack had wrong bytes
}

type lazyStats struct {
	starts, packBytes, demandBytes, wants, waited, failed, mismatches atomic.Int64
}

// Stats returns the counters.
func (c *common) Stats() LazyStats {
	s := &c.stats
	return LazyStats{Starts: s.starts.Load(), PackBytes: s.packBytes.Load(), DemandBytes: s.demandBytes.Load(),
		Wants:  s.wants.Load(),
		Waited: time.Duration(s.waited.Load()), Failed: s.failed.Load(), Mismatches: s.mismatches.Load()}
}

// FailedReads are a layer's reads that ended with an I/O error, for what they
// waited for did not come.
type FailedReads struct {
	Layer digest.Digest // its diffID
	Count int64         // of stretches that did not come, lately
	Last  time.Time
	Err   error // why the last did not come; may be nil
}

// failures are the reads that failed lately. It is safe for concurrent use.
type failures struct {
	mu sync.Mutex
	by map[digest.Digest]FailedReads
}

// keepFailures is how long a layer's failures are known after the last of them.
const keepFailures = time.Hour

func (f *failures) add(id digest.Digest, why error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	now := time.Now()
	for other, r := range f.by {
		if now.Sub(r.Last) > keepFailures {
			delete(f.by, other)
		}
	}
	if f.by == nil {
		f.by = map[digest.Digest]FailedReads{}
	}
	f.by[id] = FailedReads{Layer: id, Count: f.by[id].Count + 1, Last: now, Err: why}
}

// FailedReads returns the layers of which reads have failed since then, at most
// an hour ago, the latest first.
func (d *demand) FailedReads(since time.Time) []FailedReads {
	d.failures.mu.Lock()
	defer d.failures.mu.Unlock()
	var out []FailedReads
	for _, r := range d.failures.by {
		if r.Last.After(since) {
			out = append(out, r)
		}
	}
	slices.SortFunc(out, func(a, b FailedReads) int {
		return cmp.Or(b.Last.Compare(a.Last), cmp.Compare(a.Layer, b.Layer))
	})
	return out
}
