package health

import (
	"encoding/json"
	"strings"
	"sync"
	"time"

	"dewpoint/internal/engine"
	"dewpoint/internal/spec"
)

// Labels of containers: the check that one was deployed with, and what is known of its health.
const (
	LabelCheck = "dewpoint.health"
	LabelState = "dewpoint.health.state"
)

// Keep gives the labels of a container its check.
func Keep(labels map[string]string, h *spec.Health) map[string]string {
	if h.None() {
		return labels
	}
	if labels == nil {
		labels = map[string]string{}
	}
	labels[LabelCheck] = marshal(h)
	return labels
}

func marshal(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // texts and numbers
	}
	return string(b)
}

// checkOf is the check of a container; nil if it has none.
func checkOf(i *engine.Info) *spec.Health {
	s := i.Labels[LabelCheck]
	if s == "" {
		return nil
	}
	h := &spec.Health{}
	if err := json.Unmarshal([]byte(s), h); err != nil {
		return nil
	}
	return h
}

// state is what is known of a container's health, as its label has it.
type state struct {
	Made   int64  `json:"made"`             // when the process that it is of was made, in ns
	Health string `json:"health,omitempty"` // "" is spec.HealthStarting
	Why    string `json:"why,omitempty"`    // the last check failed; "" if it did not
	failed int    // checks in a row
}

func stateOf(labels map[string]string) (s state) {
	_ = json.Unmarshal([]byte(labels[LabelState]), &s) // none is the zero state
	return s
}

func (s state) labels() map[string]string { return map[string]string{LabelState: marshal(s)} }

// after is the state after a check that found something wrong, or nothing ("").
func (s state) after(c spec.Health, why string, early bool) state {
	s.Why = why
	switch {
	case why == "":
		s.Health, s.failed = spec.HealthHealthy, 0
	case early && s.Health == "": // it does not count
	default:
		if s.failed++; s.failed >= c.Retries {
			s.Health = spec.HealthUnhealthy
		}
	}
	return s
}

// timing is when a process that is followed was checked.
type timing struct {
	born  time.Time // of the process, by a clock that nobody sets
	last  time.Time // end of the last check; zero is that there was none yet
	known bool      // and that said something
}

// begin is that of a process that was made then.
func begin(made time.Time) timing {
	now := time.Now()
	if age := now.Sub(made); !made.IsZero() && age > 0 {
		return timing{born: now.Add(-age)}
	}
	return timing{born: now}
}

// due is when the next check is.
func (t timing) due(c spec.Health, s state) time.Time {
	soon := min(c.Interval, c.StartInterval)
	switch now := time.Now(); {
	case t.last.IsZero() && now.Sub(t.born) < soon:
		return t.born.Add(soon)
	case t.last.IsZero(): // an earlier daemon has checked it
		return now.Add(soon / 2)
	case !t.known || s.Health == "" && now.Sub(t.born) < c.StartPeriod:
		return t.last.Add(soon)
	}
	return t.last.Add(c.Interval)
}

// output keeps the beginning of what a check writes. It is safe for concurrent use.
type output struct {
	mu sync.Mutex
	b  []byte
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.b = append(o.b, p[:min(len(p), sayBytes-len(o.b))]...)
	return len(p), nil
}

// after is what is wrong with the output behind it, in one line.
func (o *output) after(what string) string {
	o.mu.Lock()
	defer o.mu.Unlock()
	said := strings.Join(strings.Fields(strings.ToValidUTF8(string(o.b), "")), " ")
	if said == "" {
		return what
	}
	return what + ": " + said
}
