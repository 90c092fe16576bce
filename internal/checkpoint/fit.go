package checkpoint

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"dewpoint/internal/checkpoint/hooks"
	"dewpoint/internal/image"
)

// Fit is everything that a checkpoint and a container that is to start from it
// must have in common. What a container may have of its own (name, host name,
// addresses, ports, limits, cgroup) is not in it. Values of variables and the
// seccomp filter are told by hashes only: a record is read by more eyes than
// the memory beside it.
type Fit struct {
	Manifest     string            `json:"manifest"` // digest of the platform's manifest
	Config       string            `json:"config"`   // digest of the image's configuration
	Args         []string          `json:"args"`
	Env          map[string]string `json:"env,omitempty"`  // hashes, by name
	User         string            `json:"user,omitempty"` // as ordered; "" is the image's
	Cwd          string            `json:"cwd"`
	Mounts       []string          `json:"mounts"`             // "TYPE DESTINATION OPTIONS [SOURCE]"
	Contents     map[string]string `json:"contents,omitempty"` // hashes of what is bound read-only, by target
	Capabilities []string          `json:"capabilities,omitempty"`
	Seccomp      string            `json:"seccomp,omitempty"` // hash
	Rlimits      []string          `json:"rlimits,omitempty"`
	Namespaces   []string          `json:"namespaces"` // "host network" is one that is not there
	Masked       string            `json:"masked"`     // hash of the masked and read-only paths
	// Options are what else the container was given that its processes can tell.
	Options []string `json:"options,omitempty"`
	// Labels are hashes of the container's own that say what is run before a checkpoint and after a
	// restore; those of the image go with Config.
	Labels map[string]string `json:"labels,omitempty"`
	// Owner is whose container it was: "" the administrators', of whom each may do everything, else
	// the name of a caller, as in LabelOwner; or Anyone. Records that say nothing are the administrators'.
	Owner string `json:"owner,omitempty"`

	Engine   string   `json:"engine"`
	Version  string   `json:"version"`
	Runc     string   `json:"runc,omitempty"`
	Kernel   string   `json:"kernel"`
	PageSize int      `json:"page_size"`
	Cgroup   string   `json:"cgroup"`
	CPU      []string `json:"cpu,omitempty"` // the node must have all of these
}

// LabelOwner is on containers that belong to one caller, and not to the administrators: his name.
const LabelOwner = "dewpoint.owner"

// Anyone is the owner of a checkpoint that an administrator has made for all callers.
const Anyone = "*"

// FitOf says what a container of img, made by the specification o on a node of ability a, has in common with
// its checkpoints, but for Contents; own are the container's labels. Variables that LabelFree names may
// differ, and so may the sources of volumes that LabelVolumes names.
func FitOf(img *image.Image, o *specs.Spec, a Ability, own map[string]string) Fit {
	f := Fit{
		Manifest: img.Desc.Digest.String(), Config: img.ConfigD.Digest.String(),
		Env: map[string]string{}, Owner: own[LabelOwner], Masked: hash(o.Linux.MaskedPaths, o.Linux.ReadonlyPaths),
		Engine: a.Engine, Version: a.Version, Runc: a.Runc, Kernel: a.Kernel, PageSize: a.PageSize,
		Cgroup: a.CgroupMode, CPU: a.CPU,
	}
	free := strings.Fields(labelsOf(img, own)[LabelFree])
	f.process(o.Process, append([]string{"HOSTNAME"}, free...))
	f.label(img, own)
	for _, m := range o.Mounts {
		f.Mounts = append(f.Mounts, mountLine(m, freeVolumes(img, own)))
	}
	slices.Sort(f.Mounts)
	if o.Linux.Seccomp != nil {
		f.Seccomp = hash(o.Linux.Seccomp)
	}
	for _, n := range o.Linux.Namespaces {
		f.Namespaces = append(f.Namespaces, string(n.Type))
	}
	slices.Sort(f.Namespaces)
	f.Options = optionsOf(o)
	return f
}

func (f *Fit) process(p *specs.Process, free []string) {
	f.Args, f.Cwd = p.Args, p.Cwd
	for _, kv := range p.Env {
		if k, v, _ := strings.Cut(kv, "="); !slices.Contains(free, k) {
			f.Env[k] = hash(k, v)
		}
	}
	if p.Capabilities != nil {
		f.Capabilities = slices.Sorted(slices.Values(p.Capabilities.Bounding))
	}
	for _, r := range p.Rlimits {
		f.Rlimits = append(f.Rlimits, fmt.Sprintf("%s %d %d", r.Type, r.Soft, r.Hard))
	}
	slices.Sort(f.Rlimits)
}

// label counts own labels that are not what the image says anyway.
func (f *Fit) label(img *image.Image, own map[string]string) {
	for _, k := range []string{hooks.LabelBefore, hooks.LabelAfter, hooks.LabelAgents} {
		if v, ok := own[k]; ok && v != img.Spec.Config.Labels[k] {
			if f.Labels == nil {
				f.Labels = map[string]string{}
			}
			f.Labels[k] = hash(k, v)
		}
	}
}

// ownFiles are bound into every container from a place of its own.
var ownFiles = []string{"/etc/hostname", "/etc/hosts", "/etc/resolv.conf", "/etc/machine-id"}

// mountLine tells a mount; the source counts where it is the container's business, and free does not name the
// target.
func mountLine(m specs.Mount, free []string) string {
	if m.Destination == hooks.AgentsDir {
		return m.Type + " " + m.Destination + " " + filepath.Base(m.Source)
	}
	line := m.Type + " " + m.Destination + " " + strings.Join(slices.Sorted(slices.Values(m.Options)), ",")
	if bound(m) && !slices.Contains(free, m.Destination) {
		line += " " + filepath.Clean(m.Source)
	}
	return line
}

// hash is a short one of values; never of what nobody is to guess only.
func hash(values ...any) string {
	b, err := json.Marshal(values)
	if err != nil {
		panic(err) // plain structs
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:16])
}

// Key is the same for all that must be equal: everything but the CPU's features.
func (f Fit) Key() string {
	f.CPU = nil
	return hash(f)
}

// kind is the same for all that are saved alike, whatever is in what they have mounted.
func (f Fit) kind() string {
	f.Contents = nil
	return f.Key()
}

// bootKey is the same for all that boot alike, whatever saves them.
func (f Fit) bootKey() string {
	f.Contents, f.Engine, f.Version, f.Runc, f.Kernel, f.PageSize, f.Cgroup, f.CPU, f.Labels, f.Owner = nil, "",
		"", "", "", 0, "", nil, nil, ""
	return hash(f)
}

// Why says in plain words why a checkpoint of fit f is of no use to a container
// of fit want; nothing if it is. Who may not have it is told no more than that.
func (f Fit) Why(want Fit) []string {
	if f.Owner != want.Owner && f.Owner != Anyone {
		return []string{"it belongs to " + owner(f.Owner)}
	}
	var why []string
	differ := func(what, had, wants string) {
		if had != wants {
			why = append(why, fmt.Sprintf("%s %s, here %s", what, or(had), or(wants)))
		}
	}
	changed := func(what string, had, wants []string) {
		if !slices.Equal(had, wants) {
			why = append(why, what+" differ: "+difference(had, wants))
		}
	}
	differ("image", f.Manifest, want.Manifest)
	differ("image configuration", f.Config, want.Config)
	changed("arguments", f.Args, want.Args)
	named := func(what string, had, wants map[string]string) {
		if names := whichDiffer(had, wants); len(names) > 0 {
			why = append(why, what+strings.Join(names, " "))
		}
	}
	named("environment differs: ", f.Env, want.Env)
	named("the container's labels differ: ", f.Labels, want.Labels)
	differ("user", f.User, want.User)
	differ("working directory", f.Cwd, want.Cwd)
	changed("mounts", f.Mounts, want.Mounts)
	if slices.Equal(f.Mounts, want.Mounts) {
		why = append(why, f.whyContents(want)...)
	}
	changed("capabilities", f.Capabilities, want.Capabilities)
	if f.Seccomp != want.Seccomp {
		why = append(why, "the seccomp filter differs")
	}
	changed("limits", f.Rlimits, want.Rlimits)
	changed("namespaces", f.Namespaces, want.Namespaces)
	changed("options", f.Options, want.Options)
	if f.Masked != want.Masked {
		why = append(why, "the paths that are hidden differ")
	}
	if f.Engine != want.Engine { // their versions have nothing to do with each other
		return append(why, fmt.Sprintf("engine %s, here %s", or(f.Engine), or(want.Engine)))
	}
	differ(f.Engine, f.Version, want.Version)
	differ("runc", f.Runc, want.Runc)
	differ("kernel", f.Kernel, want.Kernel)
	differ("page size", fmt.Sprint(f.PageSize), fmt.Sprint(want.PageSize))
	differ("cgroups", f.Cgroup, want.Cgroup)
	return append(why, f.missing(want)...)
}

// owner is who owns a checkpoint, in words.
func owner(name string) string {
	switch name {
	case "":
		return "an administrator"
	case Anyone:
		return "anyone"
	}
	return name
}

// missing are CPU features that the checkpoint's processes may use and the node lacks.
func (f Fit) missing(want Fit) []string {
	var lacks []string
	for _, c := range f.CPU {
		if !slices.Contains(want.CPU, c) {
			lacks = append(lacks, c)
		}
	}
	if len(lacks) == 0 {
		return nil
	}
	return []string{"this CPU lacks " + strings.Join(lacks, " ")}
}

func or(s string) string {
	if s == "" {
		return "none"
	}
	return s
}

// difference tells what only one of two lists has, or that the order differs.
func difference(had, wants []string) string {
	var out []string
	for _, s := range had {
		if !slices.Contains(wants, s) {
			out = append(out, fmt.Sprintf("-%q", s))
		}
	}
	for _, s := range wants {
		if !slices.Contains(had, s) {
			out = append(out, fmt.Sprintf("+%q", s))
		}
	}
	if len(out) == 0 {
		return "their order or number"
	}
	return strings.Join(out, " ")
}

// whichDiffer are the names whose values are not the same in both.
func whichDiffer(a, b map[string]string) []string {
	names := map[string]bool{}
	for k, v := range a {
		if w, ok := b[k]; !ok || w != v {
			names[k] = true
		}
	}
	for k := range b {
		if _, ok := a[k]; !ok {
			names[k] = true
		}
	}
	return slices.Sorted(maps.Keys(names))
}
