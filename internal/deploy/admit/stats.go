package admit

import (
	"time"

	"dewpoint/internal/spec"
)

// Stats is how admission stands.
type Stats struct {
	Admitted, Busy, Refused uint64 // since the start; Refused could never fit

	Waiting  map[string]int // tickets by what they wait for
	Running  int            // that have a slot
	Fetching int            // images
	Limit    int            // of Running, now
	Callers  int
	Promised int64 // bytes of memory
	Unused   int64 // bytes that running containers may yet take of their limits

	Memory   Memory
	Reserve  int64 // bytes
	Pressure Pressure
}

// Stats looks at admission and the node.
func (a *Admitter) Stats() Stats {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.look(time.Now())
	s := a.stats
	s.Waiting = map[string]int{spec.WaitsTurn: 0, spec.WaitsMemory: 0, spec.WaitsCPU: 0, spec.WaitsLink: 0,
		spec.WaitsDisk: 0}
	for _, c := range a.callers {
		for _, line := range c.lines {
			for _, t := range line {
				s.Waiting[a.waits(t)]++
			}
		}
	}
	s.Running, s.Fetching, s.Limit, s.Callers = a.used[running], a.used[fetching], a.limit(), len(a.callers)
	s.Unused = a.seen.unused
	s.Promised, s.Memory, s.Reserve, s.Pressure = a.promised, a.seen.memory, a.reserve(), a.cfg.Pressure()
	return s
}
