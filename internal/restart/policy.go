package restart

import (
	"encoding/json"
	"time"

	"dewpoint/internal/engine"
	"dewpoint/internal/spec"
)

// Labels of containers: the policy that one was deployed with, if it has one, and what has become of it.
const (
	LabelPolicy = "dewpoint.restart"
	LabelState  = "dewpoint.restart.state"
)

const (
	firstWait   = 100 * time.Millisecond // before a start; each further one in a row waits twice as long
	longestWait = time.Minute
	// steady is how long a container runs whose next end is the first in a row again.
	steady = 10 * time.Second
	// loops is the number of ends in a row that is called a crash loop.
	loops = 5
)

// mark is why a container that has ended stays down.
type mark string

const (
	stopped mark = "stopped" // a person has stopped it
	turning mark = "turning" // a person restarts it, and starts it by himself
	over    mark = "over"    // its policy has had its way: it ended well, or too often
	failed  mark = "failed"  // its deployment failed
	ill     mark = "ill"     // it is stopped for its health, and starts again
)

// state is what has become of a container, as its label has it.
type state struct {
	Restarts int  `json:"restarts,omitempty"` // since a person has started it
	Streak   int  `json:"streak,omitempty"`   // of these in a row, none of which ran for long
	Mark     mark `json:"mark,omitempty"`
}

func stateOf(labels map[string]string) (s state) {
	_ = json.Unmarshal([]byte(labels[LabelState]), &s) // none is the zero state
	return s
}

// labels are those that keep the state; the zero state needs none.
func (s state) labels() map[string]string {
	if s == (state{}) {
		return map[string]string{LabelState: ""}
	}
	b, err := json.Marshal(s)
	if err != nil {
		panic(err) // numbers and a word
	}
	return map[string]string{LabelState: string(b)}
}

// Failed are the labels of a container whose deployment has failed: it is not started again but by a person.
func Failed() map[string]string { return state{Mark: failed}.labels() }

func policyOf(i *engine.Info) spec.RestartPolicy {
	p, err := spec.ParseRestart(i.Labels[LabelPolicy])
	if err != nil {
		return spec.RestartPolicy{Kind: spec.RestartNo}
	}
	return p
}

// ending is how a container has ended.
type ending struct {
	known  bool // the end was seen: neither was the machine started anew, nor the runtime killed
	status int
	ran    time.Duration
	boot   bool // dewd has just started, and finds it ended
}

// next says what an end makes of a state, whether the container is to start again, and after which time.
func next(p spec.RestartPolicy, s state, e ending) (after state, again bool, wait time.Duration) {
	if e.ran >= steady {
		s.Streak = 0
	}
	switch {
	case p.Kind == spec.RestartNo, s.Mark == over, s.Mark == failed,
		s.Mark == stopped && !(e.boot && p.Kind == spec.RestartAlways),
		s.Mark == turning && !e.boot:
		return s, false, 0
	case e.boot && (s.Mark != "" || !e.known): // it did not end by itself
		s.Mark = ""
		return s, true, 0
	case p.Kind == spec.RestartOnFailure &&
		(e.known && e.status == 0 && s.Mark != ill || p.Most > 0 && s.Restarts >= p.Most):
		s.Mark = over
		return s, false, 0
	}
	s.Mark = ""
	s.Restarts++
	s.Streak++
	return s, true, waitOf(s.Streak)
}

// waitOf is the time before the start after so many ends in a row.
func waitOf(streak int) time.Duration {
	wait := firstWait
	for n := 1; n < streak && wait < longestWait; n++ {
		wait *= 2
	}
	return min(wait, longestWait)
}
