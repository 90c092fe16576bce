package engine

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// trialStatus is crun's word of a container that has the trial's specification.
func trialStatus(t *testing.T, e *Engine) *crunStatus {
	t.Helper()
	bundle := t.TempDir()
	if err := e.writeTrial(bundle, shimProgram); err != nil {
		t.Fatal(err)
	}
	return &crunStatus{Pid: os.Getpid(), Bundle: bundle, Rootfs: "/its/root",
		Descriptors: `["/dev/null","pipe:[1]","pipe:[2]"]`}
}

func noStandIn(t *testing.T, e *Engine, name string) {
	t.Helper()
	if _, err := os.Lstat(e.standInDir(name)); err == nil {
		t.Error("its directory is left")
	}
	for _, pattern := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/*"} {
		if left, _ := filepath.Glob(pattern + e.standInCgroup(name)); len(left) > 0 {
			t.Errorf("left: %v", left)
		}
	}
}

// What runc says of a stand-in becomes what it would say of the container.
func TestStandIn(t *testing.T) {
	e := bare(t, RuntimeRunc, "")
	s := trialStatus(t, e)
	state, err := e.standIn(t.Context(), "one", s)
	if err != nil {
		t.Fatal(err)
	}
	noStandIn(t, e, "one")
	if err := e.liken(state, "one", s, 42); err != nil {
		t.Fatal(err)
	}
	b, err := json.Marshal(state)
	if err != nil {
		t.Fatal(err)
	}
	if !e.isOf(b, s.Pid, 42) || e.isOf(b, s.Pid, 43) || e.isOf(b, 1, 42) {
		t.Error("it is not of the container's process")
	}
	var got struct {
		ID          string
		Descriptors []string          `json:"external_descriptors"`
		Cgroups     map[string]string `json:"cgroup_paths"`
		Namespaces  map[string]string `json:"namespace_paths"`
		Config      struct{ Rootfs string }
	}
	if err := json.Unmarshal(b, &got); err != nil {
		t.Fatal(err)
	}
	if got.ID != "one" || got.Config.Rootfs != "/its/root" ||
		!slices.Equal(got.Descriptors, []string{"/dev/null", "pipe:[1]", "pipe:[2]"}) {
		t.Errorf("%+v", got)
	}
	for _, p := range got.Cgroups {
		if !strings.HasSuffix(p, e.cfg.places().Cgroup("one")) {
			t.Errorf("cgroup %s", p)
		}
	}
	if len(got.Cgroups) == 0 || got.Namespaces["NEWPID"] != "/proc/"+string(mustJSON(t, s.Pid))+"/ns/pid" {
		t.Errorf("cgroups %v, namespaces %v", got.Cgroups, got.Namespaces)
	}
	if err := e.liken(map[string]any{"config": 1}, "one", s, 42); err == nil ||
		!strings.Contains(err.Error(), "engine.runtime") {
		t.Errorf("a state of another kind: %v", err)
	}
}

func mustJSON(t *testing.T, v any) []byte {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// A stand-in that a killed daemon has left goes when the next one starts.
func TestStandInLeft(t *testing.T) {
	e := bare(t, RuntimeRunc, "")
	if err := os.MkdirAll(filepath.Join(e.standInDir("one"), "rootfs"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := e.writeStandIn("one", trialStatus(t, e)); err != nil {
		t.Fatal(err)
	}
	if err := e.runcStandIn(t.Context(), "one", "create", "--bundle", e.standInDir("one"), "one"); err != nil {
		t.Fatal(err)
	}
	if err := e.removeStandIns(t.Context()); err != nil {
		t.Fatal(err)
	}
	noStandIn(t, e, "one")
}
