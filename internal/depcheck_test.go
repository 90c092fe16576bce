// Package internal holds the rules that all packages below keep.
package internal

import (
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// order is the packages as a deployment flows through them: each imports only
// those before it. Packages in one row are equals and do not import each other.
var order = [][]string{
	{"durable", "node", "image", "admit", "sched", "checkpoint/hooks/jasm"},
	{"trace"},
	{"journal", "config", "inflate", "presence", "toc", "checkpoint/image", "checkpoint/hooks"},
	{"bdi", "registry", "erofs", "tree", "checkpoint/lazypages"},
	{"mount", "pack", "datafs", "profile"},
	{"evict"},
	{"pop", "peer"},
	{"layer", "checkpoint/store"},
	{"fetch"},
	{"snapshot"},
	{"learn"},
	{"engine/logfile", "engine/network", "engine/shimgroup", "engine/metadb", "engine/launch", "engine/program"},
	{"engine"},
	{"ready"},
	{"checkpoint"},
	{"deploy"},
	{"api", "metrics"},
	{"doctor", "web"},
	{"daemon"},
	{"simulate"},
	{"cli", "demo"},
	{"bench"},
}

// light is what the command line client does without: it talks to dewd only.
var light = []string{"dewpoint/internal/engine", "dewpoint/internal/layer", "dewpoint/internal/snapshot", "github.com/containerd/containerd/v2"}

type pkg struct {
	ImportPath string
	Imports    []string
	Deps       []string
}

func TestImportOrder(t *testing.T) {
	for _, p := range list(t, "dewpoint/internal/...") {
		name := strings.TrimPrefix(p.ImportPath, "dewpoint/internal/")
		if strings.HasSuffix(name, "test") || strings.Contains(name, "/gen/") || name == p.ImportPath {
			continue
		}
		at := row(name)
		if at < 0 {
			t.Errorf("%s has no place in the order: add it", name)
			continue
		}
		for _, imp := range p.Imports {
			sub, ours := strings.CutPrefix(imp, "dewpoint/internal/")
			if !ours || strings.HasPrefix(sub, name+"/") || strings.Contains(sub, "/gen/") {
				continue
			}
			if on := row(sub); on >= at && owner(sub) != owner(name) {
				t.Errorf("%s imports %s, which is not before it", name, sub)
			}
			if strings.HasSuffix(sub, "test") {
				t.Errorf("%s imports the test helper %s", name, sub)
			}
		}
	}
}

func TestClientIsLight(t *testing.T) {
	for _, p := range list(t, "dewpoint/internal/cli") {
		for _, d := range p.Deps {
			if slices.ContainsFunc(light, func(l string) bool { return d == l || strings.HasPrefix(d, l+"/") }) {
				t.Errorf("the client drags in %s", d)
			}
		}
	}
}

// owner is the package that a subpackage belongs to.
func owner(name string) string {
	o, _, _ := strings.Cut(name, "/")
	return o
}

// row is the place of a package, or of the one it belongs to; -1 if it has none.
func row(name string) int {
	for _, n := range []string{name, owner(name)} {
		if i := slices.IndexFunc(order, func(r []string) bool { return slices.Contains(r, n) }); i >= 0 {
			return i
		}
	}
	return -1
}

func list(t *testing.T, pattern string) []pkg {
	t.Helper()
	out, err := exec.Command("go", "list", "-json=ImportPath,Imports,Deps", pattern).Output()
	if err != nil {
		t.Fatal(err)
	}
	var all []pkg
	d := json.NewDecoder(strings.NewReader(string(out)))
	for {
		var p pkg
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			return all
		} else if err != nil {
			t.Fatal(err)
		}
		all = append(all, p)
	}
}
