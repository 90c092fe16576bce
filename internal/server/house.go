package server

import (
	"context"
	"runtime/debug"
	"time"

	"dewpoint/internal/engine"
)

const (
	houseEvery = time.Minute
	quietAfter = 3 * time.Second
)

// house does what is due from time to time: it removes what nothing uses as the cache's bound and the disk
// demand, gives memory back when a burst of work is over, and what the PoP could not take before.
type house struct {
	engine      *engine.Engine
	room        *room
	news        *news
	checkpoints *checkpoints
}

// keep returns when ctx ends.
func (h *house) keep(ctx context.Context) {
	collect, quiet := time.NewTicker(houseEvery), time.NewTicker(quietAfter)
	defer collect.Stop()
	defer quiet.Stop()
	var seen, freed, kept int64
	known := false // what was being removed when an earlier process was killed
	for {
		select {
		case <-ctx.Done():
			return
		case <-quiet.C:
			h.checkpoints.publishPending(ctx)
			work := h.news.work.Load()
			if work != kept && h.room.maxBytes.Load() > 0 { // the bound holds also in a burst of work
				if h.room.excess() > 0 {
					h.collect(ctx)
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
				known = h.engine.Collect(ctx) == nil
			}
			h.collect(ctx)
		}
	}
}

func (h *house) collect(ctx context.Context) {
	h.checkpoints.tidy(ctx)
	h.room.collect(ctx)
	h.room.reserve.keep()
}
