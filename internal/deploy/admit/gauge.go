package admit

import "time"

const (
	gaugeEvery = time.Second     // while nothing is under way
	gaugeLeast = gaugeEvery / 4  // a time over which pressure can be told
	quiet      = 2 * time.Second // after deployments what follows them is still their doing
	othersFor  = time.Minute     // what other work did is believed for so long
)

// gauge is what is known of how others press the processors: the share of time in which
// somebody waited for one, between two looks of which no deployment was under way. The
// kernel's own mean of ten seconds would take what has ended for what goes on.
type gauge struct {
	at      time.Time
	waited  time.Duration // until then, since the machine's start
	busyAt  time.Time     // when deployments were last under way
	others  float64       // percent
	knownAt time.Time     // when that was seen
}

// gaugeNow looks, if it is time to. With mu held.
func (a *Admitter) gaugeNow(now time.Time) {
	g := &a.seen.gauge
	if now.Sub(g.knownAt) >= othersFor {
		g.others = 0
	}
	switch passed := now.Sub(g.at); {
	case a.used[running] > 0:
		g.busyAt = now
	case passed < gaugeLeast:
	default:
		waited := a.cfg.Pressure().Waited
		if g.at.Sub(g.busyAt) >= quiet && passed < 2*gaugeEvery {
			g.others, g.knownAt = 100*float64(waited-g.waited)/float64(passed), now
		}
		g.at, g.waited = now, waited
	}
}

// watch looks again and again, so that who comes finds what was so just now.
func (a *Admitter) watch() {
	clock := time.NewTicker(gaugeEvery)
	defer clock.Stop()
	for {
		select {
		case <-clock.C:
			a.mu.Lock()
			a.gaugeNow(time.Now())
			a.mu.Unlock()
		case <-a.life.Done():
			return
		}
	}
}
