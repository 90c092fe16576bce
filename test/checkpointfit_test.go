package test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"dewpoint/internal/spec"
	"dewpoint/testkit/registrytest"
)

// What a container may have otherwise than the one that was saved, and what keeps it from that one's memory.

// newMeasured is a node that saves what boots slowly, unasked.
func newMeasured(t *testing.T) (*machine, *registrytest.Server) {
	t.Helper()
	reg := registrytest.New(t)
	m := newMachine(t, reg)
	m.config += "[checkpoint]\nmode = \"measured\"\n"
	return m.start(), reg
}

// What boots slowly is saved unasked, and starts others as long as what they read is the same: with another
// file mounted read-only in the same place they boot, and so they do when the image's name means another
// image.
func TestCheckpointMeasured(t *testing.T) {
	t.Parallel()
	m, reg := newMeasured(t)
	img := slowApp(t, reg, nil)
	conf := filepath.Join(t.TempDir(), "app.conf")
	born := map[string]bool{}
	start := func(text, start, why string) {
		t.Helper()
		if err := os.WriteFile(conf, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		rec, url := m.boot(t, "web", img.Ref, "-v", conf+":/etc/app.conf:ro")
		if got := whys(rec, "restore: "); rec.Way.Start != start || got != why {
			t.Errorf("with %q: started by %s, since %q", text, rec.Way.Start, got)
		}
		if got := get(t, url+"/cat?/etc/app.conf"); got != text {
			t.Errorf("it reads %q, not %q", got, text)
		}
		if b := get(t, url+"/born"); born[b] != (start == "restore") {
			t.Errorf("with %q: it has the memory of another: %v", text, born[b])
		} else {
			born[b] = true
		}
	}
	start("color=red\n", "boot", "")
	m.eventually("it is saved", func() bool { return len(m.checkpoints(t)) == 1 })
	m.must("rm", "-f", "web")
	start("color=red\n", "restore", "")
	if err := os.WriteFile(conf, []byte("color=tan\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if r := m.dew("checkpoint", "web"); r.code != 12 ||
		!strings.Contains(r.err, "has changed since it was started") ||
		!strings.Contains(r.err, ": /etc/app.conf") {
		t.Errorf("saved when its file has changed: %+v", r)
	}
	m.must("rm", "-f", "web")
	start("color=tan\n", "boot", "restore: what is mounted read-only has changed: /etc/app.conf")
	m.eventually("it is saved with the other file", func() bool { return len(m.checkpoints(t)) == 2 })
	m.must("rm", "-f", "web")
	if err := os.Rename(conf, conf+".old"); err != nil { // another file, of the same text
		t.Fatal(err)
	}
	start("color=red\n", "restore", "")
	m.must("rm", "-f", "web")

	reg.PushImage("team/slow:1", appLayers(t, 1<<10), appOptions("slow", "80"))
	m.must("pull", img.Ref)
	start("color=red\n", "boot",
		"restore: the image is not the one that its checkpoints were made of: it has changed")
	m.must("rm", "-f", "web")
}

// An image that declares a volume keeps state: it is not saved unasked, nor does one start from what was
// saved of it unless somebody insists.
func TestCheckpointVolumes(t *testing.T) {
	t.Parallel()
	m, reg := newMeasured(t)
	o := appOptions("slow", "80")
	o.Config.Volumes = map[string]struct{}{"/data": {}}
	img := reg.PushImage("team/volume:1", appLayers(t, 0), o)
	plain := slowApp(t, reg, nil)
	_, url := m.boot(t, "first", img.Ref)
	born := get(t, url+"/born")
	data := func(name string) (dir string, flags []string) {
		dir = t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "who"), []byte(name), 0o644); err != nil {
			t.Fatal(err)
		}
		return dir, []string{"-v", dir + ":/data", "--label", "dewpoint.restore.volumes=/data"}
	}
	_, own := data("one")
	m.boot(t, "own", plain.Ref, own...) // what it writes to is its own, by the label
	m.eventually("what keeps nothing is saved", func() bool { return len(m.checkpoints(t)) > 0 })
	if all := m.checkpoints(t); len(all) != 1 || all[0].Image != plain.Ref {
		t.Errorf("there are %+v", all)
	}
	if r := m.dew("checkpoint", "first"); r.code != 12 ||
		!strings.Contains(r.err, "declares the volume /data") || !strings.Contains(r.err, "--stateful") {
		t.Errorf("asked for: %+v", r)
	}
	m.must("checkpoint", "--stateful", "first")
	m.must("rm", "-f", "first", "own")
	rec, _ := m.boot(t, "second", img.Ref)
	if got := whys(rec, "restore: "); rec.Way.Start != "boot" ||
		!strings.Contains(got, "only --restore always starts from it") {
		t.Errorf("the second one: started by %s, since %q", rec.Way.Start, got)
	}
	if rec, url := m.boot(t, "third", img.Ref, "--restore", "always"); rec.Way.Start != "restore" ||
		get(t, url+"/born") != born {
		t.Errorf("insisted: %+v", rec.Way)
	}
	m.must("rm", "-f", "second", "third")

	dir, own := data("two")
	rec, url = m.boot(t, "clone", plain.Ref, own...)
	if got := get(t, url+"/cat?/data/who"); rec.Way.Start != "restore" || got != "two" {
		t.Errorf("a clone with a volume of its own: %+v, it reads %q", rec.Way, got)
	}
	m.must("exec", "clone", "/app", "append", "/data/who", " and more")
	if b, err := os.ReadFile(filepath.Join(dir, "who")); err != nil || string(b) != "two and more" {
		t.Errorf("what it writes: %q, %v", b, err)
	}
	r := m.dew("run", "-d", "--name", "other", "--net", "bridge", "--restore", "always", "-v", dir+":/data",
		plain.Ref)
	if r.code != 12 || !strings.Contains(r.err, "mounts differ") {
		t.Errorf("a volume that no label names: %+v", r)
	}
	m.must("rm", "-f", "clone")
}

// identity is what a container is told apart by.
type identity struct{ machine, mac, cgroup, limit string }

// identityOf reads that, within the container and outside.
func (m *machine) identityOf(name, url string) (id identity) {
	m.t.Helper()
	t := m.t.(*testing.T)
	id.machine, id.mac = get(t, url+"/cat?/etc/machine-id"), get(t, url+"/cat?/sys/class/net/eth0/address")
	var found struct{ Container spec.Container }
	m.unmarshal(t, &found, "inspect", name)
	dirs := m.cgroups("/" + name)
	for _, d := range dirs {
		procs, _ := os.ReadFile(filepath.Join(d, "cgroup.procs"))
		if slices.Contains(strings.Fields(string(procs)), fmt.Sprint(found.Container.PID)) {
			id.cgroup = filepath.Base(d)
		} else if _, err := os.Stat(filepath.Join(d, "memory.limit_in_bytes")); err == nil {
			t.Errorf("the process of %s is not in %s", name, d)
		}
		for _, file := range []string{"memory.limit_in_bytes", "memory.max"} {
			if b, err := os.ReadFile(filepath.Join(d, file)); err == nil {
				id.limit = strings.TrimSpace(string(b))
			}
		}
	}
	return id
}

// Each clone has a machine ID, a MAC address and a cgroup with a limit of its own, and its own value of a
// variable that may differ; its processes have the one that was saved.
func TestCheckpointIdentity(t *testing.T) {
	t.Parallel()
	reg := registrytest.New(t)
	const was = "0123456789abcdef0123456789abcdef\n"
	layers := append(appLayers(t, 0),
		registrytest.Layer{Tar: registrytest.Tar(registrytest.File{Name: "etc/machine-id", Body: was})})
	o := appOptions("slow", "80")
	o.Config.Labels = map[string]string{"dewpoint.restore.env": "ZONE",
		"dewpoint.restore.after": "/app once /restored 0s"}
	img := reg.PushImage("team/identity:1", layers, o)
	m := newMachine(t, reg).start()
	_, url := m.boot(t, "first", img.Ref, "-e", "ZONE=first")
	m.must("checkpoint", "first")
	seen := []identity{m.identityOf("first", url)}
	for i, limit := range []string{"64m", "96m"} {
		name := fmt.Sprint("clone-", i)
		rec, url := m.boot(t, name, img.Ref, "-e", "ZONE="+name, "-m", limit)
		if rec.Way.Start != "restore" {
			t.Fatalf("%+v", rec.Way)
		}
		if got := get(t, url+"/env?ZONE"); got != "first\n" {
			t.Errorf("its process has the zone %q", got)
		}
		if env := m.must("exec", name, "/app", "cat", "/proc/self/environ"); !strings.Contains(env,
			"ZONE="+name+"\x00") {
			t.Errorf("its commands have %q", env)
		}
		seen = append(seen, m.identityOf(name, url))
	}
	for i, a := range seen {
		if len(strings.TrimSpace(a.machine)) != 32 || (a.machine == was) != (i == 0) ||
			len(strings.Split(a.mac, ":")) != 6 || a.cgroup != []string{"first", "clone-0", "clone-1"}[i] {
			t.Errorf("%d: %+v", i, a)
		}
		for _, b := range seen[:i] {
			if a.machine == b.machine || a.mac == b.mac || a.limit == b.limit {
				t.Errorf("%+v and %+v", a, b)
			}
		}
	}
	if seen[1].limit != fmt.Sprint(64<<20) || seen[2].limit != fmt.Sprint(96<<20) {
		t.Errorf("their limits are %s and %s", seen[1].limit, seen[2].limit)
	}
	m.must("rm", "-f", "first", "clone-0", "clone-1")

	// One that is not ready in time boots, or fails as what could not be restored.
	unready := []string{"run", "-d", "--name", "unready", "--net", "bridge", "--ready",
		"http:80/absent?/restored", "-e", "ZONE=x"}
	rec := m.record(append(unready, img.Ref)...)
	if got := whys(rec, "restore: "); rec.Way.Start != "boot" ||
		!strings.HasPrefix(got, "restore: not ready (http:80/absent") {
		t.Errorf("started by %s, since %q", rec.Way.Start, got)
	}
	m.must("rm", "-f", "unready")
	r := m.dew(append(unready, "--restore", "always", img.Ref)...)
	if r.code != 12 || !strings.Contains(r.err, "not restored: not ready") ||
		!strings.Contains(r.err, "without --restore always it boots") ||
		strings.Contains(r.err, "--ready-timeout") {
		t.Errorf("always: %+v", r)
	}
	m.must("rmi", img.Ref)
	m.must("prune")
	checkNothingLeft(t, m)
}
