package node

import (
	"fmt"
	"math"
	"slices"
	"strings"
)

// Validate says what is wrong with the instruction by itself, in one line.
// Names and references are checked by those who know their grammar.
func (r Request) Validate() error {
	switch {
	case r.Image == "":
		return fmt.Errorf("no image is named")
	case r.Memory < 0:
		return fmt.Errorf("memory limit %d is below zero", r.Memory)
	case r.CPUs < 0 || math.IsNaN(r.CPUs) || math.IsInf(r.CPUs, 0):
		return fmt.Errorf("%v is not a number of CPUs", r.CPUs)
	case r.ReadyTimeout < 0:
		return fmt.Errorf("the time to become ready, %v, is below zero", r.ReadyTimeout)
	case len(r.Ports) > 0 && r.Net != "" && r.Net != "bridge":
		return fmt.Errorf("ports are published on the bridge only: leave out --net %s, or -p", r.Net)
	}
	for _, e := range r.Env {
		if strings.IndexByte(e, 0) >= 0 || strings.HasPrefix(e, "=") || e == "" {
			return fmt.Errorf("%q is not an environment variable KEY=VALUE", e)
		}
	}
	for _, v := range r.Volumes {
		if !strings.HasPrefix(v.Source, "/") || !strings.HasPrefix(v.Target, "/") {
			return fmt.Errorf("volume %s:%s: both paths have to be absolute", v.Source, v.Target)
		}
	}
	if len(r.Terms.Key) > MaxKey {
		return fmt.Errorf("a key has at most %d bytes", MaxKey)
	}
	if r.Terms.Deadline < 0 {
		return fmt.Errorf("the deadline %v is below zero", r.Terms.Deadline)
	}
	if r.Checkpoint && r.Record {
		return fmt.Errorf("a start that is recorded makes no checkpoint")
	}
	if err := readiness(r.Ready); err != nil {
		return err
	}
	return choices(
		choice{"net", r.Net, []string{"host", "bridge", "none"}},
		choice{"lazy", r.Lazy, []string{"auto", "never"}},
		choice{"restore", r.Restore, []string{"auto", "never", "always"}},
		choice{"mount", r.Mount, []string{"erofs", "loop", "tree"}},
		choice{"order", r.Order, []string{"layers", "parallel"}},
		count(r.Inflaters),
	)
}

// Validate says what is wrong with the instruction by itself, in one line.
func (r PullRequest) Validate() error {
	if r.Image == "" {
		return fmt.Errorf("no image is named")
	}
	return choices(
		choice{"lazy", r.Lazy, []string{"auto", "never"}},
		choice{"order", r.Order, []string{"layers", "parallel"}},
		count(r.Inflaters),
	)
}

func readiness(s string) error {
	if s == "" || s == "none" {
		return nil
	}
	kind, rest, ok := strings.Cut(s, ":")
	if !ok || rest == "" || !slices.Contains([]string{"tcp", "http", "cmd", "log"}, kind) {
		return fmt.Errorf("%q does not say when the container is ready: want tcp:PORT, http:PORT/PATH, cmd:COMMAND, log:REGEXP or none", s)
	}
	return nil
}

// choice is a field whose value is one of a few, or empty.
type choice struct {
	name, value string
	of          []string
}

// count is the choice of a number that is not below zero.
func count(n int) choice {
	if n < 0 || n > 1024 {
		return choice{"inflaters", fmt.Sprint(n), []string{"0 (the node's choice)", "1 to 1024"}}
	}
	return choice{}
}

func choices(list ...choice) error {
	for _, c := range list {
		if c.value != "" && !slices.Contains(c.of, c.value) {
			return fmt.Errorf("--%s %s: want %s", c.name, c.value, strings.Join(c.of, " or "))
		}
	}
	return nil
}

// Validate says what is wrong with the instruction by itself, in one line.
func (r CheckpointRequest) Validate() error {
	if r.Name == "" {
		return fmt.Errorf("no container is named")
	}
	return choices(choice{"tcp", r.TCP, []string{"close", "refuse"}})
}
