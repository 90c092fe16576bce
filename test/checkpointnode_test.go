package test

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"dewpoint/internal/api"
	"dewpoint/internal/spec"
	"dewpoint/testkit/containerdtest"
	"dewpoint/testkit/registrytest"

	"golang.org/x/sys/unix"
)

// What a node may do to checkpoints and to those who use them.

// Who saves one container at once gets a checkpoint each, one after the other.
func TestCheckpointAtOnce(t *testing.T) {
	t.Parallel()
	b := newCheckpointBed(t, "")
	_, url := b.boot(t, "saved", b.img.Ref, "--restore", "never")
	results := make(chan result, 3)
	for range cap(results) {
		go func() { results <- b.dew("checkpoint", "saved") }()
	}
	for range cap(results) {
		if r := <-results; r.code != 0 || len(strings.TrimSpace(r.out)) != 64 {
			t.Errorf("%+v", r)
		}
	}
	get(t, url+"/count")
	if rec, _ := b.boot(t, "clone", b.img.Ref, "--restore", "always"); rec.Way.Start != "restore" {
		t.Errorf("%+v", rec.Way)
	}
	b.end()
}

// A caller of the role deploy starts from checkpoints of containers that it has deployed itself, and from
// those that an administrator has made for all, and from no other: they hold what was in others' memory.
func TestCheckpointOwner(t *testing.T) {
	t.Parallel()
	reg := registrytest.New(t)
	img := slowApp(t, reg, nil)
	m := newMachine(t, reg)
	as := m.overTCP()
	m.start()
	run := func(c *api.Client, restore string, save bool) (way spec.Way, born string, err error) {
		t.Helper()
		rec, err := c.Deploy(t.Context(),
			spec.Request{Image: img.Ref, Name: "web", Net: "bridge", Ready: "http:80/", Restore: restore,
				Checkpoint: save}, spec.Watch{})
		if err != nil {
			return way, "", err
		}
		list, err := m.client(t).List(t.Context(), false)
		i := slices.IndexFunc(list, func(c spec.Container) bool { return c.Name == "web" })
		if err != nil || i < 0 {
			t.Fatalf("%+v, %v", list, err)
		}
		born = get(t, "http://"+list[i].IP+"/born")
		if !save {
			m.must("rm", "-f", "web")
		}
		return rec.Way, born, nil
	}
	starts := func(who string, c *api.Client, want, why string) {
		t.Helper()
		way, born, err := run(c, "auto", false)
		if err != nil {
			t.Fatalf("%s: %v", who, err)
		}
		if got := whys(spec.Record{Way: way}, "restore: "); way.Start == "restore" != (why == "") ||
			way.Start == "restore" && born != want || got != why {
			t.Errorf("%s starts by %s, was born as %q (the one that was saved %q), since %q", who, way.Start, born,
				want, got)
		}
	}
	ci, other, admin := as("ci"), as("other"), m.client(t)

	_, admins, err := run(admin, "never", true)
	if err != nil {
		t.Fatal(err)
	}
	m.eventually("the administrator's is saved", func() bool { return len(m.checkpoints(t)) == 1 })
	m.must("rm", "-f", "web")
	starts("ci", ci, "", "restore: it belongs to an administrator")
	starts("an administrator", admin, admins, "")
	if _, _, err := run(ci, "always", false); code(err) != api.Unsupported ||
		!strings.Contains(err.Error(), "it belongs to an administrator") {
		t.Errorf("ci insists: %v", err)
	}

	_, own, err := run(ci, "never", true)
	if err != nil {
		t.Fatal(err)
	}
	m.eventually("ci's is saved", func() bool { return len(m.checkpoints(t)) == 2 })
	m.must("rm", "-f", "web")
	m.stop()
	m.start() // what is known of owners survives
	starts("ci", ci, own, "")
	starts("an administrator", admin, admins, "")
	starts("other", other, "",
		"restore: none of 2 checkpoints fits: it belongs to token:ci (1); it belongs to an administrator (1)")

	_, _, err = run(admin, "always", true)
	if err != nil {
		t.Fatal(err)
	}
	m.must("checkpoint", "--share", "web")
	m.must("rm", "-f", "web")
	for who, c := range map[string]*api.Client{"ci": ci, "other": other, "an administrator": admin} {
		starts(who, c, admins, "")
	}
	owners := map[string]int{}
	for _, c := range m.checkpoints(t) {
		owners[c.Owner]++
	}
	if !maps.Equal(owners, map[string]int{"": 1, "*": 1, "token:ci": 1}) {
		t.Errorf("they belong to %v", owners)
	}
}

// room leaves so many bytes free on the node's disk.
func (m *machine) room(free uint64) {
	m.t.Helper()
	var fs unix.Statfs_t
	err := unix.Statfs(m.root, &fs)
	if err == nil {
		size := (fs.Blocks-fs.Bfree)*uint64(fs.Bsize) + free
		err = unix.Mount("tmpfs", m.root, "tmpfs", unix.MS_REMOUNT, fmt.Sprint("size=", size))
	}
	if err != nil {
		m.t.Fatal(err)
	}
}

// A dump onto a full disk leaves a container that runs and no checkpoint; a restore that finds no
// room boots.
func TestCheckpointDiskFull(t *testing.T) {
	t.Parallel()
	reg := registrytest.New(t)
	img := slowApp(t, reg, nil)
	m := newMachine(t, reg)
	if err := os.MkdirAll(m.root, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", m.root, "tmpfs", 0, "size=400m"); err != nil {
		t.Fatal(err)
	}
	m.start()
	flags := []string{"-e", "MEMORY_MB=64"}
	_, url := m.boot(t, "first", img.Ref, flags...)
	m.room(16 << 20)
	r := m.dew("checkpoint", "first")
	if r.code != 8 || !strings.Contains(r.err, "no space left") {
		t.Errorf("a dump without room: %+v", r)
	}
	get(t, url+"/count")
	if left, _ := filepath.Glob(filepath.Join(m.root, "checkpoints", "store", "scratch-*")); len(left) > 0 {
		t.Errorf("the dump left %v", left)
	}
	if all := m.checkpoints(t); len(all) > 0 {
		t.Errorf("there are %+v", all)
	}
	m.room(400 << 20)
	m.must("checkpoint", "first")
	m.stop()
	if err := os.RemoveAll(filepath.Join(m.root, "checkpoints", "store", "cache")); err != nil {
		t.Fatal(err)
	}
	m.start()
	m.room(16 << 20)
	rec, url := m.boot(t, "second", img.Ref, flags...)
	if got := whys(rec, "restore: "); rec.Way.Start != "boot" || !strings.Contains(got, "no space left") {
		t.Errorf("started by %s, since %q", rec.Way.Start, got)
	}
	if got := get(t, url+"/count"); got != "1\n" {
		t.Errorf("it counts %q", got)
	}
	m.room(400 << 20)
	if rec, _ := m.boot(t, "third", img.Ref,
		append(flags, "--restore", "always")...); rec.Way.Start != "restore" {
		t.Errorf("with room again: %+v", rec.Way)
	}
}

// uptime is what a container's clock says.
func uptime(t *testing.T, url string) float64 {
	t.Helper()
	s, _, _ := strings.Cut(get(t, url+"/cat?/proc/uptime"), " ")
	n, err := strconv.ParseFloat(s, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// The clock of a clone goes on from where it was saved, whatever that of its node says.
func TestCheckpointClock(t *testing.T) {
	reg := registrytest.New(t)
	img := slowApp(t, reg, nil)
	m := newMachine(t, reg).start()
	_, url := m.boot(t, "first", img.Ref)
	m.must("checkpoint", "first")
	saved := uptime(t, url)
	const later = 5_000_000
	m.must("rm", "-f", "first")
	m.stop()
	m.reboot()
	m.under = []string{"unshare", "--time", "--monotonic", fmt.Sprint(later), "--boottime", fmt.Sprint(later),
		"--"}
	m.start()
	rec, url := m.boot(t, "clone", img.Ref, "--restore", "always")
	if rec.Way.Start != "restore" {
		t.Errorf("%+v", rec.Way)
	}
	if now := uptime(t, url); math.Abs(now-saved) > later/2 {
		t.Errorf("it was saved at %.0f s, and goes on at %.0f s", saved, now)
	}
	rec, url = m.boot(t, "booted", img.Ref, "--restore", "never")
	if now := uptime(t, url); rec.Way.Start != "boot" || now < saved+later/2 {
		t.Errorf("a container that boots on a node of a later clock reads %.0f s", now)
	}
}

// A clone has the locks that were held. As long as somebody else holds one, the restore does not wait for
// ever, and the error says who.
func TestCheckpointLocked(t *testing.T) {
	t.Parallel()
	reg := registrytest.New(t)
	img := slowApp(t, reg, nil)
	m := newMachine(t, reg).start()
	dir := t.TempDir()
	flags := []string{"-v", dir + ":/data", "-e", "LOCK=/data/lock", "--restore"}
	m.boot(t, "first", img.Ref, append(flags, "never")...)
	m.must("checkpoint", "--stateful", "first")
	args := append([]string{"run", "-d", "--name", "clone", "--net", "bridge", "--ready", "http:80/"},
		append(flags, "always", img.Ref)...)
	if r := m.dew(args...); r.code != 12 ||
		!strings.Contains(r.err, "a file that it had locked is locked by process ") {
		t.Errorf("while the lock is held: %+v", r)
	}
	m.must("rm", "-f", "first")
	if rec := m.record(args...); rec.Way.Start != "restore" {
		t.Errorf("%+v", rec.Way)
	}
	f, err := os.Open(filepath.Join(dir, "lock"))
	if err == nil {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		f.Close()
	}
	if !errors.Is(err, unix.EWOULDBLOCK) {
		t.Errorf("the clone's lock: %v", err)
	}
	m.must("rm", "-f", "clone")
	m.must("rmi", img.Ref)
	m.must("prune")
	checkNothingLeft(t, m)
}

// What cannot be saved boots, and an event tells why no checkpoint was made of it: on a node
// without CAP_SYS_RESOURCE all that is not root's.
func TestCheckpointOfUser(t *testing.T) {
	t.Parallel()
	reg := registrytest.New(t)
	o := appOptions("serve", "8080")
	o.Config.User, o.Config.Labels = "1000:1000", map[string]string{"dewpoint.checkpoint": "auto"}
	img := reg.PushImage("team/user:1", appLayers(t, 0), o)
	m := newMachine(t, reg).start()
	m.record("run", "-d", "--name", "user", "--net", "bridge", "--ready", "http:8080/", img.Ref)
	r := m.dew("checkpoint", "user")
	var found []spec.Finding
	if err := json.Unmarshal([]byte(m.dew("--json", "doctor").out), &found); err != nil {
		t.Fatal(err)
	}
	able := !slices.ContainsFunc(found, func(f spec.Finding) bool {
		return strings.Contains(f.Detail, "only processes of root can be dumped")
	})
	if able {
		if r.code != 0 {
			t.Errorf("%+v", r)
		}
		return
	}
	if r.code != 12 || !strings.Contains(r.err, "runs as user 1000") ||
		!strings.Contains(r.err, "CAP_SYS_RESOURCE") {
		t.Errorf("%+v", r)
	}
	if e := m.event(spec.EventUnsaved); e.Name != "user" || !strings.Contains(e.Error, "runs as user 1000") {
		t.Errorf("the event is %+v", e)
	}
	if rec := m.record("run", "-d", "--name", "other", "--net", "bridge", "--ready", "http:8080/",
		img.Ref); rec.Way.Start != "boot" {
		t.Errorf("%+v", rec)
	}
}

// A node whose containerd is the system's saves and restores as one with its own.
func TestCheckpointSystemContainerd(t *testing.T) {
	t.Parallel()
	reg := registrytest.New(t)
	img := slowApp(t, reg, nil)
	m := newMachine(t, reg)
	dir := filepath.Join(filepath.Dir(m.root), "c")
	if err := errors.Join(os.MkdirAll(m.state, 0o755), os.MkdirAll(dir, 0o755)); err != nil {
		t.Fatal(err)
	}
	c := containerdtest.Start(t, containerdtest.V24, dir, filepath.Join(m.state, "snapshotter.sock"))
	m.args = []string{"--containerd", c.Address}
	m.start()
	_, url := m.boot(t, "first", img.Ref)
	born := get(t, url+"/born")
	m.must("checkpoint", "first")
	rec, url := m.boot(t, "clone", img.Ref)
	if got := get(t, url+"/born"); rec.Way.Start != "restore" || got != born {
		t.Errorf("%+v: was born as %q, not %q", rec.Way, got, born)
	}
	m.must("rm", "-f", "first", "clone")
}

// A container whose memory is lost while it comes does not stay down: before it is ready it boots
// instead, later it is started anew.
func TestCheckpointLazilyLost(t *testing.T) {
	t.Parallel()
	m, img, flags, _ := newLateBed(t, 192, "1MB")
	files, err := filepath.Glob(filepath.Join(m.root, "checkpoints", "store", "*.data"))
	if err != nil || len(files) != 1 {
		t.Fatalf("data files: %v, %v", files, err)
	}
	m.stop()
	if err := os.RemoveAll(filepath.Join(m.root, "checkpoints", "store", "cache")); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(files[0], os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	fi, err := f.Stat()
	if err == nil {
		_, err = f.WriteAt([]byte("not what it was"), fi.Size()*9/10)
	}
	if err = errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
	m.start()
	flags = slices.DeleteFunc(flags, func(s string) bool { return s == "always" || s == "--restore" })
	rec, url := m.boot(t, "clone", img.Ref, flags...)
	t.Logf("%+v", rec.Way)
	if rec.Way.Start == "boot" { // it came to the damage before the container was ready
		if !strings.Contains(strings.Join(rec.Way.Why, " "), "damaged") {
			t.Errorf("it booted: %+v", rec.Way)
		}
	} else if e := m.event(spec.EventLost); e.Name != "clone" || !strings.Contains(e.Error, "damaged") {
		t.Errorf("the event is %+v", e)
	}
	m.eventually("the container serves again", func() bool {
		r, err := http.Get(url + "/count")
		if err != nil {
			return false
		}
		r.Body.Close()
		return r.StatusCode == http.StatusOK
	})
	m.eventually("the damaged checkpoint is gone", func() bool {
		left, err := filepath.Glob(filepath.Join(m.root, "checkpoints", "store", "*.data"))
		return err == nil && len(left) == 0
	})
}
