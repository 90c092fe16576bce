package admit

import (
	"time"
)

// learnt is what containers of an image take, in bytes.
type learnt map[string]int64

const (
	// overhead is what runs beside a container for it: its shim.
	overhead  = 8 << 20
	mostLearn = 512 // images
)

// add learns of a container: a larger one counts at once, smaller ones slowly.
func (l learnt) add(image string, used int64) {
	was, known := l[image]
	if !known && len(l) >= mostLearn {
		for old := range l { // any
			delete(l, old)
			break
		}
	}
	l[image] = max(used, was-(was-used)/8)
}

func (l learnt) bytesOf(image string, unknown int64) int64 {
	if n, ok := l[image]; ok {
		return n + overhead
	}
	return unknown
}

// pace counts how many deployments end in a time.
type pace struct {
	from     time.Time // of the current window
	now, was int       // in it, and in the one before
}

const paceWindow = 10 * time.Second

func (p *pace) add(now time.Time) {
	p.turn(now)
	p.now++
}

func (p *pace) turn(now time.Time) {
	switch d := now.Sub(p.from); {
	case d >= 2*paceWindow:
		p.from, p.now, p.was = now, 0, 0
	case d >= paceWindow:
		p.from, p.now, p.was = p.from.Add(paceWindow), 0, p.now
	}
}

// time is how long n deployments are likely to take: whole seconds, 1 to 600.
func (p *pace) time(n int, now time.Time) time.Duration {
	p.turn(now)
	rate := float64(max(p.now, p.was)) / paceWindow.Seconds()
	if rate == 0 {
		rate = 1
	}
	return time.Duration(min(600, max(1, float64(n)/rate))+0.999) * time.Second
}
