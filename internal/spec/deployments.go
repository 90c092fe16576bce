package spec

import (
	"fmt"
	"time"
)

// Terms are the conditions of a deployment, beside what is to run.
type Terms struct {
	// Key is the caller's own name for the deployment. The same key with the same
	// request is the same deployment; "" is none.
	Key      string
	Deadline time.Duration // of the whole deployment, its time in the queue included; 0 is none
	Detach   bool          // it goes on though nobody waits for it, and when dewd is started anew
	Caller   string        // who asks; keys are his own
	Admin    bool          // he is an administrator of the node
}

// Owner is to whom belongs what is deployed: "" is the administrators, who are one, else the caller's name.
func (t Terms) Owner() string {
	if t.Admin || t.Caller == Local {
		return ""
	}
	return t.Caller
}

// Local is the caller who came by the Unix socket, an administrator.
const Local = "local"

// MaxKey is the most bytes that a key of Terms may have.
const MaxKey = 128

// Many is one instruction to deploy many containers. Its Terms hold for each, the
// requests' own do not; deployment i has the key KEY/i.
type Many struct {
	Requests []Request
	Count    int // copies of each, 0 is one; copies of what has a name are called NAME-1, NAME-2, …
	Parallel int // under way at once of these; 0 is what the node admits
	Terms    Terms
}

// MaxMany is the most deployments that one call may ask for.
const MaxMany = 4096

// All is what Many asks for, one request for each container.
func (m Many) All() ([]Request, error) {
	count := max(1, m.Count)
	switch {
	case m.Count < 0 || m.Parallel < 0:
		return nil, fmt.Errorf("a count and a number in parallel are not below zero")
	case len(m.Requests) == 0:
		return nil, fmt.Errorf("nothing to deploy is named")
	case count > MaxMany || len(m.Requests)*count > MaxMany:
		return nil, fmt.Errorf("%d deployments are too many for one call: want at most %d", len(m.Requests)*count,
			MaxMany)
	case len(m.Terms.Key) > MaxKey-5:
		return nil, fmt.Errorf("a key has at most %d bytes", MaxKey-5)
	}
	all := make([]Request, 0, len(m.Requests)*count)
	for _, r := range m.Requests {
		if err := r.Validate(); err != nil {
			return nil, err
		}
		for c := range count {
			one := r
			if one.Name != "" && m.Count > 1 {
				one.Name = fmt.Sprintf("%s-%d", r.Name, c+1)
			}
			one.Terms = m.Terms
			if m.Terms.Key != "" {
				one.Terms.Key = fmt.Sprintf("%s/%d", m.Terms.Key, len(all))
			}
			all = append(all, one)
		}
	}
	return all, nil
}

// The states of a Deployment.
const (
	StateQueued    = "queued"    // waits for its turn
	StateDeploying = "deploying" // was admitted
	StateDone      = "done"
	StateFailed    = "failed"
	StateCanceled  = "canceled"
)

// What a deployment in the queue waits for.
const (
	WaitsTurn   = "turn" // others are before it
	WaitsMemory = "memory"
	WaitsCPU    = "cpu" // other work presses the processors: there are fewer slots
	WaitsLink   = "link"
	WaitsDisk   = "disk"
)

// Deployment is where a deployment stands.
type Deployment struct {
	ID       string    `json:"id"`
	Name     string    `json:"name"` // of the container
	Image    string    `json:"image"`
	Caller   string    `json:"caller"`
	Key      string    `json:"key,omitempty"`
	State    string    `json:"state"`
	Position int       `json:"position,omitempty"` // in the queue, from 1
	Waits    string    `json:"waits,omitempty"`    // queued: what for
	Asked    time.Time `json:"asked"`
	Ended    time.Time `json:"ended,omitzero"`
	Record   *Record   `json:"record,omitempty"` // of one that ended
	Failure  *Failure  `json:"error,omitempty"`  // of one that failed or was canceled
	Detached bool      `json:"detached,omitempty"`
}

// Over reports whether the deployment has ended.
func (d Deployment) Over() bool {
	return d.State == StateDone || d.State == StateFailed || d.State == StateCanceled
}

// Failure is why a deployment failed, as the API tells it.
type Failure struct {
	Code    string `json:"code"`
	Message string `json:"message"`
	Remedy  string `json:"remedy,omitempty"`
	Exit    int    `json:"exit"`
}

func (f *Failure) Error() string { return f.Message }

// DeploymentRef names a deployment by its ID or, unless that is set, by its caller's key.
type DeploymentRef struct {
	ID     string
	Key    string
	Caller string
}

// DeploymentQuery says which deployments are wanted.
type DeploymentQuery struct {
	All   bool // those that have ended too
	Limit int  // of those, the newest; 0 is 100
	Spans bool // with the spans of their records
}

// ManyWatch is told how many deployments go on. The functions are called by several
// goroutines and return at once.
type ManyWatch struct {
	// Watch is what the deployment of an index is watched by.
	Watch func(index int) Watch
	// Ended is called once for each, last: with its record, the zero one if nothing was
	// begun, and why it failed.
	Ended func(index int, r Record, f *Failure)
}

// Inspection is what is known of one container.
type Inspection struct {
	Container Container `json:"container"`
	Request   *Request  `json:"spec,omitempty"`   // that it was deployed from; nil is unknown
	Record    *Record   `json:"record,omitempty"` // of its deployment, for about a day
	OCI       string    `json:"oci"`              // the OCI runtime specification, JSON
}

// Span is one piece of the work of a deployment, finer than a stage.
type Span struct {
	Name       string            `json:"name"`
	From       float64           `json:"from"` // seconds from the instruction
	To         float64           `json:"to"`
	Attributes map[string]string `json:"attributes,omitempty"`
}
