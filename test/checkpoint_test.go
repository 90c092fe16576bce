package test

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"dewpoint/internal/checkpoint"
	"dewpoint/internal/checkpoint/store"
	"dewpoint/internal/spec"
	"dewpoint/testkit"
	"dewpoint/testkit/popbed"
	"dewpoint/testkit/registrytest"
)

// slowApp pushes an image whose start takes 1.5 s.
func slowApp(t *testing.T, reg *registrytest.Server, labels map[string]string) registrytest.Pushed {
	t.Helper()
	o := appOptions("slow", "80")
	o.Config.Labels = labels
	return reg.PushImage("team/slow:1", appLayers(t, 0), o)
}

// start runs a container of an image on a port of its own.
func (m *machine) boot(t *testing.T, name, ref string, flags ...string) (spec.Record, string) {
	t.Helper()
	port := freePort(t)
	args := append([]string{"run", "-d", "--name", name, "-p", "127.0.0.1:" + port + ":80", "--ready",
		"http:80/"}, flags...)
	return m.record(append(args, ref)...), "http://127.0.0.1:" + port
}

func (m *machine) checkpoints(t *testing.T) []spec.Checkpoint {
	t.Helper()
	var all []spec.Checkpoint
	if err := json.Unmarshal([]byte(m.must("--json", "checkpoints")), &all); err != nil {
		t.Fatal(err)
	}
	return all
}

// whys are the reasons of a record that begin with what.
func whys(rec spec.Record, what string) string {
	var out []string
	for _, w := range rec.Way.Why {
		if strings.HasPrefix(w, what) {
			out = append(out, w)
		}
	}
	return strings.Join(out, "; ")
}

// A container is saved, and others start from it.
func TestCheckpoint(t *testing.T) {
	t.Parallel()
	reg := registrytest.New(t)
	img := slowApp(t, reg, nil)
	m := newMachine(t, reg).start()
	rec, url := m.boot(t, "first", img.Ref)
	if rec.Way.Start != "boot" || whys(rec, "restore") != "" {
		t.Errorf("the first start: %+v", rec.Way)
	}
	born := get(t, url+"/born")
	get(t, url+"/count")
	var cp spec.Checkpoint
	if err := json.Unmarshal([]byte(m.must("--json", "checkpoint", "first")), &cp); err != nil {
		t.Fatal(err)
	}
	if cp.ID == "" || cp.Boot < 1 || cp.Pages < 256<<10 || cp.Upper == 0 || cp.Where != "node" ||
		cp.Unfit != "" || cp.Paused <= 0 {
		t.Errorf("the checkpoint is %+v", cp)
	}
	if got := get(t, url+"/count"); got != "2\n" {
		t.Errorf("the container that was saved counts %q", got)
	}
	for i := range 2 {
		name := fmt.Sprint("clone-", i)
		rec, url := m.boot(t, name, img.Ref, "-m", "256m", "--restore", []string{"auto", "always"}[i])
		if rec.Way.Start != "restore" || rec.Stages[spec.Restored] == 0 || rec.Stages[spec.Started] != 0 ||
			rec.Stages[spec.Ready] < rec.Stages[spec.Restored] {
			t.Fatalf("the clone's record: %+v", rec)
		}
		if got := get(t, url+"/born"); got != born {
			t.Errorf("the clone was born as %q, not %q", got, born)
		}
		if got := get(t, url+"/count"); got != "2\n" {
			t.Errorf("the clone counts %q", got)
		}
		if got := get(t, url+"/host"); got != name+"\n" {
			t.Errorf("the clone's host name is %q", got)
		}
		if got := get(t, url+"/cat?/state"); got != born {
			t.Errorf("the clone's file reads %q", got)
		}
	}
	if all := m.checkpoints(t); len(all) != 1 || all[0].ID != cp.ID || all[0].Restore == 0 {
		t.Errorf("there are %+v", all)
	}
	m.must("rm", "-f", "first", "clone-0", "clone-1")
	m.must("checkpoints", "rm", cp.ID)
	m.must("rmi", img.Ref)
	m.must("prune")
	checkNothingLeft(t, m)
}

// checkpointBed is a node with a checkpoint of an image that boots slowly.
type checkpointBed struct {
	*machine
	img  registrytest.Pushed
	born string
	id   string
}

// newCheckpointBed makes a node. labels are pairs, of the image.
func newCheckpointBed(t *testing.T, config string, labels ...string) *checkpointBed {
	t.Helper()
	reg := registrytest.New(t)
	l := map[string]string{}
	for i := 0; i < len(labels); i += 2 {
		l[labels[i]] = labels[i+1]
	}
	b := &checkpointBed{img: slowApp(t, reg, l), machine: newMachine(t, reg)}
	b.config += config
	b.machine.start()
	_, url := b.boot(t, "first", b.img.Ref)
	b.born = get(t, url+"/born")
	b.id = strings.TrimSpace(b.must("checkpoint", "first"))
	b.must("rm", "-f", "first")
	return b
}

// end asserts that nothing stays of the bed.
func (b *checkpointBed) end() {
	b.t.Helper()
	var ps []spec.Container
	if err := json.Unmarshal([]byte(b.must("--json", "ps", "-a")), &ps); err != nil {
		b.t.Fatal(err)
	}
	for _, c := range ps {
		b.must("rm", "-f", c.Name)
	}
	b.must("rmi", b.img.Ref)
	b.must("prune")
	if all := b.checkpoints(b.t.(*testing.T)); len(all) > 0 {
		b.t.Errorf("prune leaves the checkpoints of an image that is gone: %+v", all)
	}
	checkNothingLeft(b.t.(*testing.T), b.machine)
}

// What differs boots, and the record says why.
func TestCheckpointFit(t *testing.T) {
	t.Parallel()
	b := newCheckpointBed(t, "")
	for says, flags := range map[string][]string{
		`restore: arguments differ: -"80" +"81"`:     {"--ready", "http:81/", b.img.Ref, "slow", "81"},
		"restore: environment differs: EXTRA":        {"-e", "EXTRA=1", b.img.Ref},
		"restore: mounts differ: +\"bind /etc/more ": {"-v", t.TempDir() + ":/etc/more", b.img.Ref},
		"": {"--restore", "never", b.img.Ref},
	} {
		args := append([]string{"run", "-d", "--name", "other", "--net", "bridge", "--ready", "http:80/"}, flags...)
		rec := b.record(args...)
		if got := whys(rec, "restore: "); rec.Way.Start != "boot" || !strings.HasPrefix(got, says) ||
			(got == "") != (says == "") {
			t.Errorf("%q: started by %s, since %q", flags, rec.Way.Start, got)
		}
		b.must("rm", "-f", "other")
	}
	r := b.dew("run", "-d", "--name", "other", "--net", "bridge", "--restore", "always", "-e", "EXTRA=1",
		b.img.Ref)
	if r.code != 12 || !strings.Contains(r.err, "not restored: environment differs: EXTRA") {
		t.Errorf("always, and it does not fit: %+v", r)
	}
	if r := b.dew("run", "-d", "--name", "other", "--net", "bridge", "--restore", "always",
		b.img.Ref); r.code != 0 {
		t.Errorf("always, and it fits: %+v", r)
	}
	b.must("rm", "-f", "other")
	b.otherCPU("fancy9")
	rec := b.record("run", "-d", "--name", "other", "--net", "bridge", "--ready", "http:80/", b.img.Ref)
	if got := whys(rec, "restore: "); rec.Way.Start != "boot" || got != "restore: this CPU lacks fancy9" {
		t.Errorf("made on another CPU: started by %s, since %q", rec.Way.Start, got)
	}
	if all := b.checkpoints(t); len(all) != 1 || all[0].Unfit != "this CPU lacks fancy9" {
		t.Errorf("the list has %+v", all)
	}
	b.end()
}

// otherCPU makes the bed's checkpoint one that was made on a CPU with one more feature.
func (b *checkpointBed) otherCPU(feature string) {
	b.t.Helper()
	b.stop()
	path := filepath.Join(b.root, "checkpoints", "store", b.id+".json")
	text, err := os.ReadFile(path)
	var r store.Record
	var fit checkpoint.Fit
	if err == nil {
		err = json.Unmarshal(text, &r)
	}
	if err == nil {
		err = json.Unmarshal(r.Fit, &fit)
	}
	fit.CPU = append(fit.CPU, feature)
	if err == nil {
		r.Fit, err = json.Marshal(fit)
	}
	if err == nil {
		text, err = json.Marshal(r)
	}
	if err == nil {
		err = os.WriteFile(path, text, 0o600)
	}
	if err != nil {
		b.t.Fatal(err)
	}
	b.start()
}

// Eight containers start from one checkpoint at once, each with an address and
// a name of its own.
func TestCheckpointClones(t *testing.T) {
	t.Parallel()
	b := newCheckpointBed(t, "")
	b.must("deploy", "--count", "8", "--parallel", "8", "--name", "clone", "--net", "bridge", "--ready",
		"http:80/", "--restore", "always", b.img.Ref)
	var ps []spec.Container
	if err := json.Unmarshal([]byte(b.must("--json", "ps")), &ps); err != nil {
		t.Fatal(err)
	}
	addresses := map[string]bool{}
	for _, c := range ps {
		url := "http://" + c.IP
		addresses[c.IP] = true
		if got := get(t, url+"/born"); got != b.born {
			t.Errorf("%s was born as %q", c.Name, got)
		}
		if got := get(t, url+"/host"); got != c.Name+"\n" {
			t.Errorf("%s calls itself %q", c.Name, got)
		}
		if got := get(t, url+"/count"); got != "1\n" {
			t.Errorf("%s counts %q", c.Name, got)
		}
	}
	if len(addresses) != 8 {
		t.Errorf("8 clones have the addresses %v", addresses)
	}
	b.end()
}

// Damaged data are found, and the container boots.
func TestCheckpointDamaged(t *testing.T) {
	t.Parallel()
	b := newCheckpointBed(t, "")
	files, err := filepath.Glob(filepath.Join(b.root, "checkpoints", "store", "*.data"))
	if err != nil || len(files) != 1 {
		t.Fatalf("data files: %v, %v", files, err)
	}
	fi, err := os.Stat(files[0])
	if err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("the data file's mode is %v, %v", fi.Mode(), err)
	}
	f, err := os.OpenFile(files[0], os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte("not what it was"), fi.Size()/2); err != nil {
		t.Fatal(err)
	}
	f.Close()
	b.stop()
	// what is unpacked is right
	if err := os.RemoveAll(filepath.Join(b.root, "checkpoints", "store", "cache")); err != nil {
		t.Fatal(err)
	}
	b.start()
	rec, _ := b.boot(t, "second", b.img.Ref)
	if got := whys(rec, "restore: "); rec.Way.Start != "boot" || !strings.Contains(got, "its memory: ") ||
		!strings.Contains(got, "damaged checkpoint image") {
		t.Errorf("started by %s, since %q", rec.Way.Start, got)
	}
	if all := b.checkpoints(t); len(all) != 0 {
		t.Errorf("what is damaged is still there: %+v", all)
	}
	b.end()
}

// A checkpoint that fails again and again is not tried any more: here what the
// image wants to be run after a restore fails.
func TestCheckpointQuarantine(t *testing.T) {
	t.Parallel()
	b := newCheckpointBed(t, "", "dewpoint.restore.after", "/app exit 3")
	for i := range 4 {
		name := fmt.Sprint("c", i)
		rec, url := b.boot(t, name, b.img.Ref)
		says := "restore: hook /app exit 3: status 3"
		if i == 3 {
			says = "restore: checkpoint " + b.id[:12] + " is quarantined after 3 failures"
		}
		if got := whys(rec, "restore: "); rec.Way.Start != "boot" || got != says {
			t.Errorf("start %d by %s, since %q", i, rec.Way.Start, got)
		}
		if got := get(t, url+"/born"); got == b.born {
			t.Errorf("start %d is a clone", i)
		}
		b.must("rm", "-f", name)
	}
	r := b.dew("run", "-d", "--name", "must", "--net", "bridge", "--restore", "always", b.img.Ref)
	if r.code != 12 || !strings.Contains(r.err, "quarantined") {
		t.Errorf("always: %+v", r)
	}
	if all := b.checkpoints(t); len(all) != 1 || !strings.Contains(all[0].Unfit, "quarantined") {
		t.Errorf("the list has %+v", all)
	}
	b.end()
}

// A node without CRIU says so, and boots.
func TestCheckpointWithoutCRIU(t *testing.T) {
	t.Parallel()
	reg := registrytest.New(t)
	img := slowApp(t, reg, nil)
	m := newMachine(t, reg)
	m.config += "[checkpoint]\ncriu = \"/bin/true\"\n"
	m.start()
	rec, _ := m.boot(t, "web", img.Ref, "--checkpoint")
	if got := whys(rec, "restore: "); rec.Way.Start != "boot" ||
		!strings.Contains(got, "cannot be checkpointed") {
		t.Errorf("started by %s, since %q", rec.Way.Start, got)
	}
	if r := m.dew("checkpoint", "web"); r.code != 12 || !strings.Contains(r.err, "/bin/true") {
		t.Errorf("checkpoint: %+v", r)
	}
	if r := m.dew("run", "-d", "--net", "bridge", "--restore", "always", img.Ref); r.code != 12 ||
		!strings.Contains(r.err, "not restored: ") {
		t.Errorf("always: %+v", r)
	}
	var found []spec.Finding
	if err := json.Unmarshal([]byte(m.dew("--json", "doctor").out), &found); err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(found, func(f spec.Finding) bool {
		return f.What == "checkpoints" && f.Level == spec.LevelNote && strings.Contains(f.Detail, "/bin/true")
	}) {
		t.Errorf("doctor: %+v", found)
	}
}

// A checkpoint is made of a container that asks for it, once it is ready, and
// many containers in a row leave nothing behind: as many as DEWPOINT_RESTORES says.
func TestCheckpointAgainAndAgain(t *testing.T) {
	t.Parallel()
	reg := registrytest.New(t)
	img := slowApp(t, reg, map[string]string{"dewpoint.checkpoint": "auto"})
	m := newMachine(t, reg).start()
	m.boot(t, "first", img.Ref)
	var all []spec.Checkpoint
	for range 200 {
		if all = m.checkpoints(t); len(all) > 0 {
			break
		}
		time.Sleep(100 * time.Millisecond)
	}
	if len(all) != 1 || all[0].Boot < 1.4 {
		t.Fatalf("there are %+v", all)
	}
	m.must("rm", "-f", "first")
	before := yards()
	for left := restores(t); left > 0; left -= together {
		n := min(left, together)
		m.must("deploy", "--count", fmt.Sprint(n), "--parallel", "4", "--name", "again", "--net", "bridge",
			"--ready", "http:80/", "--restore", "always", img.Ref)
		var ps []spec.Container
		m.unmarshal(t, &ps, "ps")
		if len(ps) != n {
			t.Errorf("%d containers run, not %d", len(ps), n)
		}
		remove := []string{"rm", "-f"}
		for _, c := range ps {
			remove = append(remove, c.Name)
		}
		m.must(remove...)
	}
	if got := m.checkpoints(t); len(got) != 1 || got[0].ID != all[0].ID {
		t.Errorf("a restored container was saved again: %+v", got)
	}
	left := func() []string {
		return slices.DeleteFunc(slices.Collect(maps.Keys(yards())), func(y string) bool { return before[y] })
	}
	if l := gone(left); len(l) > 0 {
		t.Errorf("CRIU's directories left: %v", l)
	}
	m.must("rmi", img.Ref)
	m.must("prune")
	checkNothingLeft(t, m)
}

// together is how many of those are there at once.
const together = 20

// restores is how many containers are restored in a row.
func restores(t *testing.T) int {
	t.Helper()
	s := os.Getenv("DEWPOINT_RESTORES")
	if s == "" {
		return 100
	}
	n, err := strconv.Atoi(s)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// Another node of the PoP starts from what one has saved, and a third one from what was saved of that.
func TestCheckpointInPoP(t *testing.T) {
	t.Parallel()
	p := newPoP(t, popbed.Config{Store: popbed.Dir, StoreBytes: 1 << 30})
	img := p.reg.PushImage("team/slow:1", appLayers(t, 0), appOptions("slow", "80"))
	request := spec.Request{Image: img.Ref, Name: "web", Net: "host", Ready: "http:80/", Checkpoint: true}
	if _, err := p.Deploy(t.Context(), 0, request); err != nil {
		t.Fatal(err)
	}
	born, err := p.get(0, "/born")
	if err != nil {
		t.Fatal(err)
	}
	p.clone(1, request, born, 1)
	p.saveClone(1, "web")
	p.clone(2, request, born, 2)
}

// newLateBed is a node with a checkpoint of so much memory, which comes while processes run from above on,
// that are restored with the flags; sum is what it sums up to.
func newLateBed(t *testing.T, mb int, above string) (m *machine, img registrytest.Pushed, flags []string,
	sum string) {
	t.Helper()
	reg := registrytest.New(t)
	img = slowApp(t, reg, nil)
	m = newMachine(t, reg)
	m.config += fmt.Sprintf("[checkpoint]\nlazy_above = %q\n", above)
	m.start()
	flags = []string{"-e", fmt.Sprintf("MEMORY_MB=%d", mb)}
	_, url := m.boot(t, "first", img.Ref, flags...)
	sum = get(t, url+"/memory")
	m.must("checkpoint", "first")
	m.must("rm", "-f", "first")
	return m, img, append(flags, "--restore", "always"), sum
}

// Memory that comes while the processes run is what was saved, from the data file and from
// what is unpacked, for one and for several at once.
func TestCheckpointLazily(t *testing.T) {
	t.Parallel()
	m, img, flags, sum := newLateBed(t, 96, "1MB")
	clones := func() {
		t.Helper()
		urls := make([]string, 3)
		for i := range urls {
			rec, url := m.boot(t, fmt.Sprint("clone-", i), img.Ref, flags...)
			if rec.Way.Start != "restore" {
				t.Errorf("%+v", rec)
			}
			urls[i] = url
		}
		for _, url := range urls {
			if got := get(t, url+"/memory"); got != sum {
				t.Errorf("its memory sums up to %q, not %q", got, sum)
			}
		}
		m.must("rm", "-f", "clone-0", "clone-1", "clone-2")
	}
	clones()
	m.loseUnpacked(t)
	clones()
	if !m.says("memory of a restore", "faults=") {
		t.Error("all memory came before the processes ran")
	}
	if whole := m.unpackedMemory(); len(whole) > 0 {
		t.Errorf("%q was unpacked", whole)
	}
	m.must("rmi", img.Ref)
	m.must("prune")
	checkNothingLeft(t, m)
}

// loseUnpacked has a node begin anew without what of checkpoints it has unpacked.
func (m *machine) loseUnpacked(t *testing.T) {
	t.Helper()
	m.stop()
	cached, _ := filepath.Glob(filepath.Join(m.root, "checkpoints", "store", "cache", "*"))
	if len(cached) == 0 {
		t.Error("nothing was unpacked")
	}
	for _, c := range cached {
		if err := os.RemoveAll(c); err != nil {
			t.Fatal(err)
		}
	}
	m.start()
}

// unpackedMemory are the files of memory of checkpoints that are unpacked here.
func (m *machine) unpackedMemory() []string {
	all, _ := filepath.Glob(filepath.Join(m.root, "checkpoints", "store", "cache", "*", "pages-*.img"))
	return slices.DeleteFunc(all, func(name string) bool {
		dir := filepath.Dir(name)
		return strings.HasSuffix(dir, ".tmp") || strings.HasSuffix(dir, "-meta")
	})
}

// Memory that is not unpacked here comes while the processes run also from somewhat below that size on, for
// one restore at once, and is unpacked for those that follow.
func TestCheckpointLazilyUnpacked(t *testing.T) {
	t.Parallel()
	m, img, flags, sum := newLateBed(t, 96, "120MB")
	m.loseUnpacked(t)
	came := func() int {
		log, err := os.ReadFile(m.log)
		if err != nil {
			t.Fatal(err)
		}
		return strings.Count(string(log), "memory of a restore")
	}
	for _, names := range [][]string{{"one"}, {"two"}, {"three", "four", "five"}} {
		if names[0] == "three" {
			m.loseUnpacked(t)
		}
		before, want := came(), 1
		if names[0] == "two" {
			want = 0
		}
		results := make([]result, len(names))
		urls := make([]string, len(names))
		var all sync.WaitGroup
		for i, name := range names {
			port := freePort(t)
			urls[i] = "http://127.0.0.1:" + port
			args := append([]string{"run", "-d", "--name", name, "-p", "127.0.0.1:" + port + ":80", "--ready",
				"http:80/"}, flags...)
			all.Go(func() { results[i] = m.dew(append(args, img.Ref)...) })
		}
		all.Wait()
		for i, url := range urls {
			if results[i].code != 0 {
				t.Fatalf("%s: %+v", names[i], results[i])
			}
			if got := get(t, url+"/memory"); got != sum {
				t.Errorf("the memory of %s sums up to %q, not %q", names[i], got, sum)
			}
		}
		m.eventually("it is unpacked", func() bool {
			return came() >= before+want && len(m.unpackedMemory()) > 0
		})
		if n := came() - before; n != want {
			t.Errorf("of %q, memory came late %d times, not %d", names, n, want)
		}
		m.must(append([]string{"rm", "-f"}, names...)...)
	}
	m.must("rmi", img.Ref)
	m.must("prune")
	checkNothingLeft(t, m)
}

// A dewd that dies while memory is coming leaves no container with wrong memory: it is whole, or dead, and
// then the next dewd starts it anew.
func TestCheckpointLazilyKilled(t *testing.T) {
	t.Parallel()
	m, img, flags, sum := newLateBed(t, 400, "1MB")
	_, url := m.boot(t, "clone", img.Ref, flags...)
	m.kill()
	answer := make(chan string, 1)
	go func() {
		r, err := http.Get(url + "/memory")
		if err != nil {
			answer <- "dead"
			return
		}
		defer r.Body.Close()
		b, _ := io.ReadAll(r.Body)
		answer <- string(b)
	}()
	select {
	case got := <-answer:
		t.Logf("it is %q", strings.TrimSpace(got))
		if got != sum && got != "dead" && got != "" {
			t.Errorf("its memory sums up to %q, not %q", got, sum)
		}
	case <-time.After(testkit.Limit):
		t.Error("it neither answers nor ends")
	}
	m.start()
	m.eventually("it serves", func() bool {
		r, err := http.Get(url + "/count")
		if err == nil {
			r.Body.Close()
		}
		return err == nil
	})
	dead := m.says("a restored container has ended", "container=clone")
	if got := get(t, url+"/memory"); dead != (got != sum) {
		t.Errorf("its guard has ended it: %v; its memory sums up to %q, and was %q", dead, got, sum)
	}
	if dead {
		if e := m.event(spec.EventLost); e.Name != "clone" || !strings.Contains(e.Error, "dewd was killed") {
			t.Errorf("the event is %+v", e)
		}
	}
	m.must("rm", "-f", "clone")
	m.must("rmi", img.Ref)
	m.must("prune")
	checkNothingLeft(t, m)
}
