package checkpoint

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// distinguish says what each of some checkpoints of one image has that not all of
// them have, in words. Those that are made alike, or the only one, have nothing.
func distinguish(fits []Fit) [][]string {
	out := make([][]string, len(fits))
	for _, a := range aspects {
		values := make([]string, len(fits))
		for i, f := range fits {
			values[i] = a.of(f)
		}
		if same(values) {
			continue
		}
		for i, v := range values {
			out[i] = append(out[i], a.name+" "+or(v))
		}
	}
	for _, a := range listAspects {
		for i := range fits {
			for _, v := range a.of(fits[i]) {
				if slices.ContainsFunc(fits, func(f Fit) bool { return !slices.Contains(a.of(f), v) }) {
					out[i] = append(out[i], a.name+" "+v)
				}
			}
		}
	}
	distinguishHashes(out, fits, "variable", func(f Fit) map[string]string { return f.Env })
	distinguishHashes(out, fits, "contents of", func(f Fit) map[string]string { return f.Contents })
	distinguishHashes(out, fits, "label", func(f Fit) map[string]string { return f.Labels })
	return out
}

// aspects are what a fit has one of.
var aspects = []struct {
	name string
	of   func(f Fit) string
}{
	{"owner", func(f Fit) string { return owner(f.Owner) }},
	{"arguments", func(f Fit) string { return strings.Join(f.Args, " ") }},
	{"manifest", func(f Fit) string { return shorten(strings.TrimPrefix(f.Manifest, "sha256:")) }},
	{"user", func(f Fit) string { return f.User }},
	{"working directory", func(f Fit) string { return f.Cwd }},
	{"seccomp filter", func(f Fit) string { return shorten(f.Seccomp) }},
	{"hidden paths", func(f Fit) string { return shorten(f.Masked) }},
	{"engine", func(f Fit) string { return f.Engine + " " + f.Version }},
	{"runc", func(f Fit) string { return f.Runc }},
	{"kernel", func(f Fit) string { return f.Kernel }},
	{"page size", func(f Fit) string { return fmt.Sprint(f.PageSize) }},
	{"cgroups", func(f Fit) string { return f.Cgroup }},
}

// listAspects are what a fit has some of.
var listAspects = []struct {
	name string
	of   func(f Fit) []string
}{
	{"mount", func(f Fit) []string { return f.Mounts }},
	{"capability", func(f Fit) []string { return f.Capabilities }},
	{"limit", func(f Fit) []string { return f.Rlimits }},
	{"namespace", func(f Fit) []string { return f.Namespaces }},
	{"CPU feature", func(f Fit) []string { return f.CPU }},
}

// distinguishHashes tells what has a name by what its value hashes to: the values
// are nobody's business.
func distinguishHashes(out [][]string, fits []Fit, what string, of func(f Fit) map[string]string) {
	names := map[string]bool{}
	for _, f := range fits {
		for n := range of(f) {
			names[n] = true
		}
	}
	for _, n := range slices.Sorted(maps.Keys(names)) {
		values := make([]string, len(fits))
		for i, f := range fits {
			values[i] = of(f)[n]
		}
		if same(values) {
			continue
		}
		for i, v := range values {
			if v == "" {
				out[i] = append(out[i], "no "+what+" "+n)
			} else {
				out[i] = append(out[i], fmt.Sprintf("%s %s (value's hash %s)", what, n, shorten(v)))
			}
		}
	}
}

func same(values []string) bool {
	return !slices.ContainsFunc(values, func(v string) bool { return v != values[0] })
}

func shorten(hash string) string { return hash[:min(6, len(hash))] }
