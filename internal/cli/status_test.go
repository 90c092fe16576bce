package cli

import (
	"testing"
	"time"

	"dewpoint/internal/spec"
)

func TestStatus(t *testing.T) {
	soon := time.Now().Add(7 * time.Second)
	for want, c := range map[string]spec.Container{
		"running":                         {Status: spec.StatusRunning},
		"running (reads fail), 1 restart": {Status: spec.StatusRunning, ReadError: "x", Restarts: 1},
		"exited (3)":                      {Status: spec.StatusExited, ExitCode: 3},
		"exited (0), 2 restarts":          {Status: spec.StatusExited, Restarts: 2},
		"restarting (1) in 7s, crash loop, 9 restarts": {Status: spec.StatusRestarting, ExitCode: 1, NextStart: soon,
			CrashLoop: true, Restarts: 9},
		"restarting (1) in 0s":            {Status: spec.StatusRestarting, ExitCode: 1, NextStart: time.Now()},
		"running, crash loop, 9 restarts": {Status: spec.StatusRunning, CrashLoop: true, Restarts: 9},
	} {
		if got := status(c); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
