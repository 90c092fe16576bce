package fetch

import (
	"sync/atomic"
	"time"
)

// Stats counts what was lazy since the puller was made.
type Stats struct {
	Starts      int64         // images that ran before they were whole
	PackBytes   int64         // of packs, from registries
	DemandBytes int64         // fetched because something waited for them
	Wants       int64         // stretches of layers that something waited for
	Waited      time.Duration // for them, together
	Failed      int64         // of them, those that did not come: I/O errors
	Lies        int64         // layers of which a pack had wrong bytes
}

type lazyStats struct {
	starts, packBytes, demandBytes, wants, waited, failed, lies atomic.Int64
}

// Stats returns the counters.
func (p *Puller) Stats() Stats {
	s := &p.stats
	return Stats{Starts: s.starts.Load(), PackBytes: s.packBytes.Load(), DemandBytes: s.demandBytes.Load(), Wants: s.wants.Load(),
		Waited: time.Duration(s.waited.Load()), Failed: s.failed.Load(), Lies: s.lies.Load()}
}
