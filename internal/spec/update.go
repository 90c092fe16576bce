package spec

import (
	"fmt"
	"math"
)

// Update is what is to change of a container; nil leaves it as it is.
type Update struct {
	Memory  *int64   // bytes, 0 is unlimited
	CPUs    *float64 // 0 is unlimited
	Pids    *int64   // 0 is unlimited
	Restart *string  // as ParseRestart reads it
}

// MinMemory is what runc itself takes in a container's cgroup (as docker has it).
const MinMemory = 6 << 20

// Validate says what is wrong with the update by itself, in one line.
func (u Update) Validate() error {
	switch {
	case u == Update{}:
		return fmt.Errorf("nothing is to change: give --memory, --cpus, --pids-limit or --restart")
	case u.Memory != nil && (*u.Memory < 0 || *u.Memory > 0 && *u.Memory < MinMemory):
		return fmt.Errorf("--memory %d: a container needs at least %d MiB, and 0 is no limit", *u.Memory, MinMemory>>20)
	case u.CPUs != nil && (*u.CPUs < 0 || *u.CPUs > 4096 || math.IsNaN(*u.CPUs)):
		return fmt.Errorf("%v is not a number of CPUs", *u.CPUs)
	case u.Pids != nil && *u.Pids < 0:
		return fmt.Errorf("the limit of %d processes is below zero", *u.Pids)
	case u.Restart != nil:
		_, err := ParseRestart(*u.Restart)
		return err
	}
	return nil
}

// In changes what a container was asked for by.
func (u Update) In(r *Request) {
	if u.Memory != nil {
		r.Memory = *u.Memory
	}
	if u.CPUs != nil {
		r.CPUs = *u.CPUs
	}
	if u.Pids != nil {
		r.PidsLimit = *u.Pids
	}
	if u.Restart != nil {
		r.Restart = *u.Restart
	}
}
