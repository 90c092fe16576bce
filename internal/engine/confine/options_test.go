package confine

import (
	"os"
	"slices"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"dewpoint/internal/spec"
)

func TestAllowed(t *testing.T) {
	without := slices.DeleteFunc(slices.Clone(Capabilities), func(c string) bool { return c == "CAP_CHOWN" })
	for _, c := range []struct {
		add, drop, want []string
	}{
		{nil, nil, Capabilities},
		{[]string{"net_admin"}, nil, append(slices.Clone(Capabilities), "CAP_NET_ADMIN")},
		{[]string{"CHOWN"}, nil, Capabilities},
		{nil, []string{"CAP_CHOWN"}, without},
		{[]string{"CAP_NET_ADMIN"}, []string{"ALL"}, []string{"CAP_NET_ADMIN"}},
		{nil, []string{"all"}, nil},
	} {
		got, err := Allowed(&spec.Options{CapAdd: c.add, CapDrop: c.drop})
		if err != nil || !slices.Equal(got, c.want) {
			t.Errorf("with %q, without %q: %q, %v", c.add, c.drop, got, err)
		}
	}
	for _, o := range []spec.Options{{CapAdd: []string{"ALL"}, CapDrop: []string{"CHOWN"}},
		{Privileged: true, CapDrop: []string{"CHOWN"}}} {
		if got, err := Allowed(&o); err != nil || slices.Contains(got, "CAP_CHOWN") || slices.Contains(got, "CAP_ALL") {
			t.Errorf("%+v: %q, %v", o, got, err)
		}
	}
	if got, err := Allowed(&spec.Options{CapDrop: []string{"SYS_EVERYTHING"}}); err == nil {
		t.Errorf("a capability that there is not: %q", got)
	}
}

// The filter of more capabilities allows what they need.
func TestFilterFollowsCapabilities(t *testing.T) {
	more := append(slices.Clone(Capabilities), "CAP_SYS_TIME")
	allows := func(f *specs.LinuxSeccomp, call string) bool {
		return slices.ContainsFunc(f.Syscalls, func(s specs.LinuxSyscall) bool {
			return s.Action == specs.ActAllow && slices.Contains(s.Names, call)
		})
	}
	for _, dumpable := range []bool{false, true} {
		if allows(Filter(false, dumpable, Capabilities), "clock_settime") ||
			!allows(Filter(false, dumpable, more), "clock_settime") {
			t.Errorf("dumpable %t: clock_settime is not allowed by CAP_SYS_TIME", dumpable)
		}
	}
	if Filter(false, true, Capabilities) != Filter(false, true, slices.Clone(Capabilities)) {
		t.Error("the usual filter is made for each container")
	}
	if Filter(true, false, more) != nil {
		t.Error("what is not confined has a filter")
	}
}

func TestDevices(t *testing.T) {
	nodes, access, err := Devices(&spec.Options{Devices: []spec.Device{{Source: "/dev/null", Target: "/dev/x",
		Permissions: "r"}, {Source: "/dev/zero"}}})
	if err != nil || len(nodes) != 2 || len(access) != 2 {
		t.Fatalf("%+v, %+v, %v", nodes, access, err)
	}
	if n := nodes[0]; n.Path != "/dev/x" || n.Type != "c" || n.Major != 1 || n.Minor != 3 || n.FileMode == nil ||
		*n.FileMode != 0o666 {
		t.Errorf("%+v", n)
	}
	if a := access[0]; !a.Allow || a.Access != "r" || *a.Major != 1 || *a.Minor != 3 || access[1].Access != "rwm" {
		t.Errorf("%+v", access)
	}
	for _, source := range []string{"/dev/there-is-none", "/dev", "/proc/self/status"} {
		if n, _, err := Devices(&spec.Options{Devices: []spec.Device{{Source: source}}}); err == nil ||
			!strings.Contains(err.Error(), source) {
			t.Errorf("%s: %+v, %v", source, n, err)
		}
	}
	nodes, access, err = Devices(&spec.Options{Privileged: true})
	if err != nil || len(access) != 1 || !access[0].Allow || access[0].Major != nil {
		t.Fatalf("%+v, %v", access, err)
	}
	for _, n := range nodes {
		if _, err := os.Stat(n.Path); err != nil || strings.HasPrefix(n.Path, "/dev/pts/") {
			t.Errorf("%s: %v", n.Path, err)
		}
	}
	if !slices.ContainsFunc(nodes, func(n specs.LinuxDevice) bool { return n.Path == "/dev/null" }) {
		t.Errorf("a privileged container has no /dev/null of the host: %+v", nodes)
	}
}

func TestRlimits(t *testing.T) {
	got := Rlimits(&spec.Options{Ulimits: []spec.Ulimit{{Name: "nofile", Soft: 10, Hard: -1}}})
	if len(got) != 1 || got[0] != (specs.POSIXRlimit{Type: "RLIMIT_NOFILE", Soft: 10, Hard: 1<<64 - 1}) {
		t.Errorf("%+v", got)
	}
}
