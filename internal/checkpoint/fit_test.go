package checkpoint

import (
	"encoding/json"
	"errors"
	"reflect"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	specs "github.com/opencontainers/runtime-spec/specs-go"

	"dewpoint/internal/checkpoint/hooks"
	"dewpoint/internal/engine"
	"dewpoint/internal/image"
)

func someImage() *image.Image {
	return &image.Image{Desc: ocispec.Descriptor{Digest: digest.FromString("manifest")},
		ConfigD: ocispec.Descriptor{Digest: digest.FromString("config")}}
}

func someSpec(name string) *specs.Spec {
	memory := int64(len(name)) << 20
	return &specs.Spec{
		Hostname: name,
		Process: &specs.Process{Args: []string{"/app", "serve"},
			Env: []string{"PATH=/", "HOSTNAME=" + name, "SECRET=opens-the-safe"}, Cwd: "/",
			Capabilities: &specs.LinuxCapabilities{Bounding: []string{"CAP_CHOWN", "CAP_KILL"}},
			Rlimits:      []specs.POSIXRlimit{{Type: "RLIMIT_NOFILE", Soft: 1, Hard: 2}}},
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "nodev"}},
			{Destination: "/etc/hosts", Type: "bind", Source: "/var/containers/" + name + "/hosts",
				Options: []string{"rbind"}},
			{Destination: "/data", Type: "bind", Source: "/srv/data", Options: []string{"rbind", "rw"}}},
		Linux: &specs.Linux{CgroupsPath: "/dewpoint/" + name,
			Resources: &specs.LinuxResources{Memory: &specs.LinuxMemory{Limit: &memory}},
			Namespaces: []specs.LinuxNamespace{{Type: specs.PIDNamespace},
				{Type: specs.NetworkNamespace, Path: "/run/netns/" + name}},
			Seccomp: &specs.LinuxSeccomp{DefaultAction: specs.ActErrno}, MaskedPaths: []string{"/proc/kcore"}},
	}
}

func someAbility() Ability {
	return Ability{Engine: "criu", Version: "4.2", Runc: "1.1.5", Kernel: "6.18.44", PageSize: 4096,
		CPU: []string{"avx", "sse"}, CgroupMode: "hybrid", Lazy: true}
}

func TestClonesFit(t *testing.T) {
	a := FitOf(someImage(), someSpec("one"), someAbility(), nil)
	b := FitOf(someImage(), someSpec("another"), someAbility(), nil)
	if why := a.Why(b); len(why) > 0 || a.Key() != b.Key() {
		t.Errorf("containers that differ in what is their own do not fit: %q", why)
	}
	if s, _ := json.Marshal(a); strings.Contains(string(s), "opens-the-safe") {
		t.Errorf("a variable's value is in the record: %s", s)
	}
}

func TestFreeVariables(t *testing.T) {
	s := someSpec("one")
	s.Process.Env = append(s.Process.Env, "ZONE=north")
	a, b := FitOf(someImage(), s, someAbility(), map[string]string{LabelFree: "ZONE"}),
		FitOf(someImage(), someSpec("one"), someAbility(), map[string]string{LabelFree: "ZONE"})
	if why := a.Why(b); len(why) > 0 || a.Key() != b.Key() {
		t.Errorf("a variable that may differ counts: %q", why)
	}
}

// TestEveryField changes one thing after the other: the key and the reason follow.
func TestEveryField(t *testing.T) {
	own := map[string]string{hooks.LabelAfter: "renew", "color": "red"}
	for field, c := range map[string]struct {
		change func(i *image.Image, o *specs.Spec, a *Ability)
		says   string
	}{
		"Manifest": {func(i *image.Image, _ *specs.Spec, _ *Ability) {
			i.Desc.Digest = digest.FromString("other")
		}, "image sha256:"},
		"Config": {func(i *image.Image, _ *specs.Spec, _ *Ability) {
			i.ConfigD.Digest = digest.FromString("other")
		}, "image configuration"},
		"Args": {func(_ *image.Image, o *specs.Spec, _ *Ability) {
			o.Process.Args = []string{"/app", "other"}
		}, `arguments differ: -"serve" +"other"`},
		"Env": {func(_ *image.Image, o *specs.Spec, _ *Ability) {
			o.Process.Env[2] = "SECRET=other"
		}, "environment differs: SECRET"},
		"Cwd": {func(_ *image.Image, o *specs.Spec, _ *Ability) {
			o.Process.Cwd = "/tmp"
		}, "working directory /, here /tmp"},
		"Mounts": {func(_ *image.Image, o *specs.Spec, _ *Ability) {
			o.Mounts[2].Source = "/srv/other"
		}, "mounts differ"},
		"Capabilities": {func(_ *image.Image, o *specs.Spec, _ *Ability) {
			o.Process.Capabilities.Bounding = nil
		}, "capabilities differ"},
		"Seccomp": {func(_ *image.Image, o *specs.Spec, _ *Ability) { o.Linux.Seccomp = nil }, "seccomp"},
		"Rlimits": {func(_ *image.Image, o *specs.Spec, _ *Ability) {
			o.Process.Rlimits[0].Hard = 3
		}, "limits differ"},
		"Namespaces": {func(_ *image.Image, o *specs.Spec, _ *Ability) {
			o.Linux.Namespaces = o.Linux.Namespaces[:1]
		}, `namespaces differ: -"network"`},
		"Masked": {func(_ *image.Image, o *specs.Spec, _ *Ability) { o.Linux.MaskedPaths = nil }, "hidden"},
		"Options": {func(_ *image.Image, o *specs.Spec, _ *Ability) {
			o.Process.NoNewPrivileges = true
			o.Linux.Sysctl = map[string]string{"net.core.somaxconn": "1"}
			o.Linux.Devices = []specs.LinuxDevice{{Path: "/dev/x", Type: "c", Major: 1, Minor: 3}}
			o.Root = &specs.Root{Readonly: true}
		}, `options differ: +"no new privileges" +"device /dev/x c 1:3" +"read-only root" +"sysctl net.core.somaxconn=1"`},
		"Engine": {func(_ *image.Image, _ *specs.Spec, a *Ability) {
			a.Engine = "dmtcp"
		}, "engine criu, here dmtcp"},
		"Version": {func(_ *image.Image, _ *specs.Spec, a *Ability) {
			a.Version = "4.3"
		}, "criu 4.2, here 4.3"},
		"Runc": {func(_ *image.Image, _ *specs.Spec, a *Ability) {
			a.Runc = "1.2"
		}, "runc 1.1.5, here 1.2"},
		"Kernel": {func(_ *image.Image, _ *specs.Spec, a *Ability) {
			a.Kernel = "6.12"
		}, "kernel 6.18.44, here 6.12"},
		"PageSize": {func(_ *image.Image, _ *specs.Spec, a *Ability) {
			a.PageSize = 16384
		}, "page size 4096, here 16384"},
		"Cgroup": {func(_ *image.Image, _ *specs.Spec, a *Ability) {
			a.CgroupMode = "v2"
		}, "cgroups hybrid, here v2"},
		"Labels": {func(i *image.Image, _ *specs.Spec, _ *Ability) {
			i.Spec.Config.Labels = own
		}, "labels differ: " + hooks.LabelAfter},
		"CPU": {func(_ *image.Image, _ *specs.Spec, a *Ability) {
			a.CPU = []string{"sse", "sve"}
		}, "this CPU lacks avx"},
	} {
		t.Run(field, func(t *testing.T) {
			have := FitOf(someImage(), someSpec("one"), someAbility(), own)
			i, o, a := someImage(), someSpec("one"), someAbility()
			c.change(i, o, &a)
			want := FitOf(i, o, a, own)
			if reflect.DeepEqual(reflect.ValueOf(have).FieldByName(field).Interface(),
				reflect.ValueOf(want).FieldByName(field).Interface()) {
				t.Fatal("the field did not change")
			}
			why := have.Why(want)
			if len(why) != 1 || !strings.Contains(why[0], c.says) {
				t.Errorf("the reasons are %q, want one with %q", why, c.says)
			}
			if same := have.Key() == want.Key(); same != (field == "CPU") {
				t.Errorf("the keys are the same: %v", same)
			}
		})
	}
	if n := reflect.TypeFor[Fit]().NumField(); n != 23 {
		t.Errorf("Fit has %d fields: test the new ones here, as TestOwner and TestContents do", n)
	}
}

// TestOwner asks who may start from whose checkpoint. Records that name no owner, as earlier versions made
// them, are the administrators', with the key that they had.
func TestOwner(t *testing.T) {
	img := someImage()
	img.Spec.Config.Labels = map[string]string{LabelOwner: "token:image"} // nobody asks an image
	of := func(owner string) Fit {
		return FitOf(img, someSpec("one"), someAbility(), map[string]string{LabelOwner: owner})
	}
	shared := of("token:ci")
	shared.Owner = Anyone
	for _, c := range []struct {
		have Fit
		want string
		why  string
	}{
		{of(""), "", ""},
		{of(""), "token:ci", "it belongs to an administrator"},
		{of("token:ci"), "token:ci", ""},
		{of("token:ci"), "cert:ci", "it belongs to token:ci"},
		{of("token:ci"), "", "it belongs to token:ci"},
		{shared, "token:ci", ""},
		{shared, "token:other", ""},
		{shared, "", ""},
	} {
		if why := strings.Join(c.have.Why(of(c.want)), "; "); why != c.why {
			t.Errorf("of %q for %q: %q, want %q", c.have.Owner, c.want, why, c.why)
		}
	}
	other := of("token:ci")
	other.Args, other.Kernel = []string{"other"}, "6.1"
	if why := other.Why(of("")); len(why) != 1 {
		t.Errorf("who may not have it is told %q", why)
	}
	if of("").Key() == of("token:ci").Key() || of("").Key() == shared.Key() ||
		of("").bootKey() != of("token:ci").bootKey() {
		t.Error("checkpoints of several owners have one key, or boot otherwise")
	}
	if b, err := json.Marshal(of("")); err != nil || strings.Contains(string(b), "owner") ||
		of("").Key() != FitOf(img, someSpec("one"), someAbility(), nil).Key() {
		t.Errorf("an administrator's: %s, %v", b, err)
	}
}

// TestOwnLabels tells hooks that are not the same apart, and how a container boots by none of them.
func TestOwnLabels(t *testing.T) {
	fit := func(own map[string]string) Fit { return FitOf(someImage(), someSpec("one"), someAbility(), own) }
	none, hooked := fit(map[string]string{"color": "red", LabelCheckpoint: "auto", hooks.LabelBefore: ""}),
		fit(map[string]string{hooks.LabelBefore: "flush"})
	if why := fit(nil).Why(none); len(why) > 0 || none.Key() != fit(nil).Key() {
		t.Errorf("labels that change nothing count: %q", why)
	}
	if why := none.Why(hooked); len(why) != 1 || why[0] != "the container's labels differ: "+hooks.LabelBefore ||
		none.bootKey() != hooked.bootKey() {
		t.Errorf("a hook: %q", why)
	}
}

// TestMoreCPU runs a checkpoint of a poor CPU on a rich one.
func TestMoreCPU(t *testing.T) {
	have, rich := someAbility(), someAbility()
	rich.CPU = append(rich.CPU, "avx512")
	if why := FitOf(someImage(), someSpec("one"), have,
		nil).Why(FitOf(someImage(), someSpec("one"), rich, nil)); len(why) > 0 {
		t.Errorf("more features than needed are a reason: %q", why)
	}
}

// TestOtherEngine gives the one reason that counts.
func TestOtherEngine(t *testing.T) {
	a := someAbility()
	have := FitOf(someImage(), someSpec("one"), a, nil)
	a.Engine, a.Version, a.Runc, a.CgroupMode, a.CPU = "dmtcp", "5.0", "", "", nil
	want := FitOf(someImage(), someSpec("one"), a, nil)
	if why := have.Why(want); len(why) != 1 || why[0] != "engine criu, here dmtcp" {
		t.Errorf("%q", why)
	}
	if why := want.Why(have); len(why) != 1 || why[0] != "engine dmtcp, here criu" {
		t.Errorf("%q", why)
	}
}

// TestDistinguish changes one thing after the other of two.
func TestDistinguish(t *testing.T) {
	for says, change := range map[string]func(o *specs.Spec, a *Ability){
		"arguments /app other":   func(o *specs.Spec, _ *Ability) { o.Process.Args = []string{"/app", "other"} },
		"working directory /tmp": func(o *specs.Spec, _ *Ability) { o.Process.Cwd = "/tmp" },
		"mount bind /data ro /srv/other": func(o *specs.Spec, _ *Ability) {
			o.Mounts[2].Source, o.Mounts[2].Options = "/srv/other", []string{"ro"}
		},
		"limit RLIMIT_NOFILE 1 3": func(o *specs.Spec, _ *Ability) {
			o.Process.Rlimits[0].Hard = 3
		},
		"engine dmtcp 5.0": func(_ *specs.Spec, a *Ability) {
			a.Engine, a.Version = "dmtcp", "5.0"
		},
		"kernel 6.12":     func(_ *specs.Spec, a *Ability) { a.Kernel = "6.12" },
		"CPU feature sve": func(_ *specs.Spec, a *Ability) { a.CPU = append(a.CPU, "sve") },
		"no variable SECRET": func(o *specs.Spec, _ *Ability) {
			o.Process.Env = o.Process.Env[:2]
		},
		"variable ZONE (value's hash " + zoneID(): func(o *specs.Spec, _ *Ability) {
			o.Process.Env = append(o.Process.Env, "ZONE=north")
		},
	} {
		o, a := someSpec("two"), someAbility()
		change(o, &a)
		one, two := FitOf(someImage(), someSpec("one"), someAbility(), nil), FitOf(someImage(), o, a, nil)
		if d := distinguish([]Fit{one, two}); len(d[1]) != 1 || !strings.HasPrefix(d[1][0], says) {
			t.Errorf("%q, want %q", d, says)
		}
		if d := distinguish([]Fit{two, two}); len(d[0])+len(d[1]) > 0 {
			t.Errorf("%s: two that are alike differ: %q", says, d)
		}
	}
}

// TestUser restores nothing as another user than it is to run as.
func TestUser(t *testing.T) {
	m, f, s := newManager(t, nil)
	f.info.Labels = map[string]string{engine.LabelUser: "1000"}
	if _, _, err := m.Checkpoint(t.Context(), "one", Options{}); err != nil {
		t.Fatal(err)
	}
	if p, err := m.Plan(t.Context(), s, Always, false); !errors.Is(err, ErrRestore) ||
		p.Why != "user 1000, here none" {
		t.Errorf("the image's: %+v, %v", p, err)
	}
	s.User = "1000"
	if p, err := m.Plan(t.Context(), s, Always, false); err != nil || p.Record == nil {
		t.Errorf("the same: %+v, %v", p, err)
	}
}

// TestDistinguishLabels names labels that only one of two has.
func TestDistinguishLabels(t *testing.T) {
	one := FitOf(someImage(), someSpec("one"), someAbility(), nil)
	two := FitOf(someImage(), someSpec("two"), someAbility(), map[string]string{hooks.LabelAfter: "/reseed"})
	if d := distinguish([]Fit{one, two}); len(d[0]) != 1 || d[0][0] != "no label "+hooks.LabelAfter ||
		len(d[1]) != 1 || !strings.HasPrefix(d[1][0], "label "+hooks.LabelAfter+" (value's hash ") {
		t.Errorf("%q", d)
	}
}

func zoneID() string { return hash("ZONE", "north")[:6] }
