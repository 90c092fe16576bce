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
// those in rows before its own. Every package has a place of its own, also one below another's folder.
var order = [][]string{
	{"durable", "limit", "spec", "image", "sched", "engine/process", "evict"},
	{"trace", "layer/presence", "sender", "setup"},
	{"config", "deploy/admit", "deploy/journal", "layer/inflate", "layer/toc", "checkpoint/image"},
	{"registry", "layer/bdi", "layer/erofs", "layer/tree", "checkpoint/hooks", "checkpoint/lazypages",
		"checkpoint/upper"},
	{"layer/mount", "layer/datafs", "pack", "pack/profile"},
	{"layer"},
	{"fetch/link", "pop", "pop/peer"},
	{"pop/session", "checkpoint/store"},
	{"pop/local", "pop/redis"},
	{"fetch"},
	{"pop/member"},
	{"snapshot"},
	{"pack/learn"},
	{"engine/account", "engine/cgroup", "engine/confine", "engine/launch", "engine/limits", "engine/logfile", "engine/metadb",
		"engine/mounts", "engine/network", "engine/program", "engine/streams", "engine/tool", "engine/volumes"},
	{"engine/containerd", "engine/shimgroup"},
	{"engine/state"},
	{"engine/stdio"},
	{"engine", "teardown"},
	{"deploy/ready", "health", "restart", "adopt"},
	{"checkpoint"},
	{"checkpoint/criu", "checkpoint/dmtcp"},
	{"deploy"},
	{"api", "server/metrics"},
	{"server/doctor", "server/web"},
	{"server"},
	{"cli/show", "cli/docker"},
	{"cli"},
}

// light is what the command line client does without: it talks to dewd only.
var light = []string{"dewpoint/internal/engine", "dewpoint/internal/layer", "dewpoint/internal/snapshot",
	"github.com/containerd/containerd/v2"}

type pkg struct {
	ImportPath string
	Imports    []string
	Deps       []string
}

func TestImportOrder(t *testing.T) {
	for _, p := range list(t, "dewpoint/internal/...") {
		name := strings.TrimPrefix(p.ImportPath, "dewpoint/internal/")
		if strings.Contains(name, "/gen/") || name == p.ImportPath {
			continue
		}
		at := row(name)
		if at < 0 {
			t.Errorf("%s has no place in the order: add it", name)
			continue
		}
		for _, imp := range p.Imports {
			if strings.HasPrefix(imp, "dewpoint/testkit") || strings.HasPrefix(imp, "dewpoint/lab") {
				t.Errorf("%s imports %s: the product does without", name, imp)
			}
			sub, ours := strings.CutPrefix(imp, "dewpoint/internal/")
			if ours && !strings.Contains(sub, "/gen/") && row(sub) >= at {
				t.Errorf("%s imports %s, which is not before it", name, sub)
			}
		}
	}
}

func TestClientIsLight(t *testing.T) {
	for _, p := range append(list(t, "dewpoint/internal/cli"), list(t, "dewpoint/cmd/dew")...) {
		for _, d := range p.Deps {
			if slices.ContainsFunc(light, func(l string) bool { return d == l || strings.HasPrefix(d, l+"/") }) {
				t.Errorf("the client drags in %s", d)
			}
		}
	}
}

// row is the place of a package; -1 if it has none.
func row(name string) int {
	return slices.IndexFunc(order, func(r []string) bool { return slices.Contains(r, name) })
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
