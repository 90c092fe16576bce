package server

import (
	"strings"
	"testing"

	"dewpoint/internal/deploy/admit"
	"dewpoint/internal/spec"
)

// What keeps deployments waiting is found, with what to do about it.
func TestPressureFinding(t *testing.T) {
	quiet := admit.Stats{Limit: 8, Memory: admit.Memory{Available: 1 << 30, Total: 2 << 30}, Reserve: 64 << 20}
	if f := pressureFinding(quiet); f.Level != spec.LevelOK ||
		!strings.Contains(f.Detail, "1024 MiB of memory available") || strings.Contains(f.Detail, "wait") {
		t.Errorf("%+v", f)
	}
	for says, change := range map[string]func(*admit.Stats){
		"3 wait for memory": func(s *admit.Stats) {
			s.Waiting = map[string]int{spec.WaitsMemory: 3, spec.WaitsTurn: 1}
		},
		"2 wait for room on the disk": func(s *admit.Stats) {
			s.Waiting = map[string]int{spec.WaitsDisk: 2}
		},
		"70 % of the time something waits for a processor": func(s *admit.Stats) { s.Pressure.CPU = 70 },
		"70 % of the time something waits for the disk":    func(s *admit.Stats) { s.Pressure.IO = 70 },
		"12 % of the time something waits for memory":      func(s *admit.Stats) { s.Pressure.Memory = 12 },
	} {
		s := quiet
		change(&s)
		if f := pressureFinding(s); f.Level != spec.LevelNote || !strings.Contains(f.Detail, says) ||
			f.Remedy == "" {
			t.Errorf("%+v, want %q", f, says)
		}
	}
}
