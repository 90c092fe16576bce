package spec

import "time"

// Process is one of a container, as the node sees it.
type Process struct {
	PID     int       `json:"pid"`
	Parent  int       `json:"parent"`
	UID     int       `json:"uid"`
	Started time.Time `json:"started"`
	CPU     float64   `json:"cpu"`    // seconds of a processor that it has used
	Memory  int64     `json:"memory"` // bytes of it that are in memory
	Command string    `json:"command"`
}
