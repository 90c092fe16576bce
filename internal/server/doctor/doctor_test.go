package doctor

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"dewpoint/internal/layer/inflate"
	"dewpoint/internal/spec"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// examined are the findings by what was looked at.
func examined(t *testing.T, cfg Config) map[string]spec.Finding {
	t.Helper()
	out := map[string]spec.Finding{}
	for _, f := range Examine(t.Context(), cfg) {
		if _, twice := out[f.What]; twice {
			t.Errorf("%s was found twice", f.What)
		}
		switch {
		case f.What == "" || f.Detail == "":
			t.Errorf("a finding says nothing: %+v", f)
		case f.Level == spec.LevelOK && f.Remedy != "":
			t.Errorf("what is in order has a remedy: %+v", f)
		case f.Level != spec.LevelOK && f.Remedy == "":
			t.Errorf("no remedy: %+v", f)
		}
		out[f.What] = f
	}
	return out
}

func TestExamine(t *testing.T) {
	got := examined(t, Config{Root: t.TempDir(), CNI: []string{"/opt/cni/bin", "/usr/lib/cni"}})
	for _, what := range []string{"kernel", "memory", "disk", "cgroups", "inflater", "runc", "CNI plugins",
		"iptables", "joined programs"} {
		if _, ok := got[what]; !ok {
			t.Errorf("nobody looked at %s", what)
		}
	}
	// The tests need these, so they are here.
	for _, what := range []string{"kernel", "runc", "CNI plugins", "iptables"} {
		if got[what].Level != spec.LevelOK {
			t.Errorf("%+v", got[what])
		}
	}
	if got["inflater"].Detail != inflate.Engine() {
		t.Errorf("%+v", got["inflater"])
	}
}

func TestExamineChangesNothing(t *testing.T) {
	root := filepath.Join(t.TempDir(), "not", "there")
	if f := examined(t, Config{Root: root})["disk"]; !strings.Contains(f.Detail, root) {
		t.Errorf("%+v", f)
	}
	if _, err := os.Stat(root); !os.IsNotExist(err) {
		t.Errorf("the store's directory: %v", err)
	}
}

func TestMissingPlugins(t *testing.T) {
	one, two := t.TempDir(), t.TempDir()
	for dir, names := range map[string][]string{one: {"bridge", "host-local"}, two: {"loopback"}} {
		for _, n := range names {
			if err := os.WriteFile(filepath.Join(dir, n), nil, 0o755); err != nil {
				t.Fatal(err)
			}
		}
	}
	f := examined(t, Config{Root: one, CNI: []string{one, two}})["CNI plugins"]
	if f.Level != spec.LevelNote || !strings.Contains(f.Detail, "portmap;") ||
		strings.Contains(f.Detail, "host-local") || !strings.Contains(f.Remedy, "containernetworking-plugins") {
		t.Errorf("%+v", f)
	}
	if f := plugins([]string{"/does/not/exist"}); f.Level != spec.LevelNote ||
		!strings.Contains(f.Detail, "bridge, host-local, portmap, loopback") {
		t.Errorf("%+v", f)
	}
}

func TestMissingPrograms(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PATH", dir)
	got := examined(t, Config{Root: dir})
	if f := got["runc"]; f.Level != spec.LevelBad || !strings.Contains(f.Remedy, "apt-get install runc") {
		t.Errorf("%+v", f)
	}
	if f := got["iptables"]; f.Level != spec.LevelNote || !strings.Contains(f.Detail, "--net bridge") {
		t.Errorf("%+v", f)
	}
	if err := os.WriteFile(filepath.Join(dir, "runc"), []byte("#!/bin/sh\necho it is broken\nexit 3\n"),
		0o755); err != nil {
		t.Fatal(err)
	}
	if f := examined(t, Config{Root: dir})["runc"]; f.Level != spec.LevelBad ||
		!strings.Contains(f.Detail, "it is broken") {
		t.Errorf("one that fails: %+v", f)
	}
}

// A program that dew setup has joined is named, with what is left to do.
func TestJoined(t *testing.T) {
	host := t.TempDir()
	config := filepath.Join(host, "etc/nerdctl/nerdctl.toml")
	if err := os.MkdirAll(filepath.Dir(config), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(config, []byte("snapshotter = \"dewpoint\" # dewpoint\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		known  bool
		err    error
		level  string
		detail string
	}{
		{true, nil, spec.LevelOK, "nerdctl"},
		{false, nil, spec.LevelNote, "has not read"},
		{false, errors.New("refused"), spec.LevelNote, "does not answer: refused"},
	} {
		f := joined(t.Context(), host, func(_ context.Context, socket string) (bool, error) {
			if socket != "/run/containerd/containerd.sock" {
				t.Errorf("%s was asked", socket)
			}
			return c.known, c.err
		})
		if f.Level != c.level || !strings.Contains(f.Detail, c.detail) || (f.Remedy == "") != (f.Level == spec.LevelOK) {
			t.Errorf("%v, %v: %+v", c.known, c.err, f)
		}
	}
	if f := joined(t.Context(), t.TempDir(), nil); f.Level != spec.LevelOK {
		t.Errorf("%+v", f)
	}
}
