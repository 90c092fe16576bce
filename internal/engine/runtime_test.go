package engine

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"dewpoint/internal/engine/cgroup"

	"dewpoint/internal/engine/program"
)

// bare is an engine without a containerd.
func bare(t *testing.T, runtime, crun string) *Engine {
	t.Helper()
	dir := t.TempDir()
	cfg := Config{Root: dir + "/root", State: dir + "/state", ShimProgram: shimProgram,
		Runtime: runtime, Crun: crun,
		Log: slog.New(slog.NewTextHandler(testWriter{t}, nil))}
	if err := cfg.defaults(); err != nil {
		t.Fatal(err)
	}
	e := compose(cfg)
	e.runc = "/usr/sbin/runc"
	if err := os.MkdirAll(e.cfg.State, 0o711); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cgroup.Remove(e.cfg.CgroupParent) })
	return e
}

// The crun that scripts/install brings makes containers here, and leaves nothing of the trial.
func TestCrunIsTried(t *testing.T) {
	e := bare(t, RuntimeCrun, "")
	if err := e.chooseRuntime(t.Context()); err != nil {
		t.Fatal(err)
	}
	if detail, lacking := e.Runtime(); lacking || !strings.HasPrefix(detail, "crun 1.") {
		t.Errorf("%q, lacking %t", detail, lacking)
	}
	if left, _ := filepath.Glob(e.cfg.State + "/crun-trial*"); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	cgroup.Remove(e.cfg.CgroupParent)
	if left, _ := filepath.Glob("/sys/fs/cgroup/*" + e.cfg.CgroupParent); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// fakeCrun says that it is crun, and does nothing else but what the script says.
func fakeCrun(t *testing.T, version, script string) string {
	t.Helper()
	p := filepath.Join(t.TempDir(), "crun")
	text := "#!/bin/sh\n[ \"$1\" != --version ] || { echo crun version " + version + "; exit; }\n" + script
	if err := os.WriteFile(p, []byte(text), 0o755); err != nil {
		t.Fatal(err)
	}
	return p
}

// What makes containers where crun does not work is runc, and it is told why.
func TestCrunThatFails(t *testing.T) {
	for name, c := range map[string]struct{ version, script, why string }{
		"old":    {"1.8.1", "exit 0", "1.20 or newer is needed"},
		"fails":  {"1.28", "echo no cgroups today >&2; exit 1", "no cgroups today"},
		"silent": {"1.28", "exit 0", `its process says ""`},
	} {
		t.Run(name, func(t *testing.T) {
			p := fakeCrun(t, c.version, c.script)
			e := bare(t, RuntimeAuto, p)
			if err := e.chooseRuntime(t.Context()); err != nil {
				t.Fatal(err)
			}
			detail, lacking := e.Runtime()
			if !lacking || !strings.HasPrefix(detail, "runc") || !strings.Contains(detail, c.why) ||
				e.maker.program != e.runc {
				t.Errorf("%q, lacking %t, %q", detail, lacking, e.maker.program)
			}
			if err := bare(t, RuntimeCrun, p).chooseRuntime(t.Context()); err == nil ||
				!strings.Contains(err.Error(), c.why) {
				t.Errorf("asked for crun alone: %v", err)
			}
		})
	}
	if err := bare(t, "kata", "").chooseRuntime(context.Background()); err == nil {
		t.Error("a runtime that there is not")
	}
}

// What was tried is not tried again until something changes.
func TestCrunIsTriedOnce(t *testing.T) {
	e := bare(t, RuntimeCrun, fakeCrun(t, "1.28", "exit 1"))
	proof := filepath.Join(e.cfg.State, "crun-works")
	argv, _, err := findCrun(t.Context(), e.cfg.Crun)
	if err != nil {
		t.Fatal(err)
	}
	if err := e.provenCrun(t.Context(), "/bin/false", argv, false); err == nil {
		t.Fatal("what fails was proven")
	}
	if _, err := os.Stat(proof); !errors.Is(err, os.ErrNotExist) {
		t.Fatal("a failure is remembered")
	}
	works := bare(t, RuntimeCrun, "")
	if err := works.chooseRuntime(t.Context()); err != nil {
		t.Fatal(err)
	}
	works.cfg.Runtime = RuntimeAuto
	if err := os.Truncate(filepath.Join(works.cfg.State, "crun-works"), 0); err != nil {
		t.Fatal(err)
	}
	if err := works.chooseRuntime(t.Context()); err != nil || works.maker.lacking {
		t.Fatalf("%v, %q", err, works.maker.detail)
	}
	if b, err := os.ReadFile(filepath.Join(works.cfg.State, "crun-works")); err != nil || len(b) == 0 {
		t.Errorf("it was not tried anew: %q, %v", b, err)
	}
}

func TestBadCommandOfCrun(t *testing.T) {
	for text, want := range map[string]error{
		"OCI runtime create failed: executable file `/x` not found: No such file or directory: unknown":                       ErrNoCommand,
		"OCI runtime exec failed: executable file `x` not found in $PATH: No such file or directory: unknown":                 ErrNoCommand,
		"OCI runtime create failed: the path `/x` exists but it is not executable: Operation not permitted: unknown":          ErrNotExecutable,
		"OCI runtime create failed: the path `/` is not a regular file: Operation not permitted: unknown":                     ErrNotExecutable,
		"OCI runtime exec failed: exec container process `/bin/x`: Exec format error: unknown":                                ErrNotExecutable,
		"OCI runtime create failed: open `/sys/fs/cgroup/memory/x/memory.limit_in_bytes`: No such file or directory: unknown": nil,
	} {
		got := program.BadCommand(errors.New(text))
		if want == nil && (errors.Is(got, ErrNoCommand) || errors.Is(got, ErrNotExecutable)) ||
			want != nil && !errors.Is(got, want) {
			t.Errorf("%s: %v", text, got)
		}
	}
}
