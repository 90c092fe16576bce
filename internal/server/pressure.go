package server

import (
	"context"
	"fmt"
	"strings"

	"dewpoint/internal/deploy/admit"
	"dewpoint/internal/spec"
)

// findings says whether deployments wait, and for what.
func (d *deployments) findings(context.Context) []spec.Finding {
	return []spec.Finding{pressureFinding(d.deployer.Admission())}
}

const (
	muchPressure = 50.0 // percent of the last ten seconds in which something waited for a processor or the disk
	someReclaim  = 10.0 // the same for memory
)

func pressureFinding(s admit.Stats) spec.Finding {
	f := spec.Finding{What: "pressure", Level: spec.LevelOK}
	said := []string{fmt.Sprintf("%s of memory available, %s promised to deployments, %s kept for containers up to their limits, %s kept free; %d of %d deployments at once under way",
		mebi(s.Memory.Available), mebi(s.Promised), mebi(s.Unused), mebi(s.Reserve), s.Running, s.Limit)}
	waiting := 0
	for _, n := range s.Waiting {
		waiting += n
	}
	if waiting > 0 {
		said = append(said, fmt.Sprintf("%d wait", waiting))
	}
	note := func(remedy, detail string, args ...any) {
		f.Level, f.Remedy = spec.LevelNote, remedy
		said = append(said, fmt.Sprintf(detail, args...))
	}
	if s.Pressure.IO >= muchPressure {
		note("find out what reads and writes (iotop), or expect deployments to take longer",
			"%.0f %% of the time something waits for the disk", s.Pressure.IO)
	}
	if s.Pressure.CPU >= muchPressure {
		note("stop what is not needed, or expect deployments to take longer",
			"%.0f %% of the time something waits for a processor", s.Pressure.CPU)
	}
	if n := s.Waiting[spec.WaitsDisk]; n > 0 {
		note("free some space, for instance with \"dew prune\"", "%d wait for room on the disk", n)
	}
	if s.Pressure.Memory >= someReclaim {
		note("stop containers, or give them limits with --memory", "%.0f %% of the time something waits for memory",
			s.Pressure.Memory)
	}
	if n := s.Waiting[spec.WaitsMemory]; n > 0 {
		note("stop containers, or deploy with a smaller --memory", "%d wait for memory", n)
	}
	f.Detail = strings.Join(said, "; ")
	return f
}

func mebi(n int64) string { return fmt.Sprintf("%d MiB", n>>20) }
