package engine

import (
	"slices"
	"sync"

	"github.com/containerd/containerd/v2/contrib/seccomp"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// seccomp is the filter of a container, shared and not to be changed; nil is
// none.
func (c *Config) seccomp(dumpable bool) *specs.LinuxSeccomp {
	switch {
	case c.Unconfined && dumpable:
		return refuseUndumpable
	case c.Unconfined:
		return nil
	case dumpable:
		return dumpableFilter()
	}
	return filter()
}

// filter is containerd's default seccomp profile for our capabilities, which
// has no io_uring. The x32 system calls are left out, since each kind costs
// runc several milliseconds of compiling for every container.
var filter = sync.OnceValue(func() *specs.LinuxSeccomp {
	caps := &specs.LinuxCapabilities{Bounding: capabilities}
	f := seccomp.DefaultProfile(&specs.Spec{Process: &specs.Process{Capabilities: caps}, Linux: &specs.Linux{}})
	f.Architectures = slices.DeleteFunc(f.Architectures, func(a specs.Arch) bool { return a == specs.ArchX32 })
	return f
})

// dumpableFilter is filter without multipath TCP: programs that ask for it,
// those in Go, take TCP when it is refused.
var dumpableFilter = sync.OnceValue(func() *specs.LinuxSeccomp {
	f := *filter()
	f.Syscalls = slices.Clone(f.Syscalls)
	for i, s := range f.Syscalls {
		if slices.Contains(s.Names, "socket") {
			f.Syscalls[i].Args = append(slices.Clone(s.Args), multipath(specs.OpNotEqual))
		}
	}
	return &f
})

// refuseUndumpable is the filter of what is not confined otherwise.
var refuseUndumpable = &specs.LinuxSeccomp{
	DefaultAction: specs.ActAllow,
	Syscalls: []specs.LinuxSyscall{
		{Names: []string{"io_uring_setup"}, Action: specs.ActErrno},
		{Names: []string{"socket"}, Action: specs.ActErrno,
			Args: []specs.LinuxSeccompArg{multipath(specs.OpEqualTo)}},
	},
}

// multipath compares the third argument of socket(2), the protocol.
func multipath(op specs.LinuxSeccompOperator) specs.LinuxSeccompArg {
	return specs.LinuxSeccompArg{Index: 2, Value: unix.IPPROTO_MPTCP, Op: op}
}
