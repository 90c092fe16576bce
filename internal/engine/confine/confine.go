// Package confine says what the processes of a container may not do: their capabilities, what they do not
// see, and which system calls they are refused.
package confine

import (
	"slices"
	"sync"

	"github.com/containerd/containerd/v2/contrib/seccomp"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// Capabilities are those that Docker leaves to root in a container.
var Capabilities = []string{
	"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FSETID", "CAP_FOWNER", "CAP_MKNOD", "CAP_NET_RAW", "CAP_SETGID",
	"CAP_SETUID", "CAP_SETFCAP", "CAP_SETPCAP", "CAP_NET_BIND_SERVICE", "CAP_SYS_CHROOT", "CAP_KILL",
	"CAP_AUDIT_WRITE",
}

// MaskedPaths and ReadonlyPaths are those of /proc and /sys that a container does not see, or not write to.
var MaskedPaths = []string{
	"/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/latency_stats",
	"/proc/timer_list", "/proc/timer_stats", "/proc/sched_debug", "/proc/scsi",
	"/sys/devices/virtual/powercap", "/sys/firmware",
}

var ReadonlyPaths = []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"}

// Filter is the filter of system calls of a container with these capabilities, shared and not to be changed;
// nil is none. A dumpable one refuses what CRIU cannot dump: io_uring and multipath TCP.
func Filter(unconfined, dumpable bool, capabilities []string) *specs.LinuxSeccomp {
	usual := slices.Equal(capabilities, Capabilities)
	switch {
	case unconfined && dumpable:
		return refuseUndumpable
	case unconfined:
		return nil
	case usual && dumpable:
		return dumpableFilter()
	case usual:
		return filter()
	case dumpable:
		return withoutMultipath(profile(capabilities))
	}
	return profile(capabilities)
}

// filter and dumpableFilter are those of what has Docker's capabilities, made once.
var (
	filter         = sync.OnceValue(func() *specs.LinuxSeccomp { return profile(Capabilities) })
	dumpableFilter = sync.OnceValue(func() *specs.LinuxSeccomp { return withoutMultipath(filter()) })
)

// profile is containerd's default seccomp profile for the capabilities, which
// has no io_uring. The x32 system calls are left out, since each kind costs
// runc several milliseconds of compiling for every container.
func profile(capabilities []string) *specs.LinuxSeccomp {
	caps := &specs.LinuxCapabilities{Bounding: capabilities}
	f := seccomp.DefaultProfile(&specs.Spec{Process: &specs.Process{Capabilities: caps}, Linux: &specs.Linux{}})
	f.Architectures = slices.DeleteFunc(f.Architectures, func(a specs.Arch) bool { return a == specs.ArchX32 })
	return f
}

// withoutMultipath refuses multipath TCP: programs that ask for it,
// those in Go, take TCP when it is refused.
func withoutMultipath(whole *specs.LinuxSeccomp) *specs.LinuxSeccomp {
	f := *whole
	f.Syscalls = slices.Clone(f.Syscalls)
	for i, s := range f.Syscalls {
		if slices.Contains(s.Names, "socket") {
			f.Syscalls[i].Args = append(slices.Clone(s.Args), multipath(specs.OpNotEqual))
		}
	}
	return &f
}

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
