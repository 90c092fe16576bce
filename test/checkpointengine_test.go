package test

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"dewpoint/internal/spec"
	"dewpoint/testkit/registrytest"
)

// A node on which no engine of checkpoints works names what each lacks, and boots as ever.
func TestCheckpointWithoutEngines(t *testing.T) {
	t.Parallel()
	reg := registrytest.New(t)
	img := slowApp(t, reg, nil)
	m := newMachine(t, reg)
	m.config += "[checkpoint]\nengine = \"auto\"\ncriu = \"/bin/true\"\ndmtcp = \"" + t.TempDir() + "\"\n"
	m.start()
	names := func(s string) bool {
		return strings.Contains(s, "/bin/true") && strings.Contains(s, "DMTCP is not whole") &&
			strings.Contains(s, "dmtcp_launch")
	}
	rec, url := m.boot(t, "web", img.Ref, "--checkpoint")
	if got := whys(rec, "restore: "); rec.Way.Start != "boot" || !names(got) {
		t.Errorf("started by %s, since %q", rec.Way.Start, got)
	}
	get(t, url+"/born")
	if e := m.event(spec.EventUnsaved); e.Name != "web" || !names(e.Error) {
		t.Errorf("the event: %+v", e)
	}
	if r := m.dew("checkpoint", "web"); r.code != 12 || !names(r.err) {
		t.Errorf("checkpoint: %+v", r)
	}
	if r := m.dew("run", "-d", "--net", "bridge", "--restore", "always", img.Ref); r.code != 12 ||
		!names(r.err) {
		t.Errorf("always: %+v", r)
	}
	var found []spec.Finding
	if err := json.Unmarshal([]byte(m.dew("--json", "doctor").out), &found); err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(found, func(f spec.Finding) bool {
		return f.What == "checkpoints" && f.Level == spec.LevelNote && names(f.Detail)
	}) {
		t.Errorf("doctor: %+v", found)
	}
}
