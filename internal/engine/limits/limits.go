// Package limits says what containers may take of memory, processors and processes, in the words of the OCI
// runtime specification.
package limits

import (
	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// Limits of a container; 0 is none.
type Limits struct {
	Memory int64   // bytes
	CPUs   float64 // processors' time
	Pids   int64   // processes and threads at once
}

const period = 100_000 // microseconds

// quota is the time that a container has of each period.
func quota(cpus float64) int64 { return max(int64(cpus*period), 1000) }

// Set has r say the limits, and nothing of those that are none.
func (l Limits) Set(r *specs.LinuxResources) {
	r.Memory, r.CPU, r.Pids = nil, nil, nil
	if l.Memory > 0 {
		r.Memory = &specs.LinuxMemory{Limit: &l.Memory}
	}
	if l.CPUs > 0 {
		p, q := uint64(period), quota(l.CPUs)
		r.CPU = &specs.LinuxCPU{Period: &p, Quota: &q}
	}
	if l.Pids > 0 {
		r.Pids = &specs.LinuxPids{Limit: &l.Pids}
	}
}

// Resources are those of a container with the limits, and with no device.
func (l Limits) Resources() *specs.LinuxResources {
	r := &specs.LinuxResources{Devices: []specs.LinuxDeviceCgroup{{Allow: false, Access: "rwm"}}}
	l.Set(r)
	return r
}

// Of is the limits that r says.
func Of(r *specs.LinuxResources) (l Limits) {
	if r.Memory != nil && r.Memory.Limit != nil {
		l.Memory = max(0, *r.Memory.Limit)
	}
	if r.CPU != nil && r.CPU.Quota != nil && r.CPU.Period != nil && *r.CPU.Period > 0 {
		l.CPUs = max(0, float64(*r.CPU.Quota)/float64(*r.CPU.Period))
	}
	if r.Pids != nil && r.Pids.Limit != nil {
		l.Pids = max(0, *r.Pids.Limit)
	}
	return l
}

// update is what makes the limits those of a container that runs and has others: what is none is said, too,
// and what stays is not.
func (l Limits) update(before Limits) *specs.LinuxResources {
	r := &specs.LinuxResources{}
	none := int64(-1)
	if l.Memory != before.Memory {
		r.Memory = &specs.LinuxMemory{Limit: &none}
		if l.Memory > 0 {
			r.Memory.Limit = &l.Memory
		}
	}
	if l.CPUs != before.CPUs {
		p, q := uint64(period), none
		if l.CPUs > 0 {
			q = quota(l.CPUs)
		}
		r.CPU = &specs.LinuxCPU{Period: &p, Quota: &q}
	}
	if l.Pids != before.Pids {
		r.Pids = &specs.LinuxPids{Limit: &none}
		if l.Pids > 0 {
			r.Pids.Limit = &l.Pids
		}
	}
	return r
}

// Change has r say the limits that change makes of those that it says. to and back are what makes them those
// of a container that runs, and what undoes that.
func Change(r *specs.LinuxResources, change func(*Limits)) (to, back *specs.LinuxResources) {
	before := Of(r)
	after := before
	change(&after)
	after.Set(r)
	return after.update(before), before.update(after)
}
