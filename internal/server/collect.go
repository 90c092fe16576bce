package server

import (
	"context"
	"runtime/debug"
	"time"

	"dewpoint/internal/engine"
)

const (
	collectEvery = time.Minute
	quietAfter   = 3 * time.Second
)

// collector does what is due from time to time: it removes what nothing uses as the cache's bound and the
// disk demand, gives memory back when a burst of work is over, and what the PoP could not take before.
type collector struct {
	engine      *engine.Engine
	room        *room
	news        *news
	checkpoints *checkpoints
}

// run returns when ctx ends.
func (c *collector) run(ctx context.Context) {
	collect, quiet := time.NewTicker(collectEvery), time.NewTicker(quietAfter)
	defer collect.Stop()
	defer quiet.Stop()
	var seen, freed, kept int64
	known := false // what was being removed when an earlier process was killed
	for {
		select {
		case <-ctx.Done():
			return
		case <-quiet.C:
			c.checkpoints.publishPending(ctx)
			work := c.news.work.Load()
			if work != kept && c.room.maxBytes.Load() > 0 { // the bound holds also in a burst of work
				if c.room.excess() > 0 {
					c.collect(ctx)
				}
				if work == seen { // what it used is not fresh any more
					kept = work
				}
			}
			if work == seen && work != freed {
				debug.FreeOSMemory()
				freed = work
			}
			seen = work
		case <-collect.C:
			if !known {
				known = c.engine.Collect(ctx) == nil
			}
			c.collect(ctx)
		}
	}
}

func (c *collector) collect(ctx context.Context) {
	c.checkpoints.tidy(ctx)
	c.room.collect(ctx)
	c.room.reserve.keep()
}
