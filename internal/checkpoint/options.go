package checkpoint

import (
	"fmt"
	"slices"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// optionsOf are what a container is given that no other part of a Fit tells.
func optionsOf(o *specs.Spec) (list []string) {
	if o.Process.NoNewPrivileges {
		list = append(list, "no new privileges")
	}
	return append(list, unsaved(o)...)
}

// maxDevices are told each by itself.
const maxDevices = 8

// unsaved are those that no checkpoint keeps: CRIU restores neither what a device is in the middle of nor the
// settings of a network that was there before, and writes to the root.
func unsaved(o *specs.Spec) (list []string) {
	if o.Root != nil && o.Root.Readonly {
		list = append(list, "read-only root")
	}
	if n := len(o.Linux.Devices); n > maxDevices { // those of a privileged one
		return append(list, fmt.Sprintf("%d devices", n))
	}
	for _, d := range o.Linux.Devices {
		list = append(list, fmt.Sprintf("device %s %s %d:%d", d.Path, d.Type, d.Major, d.Minor))
	}
	for k, v := range o.Linux.Sysctl {
		list = append(list, "sysctl "+k+"="+v)
	}
	slices.Sort(list)
	return list
}
