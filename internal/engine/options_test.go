package engine

import (
	"errors"
	"slices"
	"strings"
	"testing"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	specs "github.com/opencontainers/runtime-spec/specs-go"

	"dewpoint/internal/engine/account"
	"dewpoint/internal/image"
	"dewpoint/internal/spec"
)

func plain(o spec.Options) *Spec {
	img := &image.Image{Spec: ocispec.Image{Config: ocispec.ImageConfig{Cmd: []string{"/app"}, WorkingDir: "/srv"}}}
	return &Spec{Name: "one", Image: img, Net: NetNone, Options: o}
}

func at(o *specs.Spec, destination string) *specs.Mount {
	i := slices.IndexFunc(o.Mounts, func(m specs.Mount) bool { return m.Destination == destination })
	if i < 0 {
		return nil
	}
	return &o.Mounts[i]
}

// What the runtime is given follows the options.
func TestOptionsInSpecification(t *testing.T) {
	c := Config{Root: t.TempDir()}
	o, err := c.ociSpec(plain(spec.Options{WorkingDir: "/w", Hostname: "box", ReadOnly: true, ShmSize: 1 << 20,
		Tmpfs:   []spec.Tmpfs{{Target: "/run/", Options: []string{"size=1m", "exec"}}},
		Ulimits: []spec.Ulimit{{Name: "nofile", Soft: 10, Hard: 20}},
		Sysctls: map[string]string{"net.core.somaxconn": "7"},
		CapAdd:  []string{"NET_ADMIN"}, CapDrop: []string{"ALL"}, NoNewPrivileges: true,
		Devices: []spec.Device{{Source: "/dev/null", Target: "/dev/nothing"}}}), account.User{UID: 7})
	if err != nil {
		t.Fatal(err)
	}
	p := o.Process
	if p.Cwd != "/w" || p.User.UID != 7 || !p.NoNewPrivileges || len(p.Rlimits) != 1 ||
		!slices.Contains(p.Env, "HOSTNAME=box") || o.Hostname != "box" || !o.Root.Readonly {
		t.Errorf("process %+v, host name %s, root %+v", p, o.Hostname, o.Root)
	}
	for _, set := range [][]string{p.Capabilities.Bounding, p.Capabilities.Effective, p.Capabilities.Permitted} {
		if !slices.Equal(set, []string{"CAP_NET_ADMIN"}) {
			t.Errorf("capabilities %q", set)
		}
	}
	if m := at(o, "/dev/shm"); !slices.Contains(m.Options, "size=1048576") ||
		slices.Contains(m.Options, "size=65536k") {
		t.Errorf("/dev/shm %q", m.Options)
	}
	if m := at(o, "/run"); m == nil || m.Type != "tmpfs" ||
		strings.Join(m.Options, ",") != "nosuid,nodev,size=1m,exec" {
		t.Errorf("/run %+v", m)
	}
	if d := o.Linux.Devices; len(d) != 1 || d[0].Path != "/dev/nothing" || len(o.Linux.Resources.Devices) != 2 ||
		o.Linux.Resources.Devices[0].Allow {
		t.Errorf("devices %+v, access %+v", d, o.Linux.Resources.Devices)
	}
	if o.Linux.Sysctl["net.core.somaxconn"] != "7" || len(o.Linux.MaskedPaths) == 0 || o.Linux.Seccomp == nil {
		t.Errorf("%+v", o.Linux)
	}
	privileged := plain(spec.Options{Privileged: true})
	privileged.Dumpable = true
	if o, err = c.ociSpec(privileged, account.User{}); err != nil {
		t.Fatal(err)
	}
	if len(o.Linux.MaskedPaths)+len(o.Linux.ReadonlyPaths) > 0 || o.Linux.Seccomp != nil ||
		slices.Contains(at(o, "/sys").Options, "ro") || len(o.Linux.Devices) == 0 ||
		!slices.Contains(o.Process.Capabilities.Bounding, "CAP_CHOWN") {
		t.Errorf("privileged: %+v", o.Linux)
	}
	if o, err = c.ociSpec(plain(spec.Options{}), account.User{}); err != nil || o.Process.Cwd != "/srv" ||
		o.Root.Readonly || !slices.Contains(at(o, "/sys").Options, "ro") {
		t.Errorf("without options: %+v, %v", o, err)
	}
}

func TestOptionsThatCannotBe(t *testing.T) {
	c := Config{Root: t.TempDir()}
	for want, o := range map[string]spec.Options{
		"CAP_EVERYTHING": {CapAdd: []string{"EVERYTHING"}},
		"/dev/none":      {Devices: []spec.Device{{Source: "/dev/none"}}},
	} {
		if _, err := c.ociSpec(plain(o), account.User{}); !errors.Is(err, ErrOption) ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
}

// Mounts below others come behind them, whatever their order was.
func TestMountsByDepth(t *testing.T) {
	c := Config{Root: t.TempDir()}
	s := plain(spec.Options{Tmpfs: []spec.Tmpfs{{Target: "/a/b"}}})
	s.Volumes = []Volume{{Source: "/v/deep", Target: "/a/b/c"}, {Source: "/v/top", Target: "/a"}}
	o, err := c.ociSpec(s, account.User{})
	if err != nil {
		t.Fatal(err)
	}
	var order []string
	for _, m := range o.Mounts {
		if strings.HasPrefix(m.Destination, "/a") {
			order = append(order, m.Destination)
		}
	}
	if strings.Join(order, " ") != "/a /a/b /a/b/c" {
		t.Errorf("%q", order)
	}
	s.Volumes[0].Target = "/a/b"
	if o, err = c.ociSpec(s, account.User{}); err != nil || at(o, "/a/b").Type != "tmpfs" {
		t.Errorf("the last of two for a path is not the one: %+v, %v", at(o, "/a/b"), err)
	}
}
