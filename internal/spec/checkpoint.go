package spec

import "time"

// CheckpointRequest is one instruction to make a checkpoint of a container.
type CheckpointRequest struct {
	Name     string // of the container
	Share    bool   // it is for all callers, not only for the container's owner
	Stateful bool   // though the container keeps state outside, or says that it is stateful
	TCP      string // close (clients' connections are closed in what is restored), refuse; "" is close
}

// Checkpoint is a container's memory and writable layer, from which others start.
type Checkpoint struct {
	ID      string    `json:"id"`
	Image   string    `json:"image"`
	Digest  string    `json:"digest"` // of the platform's manifest
	Args    []string  `json:"args"`   // of the container
	Created time.Time `json:"created"`
	Node    string    `json:"node"` // that made it
	Engine  string    `json:"engine"`
	// Owner is the caller who alone starts containers from it, "" the administrators, "*" anyone.
	Owner string `json:"owner,omitempty"`
	Size  int64  `json:"size"`  // bytes stored, of memory and all that is not the writable layer
	Pages int64  `json:"pages"` // bytes of memory
	Upper int64  `json:"upper"` // bytes of the writable layer
	// Boot and Restore are seconds from the start to readiness, as measured;
	// 0 is unknown.
	Boot    float64 `json:"boot,omitempty"`
	Restore float64 `json:"restore,omitempty"`
	Paused  float64 `json:"paused,omitempty"` // seconds; of one that was made just now
	// Stateful says that clones share state, which was accepted.
	Stateful bool   `json:"stateful,omitempty"`
	Where    string `json:"where"` // node, pop, both
	// Unfit is why it is of no use on this node now; "" if it is.
	Unfit string `json:"unfit,omitempty"`
	// Differs is what others of the image have otherwise, such as "arguments serve" or "no variable ZONE".
	Differs []string `json:"differs,omitempty"`
}
